//! Tests of shared receive queues: queue pairs that wait for a receive, and destroyed queues.

use super::*;
use crate::testing::{context, queue_pair};

const RECV: RecvWr<'static> = RecvWr {
    wr_id: 1,
    sges: &[],
};

#[test]
fn receive_drives_waiting_queue_pair() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    for waits in [false, true] {
        for posted in [false, true] {
            let srq = ctx.create_srq(1, 4, 1).unwrap();
            if waits {
                for _ in 0..2 {
                    assert!(srq.inner.wait(&qp.inner));
                    assert_eq!(srq.inner.state.lock().waiting.len(), 1);
                }
            }
            if posted {
                srq.inner.state.lock().queue.post(&RECV).unwrap();
            }
            assert_eq!(srq.inner.has_waiting(), waits && posted);
            // If a receive is posted already, the queue pair need not wait.
            assert_eq!(srq.inner.wait(&qp.inner), !posted);
            srq.post(&[RECV]).unwrap();
            assert_eq!(srq.len(), 1 + usize::from(posted));
            assert!(srq.inner.state.lock().waiting.is_empty());
        }
    }
    qp.destroy();
}

#[test]
fn destroyed_queue_has_no_waiters() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let srq = ctx.create_srq(1, 4, 1).unwrap();
    assert!(srq.inner.wait(&qp.inner));
    srq.destroy();
    assert!(srq.inner.state.lock().waiting.is_empty());
    assert!(!srq.inner.wait(&qp.inner));
    assert!(srq.inner.with_queue(|_| Some(())).is_none());
    qp.destroy();
}

/// Messages and datagrams that arrive after the destruction take no receive, although some are
/// posted.
#[test]
fn destroyed_queue_gives_no_receives() {
    let ctx = context();
    let srq = ctx.create_srq(1, 4, 1).unwrap();
    srq.post(&[RECV; 4]).unwrap();
    let mut taken = TakenRecv::new(1).unwrap();
    let mut take = || {
        let message = srq.inner.take(&mut taken).0;
        let (datagram, _) = srq.inner.take_if_fits(&mut taken, 0);
        (message, datagram)
    };
    assert_eq!(take(), (true, Taken::Yes));
    srq.destroy();
    assert_eq!(take(), (false, Taken::None));
    assert_eq!(srq.len(), 2);
}

/// A program may drop its handles without destroying the queue. The domain then no longer knows the
/// queue's number and protection domain.
#[test]
fn dropped_srq_is_removed_from_xrc_domain() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let domain = ctx.open_xrc_domain(None, true, false).unwrap();
    let create = |pd| ctx.create_xrc_srq(&domain, &cq, pd, 4, 1).unwrap();
    let [first, second] = [7, 8].map(create);
    assert!(first.num().is_some() && first.num() != second.num());
    let target = ctx.create_xrc_target(
        &domain,
        crate::xrc::XrcTargetAttributes {
            max_ird: 0,
            addressable: false,
        },
    );
    let target = target.unwrap();
    // Returns the protection domain of the queue `num`, and that of the queue with the lowest
    // number.
    let pds = |qp: &crate::conn::qp::QueuePair, num| {
        let target = qp.inner.xrc.as_ref().expect("a target");
        (target.select(num), target.default_pd())
    };
    let num = second.num().unwrap();
    let lowest = if first.num() < second.num() { 7 } else { 8 };
    assert_eq!(pds(&target, num), (Some(8), lowest));
    // The target still holds a reference to the queue that it selected last; this releases it.
    assert_eq!(pds(&target, 0), (None, lowest));
    drop(second);
    assert_eq!(pds(&target, num), (None, 7));
    first.destroy();
    assert_eq!(pds(&target, num), (None, 0));
    target.destroy();
}
