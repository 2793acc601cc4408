//! The send queue's view of requests that are queued, started, done and acknowledged. Each started
//! request completes once, in order.

use super::*;
use crate::Cqe;
use std::vec;

const CAPACITY: u32 = 8;

impl SendQueue {
    /// Starts as if `seq` requests had completed before.
    pub(in crate::qp) const fn begin_at(&mut self, seq: u32) {
        self.front_seq = seq;
        self.held_from = seq;
    }
}

/// Returns a queue for eight requests with `posted` of them, the first `started` of which are
/// started. Their sequence numbers and `wr_id`s are 0, 1, 2 ….
fn queue(posted: u32, started: u32) -> SendQueue {
    let mut queue = SendQueue::new(&QpConfig {
        max_send_wr: CAPACITY,
        ..QpConfig::default()
    })
    .unwrap();
    for wr_id in 0..u64::from(posted) {
        let wr = SendWr::new(wr_id, SendOp::Send, &[]).signaled();
        queue.push(&wr, 0).unwrap();
    }
    for _ in 0..started {
        queue.advance();
    }
    queue
}

fn completed(call: impl FnOnce(&mut dyn FnMut(Cqe))) -> Vec<(u64, WcStatus)> {
    let mut cqes = vec![];
    call(&mut |cqe| cqes.push(cqe));
    cqes.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn complete(queue: &mut SendQueue, seq: u32) -> Vec<(u64, WcStatus)> {
    completed(|emit| {
        if queue.complete(seq, &mut *emit) {
            queue.retire_done(RETIRE_MAX, emit);
        }
    })
}

fn complete_through(queue: &mut SendQueue, seq: u32) -> Vec<(u64, WcStatus)> {
    completed(|emit| queue.complete_through(seq, emit))
}

fn flush(queue: &mut SendQueue, most: u32) -> Vec<(u64, WcStatus)> {
    completed(|emit| _ = queue.flush(most, emit))
}

fn done(ids: core::ops::Range<u64>) -> Vec<(u64, WcStatus)> {
    ids.map(|id| (id, WcStatus::Success)).collect()
}

/// Returns the sequence numbers of the started, unacknowledged requests, and checks that both
/// directions agree.
fn unacknowledged_seqs(queue: &SendQueue) -> Vec<u32> {
    let numbers = |at: &dyn Fn(u32) -> Option<u32>| (0..).map_while(at).collect::<Vec<_>>();
    let up = numbers(&|i| queue.started_from(i).map(|(seq, _)| seq));
    let mut down = numbers(&|i| queue.started_from_end(i).map(|(seq, _)| seq));
    down.reverse();
    assert_eq!(up, down);
    assert_eq!(up.len(), queue.unacknowledged() as usize);
    for seq in &up {
        assert_eq!(queue.slot(*seq).unwrap().wr_id, u64::from(*seq));
    }
    up
}

#[test]
fn next_is_first_not_started() {
    let mut q = queue(3, 0);
    assert_eq!((q.unsent(), q.room(), q.len()), (3, 5, 3));
    assert!(q.nothing_outstanding() && !q.nothing_unsent());
    assert_eq!(q.last_started(), None);
    for i in 0..3 {
        assert_eq!(q.unsent(), 3 - i);
        let next = q.next().map(|(seq, slot)| (seq, slot.wr_id));
        assert_eq!(next, Some((i, u64::from(i))));
        let placed = q.next_with_place();
        let placed = placed.map(|(seq, slot, place)| (seq, slot.wr_id, place));
        assert_eq!(placed, Some((i, u64::from(i), i as usize)));
        q.advance();
        assert_eq!(q.last_started(), Some(i));
        assert!(!q.nothing_outstanding());
    }
    assert!(q.nothing_unsent() && q.next().is_none() && q.next_with_place().is_none());
    assert_eq!((q.unsent(), q.len()), (0, 3));
}

#[test]
fn requests_complete_in_order() {
    let mut q = queue(5, 4);
    assert_eq!(unacknowledged_seqs(&q), [0, 1, 2, 3]);
    assert_eq!(q.first_not_done(), Some(0));
    assert_eq!(complete(&mut q, 2), []);
    assert_eq!(complete(&mut q, 1), []);
    assert!(!q.is_front_done());
    assert_eq!(q.first_not_done(), Some(0));
    assert_eq!(complete(&mut q, 0), done(0..3));
    assert_eq!(unacknowledged_seqs(&q), [3]);
    assert_eq!((q.first_not_done(), q.last_started()), (Some(3), Some(3)));
    assert_eq!(complete(&mut q, 3), done(3..4));
    assert_eq!((q.first_not_done(), q.last_started()), (Some(4), None));
    assert_eq!((q.len(), q.unsent(), q.room()), (1, 1, 7));
    assert_eq!(unacknowledged_seqs(&q), []);
}

#[test]
fn unstarted_requests_do_not_complete() {
    for started in 0..3 {
        let mut q = queue(3, started);
        for seq in started..5 {
            assert_eq!(complete(&mut q, seq), []);
            assert_eq!(complete_through(&mut q, seq), []);
        }
        assert_eq!(q.unacknowledged(), started);
        for _ in started..3 {
            q.advance();
        }
        assert!(!q.is_front_done());
        assert_eq!(unacknowledged_seqs(&q), [0, 1, 2]);
        for seq in 0..3 {
            let id = u64::from(seq);
            assert_eq!(q.first_not_done(), Some(seq));
            assert_eq!(complete(&mut q, seq), done(id..id + 1));
        }
    }
}

#[test]
fn response_completes_earlier_requests() {
    let mut q = queue(5, 4);
    assert_eq!(complete_through(&mut q, 4), [], "request 4 is not started");
    assert_eq!(complete_through(&mut q, 2), done(0..3));
    // Older requests have already completed.
    assert_eq!(complete_through(&mut q, 1), []);
    assert_eq!(unacknowledged_seqs(&q), [3]);
    assert_eq!(complete_through(&mut q, 3), done(3..4));
    assert_eq!((q.len(), q.unacknowledged()), (1, 0));
}

/// One call completes a limited number of requests; the others stay acknowledged.
#[test]
fn acknowledged_requests_complete_in_steps() {
    let posted = RETIRE_MAX + 6;
    let mut q = SendQueue::new(&QpConfig {
        max_send_wr: posted,
        ..QpConfig::default()
    })
    .unwrap();
    for wr_id in 0..u64::from(posted) {
        let wr = SendWr::new(wr_id, SendOp::Send, &[]).signaled();
        q.push(&wr, 0).unwrap();
        q.advance();
    }
    let most = u64::from(RETIRE_MAX);
    let reported = complete_through(&mut q, posted - 3);
    assert_eq!(reported, done(0..most));
    assert!(q.is_front_done());
    assert_eq!(unacknowledged_seqs(&q), [posted - 2, posted - 1]);
    assert_eq!(q.first_not_done(), Some(posted - 2));
    assert_eq!((q.len(), q.room()), (6, RETIRE_MAX));
    let reported = completed(|emit| q.retire_done(1, emit));
    assert_eq!(reported, done(most..most + 1));
    assert_eq!(unacknowledged_seqs(&q), [posted - 2, posted - 1]);
    // At the end, acknowledged requests succeed, and the others are flushed, even one that was done
    // after them.
    assert_eq!(complete(&mut q, posted - 1), done(most + 1..most + 4));
    assert!(!q.is_front_done());
    assert_eq!(
        flush(&mut q, posted),
        [(most + 4, WcStatus::Flushed), (most + 5, WcStatus::Flushed)]
    );
}

#[test]
fn partial_flush_continues() {
    let mut q = queue(6, 5);
    assert_eq!(complete(&mut q, 1), []);
    assert_eq!(complete(&mut q, 4), []);
    q.fail(2, WcStatus::RemoteAccess, 77);
    let flushed = |id| (id, WcStatus::Flushed);
    assert_eq!(flush(&mut q, 1), [flushed(0)]);
    // A plan may still contain requests of this queue: they complete nothing.
    assert_eq!(complete(&mut q, 1), []);
    assert_eq!(complete_through(&mut q, 3), []);
    assert!(!q.is_front_done());
    assert_eq!(
        flush(&mut q, 2),
        [flushed(1), (2, WcStatus::RemoteAccess)],
        "even a request that is done, after one that is not"
    );
    assert_eq!(flush(&mut q, 9), [flushed(3), flushed(4), flushed(5)]);
    assert_eq!((q.len(), q.unsent(), q.room()), (0, 0, CAPACITY));
    assert_eq!(flush(&mut q, 9), []);
}

/// The request after the last one that is done may be in a plan, but is flushed nevertheless.
#[test]
fn planned_request_is_flushed() {
    let mut q = queue(2, 2);
    q.slots.get_mut(0).unwrap().done = true;
    assert_eq!(flush(&mut q, 1), done(0..1));
    assert_eq!(complete(&mut q, 1), []);
    assert_eq!(flush(&mut q, 1), [(1, WcStatus::Flushed)]);
}

#[test]
fn sequence_continues_after_reset() {
    let mut q = queue(3, 2);
    assert_eq!(complete(&mut q, 0), done(0..1));
    q.fail(1, WcStatus::RemoteAccess, 0);
    q.clear();
    assert_eq!((q.len(), q.unsent(), q.room()), (0, 0, CAPACITY));
    assert!(q.nothing_outstanding() && q.nothing_unsent());
    let wr = SendWr::new(9, SendOp::Send, &[]).signaled();
    for _ in 0..2 {
        q.push(&wr, 0).unwrap();
        q.advance();
    }
    // A completion of a request from before the reset matches none of the new requests.
    for old in 0..3 {
        assert!(q.slot(old).is_none() && q.slot_with_place(old).is_none());
        assert_eq!(complete(&mut q, old), []);
        assert_eq!(complete_through(&mut q, old), []);
    }
    assert_eq!(q.last_started(), Some(4));
    assert_eq!(complete(&mut q, 3), [(9, WcStatus::Success)]);
    // The earlier failure does not apply any more.
    assert_eq!(flush(&mut q, 9), [(9, WcStatus::Flushed)]);
}

/// One call completes its request, and a limited number of requests that waited for it.
#[test]
fn completion_retires_limited_number() {
    let posted = RETIRE_MAX + 6;
    let mut q = SendQueue::new(&QpConfig {
        max_send_wr: posted,
        ..QpConfig::default()
    })
    .unwrap();
    for wr_id in 0..u64::from(posted) {
        let wr = SendWr::new(wr_id, SendOp::Send, &[]).signaled();
        q.push(&wr, 0).unwrap();
        q.advance();
    }
    for seq in 1..posted {
        assert_eq!(complete(&mut q, seq), []);
    }
    let first = u64::from(RETIRE_MAX) + 1;
    assert_eq!(complete(&mut q, 0), done(0..first));
    assert!(q.is_front_done());
    let reported = completed(|emit| q.retire_done(RETIRE_MAX, emit));
    assert_eq!(reported, done(first..u64::from(posted)));
    assert!(!q.is_front_done() && q.nothing_outstanding());
}
