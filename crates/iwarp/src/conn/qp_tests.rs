//! Tests of queue pairs: attaching streams, counters, and posting.

use super::*;
use crate::conn::attributes::is_unreliable;
use crate::conn::liveness::Reach;
use crate::engine::policy::Verdict;
use crate::engine::{Engine, Source};
use crate::objects::any_qp::AnyQp;
use crate::sys::poller::Interest;
use crate::testing::{
    attributes, connected, connected_for, context, link, open, queue_pair, send_fpdu, unattached,
    until, unwatched_link,
};
use iwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr};
use std::io::{Read, Write};

#[test]
fn only_own_socket_is_linked() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qps = [0; 2].map(|_| queue_pair(&ctx, &cq, &cq));
    let _peers = qps.each_ref().map(connected);
    let links = qps.each_ref().map(link);
    for (i, qp) in qps.iter().enumerate() {
        let g = qp.inner.state.lock();
        let is_linked = links.each_ref().map(|socket| g.is_linked(socket));
        assert_eq!(is_linked, [i == 0, i == 1]);
    }
    qps[0].abort();
    assert!(!qps[0].inner.state.lock().is_linked(&links[0]));
    qps.iter().for_each(QueuePair::destroy);
}

/// Whether a peer answers is known only after the time in which TCP would have retransmitted.
#[test]
fn reach_is_known_after_retransmission_time() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    let socket = link(&qp);
    // On an idle connection the time does not change.
    let time = socket.stream.detection_time().unwrap();
    let nanosecond = Duration::from_nanos(1);
    for (quiet, reach) in [
        (Duration::ZERO, Reach::Unknown(time)),
        (time - nanosecond, Reach::Unknown(time)),
        (time, Reach::Answers),
        (time + nanosecond, Reach::Answers),
        (Duration::MAX, Reach::Answers),
    ] {
        assert_eq!(socket.reach(quiet), reach, "{quiet:?}");
    }
    qp.destroy();
}

const SEND: SendWr<'static> = SendWr {
    wr_id: 1,
    op: SendOp::Send,
    flags: SendFlags::SIGNALED,
    sges: &[],
    inline: &[],
};

/// A forked child must not wait for a lock that a thread of the parent held.
#[test]
fn counters_are_read_without_waiting() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    qp.post_send(&[SEND]).unwrap();
    let counters = AnyQp::counters(&*qp.inner, false).expect("the state is not locked");
    assert_eq!(counters.tx_messages, 1);
    let state = qp.inner.state.lock();
    assert!(AnyQp::counters(&*qp.inner, false).is_none());
    drop(state);
    qp.destroy();
}

#[test]
fn half_full_queue_is_sent() {
    let ctx = context();
    let cq = ctx.create_cq(8, None).unwrap();
    for _ in 0..20 {
        let qp = ctx
            .create_qp(&QpAttributes {
                max_send_wr: 8,
                ..attributes(&ctx, &cq, &cq)
            })
            .unwrap();
        let _peer = connected(&qp);
        let mut effects = Effects::default();
        // `post` sends nothing, so all posted requests wait in the queue.
        let verdicts = [0; 8].map(|_| {
            let (result, verdict) = qp.inner.post::<false, false, _>(&[SEND], &mut effects);
            result.unwrap();
            verdict
        });
        let defers = |verdict: &Verdict| matches!(verdict, Verdict::Defer | Verdict::Join);
        assert!(!verdicts[3..].iter().any(defers), "{verdicts:?}");
        effects.apply(&qp.inner);
        qp.destroy();
    }
}

#[test]
fn either_baton_means_driven_elsewhere() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    assert!(!qp.inner.is_driven_elsewhere());
    for baton in [&qp.inner.rx, &qp.inner.tx] {
        let mut driven = 0;
        assert!(baton.drive(|| {
            driven += usize::from(qp.inner.is_driven_elsewhere());
        }));
        assert_eq!(driven, 1);
        assert!(!qp.inner.is_driven_elsewhere());
    }
    qp.destroy();
}

#[test]
fn sent_bytes_are_acknowledged() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    let socket = link(&qp);
    let acknowledged =
        || super::super::linger::acknowledged(&qp.inner.state.lock().machine, &socket);
    assert_eq!(acknowledged(), 0);
    qp.post_send(&[SEND]).unwrap();
    let sent = qp.counters().tx_bytes;
    assert!(sent > 1);
    until("the request is not acknowledged", || acknowledged() == sent);
    qp.destroy();
}

#[test]
fn unreliable_queue_pair_has_no_reads() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    for unreliable in [false, true] {
        let qp = ctx
            .create_qp(&QpAttributes {
                unreliable,
                max_ird: 3,
                max_ord: 2,
                ..attributes(&ctx, &cq, &cq)
            })
            .unwrap();
        assert_eq!(is_unreliable(&qp.inner.state.lock().machine), unreliable);
        let config = qp.config();
        let sizes = if unreliable { (0, 0) } else { (3, 2) };
        assert_eq!((config.max_ird, config.max_ord), sizes);
        qp.destroy();
    }
}

#[derive(Default)]
struct WakeFlag(AtomicBool);

impl std::task::Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// In the error state a request is flushed at once, whichever call posts it.
#[test]
fn immediate_flush_wakes_waiting_task() {
    let ctx = context();
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    qp.modify(State::Error).unwrap();
    let posts: [fn(&QueuePair); 4] = [
        |qp| qp.post_send(&[SEND]).unwrap(),
        |qp| qp.post_send_all(&[SEND]).unwrap(),
        |qp| qp.post_more(&SEND).unwrap(),
        |qp| {
            let sges = &[];
            qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
        },
    ];
    for (i, post) in posts.into_iter().enumerate() {
        let woken = Arc::new(WakeFlag::default());
        cq.wake_at_next(&Arc::clone(&woken).into());
        post(&qp);
        assert!(woken.0.load(Ordering::Relaxed), "post {i}");
        assert_eq!(cq.take_ready(&mut [iwarp_rnic::Cqe::default(); 2]), Ok(1));
    }
    qp.destroy();
}

#[test]
fn second_stream_is_refused() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    let first = qp.addresses();
    assert!(first.is_some() && connected_for(&qp, None).is_err());
    assert_eq!(qp.addresses(), first);
    qp.destroy();
    assert!(connected_for(&qp, None).is_err());
    let qp = queue_pair(&ctx, &cq, &cq);
    qp.destroy();
    assert!(connected_for(&qp, None).is_err());
}

#[test]
fn posted_receive_completes_held_send() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    for posted_first in [false, true] {
        let qp = queue_pair(&ctx, &cq, &cq);
        let mut peer = connected(&qp);
        let socket = unwatched_link(&qp);
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        if posted_first {
            qp.post_recv(&[wr]).unwrap();
        }
        peer.write_all(&send_fpdu(&[])).unwrap();
        until("the message does not arrive", || {
            socket.stream.has_octets().unwrap()
        });
        assert!(qp.inner.drive_rx());
        let is_held = open(&mut qp.inner.state.lock()).held_since != 0;
        assert_eq!(is_held, !posted_first);
        if !posted_first {
            qp.post_recv(&[wr]).unwrap();
        }
        assert_eq!(open(&mut qp.inner.state.lock()).held_since, 0);
        assert_eq!(cq.take_ready(&mut [iwarp_rnic::Cqe::default(); 2]), Ok(1));
        assert_eq!(qp.inner.state.lock().held_ns == 0, posted_first);
        qp.destroy();
    }
}

/// Posts `sends` Sends without sending them. They fill the send queue.
fn with_unsent_sends(ctx: &Context, sends: usize) -> (QueuePair, std::net::TcpStream) {
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = ctx
        .create_qp(&QpAttributes {
            max_send_wr: sends as u32,
            ..attributes(ctx, &cq, &cq)
        })
        .unwrap();
    let peer = connected(&qp);
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut effects = Effects::default();
    let (posted, _) = qp
        .inner
        .post::<false, false, _>(&vec![SEND; sends], &mut effects);
    posted.unwrap();
    effects.apply(&qp.inner);
    (qp, peer)
}

/// A post that finds the queue full must send the deferred requests. Otherwise the program would
/// wait forever for their completions.
#[test]
fn post_to_full_queue_sends() {
    let ctx = context();
    for all_or_none in [false, true] {
        let (qp, mut peer) = with_unsent_sends(&ctx, 2);
        let refused = match all_or_none {
            true => qp.post_send_all(&[SEND; 2]),
            false => qp.post_send(&[SEND; 2]),
        };
        assert_eq!(refused.unwrap_err().accepted(), 0);
        peer.read_exact(&mut vec![0; 2 * send_fpdu(&[]).len()])
            .unwrap();
        qp.destroy();
    }
}

#[test]
fn deferred_requests_are_sent_before_end() {
    let ctx = context();
    let ends: [fn(&QueuePair); 2] = [QueuePair::destroy, QueuePair::disconnect];
    for end in ends {
        let (qp, mut peer) = with_unsent_sends(&ctx, 2);
        end(&qp);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).unwrap();
        assert_eq!(received.len(), 2 * send_fpdu(&[]).len());
        qp.destroy();
    }
}

/// Before a stream is attached, the engine watches it for the connection manager. If the queue pair
/// refuses the stream, the engine must stop watching it and drop its source.
#[test]
fn refused_stream_is_not_watched() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let refusals: [fn(&QueuePair); 3] = [
        QueuePair::destroy,
        // The queue pair was reset after the attempt to connect had begun.
        |qp| qp.modify(State::Reset).unwrap(),
        |qp| qp.modify(State::Error).unwrap(),
    ];
    for (i, refuse) in refusals.into_iter().enumerate() {
        // The queue pair gets a stream that another source watches.
        let qp = queue_pair(&ctx, &cq, &cq);
        let epoch = qp.epoch();
        refuse(&qp);
        let watcher = queue_pair(&ctx, &cq, &cq);
        let engine = Engine::current().unwrap();
        let token = engine.token();
        let mut handover = unattached(Some(epoch), true).0;
        let source = Arc::clone(&watcher.inner) as Arc<dyn Source>;
        engine
            .add(&handover.stream, token, Interest::READ, source)
            .unwrap();
        handover.watched = Some(token);
        let users = Arc::strong_count(&watcher.inner);
        assert!(qp.inner.attach(handover).is_err(), "refusal {i}");
        until("the engine keeps its source", || {
            Arc::strong_count(&watcher.inner) < users
        });
        watcher.destroy();
        qp.destroy();
    }
}
