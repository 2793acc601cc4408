//! Staging: a buffer for octets that have come from the stream and are not processed yet.

use crate::AllocError;
use crate::boxed::{try_box, zeros};
use crate::limits::{MAX_FPDU, MAX_SGE, RX_DIRECT_TAIL, RX_READ_MAX, RX_STAGING};
use crate::memory::{Memory, MemoryTable, Users};
use alloc::boxed::Box;
use alloc::vec::Vec;
use iwarp_proto::ddp::Stag;

/// Sizes of a staging buffer. Those that are too small for one FPDU of any kind are raised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RxSizes {
    /// Octets of staging: at least one FPDU, and one read behind a part of it.
    pub staging: usize,
    /// Most octets asked of the stream in one read. See [`RX_READ_MAX`].
    pub read_max: usize,
}

impl RxSizes {
    /// What suits a process.
    pub const DEFAULT: Self = Self {
        staging: RX_STAGING,
        read_max: RX_READ_MAX,
    };

    fn raised(self) -> Self {
        // Less would ask for headers alone, one by one.
        let read_max = self.read_max.max(RX_DIRECT_TAIL);
        Self {
            staging: self.staging.max(MAX_FPDU.saturating_add(read_max)),
            read_max,
        }
    }
}

impl Default for RxSizes {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A staging buffer. Between FPDUs it is empty and may serve any queue pair. With a part of an FPDU in it, it belongs to
/// that FPDU's queue pair.
#[derive(Debug)]
pub struct RxBuffer {
    /// The staging, and behind it room for one ULPDU without its markers. A single allocation of this size comes zeroed from the system, and
    /// what is never used of it is never touched. Smaller pieces would have to be zeroed by hand.
    data: Vec<u8>,
    /// Octets of staging.
    staging: usize,
    start: usize,
    end: usize,
    read_max: usize,
}

/// Octets of one ULPDU, at most: what its length field can say.
const UNMARKED: usize = u16::MAX as usize;

impl RxBuffer {
    /// Makes an empty buffer of the [usual sizes](RxSizes::DEFAULT). It takes about 320 KiB of memory; share buffers between queue pairs.
    pub fn new() -> Result<Box<Self>, AllocError> {
        Self::with(RxSizes::DEFAULT)
    }

    /// Makes an empty buffer. Everything that it will ever need is allocated here.
    pub fn with(sizes: RxSizes) -> Result<Box<Self>, AllocError> {
        let sizes = sizes.raised();
        let buffer = Self {
            data: zeros(sizes.staging.saturating_add(UNMARKED))?,
            staging: sizes.staging,
            start: 0,
            end: 0,
            read_max: sizes.read_max,
        };
        try_box(move || buffer)
    }

    /// Nothing in it.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Octets in it.
    pub const fn len(&self) -> usize {
        self.end.wrapping_sub(self.start)
    }

    /// Drops its contents.
    pub const fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
    }

    /// What is in it.
    #[inline]
    pub(super) fn octets(&self) -> &[u8] {
        self.data.get(self.start..self.end).unwrap_or(&[])
    }

    /// Room for one ULPDU without its markers.
    #[inline]
    pub(super) fn unmarked(&mut self) -> &mut [u8] {
        self.data.get_mut(self.staging..).unwrap_or(&mut [])
    }

    /// Returns the octets and the room for an unmarked ULPDU together.
    #[inline]
    pub(super) fn octets_and_unmarked(&mut self) -> (&[u8], &mut [u8]) {
        let at = self.staging.min(self.data.len());
        let (staging, unmarked) = self.data.split_at_mut(at);
        (staging.get(self.start..self.end).unwrap_or(&[]), unmarked)
    }

    #[inline]
    pub(super) const fn consume(&mut self, n: usize) {
        self.start = self.start.wrapping_add(n);
        if self.start >= self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Notes that `n` octets were read into [`room`](Self::room).
    pub(super) fn filled(&mut self, n: usize) {
        self.end = self.end.saturating_add(n).min(self.staging);
    }

    /// Keeps octets behind those that are in it. Returns how many: all of one FPDU.
    pub(super) fn keep(&mut self, octets: &[u8]) -> usize {
        if self.staging.saturating_sub(self.end) < octets.len() {
            self.move_to_front();
        }
        let room = self.data.get_mut(self.end..self.staging).unwrap_or(&mut []);
        let n = room.len().min(octets.len());
        if let (Some(to), Some(from)) = (room.get_mut(..n), octets.get(..n)) {
            to.copy_from_slice(from);
        }
        self.filled(n);
        n
    }

    /// Returns where the next octets may be read to, at most `most`.
    pub(super) fn room(&mut self, most: usize) -> &mut [u8] {
        let most = most.min(self.read_max);
        // A part of an FPDU moves to the front when the space behind it runs out.
        if self.start > 0 && self.staging.saturating_sub(self.end) < most {
            self.move_to_front();
        }
        let end = self.end.saturating_add(most).min(self.staging);
        self.data.get_mut(self.end..end).unwrap_or(&mut [])
    }

    /// Returns `true` if nothing was ever put into the staging.
    #[cfg(test)]
    pub(super) fn is_untouched(&self) -> bool {
        self.data.iter().take(self.staging).all(|octet| *octet == 0)
    }

    fn move_to_front(&mut self) {
        let (start, end) = (self.start, self.end);
        // It is always so. With the comparison the compiler knows it, and makes no code for the contrary.
        if start <= end && end <= self.data.len() {
            self.data.copy_within(start..end, 0);
            self.start = 0;
            self.end = end.wrapping_sub(start);
        }
    }
}

/// What [`QueuePair::rx_plan`](super::QueuePair::rx_plan) has said about where the next octets of a stream should be read to.
#[derive(Debug)]
pub struct RxPlan {
    /// Most runs that it may name.
    pub(super) most: usize,
    /// Octets of them.
    pub(super) room: usize,
    /// How many of these octets are in registered memory.
    pub(super) direct: usize,
    /// That memory, until the read is over.
    pub(super) users: Users<[Stag; MAX_SGE as usize]>,
}

impl RxPlan {
    /// Makes an empty plan for up to `runs` runs.
    pub const fn new(runs: usize) -> Self {
        Self {
            most: runs,
            room: 0,
            direct: 0,
            users: Users::new([Stag(0); MAX_SGE as usize]),
        }
    }

    /// Ends the use of registered memory: the read that the plan was for is over. [`QueuePair::rx_filled`](super::QueuePair::rx_filled) does
    /// it too; a driver that waits before it calls that, or does not call it, does it at once.
    pub fn release<M: Memory>(&mut self, memory: &MemoryTable<M>) {
        self.users.release(memory);
    }

    /// Makes it a plan for nothing, for processing octets that wait in the buffer.
    pub const fn clear(&mut self) {
        self.room = 0;
        self.direct = 0;
    }

    /// Returns how many octets the runs can take.
    pub const fn room(&self) -> usize {
        self.room
    }

    /// Returns how many octets of registered memory the runs name.
    pub const fn direct(&self) -> usize {
        self.direct
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const NONE: RxSizes = RxSizes {
        staging: 0,
        read_max: 0,
    };

    #[test]
    fn sizes_that_are_too_small_are_raised() {
        let mut buffer = RxBuffer::with(NONE).unwrap();
        assert!(buffer.staging >= MAX_FPDU + buffer.read_max);
        assert_eq!(buffer.room(usize::MAX).len(), RX_DIRECT_TAIL);
        assert_eq!(buffer.unmarked().len(), 65_535);
        let mut usual = RxBuffer::new().unwrap();
        assert_eq!(usual.staging, 256 * 1024);
        assert_eq!(usual.room(usize::MAX).len(), 128 * 1024);
    }

    #[test]
    fn a_part_of_an_fpdu_moves_to_the_front_when_the_space_behind_it_runs_out() {
        let mut buffer = RxBuffer::with(NONE).unwrap();
        let (mut put, mut taken) = (0u32, 0u32);
        let mut moved = 0;
        // Almost all of the largest FPDU is here, whenever there is more to read.
        for _ in 0..2000 {
            let from = buffer.start;
            let room = buffer.room(usize::MAX);
            assert_eq!(room.len(), RX_DIRECT_TAIL, "a whole read finds room");
            for octet in room {
                *octet = put as u8;
                put += 1;
            }
            moved += u32::from(buffer.start < from);
            buffer.filled(RX_DIRECT_TAIL);
            if buffer.len() >= MAX_FPDU {
                let here: Vec<u8> = buffer.octets().to_vec();
                for octet in &here[..1021] {
                    assert_eq!(*octet, taken as u8);
                    taken += 1;
                }
                buffer.consume(1021);
            }
        }
        assert!(moved > 3 && taken > 500_000, "{moved} {taken}");
    }

    /// Octets are moved only if what comes next does not fit behind them.
    #[test]
    fn octets_that_leave_enough_space_behind_them_stay_where_they_are() {
        type Next = fn(&mut RxBuffer) -> usize;
        let reads: Next = |buffer| buffer.room(usize::MAX).len();
        let keeps: Next = |buffer| buffer.keep(&[8; RX_DIRECT_TAIL]);
        let few = RX_DIRECT_TAIL - 1;
        let cases = [(few + 2, false), (few + 1, false), (few, true), (0, true)];
        for next in [reads, keeps] {
            for (free, moves) in cases {
                let mut buffer = RxBuffer::with(NONE).unwrap();
                let end = buffer.staging - free;
                buffer.filled(end);
                buffer.consume(end - 10);
                assert_eq!(next(&mut buffer), RX_DIRECT_TAIL);
                assert_eq!(buffer.start == 0, moves, "{free}");
            }
        }
    }

    /// What is kept is whole, wherever the octets before it lie.
    #[test]
    fn a_cut_fpdu_is_kept_as_a_whole() {
        for left in [0, 1, 3, 900] {
            for free in [0, 1, 5, 99, 100, 101] {
                let mut buffer = RxBuffer::with(NONE).unwrap();
                let (end, before) = (buffer.staging - free, buffer.staging - free - left);
                buffer.filled(end);
                buffer.data[before..end].fill(7);
                buffer.consume(before);
                assert_eq!(buffer.len(), left);
                assert_eq!(buffer.keep(&[8; 100]), 100, "{left} {free}");
                let mut want = std::vec![7; left];
                want.resize(left + 100, 8);
                assert_eq!(buffer.octets(), want);
            }
        }
    }

    /// The same for one that takes up most of the staging, and begins near its front.
    #[test]
    fn the_longest_fpdu_is_kept_as_a_whole_wherever_it_begins() {
        for before in [1, 700, 30_000, 60_000] {
            let mut buffer = RxBuffer::with(NONE).unwrap();
            let left = buffer.staging - before;
            let left = left.min(MAX_FPDU - 100);
            buffer.filled(before + left);
            buffer.data[before..before + left].fill(7);
            buffer.consume(before);
            let missing = std::vec![8; MAX_FPDU - left];
            assert_eq!(buffer.keep(&missing), missing.len(), "{before}");
            assert_eq!(buffer.len(), MAX_FPDU);
            assert!(buffer.octets().starts_with(&std::vec![7; left]));
            assert!(buffer.octets().ends_with(&missing));
        }
    }
}
