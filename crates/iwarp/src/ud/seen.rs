//! Records delivered datagrams, so that a datagram which the network has duplicated is delivered
//! once.
//!
//! Each sender numbers its datagrams. For each of the last [`SENDERS_MAX`] senders there is a
//! window of the [`WINDOW`] sequence numbers up to the newest delivered one, with one bit for each.
//! A datagram whose bit is set is a copy. A datagram with a number before the window may be a copy,
//! and is dropped, too. Therefore memory is bounded.

use std::collections::HashMap;
use std::net::SocketAddr;

const WINDOW: usize = 1024;
/// Maximum number of senders with a window. For a further sender, the window that was unused for
/// longest is dropped.
const SENDERS_MAX: usize = 256;
/// If a sequence number differs from the newest one by more than this, the sender is a new queue
/// pair with the same number and address.
const JUMP: u32 = 1 << 16;

const BITS: usize = u64::BITS as usize;
const _: () = assert!(WINDOW.is_power_of_two() && WINDOW < JUMP as usize);

type Sender = (SocketAddr, u32);

struct Window {
    newest: u32,
    /// One bit per sequence number, set if it was delivered. The lower bits of the number are the
    /// position of the bit.
    delivered: [u64; WINDOW / BITS],
    /// Value of [`Seen::clock`] when the window was last used.
    used: u64,
}

// A window must be small, because a queue pair may have many senders.
const _: () = assert!(size_of::<Window>() <= WINDOW / 8 + 2 * size_of::<u64>());

/// The position of a sequence number relative to the window.
enum Position {
    /// Newer by this difference.
    Ahead(u32),
    /// Within the window.
    Within,
    /// Older than the window.
    Behind,
    /// From another queue pair with the same number and address.
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

    const fn position(&self, sequence: u32) -> Position {
        let (ahead, behind) = (
            sequence.wrapping_sub(self.newest),
            self.newest.wrapping_sub(sequence),
        );
        if behind < WINDOW as u32 {
            Position::Within
        } else if behind <= JUMP {
            Position::Behind
        } else if ahead <= JUMP {
            Position::Ahead(ahead)
        } else {
            Position::Elsewhere
        }
    }

    const fn bit(sequence: u32) -> (usize, u64) {
        let index = sequence as usize % WINDOW;
        (index / BITS, 1 << (index % BITS))
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

    fn record(&mut self, sequence: u32) {
        match self.position(sequence) {
            Position::Ahead(by) => {
                // Older numbers have used the bits of the numbers in between.
                for i in 0..by.min(WINDOW as u32) {
                    self.set(sequence.wrapping_sub(i), false);
                }
                self.newest = sequence;
            }
            Position::Elsewhere => *self = Self::new(sequence),
            Position::Within | Position::Behind => {}
        }
        self.set(sequence, true);
    }
}

#[derive(Default)]
pub(super) struct Seen {
    /// The hash has a secret key, so that peers cannot choose addresses and numbers that collide.
    windows: HashMap<Sender, Window>,
    /// Number of recorded datagrams, used as a clock.
    clock: u64,
}

impl Seen {
    pub(super) fn clear(&mut self) {
        self.windows.clear();
    }

    /// Returns `true` if a datagram was delivered before, or is too old to know.
    pub(super) fn is_copy(&self, from: SocketAddr, source: u32, sequence: u32) -> bool {
        let Some(window) = self.windows.get(&(from, source)) else {
            return false;
        };
        match window.position(sequence) {
            Position::Within => window.has(sequence),
            Position::Behind => true,
            Position::Ahead(_) | Position::Elsewhere => false,
        }
    }

    /// Records a delivered datagram. Allocates memory for a new sender.
    pub(super) fn record(&mut self, from: SocketAddr, source: u32, sequence: u32) {
        self.clock += 1;
        let sender = (from, source);
        if let Some(window) = self.windows.get_mut(&sender) {
            window.record(sequence);
            window.used = self.clock;
            return;
        }
        self.make_room();
        let mut window = Window::new(sequence);
        window.record(sequence);
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

    /// Records a datagram, unless it is a copy. Returns `true` if it is new.
    fn arrives(seen: &mut Seen, port: u16, sequence: u32) -> bool {
        let is_new = !seen.is_copy(from(port), 3, sequence);
        if is_new {
            seen.record(from(port), 3, sequence);
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
        assert!(!arrives(&mut seen, 7, 99), "a number before the window");
        // The bit of a number that is no longer in the window is reused.
        assert!(arrives(&mut seen, 7, newest + 1));
        assert!(arrives(&mut seen, 7, newest - 1));
    }

    #[test]
    fn new_sender_with_same_number_is_accepted() {
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
        seen.record(from(1), 3, 9);
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
        assert!(!arrives(&mut seen, 1, 9), "the sender was active recently");
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
            let (mut delivered, mut index, mut newest) = (BTreeSet::new(), 0i32, 0i32);
            for step in steps {
                index = (newest + step).max(index - 1200);
                let sequence = begin.wrapping_add(index as u32);
                let is_new = arrives(&mut seen, 7, sequence);
                prop_assert!(!is_new || delivered.insert(index), "{index} is delivered twice");
                if is_new {
                    newest = if delivered.len() == 1 { index } else { newest.max(index) };
                }
                // No new datagram within the window is lost.
                prop_assert!(delivered.contains(&index) || newest - index >= WINDOW as i32);
            }
        }
    }
}
