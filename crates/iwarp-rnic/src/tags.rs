//! Buffers that are posted with a tag to a shared receive queue, and what the headers of arriving messages do to them (`ibv_post_srq_ops(3)`,
//! rdma-core's `Documentation/tag_matching.md`).
//!
//! Nothing here is about queue pairs or memory: `qp::tagged` asks which buffer a message is for, and carries it out.
//!
//! A buffer is *posted* until the first message that matches takes it. An eager message ends it at once. After a request for a rendezvous it is
//! *matched*, then *read into*, and ends when the Read has been answered. So the list bounds everything that a peer can make us remember.
//!
//! The program searches messages that matched nothing itself. Until it has told that it knows all of them, buffers that it posts are not
//! matched: it may still find the message in its own list that this buffer is for, which came earlier than the next one.

use crate::storage::filled;
use crate::taken_receive::TakenRecv;
use crate::{AllocError, Sge};
use alloc::vec::Vec;
use iwarp_proto::tag_matching::{Operation, Rvh, Tmh};

/// Most tagged buffers of a queue. A message is compared with each of them, so there are not many.
pub const MAX_TAGS: u32 = 1 << INDEX_BITS;
/// Most elements of a tagged buffer.
pub const MAX_TAG_SGE: u32 = 4;

/// A handle is an index, and above it a number that changes whenever the entry is used again.
const INDEX_BITS: u32 = 10;
/// Ends a chain of entries.
const NONE: u32 = u32::MAX;

/// A buffer to be posted.
#[derive(Debug, Clone, Copy)]
pub struct TaggedBuffer<'a> {
    /// A number of the program's, which comes back in the completions of the message.
    pub wr_id: u64,
    /// It is for messages whose tag is this one,
    pub tag: u64,
    /// where these bits are compared.
    pub mask: u64,
    /// Where the payload lands, without the message's headers.
    pub sges: &'a [Sge],
}

/// Why a buffer was not posted or not taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagError {
    /// As many are posted as the queue was made for (ENOMEM).
    Full,
    /// It has more than [`MAX_TAG_SGE`] elements, or the handle is none that was ever given (EINVAL).
    Invalid,
    /// A message has taken it, or it was taken away before.
    Gone,
}

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It has no tag.
    NoTag,
    /// No buffer has its tag: the program looks for it.
    Unexpected,
    /// It is for the buffer that was taken.
    Eager,
    /// Its sender's memory is to be read into the buffer with this `wr_id`: [`TagList::next_read`].
    Rendezvous(u64),
    /// It is longer than the buffer with this `wr_id`, which is gone.
    TooLong(u64),
}

/// A Read that brings the payload of a rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TagRead {
    /// The buffer that it is for.
    pub handle: u32,
    /// Where the payload is.
    pub source: Rvh,
}

/// A rendezvous whose payload is there, or cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TagDone {
    /// The buffer's number of the program's.
    pub wr_id: u64,
    /// Octets of payload.
    pub len: u32,
    /// The header of the request.
    pub request: Tmh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    Free,
    /// `Some` messages may not be known to the program that came before it: it is not matched.
    Posted {
        waits: bool,
    },
    Matched,
    Reading,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    stage: Stage,
    /// Counts its uses; the upper part of its handle.
    uses: u32,
    num_sge: u8,
    wr_id: u64,
    tag: u64,
    mask: u64,
    /// Sum of the elements' lengths.
    len: u64,
    /// The next posted entry, or the next free one.
    next: u32,
    /// Of a rendezvous: the queue pair that it came to, its place among those, and its headers.
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
    /// Messages that matched nothing, modulo 2^32, and how many of them the program knows.
    unexpected: u32,
    handled: u32,
    /// Rendezvous that have matched, modulo 2^32.
    rendezvous: u32,
}

impl TagList {
    /// Makes room for `max_tags` buffers, up to [`MAX_TAGS`].
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

    /// Returns how many buffers there is room for.
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

    /// Returns the index of an entry that is in use under this handle.
    fn find(&self, handle: u32) -> Result<u32, TagError> {
        let index = handle & (MAX_TAGS.wrapping_sub(1));
        let entry = self.at(index).ok_or(TagError::Invalid)?;
        match self.handle(index) == handle && entry.stage != Stage::Free {
            true => Ok(index),
            false => Err(TagError::Gone),
        }
    }

    /// Where the elements of an entry begin. All entries have theirs inside of `sges`.
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

    /// Takes a buffer away (`IBV_WR_TAG_DEL`).
    pub fn remove(&mut self, handle: u32) -> Result<(), TagError> {
        let index = self.find(handle)?;
        let before = self
            .posted()
            .find(|at| self.at(*at).is_some_and(|entry| entry.next == index));
        if self.first != index && before.is_none() {
            // A rendezvous has it.
            return Err(TagError::Gone);
        }
        self.unlink(before.unwrap_or(NONE), index);
        self.release(index);
        Ok(())
    }

    /// Notes how many messages that matched nothing the program knows (`IBV_OPS_TM_SYNC`).
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

    /// Returns `true` if the program knows all messages that matched nothing. Otherwise buffers that are posted now are not matched before
    /// it has told so.
    pub const fn is_synchronized(&self) -> bool {
        self.handled == self.unexpected
    }

    /// Decides what a message is for whose headers are these; `payload` counts its octets behind the first header. `reads` says whether
    /// the peer answers Reads. A buffer for an eager message is taken.
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
            // Only the program can ask the sender to do without.
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
            self.lend(index, u32::MAX, taken);
            self.release(index);
            return Arrival::Eager;
        }
        let order = self.rendezvous;
        self.rendezvous = order.wrapping_add(1);
        if let Some(entry) = self.at_mut(index) {
            entry.stage = Stage::Matched;
            (entry.qp_num, entry.order) = (qp_num, order);
            // The buffer's own tag was compared under its mask; the sender hears its own again.
            entry.tag = tmh.tag;
            (entry.app_ctx, entry.source) = (tmh.app_ctx, rvh);
        }
        Arrival::Rendezvous(entry.wr_id)
    }

    /// Takes the next Read of a queue pair that is to be asked for, with the elements of its sink, which are as long as the payload.
    pub fn next_read(&mut self, qp_num: u32, sink: &mut TakenRecv) -> Option<TagRead> {
        let ours = |entry: &Entry| entry.stage == Stage::Matched && entry.qp_num == qp_num;
        let age = |entry: &Entry| self.rendezvous.wrapping_sub(entry.order);
        let waiting = (0u32..).zip(&self.entries).filter(|(_, e)| ours(e));
        let (index, _) = waiting.max_by_key(|(_, entry)| age(entry))?;
        let entry = self.at_mut(index)?;
        entry.stage = Stage::Reading;
        let source = entry.source;
        self.lend(index, source.len, sink);
        let handle = self.handle(index);
        Some(TagRead { handle, source })
    }

    /// Ends a Read, whatever came of it. Returns `None` if it has ended before.
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

    /// Forgets the rendezvous of a queue pair that is reset: their buffers are gone, and nothing completes.
    pub fn forget(&mut self, qp_num: u32) {
        for index in 0..self.capacity() {
            let is_its = |entry: &Entry| {
                matches!(entry.stage, Stage::Matched | Stage::Reading) && entry.qp_num == qp_num
            };
            if self.at(index).is_some_and(is_its) {
                self.release(index);
            }
        }
    }

    /// The indices of posted entries, oldest first. No more than there are entries, whatever the links say.
    fn posted(&self) -> impl Iterator<Item = u32> {
        let next = |at: &u32| self.at(*at).map(|entry| entry.next);
        let chain = core::iter::successors(Some(self.first), next);
        chain.take_while(|at| *at != NONE).take(self.entries.len())
    }

    /// Returns the oldest buffer that has this tag, and the one before it.
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

    /// Takes an entry out of the chain of posted ones; `before` is the one before it, if there is one.
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

    /// Makes an entry free, and its handle invalid.
    fn release(&mut self, index: u32) {
        let free = self.free;
        if let Some(entry) = self.at_mut(index) {
            entry.stage = Stage::Free;
            entry.uses = entry.uses.wrapping_add(1);
            entry.next = free;
            self.free = index;
        }
    }

    /// Copies the elements of an entry, up to `len` octets of them.
    fn lend(&self, index: u32, len: u32, taken: &mut TakenRecv) {
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
