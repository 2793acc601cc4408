//! Which datagrams were delivered lately, so that a datagram that the network has doubled is delivered once.
//!
//! A fixed number of places, each for the last datagram whose sender and sequence number lead there. The datagrams of one sender have
//! consecutive numbers and so places of their own: a copy is noticed if it comes among the next [`PLACES`] of them. Of several senders
//! each may take a place from another, and then a late copy is delivered. So memory is bounded whoever sends, and nothing that is new is
//! taken for a copy unless 64 bits of a keyed hash are equal.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;

/// Datagrams that are remembered.
const PLACES: usize = 1024;

pub(super) struct Seen {
    /// A key that no peer knows.
    key: RandomState,
    /// The mark of the datagram of each place; zero if there is none.
    places: Box<[u64]>,
}

impl Seen {
    pub(super) fn new() -> Self {
        Self {
            key: RandomState::new(),
            places: vec![0; PLACES].into_boxed_slice(),
        }
    }

    pub(super) fn clear(&mut self) {
        self.places.fill(0);
    }

    /// Returns where a datagram belongs, and its mark, if it was not seen yet.
    pub(super) fn look(
        &self,
        from: SocketAddr,
        source: u32,
        sequence: u32,
    ) -> Option<(usize, u64)> {
        let sender = self.key.hash_one((from, source));
        let place = (sender as usize).wrapping_add(sequence as usize) % PLACES;
        let mark = self.key.hash_one((sender, sequence)) | 1;
        (self.places[place] != mark).then_some((place, mark))
    }

    /// Notes that the datagram of a [`look`](Self::look) was delivered.
    pub(super) fn note(&mut self, (place, mark): (usize, u64)) {
        self.places[place] = mark;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_noticed_among_the_next_of_its_sender() {
        let mut seen = Seen::new();
        let from = SocketAddr::from(([10, 0, 0, 1], 7));
        let first = u32::MAX - 5;
        for i in 0..PLACES as u32 {
            let sequence = first.wrapping_add(i);
            let place = seen.look(from, 3, sequence).expect("it is new");
            seen.note(place);
            assert!(seen.look(from, 3, sequence).is_none());
            assert!(seen.look(from, 3, first).is_none(), "after {i} others");
        }
        let next = first.wrapping_add(PLACES as u32);
        let place = seen.look(from, 3, next).unwrap();
        seen.note(place);
        assert!(seen.look(from, 3, first).is_some(), "its place is taken");
    }

    #[test]
    fn senders_are_told_apart() {
        let mut seen = Seen::new();
        let from = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let place = seen.look(from(1), 3, 9).unwrap();
        seen.note(place);
        assert!(seen.look(from(2), 3, 9).is_some());
        assert!(seen.look(from(1), 4, 9).is_some());
        assert!(seen.look(from(1), 3, 9).is_none());
        seen.clear();
        assert!(seen.look(from(1), 3, 9).is_some());
    }
}
