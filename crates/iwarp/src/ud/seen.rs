//! Recently delivered datagrams, so that a datagram that the network has duplicated is delivered
//! once.
//!
//! Each sender numbers its datagrams. For each of the last [`SENDERS_MAX`] senders there is a
//! window of the [`WINDOW`] numbers up to the newest delivered one, with a bit for each. A number
//! in the window with its bit set is a copy. An older number may be one, and is treated as one: a
//! datagram that comes so late counts as lost. Therefore memory is bounded.

use std::collections::HashMap;
use std::net::SocketAddr;

const WINDOW: usize = 1024;
/// Senders that are remembered. If there are more, the one that has been silent for longest is
/// forgotten.
const SENDERS_MAX: usize = 256;
/// A number that differs from the newest one by more than this belongs to another queue pair with
/// the same number and address, which started at another value.
const JUMP: u32 = 1 << 16;

const BITS: usize = u64::BITS as usize;
const _: () = assert!(WINDOW.is_power_of_two() && WINDOW < JUMP as usize);

type Sender = (SocketAddr, u32);

struct Window {
    newest: u32,
    /// Whether each of the numbers up to the newest was delivered. The lower bits of a number are
    /// its place.
    delivered: [u64; WINDOW / BITS],
    /// When the window was last used, counted in datagrams.
    used: u64,
}

// One bit per number, because programs may have very many senders.
const _: () = assert!(size_of::<Window>() <= WINDOW / 8 + 2 * size_of::<u64>());

/// The position of a number relative to the newest one.
enum Place {
    /// Newer by this difference.
    Ahead(u32),
    /// In the window.
    Within,
    /// Older than the window.
    Behind,
    /// It belongs to another queue pair.
    Elsewhere,
}

impl Window {
    const fn new(newest: u32) -> Self {
        Self {
            newest,
            delivered: [0; WINDOW / BITS],
            used: 0,
        }
    }

    const fn place(&self, sequence: u32) -> Place {
        let (ahead, behind) = (
            sequence.wrapping_sub(self.newest),
            self.newest.wrapping_sub(sequence),
        );
        if behind < WINDOW as u32 {
            Place::Within
        } else if behind <= JUMP {
            Place::Behind
        } else if ahead <= JUMP {
            Place::Ahead(ahead)
        } else {
            Place::Elsewhere
        }
    }

    const fn bit(sequence: u32) -> (usize, u64) {
        let at = sequence as usize % WINDOW;
        (at / BITS, 1 << (at % BITS))
    }

    fn has(&self, sequence: u32) -> bool {
        let (word, bit) = Self::bit(sequence);
        self.delivered[word] & bit != 0
    }

    fn set(&mut self, sequence: u32, delivered: bool) {
        let (word, bit) = Self::bit(sequence);
        match delivered {
            true => self.delivered[word] |= bit,
            false => self.delivered[word] &= !bit,
        }
    }

    fn note(&mut self, sequence: u32) {
        match self.place(sequence) {
            Place::Ahead(by) => {
                // The places of the numbers in between were used by older numbers.
                for i in 0..by.min(WINDOW as u32) {
                    self.set(sequence.wrapping_sub(i), false);
                }
                self.newest = sequence;
            }
            Place::Elsewhere => *self = Self::new(sequence),
            Place::Within | Place::Behind => {}
        }
        self.set(sequence, true);
    }
}

#[derive(Default)]
pub(super) struct Seen {
    /// Its hash has a secret key, so that no peer can choose numbers that collide.
    windows: HashMap<Sender, Window>,
    /// Number of recorded datagrams.
    clock: u64,
}

impl Seen {
    pub(super) fn clear(&mut self) {
        self.windows.clear();
    }

    /// Returns `true` if a datagram was delivered before, or is so old that it may have been.
    pub(super) fn is_copy(&self, from: SocketAddr, source: u32, sequence: u32) -> bool {
        let Some(window) = self.windows.get(&(from, source)) else {
            return false;
        };
        match window.place(sequence) {
            Place::Within => window.has(sequence),
            Place::Behind => true,
            Place::Ahead(_) | Place::Elsewhere => false,
        }
    }

    /// Records that a datagram was delivered. Allocates memory for a new sender.
    pub(super) fn note(&mut self, from: SocketAddr, source: u32, sequence: u32) {
        self.clock += 1;
        let sender = (from, source);
        if let Some(window) = self.windows.get_mut(&sender) {
            window.note(sequence);
            window.used = self.clock;
            return;
        }
        self.make_room();
        let mut window = Window::new(sequence);
        window.note(sequence);
        window.used = self.clock;
        self.windows.insert(sender, window);
    }

    fn make_room(&mut self) {
        if self.windows.len() < SENDERS_MAX {
            return;
        }
        let silent = self.windows.iter().min_by_key(|(_, window)| window.used);
        if let Some(sender) = silent.map(|(sender, _)| *sender) {
            self.windows.remove(&sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn from(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    /// Records a datagram. Returns `true` if it is new.
    fn arrives(seen: &mut Seen, port: u16, sequence: u32) -> bool {
        let is_new = !seen.is_copy(from(port), 3, sequence);
        if is_new {
            seen.note(from(port), 3, sequence);
        }
        is_new
    }

    #[test]
    fn late_copy_is_dropped() {
        let mut seen = Seen::default();
        let first = u32::MAX - 5;
        for i in 0..5000 {
            let sequence = first.wrapping_add(i);
            assert!(arrives(&mut seen, 7, sequence));
            assert!(!arrives(&mut seen, 7, sequence));
            assert!(!arrives(&mut seen, 7, first), "after {i} others");
        }
    }

    #[test]
    fn reordered_datagrams_are_delivered() {
        let mut seen = Seen::default();
        let newest = 100 + WINDOW as u32;
        assert!(arrives(&mut seen, 7, 100));
        assert!(arrives(&mut seen, 7, newest));
        assert!(arrives(&mut seen, 7, 101));
        assert!(!arrives(&mut seen, 7, 101));
        assert!(!arrives(&mut seen, 7, 99), "it may be a copy");
        // The place of a number that has left the window is free again.
        assert!(arrives(&mut seen, 7, newest + 1));
        assert!(arrives(&mut seen, 7, newest - 1));
    }

    #[test]
    fn reused_number_is_accepted() {
        let mut seen = Seen::default();
        let begin = 1 << 30;
        assert!(arrives(&mut seen, 7, begin));
        for other in [begin - JUMP - 1, begin + JUMP, 5, u32::MAX] {
            assert!(arrives(&mut seen, 7, other));
            assert!(!arrives(&mut seen, 7, other));
        }
    }

    #[test]
    fn senders_are_distinguished() {
        let mut seen = Seen::default();
        seen.note(from(1), 3, 9);
        assert!(!seen.is_copy(from(2), 3, 9));
        assert!(!seen.is_copy(from(1), 4, 9));
        assert!(seen.is_copy(from(1), 3, 9));
        seen.clear();
        assert!(!seen.is_copy(from(1), 3, 9));
    }

    #[test]
    fn oldest_sender_is_forgotten() {
        let mut seen = Seen::default();
        for port in 1..=SENDERS_MAX as u16 {
            assert!(arrives(&mut seen, port, 9));
        }
        assert!(arrives(&mut seen, 1, 10));
        assert!(arrives(&mut seen, 1000, 9));
        assert_eq!(seen.windows.len(), SENDERS_MAX);
        assert!(!arrives(&mut seen, 1, 9), "it was not silent");
        assert!(!arrives(&mut seen, 3, 9));
        assert!(!seen.is_copy(from(2), 3, 9));
    }

    proptest! {
        /// Compares the window with a list of all delivered datagrams.
        #[test]
        fn nothing_is_delivered_twice(
            begin in any::<u32>(),
            steps in proptest::collection::vec(-1500i32..1500, 1..400),
        ) {
            let mut seen = Seen::default();
            let (mut delivered, mut at, mut newest) = (BTreeSet::new(), 0i32, 0i32);
            for step in steps {
                at = (newest + step).max(at - 1200);
                let sequence = begin.wrapping_add(at as u32);
                let is_new = arrives(&mut seen, 7, sequence);
                prop_assert!(!is_new || delivered.insert(at), "{at} is delivered twice");
                if is_new {
                    newest = if delivered.len() == 1 { at } else { newest.max(at) };
                }
                // No new datagram within the window is lost.
                prop_assert!(delivered.contains(&at) || newest - at >= WINDOW as i32);
            }
        }
    }
}
