//! Completion queues (`ibv_create_cq(3)`, `ibv_poll_cq(3)`, `ibv_req_notify_cq(3)`).

use crate::limits::MAX_CQE;
use crate::storage::Ring;
use crate::{AllocError, Cqe, WcFlags, WcStatus, Work};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Any,
    Solicited,
}

/// The result of writing a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// The completion was written.
    Quiet,
    /// The completion was written, and the queue was armed for it: the caller raises one completion
    /// event.
    Notify,
    /// The queue is full: the completion is lost, and the queue is unusable from now on. On the
    /// first loss the caller raises the asynchronous event "CQ error".
    Overflow {
        /// `true` for the first loss.
        first: bool,
    },
}

/// A completion queue of fixed capacity.
#[derive(Debug)]
pub struct CompletionQueue {
    ring: Ring<Cqe>,
    armed: Armed,
    overflowed: bool,
    purge: Option<Purge>,
}

/// An unfinished purge. It scans from the newest completion to the oldest, and moves the
/// completions that it keeps towards the newest end:
///
/// ```text
/// oldest                                          newest
/// │ not scanned yet │ gap │ kept, or written later │
/// ```
/// Completions can therefore be pushed and popped between the steps of a purge, and keep their
/// order.
#[derive(Debug, Clone, Copy)]
struct Purge {
    qp_num: u32,
    /// Completions not scanned yet.
    unscanned: u32,
    /// Number of free slots between the unscanned completions and the others.
    gap: u32,
}

/// Why a completion queue cannot have the requested size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqSizeError {
    /// The size is zero, above the limit, or less than the number of pending completions (EINVAL).
    Invalid,
    /// The allocator has no memory (ENOMEM).
    OutOfMemory,
}

impl From<AllocError> for CqSizeError {
    fn from(_: AllocError) -> Self {
        Self::OutOfMemory
    }
}

impl CompletionQueue {
    /// Creates a queue for `capacity` completions, 1 to [`MAX_CQE`].
    pub fn new(capacity: u32) -> Result<Self, CqSizeError> {
        Ok(Self {
            ring: Self::ring(capacity)?,
            armed: Armed::No,
            overflowed: false,
            purge: None,
        })
    }

    fn ring(capacity: u32) -> Result<Ring<Cqe>, CqSizeError> {
        match capacity {
            1..=MAX_CQE => Ok(Ring::new(capacity)?),
            _ => Err(CqSizeError::Invalid),
        }
    }

    /// Returns the capacity in completions.
    pub const fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Returns the number of pending completions.
    pub const fn len(&self) -> u32 {
        match self.purge {
            None => self.ring.len(),
            Some(purge) => self.ring.len().saturating_sub(purge.gap),
        }
    }

    /// Returns `true` if no completion is pending.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `true` once a completion was lost. The queue pairs that use this queue must then
    /// fail.
    pub const fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Appends a completion.
    #[inline]
    pub fn push(&mut self, cqe: Cqe) -> Pushed {
        if self.overflowed || self.ring.push(cqe).is_err() {
            return self.record_loss();
        }
        match self.armed {
            Armed::No => Pushed::Quiet,
            Armed::Any | Armed::Solicited => self.notify(cqe.status, cqe.flags),
        }
    }

    /// Drops a completion as if the queue were full, to test how a program handles that.
    #[cold]
    pub const fn overflow(&mut self) -> Pushed {
        self.record_loss()
    }

    #[cold]
    const fn record_loss(&mut self) -> Pushed {
        //= rfc5040 section 8.1.1
        //# 10. An RNIC MUST ensure that if a CQ overflows, any Streams that do not use
        //# the CQ MUST remain unaffected.
        let first = !self.overflowed;
        self.overflowed = true;
        Pushed::Overflow { first }
    }

    /// If the queue is armed for a completion with this status and flags, disarms it.
    #[inline(never)]
    fn notify(&mut self, status: WcStatus, flags: WcFlags) -> Pushed {
        // A failed completion is treated as solicited (ibv_req_notify_cq(3)).
        let solicited = status != WcStatus::Success || flags.contains(WcFlags::SOLICITED);
        if self.armed == Armed::Solicited && !solicited {
            return Pushed::Quiet;
        }
        self.armed = Armed::No;
        Pushed::Notify
    }

    /// Removes and returns the oldest completion.
    #[inline]
    pub fn pop(&mut self) -> Option<Cqe> {
        if self.purge.is_some() {
            return self.pop_while_purging();
        }
        self.ring.pop()
    }

    #[cold]
    fn pop_while_purging(&mut self) -> Option<Cqe> {
        if let Some(purge) = &mut self.purge {
            purge.unscanned = purge.unscanned.saturating_sub(1);
        }
        let cqe = self.ring.pop();
        self.close_gap();
        cqe
    }

    /// If the purge has scanned everything, removes the gap, which is then at the oldest end.
    fn close_gap(&mut self) {
        if let Some(purge) = self.purge.filter(|purge| purge.unscanned == 0) {
            self.ring.skip_many(purge.gap);
            self.purge = None;
        }
    }

    /// Returns `true` if a successful completion of the queue pair is pending. Scans the entire
    /// queue.
    pub fn has_success_of(&self, qp_num: u32) -> bool {
        self.waiting()
            .any(|cqe| cqe.qp_num == qp_num && cqe.status == WcStatus::Success)
    }

    /// Returns the pending completions, oldest first. During a purge, some dropped completions are
    /// included.
    pub fn waiting(&self) -> impl Iterator<Item = &Cqe> {
        (0..self.ring.len()).filter_map(|i| self.ring.get(i))
    }

    /// Moves up to `out.len()` completions to `out`, oldest first, and returns how many.
    #[inline]
    pub fn poll(&mut self, out: &mut [Cqe]) -> usize {
        let mut n = 0usize;
        for slot in out {
            match self.pop() {
                Some(cqe) => *slot = cqe,
                None => break,
            }
            n = n.wrapping_add(1);
        }
        n
    }

    /// Requests one event: for the next completion, or for the next solicited or failed completion
    /// (`solicited_only`). Pending completions raise no event. A request for any completion is not
    /// narrowed by a later request for solicited completions.
    pub fn arm(&mut self, solicited_only: bool) {
        self.armed = match (self.armed, solicited_only) {
            (Armed::Any, _) | (_, false) => Armed::Any,
            (_, true) => Armed::Solicited,
        };
    }

    /// Changes the capacity and keeps the pending completions. An unfinished purge starts again.
    pub fn resize(&mut self, capacity: u32) -> Result<(), CqSizeError> {
        if capacity < self.len() {
            return Err(CqSizeError::Invalid);
        }
        let mut ring = Self::ring(capacity)?;
        while let Some(cqe) = self.pop() {
            // This cannot fail: the length was checked above.
            let _ = ring.push(cqe);
        }
        self.ring = ring;
        Ok(())
    }

    /// Drops completions of a queue pair that is being destroyed or reset, so that they are never
    /// polled. Scans at most `most` completions; call it again after [`Work::More`]. The queue pair
    /// must not push completions meanwhile.
    ///
    /// Between two calls the queue may be unlocked, and completions may be pushed and popped. Until
    /// the last call, dropped completions may still use capacity. Only one purge runs at a time: a
    /// call for another queue pair continues the first purge. Callers therefore hold a lock from
    /// their first call to their last.
    pub fn purge(&mut self, qp_num: u32, most: u32) -> Work {
        let unscanned = self.ring.len();
        let purge = self.purge.get_or_insert(Purge {
            qp_num,
            unscanned,
            gap: 0,
        });
        let ours = purge.qp_num == qp_num;
        for _ in 0..most.max(1).min(purge.unscanned) {
            purge.unscanned = purge.unscanned.saturating_sub(1);
            let Some(cqe) = self.ring.get(purge.unscanned).copied() else {
                break;
            };
            if cqe.qp_num == purge.qp_num {
                purge.gap = purge.gap.saturating_add(1);
            } else if let Some(to) = self.ring.get_mut(purge.unscanned.saturating_add(purge.gap)) {
                *to = cqe;
            }
        }
        self.close_gap();
        match ours && self.purge.is_none() {
            true => Work::Done,
            false => Work::More,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::vec::Vec;

    fn cqe(wr_id: u64) -> Cqe {
        Cqe {
            wr_id,
            ..Cqe::default()
        }
    }

    #[test]
    fn overflow_keeps_older_completions() {
        let mut cq = CompletionQueue::new(2).unwrap();
        assert_eq!(cq.push(cqe(1)), Pushed::Quiet);
        assert_eq!(cq.push(cqe(2)), Pushed::Quiet);
        assert!(!cq.overflowed());
        assert_eq!(cq.push(cqe(3)), Pushed::Overflow { first: true });
        assert!(cq.overflowed());
        assert_eq!(cq.push(cqe(4)), Pushed::Overflow { first: false });
        assert_eq!(cq.pop().map(|c| c.wr_id), Some(1));
        // The queue stays unusable even if it has free slots again.
        assert_eq!(cq.push(cqe(5)), Pushed::Overflow { first: false });
        assert_eq!(cq.pop().map(|c| c.wr_id), Some(2));
        assert_eq!(cq.pop(), None);
        assert!(cq.overflowed());
    }

    #[test]
    fn arming_fires_once() {
        let mut cq = CompletionQueue::new(8).unwrap();
        cq.arm(true);
        assert_eq!(cq.push(cqe(1)), Pushed::Quiet);
        assert_eq!(
            cq.push(Cqe {
                flags: WcFlags::SOLICITED,
                ..cqe(2)
            }),
            Pushed::Notify
        );
        assert_eq!(
            cq.push(Cqe {
                flags: WcFlags::SOLICITED,
                ..cqe(3)
            }),
            Pushed::Quiet
        );
        cq.arm(true);
        assert_eq!(
            cq.push(Cqe {
                status: WcStatus::Flushed,
                ..cqe(4)
            }),
            Pushed::Notify
        );
        cq.arm(false);
        cq.arm(true);
        assert_eq!(cq.push(cqe(5)), Pushed::Notify);
    }

    #[test]
    fn purged_completions_allow_shrinking() {
        let mut cq = CompletionQueue::new(4).unwrap();
        for i in 0..4 {
            let _ = cq.push(Cqe {
                qp_num: i % 2,
                ..cqe(u64::from(i))
            });
        }
        assert_eq!(cq.resize(3), Err(CqSizeError::Invalid));
        assert_eq!(cq.purge(0, u32::MAX), Work::Done);
        cq.resize(2).unwrap();
        let mut out = [Cqe::default(); 4];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!((out[0].wr_id, out[1].wr_id), (1, 3));
    }

    #[test]
    fn queue_stays_armed() {
        for solicited_only in [false, true] {
            let mut cq = CompletionQueue::new(4).unwrap();
            let _ = cq.push(cqe(1));
            cq.arm(solicited_only);
            assert_eq!(cq.resize(8), Ok(()));
            assert_eq!(cq.purge(7, u32::MAX), Work::Done);
            assert_eq!(cq.pop().map(|c| c.wr_id), Some(1));
            assert_eq!(cq.pop(), None);
            let plain = cq.push(cqe(2));
            assert_eq!(plain == Pushed::Notify, !solicited_only);
            let flags = WcFlags::SOLICITED;
            let solicited = cq.push(Cqe { flags, ..cqe(3) });
            assert_eq!(solicited == Pushed::Notify, solicited_only);
            assert_eq!(cq.push(Cqe { flags, ..cqe(4) }), Pushed::Quiet);
        }
    }

    #[test]
    fn queue_shrinks_during_purge() {
        let mut cq = CompletionQueue::new(6).unwrap();
        for i in 0..6 {
            let _ = cq.push(Cqe {
                qp_num: u32::from(i >= 3),
                ..cqe(i)
            });
        }
        assert_eq!(cq.purge(1, 3), Work::More);
        assert_eq!(cq.len(), 3);
        assert_eq!(cq.resize(2), Err(CqSizeError::Invalid));
        assert_eq!(cq.resize(3), Ok(()));
        assert_eq!((cq.capacity(), cq.len()), (3, 3));
        assert_eq!(cq.purge(1, u32::MAX), Work::Done);
        let left: Vec<u64> = core::iter::from_fn(|| cq.pop()).map(|c| c.wr_id).collect();
        assert_eq!(left, [0, 1, 2]);
    }

    #[test]
    fn capacity_is_limited() {
        let mut cq = CompletionQueue::new(2).unwrap();
        // The queue is empty, so only the capacity itself can be wrong.
        for capacity in [0, MAX_CQE + 1, u32::MAX] {
            assert_eq!(cq.resize(capacity), Err(CqSizeError::Invalid));
            assert!(matches!(
                CompletionQueue::new(capacity),
                Err(CqSizeError::Invalid)
            ));
        }
        assert_eq!(cq.capacity(), 2);
        assert_eq!(cq.resize(1), Ok(()));
        assert_eq!((cq.capacity(), cq.len(), cq.is_empty()), (1, 0, true));
        let _ = cq.push(cqe(1));
        assert_eq!(cq.resize(1), Ok(()));
        assert_eq!((cq.len(), cq.is_empty()), (1, false));
    }

    /// Three completions of two queue pairs with two statuses, in any order.
    #[test]
    fn pending_success_is_found() {
        let kinds = [1, 2].map(|qp| [WcStatus::Flushed, WcStatus::Success].map(|s| (qp, s)));
        let kinds: Vec<_> = kinds.into_iter().flatten().collect();
        for n in 0..64 {
            let written = [kinds[n % 4], kinds[n / 4 % 4], kinds[n / 16]];
            let mut cq = CompletionQueue::new(4).unwrap();
            for (qp_num, status) in written {
                let _ = cq.push(Cqe {
                    qp_num,
                    status,
                    ..cqe(0)
                });
            }
            for taken in 0..=3 {
                for qp_num in [1, 2] {
                    let waits = written[taken..].contains(&(qp_num, WcStatus::Success));
                    assert_eq!(cq.has_success_of(qp_num), waits, "{written:?} {taken}");
                }
                assert_eq!(cq.pop().is_some(), taken < 3);
            }
        }
    }

    /// A program's action while a purge is in progress.
    #[derive(Debug, Clone)]
    enum Step {
        Purge(u32),
        Take,
        Write(u32),
        /// Resize to the number of pending completions plus this many.
        Resize(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1u32..4).prop_map(Step::Purge),
            Just(Step::Take),
            (1u32..3).prop_map(Step::Write),
            (0u32..4).prop_map(Step::Resize),
        ];
        proptest::collection::vec(step, 0..40)
    }

    proptest! {
        /// A purge drops exactly the completions of its queue pair, although the queue is pushed,
        /// popped and resized between its steps.
        #[test]
        fn purge_in_steps_keeps_other_completions(
            before in proptest::collection::vec(0u32..3, 0..19),
            turn in 0usize..20,
            steps in steps(),
        ) {
            let mut cq = CompletionQueue::new(20).unwrap();
            for _ in 0..turn {
                let _ = cq.push(cqe(0));
            }
            let mut next = 0;
            let mut write = |cq: &mut CompletionQueue, qp_num| {
                next += 1;
                let _ = cq.push(Cqe { qp_num, ..cqe(next) });
                (next, qp_num)
            };
            let mut kept = VecDeque::from([write(&mut cq, 1)]);
            for _ in 0..turn {
                let _ = cq.pop();
            }
            kept.extend(before.iter().map(|qp| write(&mut cq, *qp)).filter(|(_, qp)| *qp != 0));
            let mut done = false;
            for step in steps {
                match step {
                    Step::Purge(most) => done |= cq.purge(0, most) == Work::Done,
                    Step::Take => {
                        let was_empty = cq.is_empty();
                        let popped = cq.pop();
                        prop_assert_eq!(popped.is_none(), was_empty);
                        match popped {
                            Some(popped) if popped.qp_num == 0 => prop_assert!(!done),
                            popped => {
                            let popped = popped.map(|c| (c.wr_id, c.qp_num));
                            prop_assert_eq!(popped, kept.pop_front());
                        }
                        }
                    }
                    Step::Write(_) if cq.ring.is_full() => {}
                    Step::Write(qp) => kept.push_back(write(&mut cq, qp)),
                    Step::Resize(more) => {
                        let waiting = cq.len();
                        let capacity = (waiting + more).max(1);
                        prop_assert_eq!(cq.resize(capacity), Ok(()));
                        prop_assert_eq!((cq.capacity(), cq.len()), (capacity, waiting));
                    }
                }
            }
            while cq.purge(0, 1) == Work::More {}
            prop_assert_eq!(cq.len() as usize, kept.len());
            while let Some(popped) = cq.pop() {
                prop_assert_eq!(Some((popped.wr_id, popped.qp_num)), kept.pop_front());
            }
            prop_assert!(kept.is_empty());
        }
    }

    #[test]
    fn purge_is_bounded() {
        let mut cq = CompletionQueue::new(100).unwrap();
        for i in 0..100 {
            let _ = cq.push(cqe(i));
        }
        for calls in 1..=10 {
            let work = cq.purge(0, 10);
            assert_eq!(work == Work::Done, calls == 10);
            assert_eq!(cq.len(), 100 - 10 * calls);
        }
    }

    #[test]
    fn second_purge_waits_for_first() {
        let mut cq = CompletionQueue::new(6).unwrap();
        for i in 0..6 {
            let _ = cq.push(Cqe {
                qp_num: i % 3,
                ..cqe(u64::from(i))
            });
        }
        assert_eq!(cq.purge(0, 1), Work::More);
        assert_eq!(
            cq.purge(1, 100),
            Work::More,
            "this call finished the first purge"
        );
        assert_eq!(cq.len(), 4);
        assert_eq!(cq.purge(1, 100), Work::Done);
        assert_eq!(cq.purge(0, 100), Work::Done);
        let mut out = [Cqe::default(); 6];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!((out[0].wr_id, out[1].wr_id), (2, 5));
    }
}
