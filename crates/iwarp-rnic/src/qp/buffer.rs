//! Staging: a buffer for octets that have come from the stream and are not processed yet.

use crate::AllocError;
use crate::limits::{MAX_SGE, RX_READ_MAX, RX_STAGING};
use crate::memory::{Memory, MemoryTable, Users};
use crate::storage::filled;
use alloc::boxed::Box;
use alloc::vec::Vec;

/// A staging buffer. Between FPDUs it is empty and may serve any queue pair. With a part of an FPDU in it, it belongs to
/// that FPDU's queue pair.
#[derive(Debug)]
pub struct RxBuffer {
    data: Vec<u8>,
    start: usize,
    end: usize,
    /// Room for one ULPDU without its markers, allocated at first use.
    pub(super) unmarked: Vec<u8>,
}

impl RxBuffer {
    /// An empty buffer of 256 KiB.
    pub fn new() -> Result<Box<Self>, AllocError> {
        Ok(Box::new(Self {
            data: filled(RX_STAGING)?,
            start: 0,
            end: 0,
            unmarked: Vec::new(),
        }))
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

    /// Returns the octets and the room for an unmarked ULPDU together.
    pub(super) fn octets_and_unmarked(&mut self) -> (&[u8], &mut Vec<u8>) {
        (
            self.data.get(self.start..self.end).unwrap_or(&[]),
            &mut self.unmarked,
        )
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
        self.end = self.end.saturating_add(n).min(self.data.len());
    }

    /// Returns where the next octets may be read to, at most `most`.
    pub(super) fn room(&mut self, most: usize) -> &mut [u8] {
        let most = most.min(RX_READ_MAX);
        // A part of an FPDU moves to the front when the space behind it runs out.
        if self.start > 0 && self.data.len().saturating_sub(self.end) < most {
            self.data.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let end = self.end.saturating_add(most).min(self.data.len());
        self.data.get_mut(self.end..end).unwrap_or(&mut [])
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
    pub(super) users: Users<[u32; MAX_SGE as usize]>,
}

impl RxPlan {
    /// Makes an empty plan for up to `runs` runs.
    pub const fn new(runs: usize) -> Self {
        Self {
            most: runs,
            room: 0,
            direct: 0,
            users: Users::new([0; MAX_SGE as usize]),
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
