//! Tagged buffers of a shared receive queue, and the effects of arriving headers on them
//! (`ibv_post_srq_ops(3)`, rdma-core's `Documentation/tag_matching.md`).
//!
//! This module does not depend on queue pairs or memory: `qp::tagged` looks up the buffer of a
//! message and acts on the result.
//!
//! A buffer is *posted* until the first matching message consumes it. An eager message frees its
//! entry immediately. A rendezvous request makes it *matched*, then *reading*; the entry is freed
//! when the Read is answered. The state that a peer can create is therefore bounded by the list.
//!
//! The program itself matches the messages that matched no buffer. Until it confirms that it has
//! seen all of them, newly posted buffers are not matched: the program may still find an earlier
//! message for such a buffer.

use crate::storage::filled;
use crate::taken_receive::TakenRecv;
use crate::{AllocError, Sge};
use alloc::vec::Vec;
use iwarp_proto::tag_matching::{Operation, Rvh, Tmh};

/// Maximum tagged buffers of a queue. The limit is low, because a message is compared with each
/// buffer.
pub const MAX_TAGS: u32 = 1 << INDEX_BITS;
/// Maximum elements of a tagged buffer.
pub const MAX_TAG_SGE: u32 = 4;

/// Number of low bits of a handle that hold the index. The other bits change whenever the entry is
/// reused.
const INDEX_BITS: u32 = 10;
/// End of a chain of entries.
const NONE: u32 = u32::MAX;

/// A buffer to be posted.
#[derive(Debug, Clone, Copy)]
pub struct TaggedBuffer<'a> {
    /// The program's identifier, returned in the completions of the message.
    pub wr_id: u64,
    /// The tag to match.
    pub tag: u64,
    /// The bits of the tag that are compared.
    pub mask: u64,
    /// Destination of the payload without the message's headers.
    pub sges: &'a [Sge],
}

/// Why a buffer was not posted or not removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagError {
    /// The queue has the maximum number of posted buffers (ENOMEM).
    Full,
    /// The buffer has more than [`MAX_TAG_SGE`] elements, or the handle was never valid (EINVAL).
    Invalid,
    /// A message has consumed the buffer, or it was already removed.
    Gone,
}

/// How a message is to be processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// The message has no tag, and goes into an ordinary receive.
    NoTag,
    /// No buffer matches the tag: the program gets the message in an ordinary receive.
    Unexpected,
    /// The message goes into the matching buffer, whose elements were copied to `taken`.
    Eager,
    /// The sender's memory is to be read into the buffer with this `wr_id`: [`TagList::next_read`].
    Rendezvous(u64),
    /// The message is longer than the matching buffer, which has this `wr_id` and was removed.
    TooLong(u64),
}

/// A Read that fetches the payload of a rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TagRead {
    /// The destination buffer.
    pub handle: u32,
    /// The location of the payload.
    pub source: Rvh,
}

/// A rendezvous whose payload has arrived or cannot be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TagDone {
    /// The `wr_id` of the buffer.
    pub wr_id: u64,
    /// Octets of payload.
    pub len: u32,
    /// The header of the rendezvous request.
    pub request: Tmh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    Free,
    /// If `waits`, the buffer is not matched yet: the program may not know all earlier messages.
    Posted {
        waits: bool,
    },
    Matched,
    Reading,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    stage: Stage,
    /// Number of uses; the upper part of the handle.
    uses: u32,
    num_sge: u8,
    wr_id: u64,
    tag: u64,
    mask: u64,
    /// Sum of the elements' lengths.
    len: u64,
    /// The next posted entry, or the next free one.
    next: u32,
    /// For a rendezvous: the queue pair, the position among all rendezvous, and fields of the
    /// request.
    qp_num: u32,
    order: u32,
    app_ctx: u32,
    source: Rvh,
}

/// The tagged buffers of a shared receive queue.
#[derive(Debug)]
pub struct TagList {
    entries: Vec<Entry>,
    sges: Vec<Sge>,
    /// The posted entries, oldest first.
    first: u32,
    last: u32,
    free: u32,
    /// Number of messages that matched no buffer, modulo 2^32.
    unexpected: u32,
    /// How many of the unexpected messages the program knows, modulo 2^32.
    handled: u32,
    /// Number of matched rendezvous, modulo 2^32.
    rendezvous: u32,
}

impl TagList {
    /// Creates a list for `max_tags` buffers, up to [`MAX_TAGS`].
    pub fn new(max_tags: u32) -> Result<Self, AllocError> {
        let number = max_tags.min(MAX_TAGS);
        let mut entries: Vec<Entry> = filled(number as usize)?;
        for (at, entry) in (1u32..).zip(&mut entries) {
            entry.next = if at == number { NONE } else { at };
        }
        Ok(Self {
            entries,
            sges: filled((number as usize).saturating_mul(MAX_TAG_SGE as usize))?,
            first: NONE,
            last: NONE,
            free: if number == 0 { NONE } else { 0 },
            unexpected: 0,
            handled: 0,
            rendezvous: 0,
        })
    }

    /// Returns the maximum number of buffers.
    pub const fn capacity(&self) -> u32 {
        self.entries.len() as u32
    }

    fn at(&self, index: u32) -> Option<&Entry> {
        self.entries.get(index as usize)
    }

    fn at_mut(&mut self, index: u32) -> Option<&mut Entry> {
        self.entries.get_mut(index as usize)
    }

    fn handle(&self, index: u32) -> u32 {
        let uses = self.at(index).map_or(0, |entry| entry.uses);
        uses.wrapping_shl(INDEX_BITS) | index
    }

    /// Returns the index of the entry in use with this handle.
    fn find(&self, handle: u32) -> Result<u32, TagError> {
        let index = handle & (MAX_TAGS.wrapping_sub(1));
        let entry = self.at(index).ok_or(TagError::Invalid)?;
        match self.handle(index) == handle && entry.stage != Stage::Free {
            true => Ok(index),
            false => Err(TagError::Gone),
        }
    }

    /// Returns the index of an entry's first element. It is inside `sges`.
    const fn first_sge(index: u32) -> usize {
        (index as usize).wrapping_mul(MAX_TAG_SGE as usize)
    }

    /// Posts a buffer (`IBV_WR_TAG_ADD`). Returns its handle.
    pub fn add(&mut self, buffer: &TaggedBuffer<'_>) -> Result<u32, TagError> {
        if buffer.sges.len() > MAX_TAG_SGE as usize {
            return Err(TagError::Invalid);
        }
        let (index, waits) = (self.free, !self.is_synchronized());
        let entry = self.at_mut(index).ok_or(TagError::Full)?;
        let next_free = entry.next;
        *entry = Entry {
            stage: Stage::Posted { waits },
            uses: entry.uses,
            num_sge: buffer.sges.len() as u8,
            wr_id: buffer.wr_id,
            tag: buffer.tag,
            mask: buffer.mask,
            len: buffer.sges.iter().map(|sge| u64::from(sge.len)).sum(),
            next: NONE,
            ..Entry::default()
        };
        self.free = next_free;
        let room = self.sges.iter_mut().skip(Self::first_sge(index));
        for (to, from) in room.zip(buffer.sges) {
            *to = *from;
        }
        match self.at_mut(self.last) {
            Some(last) => last.next = index,
            None => self.first = index,
        }
        self.last = index;
        Ok(self.handle(index))
    }

    /// Removes a buffer (`IBV_WR_TAG_DEL`).
    pub fn remove(&mut self, handle: u32) -> Result<(), TagError> {
        let index = self.find(handle)?;
        let before = self
            .posted()
            .find(|at| self.at(*at).is_some_and(|entry| entry.next == index));
        if self.first != index && before.is_none() {
            // A rendezvous uses the buffer.
            return Err(TagError::Gone);
        }
        self.unlink(before.unwrap_or(NONE), index);
        self.release(index);
        Ok(())
    }

    /// Sets how many of the messages that matched no buffer the program knows (`IBV_OPS_TM_SYNC`).
    pub fn synchronize(&mut self, handled: u32) {
        self.handled = handled;
        if !self.is_synchronized() {
            return;
        }
        for entry in &mut self.entries {
            if entry.stage == (Stage::Posted { waits: true }) {
                entry.stage = Stage::Posted { waits: false };
            }
        }
    }

    /// Returns `true` if the program knows all messages that matched no buffer. Otherwise, newly
    /// posted buffers are not matched before it does.
    pub const fn is_synchronized(&self) -> bool {
        self.handled == self.unexpected
    }

    /// Decides how a message with these headers is processed; `payload` is the number of octets
    /// after the first header. `reads` is `true` if the peer serves Reads. The buffer of an eager
    /// message is removed, and its elements are copied to `taken`.
    pub fn arrive(
        &mut self,
        qp_num: u32,
        (tmh, rvh): (Option<Tmh>, Option<Rvh>),
        payload: u32,
        reads: bool,
        taken: &mut TakenRecv,
    ) -> Arrival {
        let (Some(tmh), rvh) = (tmh, rvh.unwrap_or_default()) else {
            return Arrival::NoTag;
        };
        let (rendezvous, len) = match tmh.operation {
            Operation::Eager => (false, payload),
            Operation::Rendezvous if payload >= Rvh::LEN as u32 => (true, rvh.len),
            _ => return Arrival::NoTag,
        };
        let found = match rendezvous && !reads {
            // Only the program can ask the sender to transfer the payload without a Read.
            true => None,
            false => self.search(tmh.tag),
        };
        let Some((before, index)) = found else {
            self.unexpected = self.unexpected.wrapping_add(1);
            return Arrival::Unexpected;
        };
        self.unlink(before, index);
        let entry = self.at(index).copied().unwrap_or_default();
        if u64::from(len) > entry.len {
            self.release(index);
            return Arrival::TooLong(entry.wr_id);
        }
        if !rendezvous {
            self.copy_elements(index, u32::MAX, taken);
            self.release(index);
            return Arrival::Eager;
        }
        let order = self.rendezvous;
        self.rendezvous = order.wrapping_add(1);
        if let Some(entry) = self.at_mut(index) {
            entry.stage = Stage::Matched;
            (entry.qp_num, entry.order) = (qp_num, order);
            // The sender's notification must contain the tag that it sent, not the buffer's.
            entry.tag = tmh.tag;
            (entry.app_ctx, entry.source) = (tmh.app_ctx, rvh);
        }
        Arrival::Rendezvous(entry.wr_id)
    }

    /// Returns the next Read that a queue pair should send, and copies the elements of its sink,
    /// limited to the length of the payload.
    pub fn next_read(&mut self, qp_num: u32, sink: &mut TakenRecv) -> Option<TagRead> {
        let ours = |entry: &Entry| entry.stage == Stage::Matched && entry.qp_num == qp_num;
        let age = |entry: &Entry| self.rendezvous.wrapping_sub(entry.order);
        let waiting = (0u32..).zip(&self.entries).filter(|(_, e)| ours(e));
        let (index, _) = waiting.max_by_key(|(_, entry)| age(entry))?;
        let entry = self.at_mut(index)?;
        entry.stage = Stage::Reading;
        let source = entry.source;
        self.copy_elements(index, source.len, sink);
        let handle = self.handle(index);
        Some(TagRead { handle, source })
    }

    /// Ends a Read that succeeded or failed. Returns `None` if it has already ended.
    pub fn end_read(&mut self, handle: u32) -> Option<TagDone> {
        let index = self.find(handle).ok()?;
        let entry = *self.at(index)?;
        if entry.stage != Stage::Reading {
            return None;
        }
        self.release(index);
        Some(TagDone {
            wr_id: entry.wr_id,
            len: entry.source.len,
            request: Tmh {
                operation: Operation::Rendezvous,
                app_ctx: entry.app_ctx,
                tag: entry.tag,
            },
        })
    }

    /// Drops the rendezvous of a queue pair that is reset, without completions.
    pub fn forget(&mut self, qp_num: u32) {
        for index in 0..self.capacity() {
            let belongs_to_qp = |entry: &Entry| {
                matches!(entry.stage, Stage::Matched | Stage::Reading) && entry.qp_num == qp_num
            };
            if self.at(index).is_some_and(belongs_to_qp) {
                self.release(index);
            }
        }
    }

    /// Returns the indices of posted entries, oldest first. The number of steps is bounded.
    fn posted(&self) -> impl Iterator<Item = u32> {
        let next = |at: &u32| self.at(*at).map(|entry| entry.next);
        let chain = core::iter::successors(Some(self.first), next);
        chain.take_while(|at| *at != NONE).take(self.entries.len())
    }

    /// Returns the oldest buffer that matches this tag, and its predecessor.
    fn search(&self, tag: u64) -> Option<(u32, u32)> {
        let mut before = NONE;
        for index in self.posted() {
            let entry = self.at(index)?;
            if entry.stage == (Stage::Posted { waits: false }) && tag & entry.mask == entry.tag {
                return Some((before, index));
            }
            before = index;
        }
        None
    }

    /// Removes an entry from the chain of posted entries; `before` is its predecessor or `NONE`.
    fn unlink(&mut self, before: u32, index: u32) {
        let next = self.at(index).map_or(NONE, |entry| entry.next);
        match self.at_mut(before) {
            Some(entry) => entry.next = next,
            None => self.first = next,
        }
        if self.last == index {
            self.last = before;
        }
    }

    fn release(&mut self, index: u32) {
        let free = self.free;
        if let Some(entry) = self.at_mut(index) {
            entry.stage = Stage::Free;
            entry.uses = entry.uses.wrapping_add(1);
            entry.next = free;
            self.free = index;
        }
    }

    /// Copies up to `len` octets of an entry's elements to `taken`.
    fn copy_elements(&self, index: u32, len: u32, taken: &mut TakenRecv) {
        let Some(entry) = self.at(index) else {
            return;
        };
        let from = Self::first_sge(index);
        let end = from.wrapping_add(entry.num_sge as usize);
        taken.fill(entry.wr_id, self.sges.get(from..end).unwrap_or(&[]), len);
    }
}

#[cfg(test)]
mod tests;
