//! Receive queues: a queue pair's ring of receive work requests, and the shared receive queue with
//! its limit event (`ibv_create_srq(3)`).

use crate::limits::{MAX_QP_WR, MAX_SGE};
use crate::storage::{Ring, filled};
use crate::tags::{MAX_TAGS, TagList};
use crate::{AllocError, PostError, RecvWr, Sge};
use alloc::vec::Vec;

pub use crate::taken_receive::TakenRecv;

/// Whether a receive was taken for a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// A receive was taken.
    Yes,
    /// No receive is posted.
    None,
    /// The oldest receive is too small, and stays posted.
    TooSmall,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    wr_id: u64,
    /// Sum of the elements' lengths.
    len: u64,
    num_sge: u8,
}

/// A ring of receive work requests of fixed depth.
#[derive(Debug)]
pub struct ReceiveQueue {
    ring: Ring<Slot>,
    sges: Vec<Sge>,
    max_sge: u32,
    /// Number of slots that are not [released](Self::release); meaningful only if `holds`.
    used: u32,
    /// A request that was taken keeps its slot until the slot is released.
    holds: bool,
}

impl ReceiveQueue {
    /// Creates a ring for `depth` requests of at most `max_sge` elements each. The depth may be
    /// zero.
    pub fn new(depth: u32, max_sge: u32) -> Result<Self, AllocError> {
        let depth = depth.min(MAX_QP_WR);
        let max_sge = max_sge.min(MAX_SGE);
        let sges = filled((depth as usize).saturating_mul(max_sge as usize))?;
        Ok(Self {
            ring: Ring::new(depth)?,
            sges,
            max_sge,
            used: 0,
            holds: false,
        })
    }

    /// Sets whether a request that was taken keeps its slot until it is [released](Self::release).
    pub const fn hold_slots(&mut self, hold: bool) {
        self.holds = hold;
    }

    /// Frees the slots of `n` requests that were taken.
    pub const fn release(&mut self, n: u32) {
        let waiting = self.ring.len();
        let left = self.used.saturating_sub(n);
        self.used = if left < waiting { waiting } else { left };
    }

    /// Returns how many more requests can be posted.
    pub const fn room(&self) -> u32 {
        let used = match self.holds {
            true => self.used,
            false => self.ring.len(),
        };
        self.ring.capacity().saturating_sub(used)
    }

    /// Returns the capacity in requests.
    pub const fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Returns the number of posted requests.
    pub const fn len(&self) -> u32 {
        self.ring.len()
    }

    /// Returns `true` if no request is posted.
    pub const fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    #[inline]
    pub(crate) const fn is_full(&self) -> bool {
        self.room() == 0
    }

    /// Appends a request.
    #[inline]
    pub fn post(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        if self.is_full() {
            return Err(PostError::QueueFull);
        }
        let mut len = 0u64;
        for sge in wr.sges {
            len = len.wrapping_add(u64::from(sge.len));
        }
        let slot = Slot {
            wr_id: wr.wr_id,
            len,
            num_sge: wr.sges.len() as u8,
        };
        let slot = self.ring.push(slot).map_err(|_| PostError::QueueFull)?;
        self.used = self.used.wrapping_add(1);
        let at = self.first_sge(slot);
        for (to, from) in self.sges.iter_mut().skip(at).zip(wr.sges) {
            *to = *from;
        }
        Ok(())
    }

    /// Returns the index of a slot's first element. It is inside `sges`, so this does not wrap.
    #[inline]
    const fn first_sge(&self, slot: u32) -> usize {
        (slot as usize).wrapping_mul(self.max_sge as usize)
    }

    /// Moves the oldest request to `taken`. Returns `false` if there is none.
    #[inline(always)]
    pub fn take(&mut self, taken: &mut TakenRecv) -> bool {
        let at = self.first_sge(self.ring.head_slot());
        let Some(slot) = self.ring.pop() else {
            return false;
        };
        taken.wr_id = slot.wr_id;
        taken.num_sge = slot.num_sge;
        taken.len = slot.len;
        // Nearly always there is one element.
        match self.sges.get(at) {
            Some(first) if slot.num_sge == 1 => taken.first = *first,
            _ => self.take_elements(at, taken),
        }
        true
    }

    /// Moves the oldest request to `taken` if its elements have room for `len` octets.
    pub fn take_if_fits(&mut self, taken: &mut TakenRecv, len: u64) -> Taken {
        match self.ring.get(0) {
            None => Taken::None,
            Some(slot) if slot.len < len => Taken::TooSmall,
            Some(_) => match self.take(taken) {
                true => Taken::Yes,
                false => Taken::None,
            },
        }
    }

    #[inline(never)]
    fn take_elements(&self, at: usize, taken: &mut TakenRecv) {
        let end = at.wrapping_add(taken.num_sge as usize);
        let from = self.sges.get(at..end).unwrap_or(&[]);
        taken.first = from.first().copied().unwrap_or_default();
        for (to, from) in taken.several.iter_mut().zip(from) {
            *to = *from;
        }
    }

    /// Removes the oldest request, to flush it. Returns its identifier.
    pub fn flush_one(&mut self) -> Option<u64> {
        self.ring.pop().map(|s| s.wr_id)
    }

    /// Passes the addresses of the next request to be taken and of the next slot to be filled to
    /// `fetch`.
    #[inline]
    pub(crate) fn prefetch(&self, fetch: &impl Fn(*const u8)) {
        for slot in [self.ring.head_slot(), self.ring.tail_slot()] {
            self.ring.prefetch(slot, fetch);
            if let Some(sge) = self.sges.get(self.first_sge(slot)) {
                fetch(core::ptr::from_ref(sge).cast());
            }
        }
    }

    /// Drops all requests, on a change to RESET.
    pub fn clear(&mut self) {
        self.ring.clear();
        self.used = 0;
    }
}

/// A receive queue shared by several queue pairs.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    queue: ReceiveQueue,
    limit: u32,
    /// The tagged buffers, if the queue matches tags.
    tags: Option<TagList>,
}

/// Why a shared receive queue cannot be created or modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SrqError {
    /// A value is zero, above its limit, or below the number of posted requests (EINVAL).
    Invalid,
    /// The allocator has no memory (ENOMEM).
    OutOfMemory,
}

impl SharedReceiveQueue {
    /// Creates a queue for `depth` requests of at most `max_sge` elements.
    pub fn new(depth: u32, max_sge: u32) -> Result<Self, SrqError> {
        if depth == 0 || depth > MAX_QP_WR || max_sge > MAX_SGE {
            return Err(SrqError::Invalid);
        }
        let queue = ReceiveQueue::new(depth, max_sge).map_err(|_| SrqError::OutOfMemory)?;
        Ok(Self {
            queue,
            limit: 0,
            tags: None,
        })
    }

    /// Makes the queue match tags, with up to `max_tags` tagged buffers.
    pub fn match_tags(&mut self, max_tags: u32) -> Result<(), SrqError> {
        if max_tags == 0 || max_tags > MAX_TAGS {
            return Err(SrqError::Invalid);
        }
        self.tags = Some(TagList::new(max_tags).map_err(|_| SrqError::OutOfMemory)?);
        Ok(())
    }

    /// Returns the tagged buffers, if the queue matches tags.
    pub const fn tags(&mut self) -> Option<&mut TagList> {
        self.tags.as_mut()
    }

    /// Returns the capacity in requests.
    pub const fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// Returns the maximum elements per request.
    pub const fn max_sge(&self) -> u32 {
        self.queue.max_sge
    }

    /// Returns the number of posted requests.
    pub const fn len(&self) -> u32 {
        self.queue.len()
    }

    /// Returns `true` if no request is posted.
    pub const fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the limit; zero if it is disarmed or was reported.
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Requests one event when fewer than `limit` requests are posted. Zero disarms the event.
    pub fn set_limit(&mut self, limit: u32) -> Result<(), SrqError> {
        self.modify(None, Some(limit))
    }

    /// Changes depth, limit or both in one step. A refused call changes neither.
    pub fn modify(&mut self, depth: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let new_limit = limit.unwrap_or(self.limit);
        if new_limit > depth.unwrap_or(self.queue.capacity()) {
            return Err(SrqError::Invalid);
        }
        if let Some(depth) = depth {
            self.change_depth(depth)?;
        }
        self.limit = new_limit;
        Ok(())
    }

    /// Appends a request.
    pub fn post(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.queue.post(wr)
    }

    /// Moves the oldest request to `taken`. The first result is `false` if there is none; the
    /// second is `true` if the limit event is due.
    #[inline]
    pub fn take(&mut self, taken: &mut TakenRecv) -> (bool, bool) {
        let result = self.queue.take(taken);
        let due = self.limit != 0 && self.queue.len() < self.limit;
        if due {
            self.limit = 0;
        }
        (result, due)
    }

    /// Moves the oldest request to `taken` if its elements have room for `len` octets. The second
    /// result is `true` if the limit event is due.
    pub fn take_if_fits(&mut self, taken: &mut TakenRecv, len: u64) -> (Taken, bool) {
        let result = self.queue.take_if_fits(taken, len);
        let due = result == Taken::Yes && self.limit != 0 && self.queue.len() < self.limit;
        if due {
            self.limit = 0;
        }
        (result, due)
    }

    /// Changes the depth and keeps the posted requests.
    pub fn resize(&mut self, depth: u32) -> Result<(), SrqError> {
        self.modify(Some(depth), None)
    }

    fn change_depth(&mut self, depth: u32) -> Result<(), SrqError> {
        if depth == 0 || depth > MAX_QP_WR || depth < self.queue.len() {
            return Err(SrqError::Invalid);
        }
        let max_sge = self.queue.max_sge;
        let mut queue = ReceiveQueue::new(depth, max_sge).map_err(|_| SrqError::OutOfMemory)?;
        let mut taken = TakenRecv::new(max_sge).map_err(|_| SrqError::OutOfMemory)?;
        while self.queue.take(&mut taken) {
            // This cannot fail: the length was checked above.
            let _ = queue.post(&RecvWr {
                wr_id: taken.wr_id,
                sges: taken.sges(),
            });
        }
        self.queue = queue;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tags::TaggedBuffer;

    #[test]
    fn prefetch_passes_next_addresses() {
        let mut queue = ReceiveQueue::new(2, 3).unwrap();
        let addresses = |queue: &ReceiveQueue| {
            let list = core::cell::RefCell::new(Vec::new());
            queue.prefetch(&|at| list.borrow_mut().push(at as usize));
            list.into_inner()
        };
        let first = queue.sges.as_ptr() as usize;
        let second = first + 3 * size_of::<Sge>();
        let next = |queue: &ReceiveQueue| (addresses(queue)[1], addresses(queue)[3]);
        assert_eq!(next(&queue), (first, first));
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        queue.post(&wr).unwrap();
        assert_eq!(next(&queue), (first, second));
        queue.post(&wr).unwrap();
        let mut taken = TakenRecv::new(MAX_SGE).unwrap();
        assert!(queue.take(&mut taken));
        assert_eq!(next(&queue), (second, first));
        assert!(queue.take(&mut taken));
        assert_eq!(next(&queue), (first, first), "an empty queue starts over");
        assert!(addresses(&ReceiveQueue::new(0, 1).unwrap()).is_empty());
    }

    #[test]
    fn too_small_request_stays_posted() {
        let mut srq = SharedReceiveQueue::new(3, 1).unwrap();
        let mut taken = TakenRecv::new(1).unwrap();
        assert_eq!(srq.take_if_fits(&mut taken, 0), (Taken::None, false));
        for wr_id in [4, 5, 6] {
            let sges = [Sge {
                addr: 0,
                len: 10,
                lkey: 1,
            }];
            srq.post(&RecvWr { wr_id, sges: &sges }).unwrap();
        }
        srq.set_limit(2).unwrap();
        assert_eq!(srq.take_if_fits(&mut taken, 11), (Taken::TooSmall, false));
        // The event is due when fewer than the limit are posted.
        assert_eq!(srq.take_if_fits(&mut taken, 10), (Taken::Yes, false));
        assert_eq!((taken.wr_id, taken.len), (4, 10));
        assert_eq!(srq.take_if_fits(&mut taken, 10), (Taken::Yes, true));
        assert_eq!((taken.wr_id, taken.len), (5, 10));
        assert_eq!(srq.take_if_fits(&mut taken, 0), (Taken::Yes, false));
        assert_eq!(taken.wr_id, 6);
    }

    /// The limit event is raised once. A dropped datagram must not use it up.
    #[test]
    fn dropped_datagram_raises_no_limit_event() {
        let mut srq = SharedReceiveQueue::new(2, 1).unwrap();
        let mut taken = TakenRecv::new(1).unwrap();
        srq.set_limit(2).unwrap();
        assert_eq!(srq.take_if_fits(&mut taken, 0), (Taken::None, false));
        let wr = RecvWr {
            wr_id: 5,
            sges: &[],
        };
        srq.post(&wr).unwrap();
        assert_eq!(srq.take_if_fits(&mut taken, 1), (Taken::TooSmall, false));
        assert_eq!(srq.take_if_fits(&mut taken, 0), (Taken::Yes, true));
    }

    #[test]
    fn limit_event_fires_once() {
        let mut srq = SharedReceiveQueue::new(4, 1).unwrap();
        for i in 0..3 {
            srq.post(&RecvWr {
                wr_id: i,
                sges: &[Sge {
                    addr: i,
                    len: 1,
                    lkey: 2,
                }],
            })
            .unwrap();
        }
        srq.set_limit(2).unwrap();
        let mut taken = TakenRecv::new(MAX_SGE).unwrap();
        assert_eq!(srq.take(&mut taken), (true, false));
        assert_eq!(srq.take(&mut taken), (true, true));
        assert_eq!(
            taken.sges(),
            &[Sge {
                addr: 1,
                len: 1,
                lkey: 2
            }]
        );
        assert_eq!(srq.take(&mut taken), (true, false));
        assert_eq!(srq.take(&mut taken), (false, false));
        assert_eq!(srq.set_limit(5), Err(SrqError::Invalid));
        // The depth cannot become smaller than the limit.
        srq.set_limit(3).unwrap();
        assert_eq!(srq.resize(2), Err(SrqError::Invalid));
        assert_eq!(srq.resize(3), Ok(()));
        assert_eq!((srq.capacity(), srq.limit()), (3, 3));
    }

    #[test]
    fn post_checks_capacity_and_elements() {
        let mut q = ReceiveQueue::new(1, 1).unwrap();
        let two = [Sge::default(); 2];
        assert_eq!(
            q.post(&RecvWr {
                wr_id: 0,
                sges: &two
            }),
            Err(PostError::TooManySges)
        );
        assert!(!q.is_full());
        q.post(&RecvWr {
            wr_id: 0,
            sges: &[],
        })
        .unwrap();
        assert_eq!(
            q.post(&RecvWr {
                wr_id: 0,
                sges: &[]
            }),
            Err(PostError::QueueFull)
        );
        assert!(q.is_full());
    }

    #[test]
    fn resize_keeps_requests() {
        let mut srq = SharedReceiveQueue::new(3, 2).unwrap();
        let sge = |addr| Sge {
            addr,
            len: 9,
            lkey: 3,
        };
        let lists: [&[Sge]; 3] = [&[], &[sge(1)], &[sge(2), sge(3)]];
        for (wr_id, sges) in (7..).zip(lists) {
            srq.post(&RecvWr { wr_id, sges }).unwrap();
        }
        srq.resize(8).unwrap();
        let mut taken = TakenRecv::new(2).unwrap();
        for (wr_id, sges) in (7..).zip(lists) {
            assert!(srq.take(&mut taken).0);
            let addr = sges.first().map_or(0, |sge| sge.addr);
            assert_eq!((taken.wr_id, taken.len), (wr_id, 9 * sges.len() as u64));
            assert_eq!((taken.sges(), taken.first().addr), (sges, addr));
        }
        assert!(!srq.take(&mut taken).0);
    }

    /// Tagged buffers do not count towards the depth.
    #[test]
    fn resize_keeps_limit_and_tags() {
        let mut srq = SharedReceiveQueue::new(2, 1).unwrap();
        srq.match_tags(3).unwrap();
        srq.set_limit(1).unwrap();
        let buffer = TaggedBuffer {
            wr_id: 7,
            tag: 5,
            mask: u64::MAX,
            sges: &[],
        };
        let handle = srq.tags().unwrap().add(&buffer).unwrap();
        for depth in [4, 1] {
            srq.resize(depth).unwrap();
            assert_eq!((srq.capacity(), srq.limit()), (depth, 1));
            assert_eq!(srq.tags().map(|tags| tags.capacity()), Some(3));
        }
        let tags = srq.tags().unwrap();
        assert_eq!(tags.remove(handle), Ok(()), "the buffer is still posted");
    }

    #[test]
    fn shared_queue_sizes_are_limited() {
        let invalid = Err(SrqError::Invalid);
        let mut srq = SharedReceiveQueue::new(2, 3).unwrap();
        assert_eq!((srq.capacity(), srq.max_sge()), (2, 3));
        assert_eq!((srq.len(), srq.is_empty(), srq.limit()), (0, true, 0));
        assert_eq!(srq.set_limit(3), invalid);
        assert_eq!(srq.limit(), 0);
        // The queue is empty and has no limit, so only the depth itself can be wrong.
        assert_eq!(srq.resize(0), invalid);
        assert_eq!(srq.resize(MAX_QP_WR + 1), invalid);
        assert_eq!(srq.capacity(), 2);
        assert_eq!(srq.resize(MAX_QP_WR), Ok(()));
        assert_eq!(srq.capacity(), MAX_QP_WR);
        for wr_id in 0..3 {
            srq.post(&RecvWr { wr_id, sges: &[] }).unwrap();
        }
        assert_eq!((srq.len(), srq.is_empty()), (3, false));
        assert_eq!(srq.resize(2), invalid);
        assert_eq!(srq.resize(3), Ok(()));
        assert_eq!((srq.capacity(), srq.len()), (3, 3));
        assert!(srq.tags().is_none());
        assert_eq!(srq.match_tags(0), invalid);
        assert_eq!(srq.match_tags(MAX_TAGS + 1), invalid);
        assert!(srq.tags().is_none());
        assert_eq!(srq.match_tags(MAX_TAGS), Ok(()));
        assert_eq!(srq.tags().unwrap().capacity(), MAX_TAGS);
    }
}
