//! Staging buffers for received octets that are not processed yet.

use crate::AllocError;
use crate::boxed::{try_box, zeros};
use crate::limits::{MAX_FPDU, MAX_SGE, RX_DIRECT_TAIL, RX_READ_MAX, RX_STAGING};
use crate::memory::{Memory, MemoryTable, Users};
use alloc::boxed::Box;
use alloc::vec::Vec;
use iwarp_proto::ddp::Stag;

/// Sizes of a staging buffer. A size that is too small for one FPDU is increased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RxSizes {
    /// Bytes of staging: at least one FPDU and one read after a part of it.
    pub staging: usize,
    /// Maximum size of one read. See [`RX_READ_MAX`].
    pub read_max: usize,
}

impl RxSizes {
    /// Default sizes for a process.
    pub const DEFAULT: Self = Self {
        staging: RX_STAGING,
        read_max: RX_READ_MAX,
    };

    fn with_minimums(self) -> Self {
        // A smaller size would read headers one by one.
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

/// A staging buffer. An empty buffer can be used for any queue pair. While it holds a partial FPDU,
/// it belongs to that FPDU's queue pair.
#[derive(Debug)]
pub struct RxBuffer {
    /// The staging area, followed by room for one ULPDU without its markers. The system zeroes a
    /// single large allocation, and unused pages are never touched; smaller allocations would have
    /// to be zeroed explicitly.
    data: Vec<u8>,
    staging: usize,
    start: usize,
    end: usize,
    read_max: usize,
}

/// Maximum octets of one ULPDU (limit of its length field).
const UNMARKED: usize = u16::MAX as usize;

impl RxBuffer {
    /// Creates an empty buffer of the [default sizes](RxSizes::DEFAULT). It occupies about 320 KiB
    /// of memory, so queue pairs should share buffers.
    pub fn new() -> Result<Box<Self>, AllocError> {
        Self::with(RxSizes::DEFAULT)
    }

    /// Creates an empty buffer. No later call allocates.
    pub fn with(sizes: RxSizes) -> Result<Box<Self>, AllocError> {
        let sizes = sizes.with_minimums();
        let buffer = Self {
            data: zeros(sizes.staging.saturating_add(UNMARKED))?,
            staging: sizes.staging,
            start: 0,
            end: 0,
            read_max: sizes.read_max,
        };
        try_box(move || buffer)
    }

    /// Returns `true` if the buffer is empty.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns the number of octets in the buffer.
    pub const fn len(&self) -> usize {
        self.end.wrapping_sub(self.start)
    }

    /// Returns the octets of the partial FPDU, for a driver that keeps them elsewhere.
    pub fn contents(&self) -> &[u8] {
        self.octets()
    }

    /// Puts octets that [`contents`](Self::contents) has returned into an empty buffer. Returns
    /// `false` if the buffer is not empty or the octets do not fit.
    #[must_use]
    pub fn restore(&mut self, octets: &[u8]) -> bool {
        self.is_empty() && self.keep(octets) == octets.len()
    }

    /// Discards the contents.
    pub const fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
    }

    #[inline]
    pub(super) fn octets(&self) -> &[u8] {
        self.data.get(self.start..self.end).unwrap_or(&[])
    }

    #[inline]
    pub(super) fn unmarked(&mut self) -> &mut [u8] {
        self.data.get_mut(self.staging..).unwrap_or(&mut [])
    }

    /// Returns the contents, and the room for an unmarked ULPDU.
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

    /// Records that `n` octets were read into [`room`](Self::room).
    pub(super) fn filled(&mut self, n: usize) {
        self.end = self.end.saturating_add(n).min(self.staging);
    }

    /// Appends octets of one FPDU. Returns how many were copied, which is always all of them.
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

    /// Returns room for the next octets, at most `max_len`.
    pub(super) fn room(&mut self, max_len: usize) -> &mut [u8] {
        let max_len = max_len.min(self.read_max);
        // Move a partial FPDU to the front if the space after it is too small.
        if self.start > 0 && self.staging.saturating_sub(self.end) < max_len {
            self.move_to_front();
        }
        let end = self.end.saturating_add(max_len).min(self.staging);
        self.data.get_mut(self.end..end).unwrap_or(&mut [])
    }

    #[cfg(test)]
    pub(super) fn is_untouched(&self) -> bool {
        self.data.iter().take(self.staging).all(|octet| *octet == 0)
    }

    fn move_to_front(&mut self) {
        let (start, end) = (self.start, self.end);
        // This is always true; the comparison lets the compiler drop the bounds checks.
        if start <= end && end <= self.data.len() {
            self.data.copy_within(start..end, 0);
            self.start = 0;
            self.end = end.wrapping_sub(start);
        }
    }
}

/// The memory to which the next octets of a stream are to be read
/// ([`QueuePair::rx_plan`](super::QueuePair::rx_plan)).
#[derive(Debug)]
pub struct RxPlan {
    pub(super) max_runs: usize,
    pub(super) room: usize,
    /// Length of the runs that are in registered memory.
    pub(super) direct: usize,
    /// The registered memory in use until the read is finished.
    pub(super) users: Users<[Stag; MAX_SGE as usize]>,
}

impl RxPlan {
    /// Returns an empty plan for up to `runs` runs.
    pub const fn new(runs: usize) -> Self {
        Self {
            max_runs: runs,
            room: 0,
            direct: 0,
            users: Users::new([Stag(0); MAX_SGE as usize]),
        }
    }

    /// Ends the use of registered memory after the planned read.
    /// [`QueuePair::rx_filled`](super::QueuePair::rx_filled) also does this. A driver that delays
    /// or omits that call must call this function immediately after the read.
    pub fn release<M: Memory>(&mut self, memory: &MemoryTable<M>) {
        self.users.release(memory);
    }

    /// Clears the plan. Must be called before the buffer is processed without a new read.
    pub const fn clear(&mut self) {
        self.room = 0;
        self.direct = 0;
    }

    /// Returns the total length of the runs.
    pub const fn room(&self) -> usize {
        self.room
    }

    /// Returns the length of the runs that are in registered memory.
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
    fn small_sizes_are_increased() {
        let mut buffer = RxBuffer::with(NONE).unwrap();
        assert!(buffer.staging >= MAX_FPDU + buffer.read_max);
        assert_eq!(buffer.room(usize::MAX).len(), RX_DIRECT_TAIL);
        assert_eq!(buffer.unmarked().len(), 65_535);
        let mut default_buffer = RxBuffer::new().unwrap();
        assert_eq!(default_buffer.staging, 256 * 1024);
        assert_eq!(default_buffer.room(usize::MAX).len(), 128 * 1024);
    }

    #[test]
    fn partial_fpdu_moves_to_front() {
        let mut buffer = RxBuffer::with(NONE).unwrap();
        let (mut put, mut taken) = (0u32, 0u32);
        let mut moved = 0;
        // Before most reads, the buffer holds almost all of the largest FPDU.
        for _ in 0..2000 {
            let from = buffer.start;
            let room = buffer.room(usize::MAX);
            assert_eq!(room.len(), RX_DIRECT_TAIL, "there is room for one read");
            for octet in room {
                *octet = put as u8;
                put += 1;
            }
            moved += u32::from(buffer.start < from);
            buffer.filled(RX_DIRECT_TAIL);
            if buffer.len() >= MAX_FPDU {
                let contents: Vec<u8> = buffer.octets().to_vec();
                for octet in &contents[..1021] {
                    assert_eq!(*octet, taken as u8);
                    taken += 1;
                }
                buffer.consume(1021);
            }
        }
        assert!(moved > 3 && taken > 500_000, "{moved} {taken}");
    }

    /// Octets are moved only if the next octets do not fit behind them.
    #[test]
    fn octets_move_only_if_needed() {
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

    #[test]
    fn partial_fpdu_is_kept() {
        for partial_len in [0, 1, 3, 900] {
            for free in [0, 1, 5, 99, 100, 101] {
                let mut buffer = RxBuffer::with(NONE).unwrap();
                let (end, before) = (buffer.staging - free, buffer.staging - free - partial_len);
                buffer.filled(end);
                buffer.data[before..end].fill(7);
                buffer.consume(before);
                assert_eq!(buffer.len(), partial_len);
                assert_eq!(buffer.keep(&[8; 100]), 100, "{partial_len} {free}");
                let mut expected = std::vec![7; partial_len];
                expected.resize(partial_len + 100, 8);
                assert_eq!(buffer.octets(), expected);
            }
        }
    }

    #[test]
    fn contents_move_between_buffers() {
        let (mut from, mut to) = (RxBuffer::new().unwrap(), RxBuffer::with(NONE).unwrap());
        assert_eq!(from.keep(&[7; 900]), 900);
        from.consume(100);
        assert!(to.restore(from.contents()));
        assert_eq!(to.contents(), [7; 800]);
        assert!(!to.restore(&[8]), "the buffer is not empty");
        to.clear();
        assert!(!to.restore(&std::vec![9; to.staging + 1]), "too many");
    }

    /// A long FPDU takes up most of the staging and begins near its front.
    #[test]
    fn longest_fpdu_is_kept() {
        for before in [1, 700, 30_000, 60_000] {
            let mut buffer = RxBuffer::with(NONE).unwrap();
            let partial_len = buffer.staging - before;
            let partial_len = partial_len.min(MAX_FPDU - 100);
            buffer.filled(before + partial_len);
            buffer.data[before..before + partial_len].fill(7);
            buffer.consume(before);
            let missing = std::vec![8; MAX_FPDU - partial_len];
            assert_eq!(buffer.keep(&missing), missing.len(), "{before}");
            assert_eq!(buffer.len(), MAX_FPDU);
            assert!(buffer.octets().starts_with(&std::vec![7; partial_len]));
            assert!(buffer.octets().ends_with(&missing));
        }
    }
}
