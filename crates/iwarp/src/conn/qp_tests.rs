//! What a queue pair knows of its connection and its counters, and which posts are sent at once.

use super::*;
use crate::conn::liveness::Reach;
use crate::objects::member::Member;
use crate::testing::{
    attributes, connected, connected_for, context, link, open, queue_pair, send_fpdu, unattached,
    until, unwatched_link,
};
use iwarp_rnic::SendFlags;
use std::io::{Read, Write};

#[test]
fn only_its_own_connection_is_the_connection() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qps = [0; 2].map(|_| queue_pair(&ctx, &cq, &cq));
    let _peers = qps.each_ref().map(connected);
    let links = qps.each_ref().map(link);
    for (at, qp) in qps.iter().enumerate() {
        let g = qp.inner.state.lock();
        let is_linked = links.each_ref().map(|socket| g.is_linked(socket));
        assert_eq!(is_linked, [at == 0, at == 1]);
    }
    qps[0].abort();
    assert!(!qps[0].inner.state.lock().is_linked(&links[0]));
    qps.iter().for_each(QueuePair::destroy);
}

/// A peer is known to answer, or not to, when TCP would have sent something again by now.
#[test]
fn whether_a_peer_answers_is_known_after_a_while() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    let socket = link(&qp);
    // An idle connection: the time does not change.
    let time = socket.stream.time_to_tell().unwrap();
    let instant = Duration::from_nanos(1);
    for (quiet, reach) in [
        (Duration::ZERO, Reach::Unknown(time)),
        (time - instant, Reach::Unknown(time)),
        (time, Reach::Answers),
        (time + instant, Reach::Answers),
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

/// A child of the process must not wait for a lock that a thread of the parent held.
#[test]
fn counters_are_given_without_waiting() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    qp.post_send(&[SEND]).unwrap();
    let counters = Member::counters(&*qp.inner, false).expect("nobody has it");
    assert_eq!(counters.tx_messages, 1);
    let state = qp.inner.state.lock();
    assert!(Member::counters(&*qp.inner, false).is_none());
    drop(state);
    qp.destroy();
}

/// However quickly posts follow each other, at most a part of the queue waits.
#[test]
fn posts_are_sent_at_once_when_half_of_the_queue_waits() {
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
        // What is to be sent now is not: all that was posted waits.
        let verdicts = [0; 8].map(|_| {
            let (result, verdict) = qp.inner.post::<false, false, _>(&[SEND], &mut effects);
            result.unwrap();
            verdict
        });
        let waits = |verdict: &Verdict| matches!(verdict, Verdict::PutOff | Verdict::Join);
        assert!(!verdicts[3..].iter().any(waits), "{verdicts:?}");
        effects.apply(&qp.inner);
        qp.destroy();
    }
}

/// A thread that polls gives up its processor while another one is at the sockets.
#[test]
fn whoever_has_a_direction_drives() {
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

/// Octets that the peer's TCP has acknowledged.
#[test]
fn what_is_sent_and_does_not_wait_is_acknowledged() {
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
    until("it is never acknowledged", || acknowledged() == sent);
    qp.destroy();
}

#[test]
fn a_queue_pair_that_drops_what_finds_no_receive_is_unreliable() {
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
struct Woken(AtomicBool);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A request of a queue pair in error is flushed at once, and whoever waits for it is told, however it was posted.
#[test]
fn who_waits_for_a_request_that_is_flushed_at_once_is_woken() {
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
    for (at, post) in posts.into_iter().enumerate() {
        let woken = Arc::new(Woken::default());
        cq.wake_at_next(&Arc::clone(&woken).into());
        post(&qp);
        assert!(woken.0.load(Ordering::Relaxed), "{at}");
        assert_eq!(cq.take_ready(&mut [iwarp_rnic::Cqe::default(); 2]), Ok(1));
    }
    qp.destroy();
}

#[test]
fn a_queue_pair_takes_one_connection_and_none_when_it_is_destroyed() {
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

/// A Send that comes before its receive is held, and whoever posts the receive takes it at once.
#[test]
fn a_held_send_is_taken_by_the_thread_that_posts_its_receive() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    for early in [false, true] {
        let qp = queue_pair(&ctx, &cq, &cq);
        let mut peer = connected(&qp);
        let socket = unwatched_link(&qp);
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        if early {
            qp.post_recv(&[wr]).unwrap();
        }
        peer.write_all(&send_fpdu(&[])).unwrap();
        until("it does not arrive", || socket.stream.has_octets().unwrap());
        assert!(qp.inner.drive_rx());
        assert_eq!(open(&mut qp.inner.state.lock()).held_since == 0, early);
        if !early {
            qp.post_recv(&[wr]).unwrap();
        }
        assert_eq!(open(&mut qp.inner.state.lock()).held_since, 0);
        assert_eq!(cq.take_ready(&mut [iwarp_rnic::Cqe::default(); 2]), Ok(1));
        assert_eq!(qp.inner.state.lock().held_ns == 0, early);
        qp.destroy();
    }
}

/// A queue pair with room for so many Sends, all of which wait to be sent.
fn with_waiting_sends(ctx: &Context, sends: usize) -> (QueuePair, std::net::TcpStream) {
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

/// Otherwise the program would wait for completions of requests that nobody sends.
#[test]
fn posting_to_a_full_queue_sends_what_waits() {
    let ctx = context();
    for whole in [false, true] {
        let (qp, mut peer) = with_waiting_sends(&ctx, 2);
        let refused = match whole {
            true => qp.post_send_all(&[SEND; 2]),
            false => qp.post_send(&[SEND; 2]),
        };
        assert_eq!(refused.unwrap_err().accepted(), 0);
        peer.read_exact(&mut vec![0; 2 * send_fpdu(&[]).len()])
            .unwrap();
        qp.destroy();
    }
}

/// Whichever way the program ends it.
#[test]
fn what_waits_is_sent_before_the_end() {
    let ctx = context();
    let ends: [fn(&QueuePair); 2] = [QueuePair::destroy, QueuePair::disconnect];
    for end in ends {
        let (qp, mut peer) = with_waiting_sends(&ctx, 2);
        end(&qp);
        let mut said = Vec::new();
        peer.read_to_end(&mut said).unwrap();
        assert_eq!(said.len(), 2 * send_fpdu(&[]).len());
        qp.destroy();
    }
}

/// The connection manager has watched the stream until now. If the queue pair does not take it, nobody watches it any more: what stays in the
/// engine is never dropped.
#[test]
fn a_stream_that_is_not_taken_is_not_watched() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let refusals: [fn(&QueuePair); 3] = [
        QueuePair::destroy,
        // It was reset since the stream was asked for.
        |qp| qp.modify(State::Reset).unwrap(),
        |qp| qp.modify(State::Error).unwrap(),
    ];
    for (at, refuse) in refusals.into_iter().enumerate() {
        // Its own handover has all but the token.
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
        assert!(qp.inner.attach(handover).is_err(), "{at}");
        until("the engine keeps its source", || {
            Arc::strong_count(&watcher.inner) < users
        });
        watcher.destroy();
        qp.destroy();
    }
}
