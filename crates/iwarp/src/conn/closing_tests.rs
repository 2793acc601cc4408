//! What the end of a connection waits for, says, and leaves behind.

use super::super::link::Report;
use super::super::pool;
use super::super::qp::{CmSink, QpAttributes, QueuePair};
use super::*;
use crate::config::Config;
use crate::engine::Source;
use crate::objects::context::Context;
use crate::testing::{
    EMPTY_SEND, attributes, break_off, connected, connected_as_responder, context, context_with,
    link, open, queue_pair, send_fpdu, until, unwatched_link,
};
use iwarp_rnic::RecvWr;
use iwarp_rnic::qp::Fault;
use parking_lot::Mutex;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Weak;
use std::sync::atomic::AtomicBool;

/// With room for receives, connected.
fn connection(ctx: &Context) -> (QueuePair, TcpStream) {
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = queue_pair(ctx, &cq, &cq);
    let peer = connected(&qp);
    (qp, peer)
}

#[derive(Default)]
struct Told(Mutex<Events>);

impl CmSink for Told {
    fn qp_event(&self, events: Events, _: Option<Fault>) {
        *self.0.lock() |= events;
    }

    fn first_message_overdue(&self) {}
}

/// The thread that has seen the first message may be slow. Whoever tells of the end tells of the begin, too.
#[test]
fn the_end_of_a_connection_is_not_told_before_its_begin() {
    let ctx = context();
    let ends: [fn(&QueuePair); 3] = [QueuePair::disconnect, QueuePair::abort, |qp| {
        qp.modify(State::Error).unwrap()
    }];
    for end in ends {
        for begun in [false, true] {
            let (qp, _peer) = connection(&ctx);
            // It is flushed before anything is told.
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            let sink = Arc::new(Told::default());
            let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
            {
                let mut g = qp.inner.state.lock();
                *g.link.report_mut() = Report {
                    cm: Some(cm),
                    established: begun,
                };
            }
            end(&qp);
            let told = *sink.0.lock();
            assert!(told.contains(Events::DISCONNECTED), "{told:?}");
            assert_eq!(told.contains(Events::ESTABLISHED), begun, "{told:?}");
            qp.destroy();
        }
    }
}

/// The begin of a responder's connection is its peer's first message, and it is told with the end once more.
#[test]
fn the_first_message_begins_the_connection_of_a_responder() {
    let ctx = context();
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let wr = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    let mut peer = connected_as_responder(&qp);
    qp.post_recv(&[wr]).unwrap();
    let is_established = || qp.inner.state.lock().link.report().established;
    assert!(!is_established());
    peer.write_all(&send_fpdu(&[])).unwrap();
    until("it does not begin", is_established);
    qp.destroy();
}

/// Completions are written a few at a time, and what was to be told before is told afterwards.
#[test]
fn the_end_is_told_after_many_completions() {
    let ctx = context();
    let receives = 8000;
    let cq = ctx.create_cq(receives, None).unwrap();
    let qp = ctx
        .create_qp(&QpAttributes {
            max_recv_wr: receives,
            ..attributes(&ctx, &cq, &cq)
        })
        .unwrap();
    let _peer = connected(&qp);
    let wr = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    qp.post_recv(&vec![wr; receives as usize]).unwrap();
    let sink = Arc::new(Told::default());
    let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
    qp.inner.state.lock().link.report_mut().cm = Some(cm);
    qp.modify(State::Error).unwrap();
    assert_eq!(cq.len(), receives as usize);
    assert!(sink.0.lock().contains(Events::DISCONNECTED));
    qp.destroy();
}

/// A queue pair that is connected by number and leaves takes what has arrived, because its peer counts on that. Others flush their receives.
#[test]
fn what_has_arrived_is_taken_before_the_end_of_a_connection_by_number() {
    let ctx = context();
    for by_number in [false, true] {
        for to in [State::Error, State::Reset] {
            let (qp, mut peer) = connection(&ctx);
            let socket = unwatched_link(&qp);
            if by_number {
                qp.inner.state.lock().machine.hide_connection();
            }
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            peer.write_all(&send_fpdu(&[])).unwrap();
            until("it does not arrive", || socket.stream.has_octets().unwrap());
            assert_eq!(qp.counters().rx_messages, 0);
            qp.modify(to).unwrap();
            let taken = qp.counters().rx_messages;
            assert_eq!(taken, u64::from(by_number), "{by_number} {to:?}");
            qp.destroy();
        }
    }
}

/// A reset takes the stream away from the thread that is sending, which may have a Terminate in its hands. So it waits for that thread.
#[test]
fn a_reset_waits_for_the_thread_that_sends_the_end() {
    let ctx = context();
    let (qp, _peer) = connection(&ctx);
    qp.disconnect();
    assert!(qp.inner.state.lock().machine.is_ending());
    let [holds, returned, early] = [(); 3].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            qp.inner.tx.drive(|| {
                if holds.swap(true, Ordering::SeqCst) {
                    // Once more, because somebody has asked for it.
                    return;
                }
                let begin = Instant::now();
                loop {
                    let has_returned = returned.load(Ordering::SeqCst);
                    // Later it may have lost its patience.
                    if begin.elapsed() > PATIENCE / 4 {
                        break;
                    }
                    early.fetch_or(has_returned, Ordering::SeqCst);
                    std::thread::yield_now();
                }
            });
        });
        until("the other thread does not come", || {
            holds.load(Ordering::SeqCst)
        });
        qp.modify(State::Reset).unwrap();
        returned.store(true, Ordering::SeqCst);
    });
    assert!(!early.load(Ordering::SeqCst), "it has not waited");
    qp.destroy();
}

/// Of a connection that the program has ended nothing is taken any more, but the stream is read to its end, or it would be reset.
#[test]
fn what_comes_after_the_end_is_thrown_away() {
    let ctx = context_with(Config {
        linger: Duration::from_secs(3600),
        ..Config::default()
    });
    let (qp, mut peer) = connection(&ctx);
    qp.disconnect();
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    peer.write_all(&[0; 200_000]).unwrap();
    assert!(qp.inner.state.lock().link.is_open());
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    until("the end is not noticed", || {
        qp.inner.state.lock().link.is_none()
    });
    // Not even after the end.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    assert_eq!(qp.counters().rx_messages, 0);
    qp.destroy();
}

/// What the peer's TCP sees: the end of the stream, or a reset.
#[test]
fn a_connection_ends_as_the_program_has_said() {
    let ctx = context();
    type End = fn(&QueuePair);
    let ends: [(End, bool); 5] = [
        (QueuePair::disconnect, false),
        (QueuePair::destroy, false),
        (|qp| qp.modify(State::Error).unwrap(), false),
        (|qp| qp.modify(State::Reset).unwrap(), false),
        (QueuePair::abort, true),
    ];
    for (at, (end, reset)) in ends.into_iter().enumerate() {
        let (qp, mut peer) = connection(&ctx);
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        end(&qp);
        match peer.read(&mut [0; 64]) {
            Ok(n) => assert!(n == 0 && !reset, "{at}"),
            Err(error) => assert!(
                reset && error.kind() == ErrorKind::ConnectionReset,
                "{at} {error}"
            ),
        }
        qp.destroy();
    }
}

/// The peer may also break it off after the program has ended it.
#[test]
fn a_connection_that_ends_may_be_broken_off() {
    let ctx = context_with(Config {
        linger: Duration::from_secs(3600),
        ..Config::default()
    });
    let (qp, peer) = connection(&ctx);
    qp.disconnect();
    let socket = unwatched_link(&qp);
    break_off(&socket, peer);
    qp.inner.drive_rx();
    assert!(qp.inner.state.lock().link.is_none());
    qp.destroy();
}

/// A peer may take what was queued before the end as slowly as it likes, but from each look to the next it has to take something.
#[test]
fn a_connection_that_ends_stays_while_its_peer_takes_something() {
    let ctx = context_with(Config {
        linger: Duration::from_secs(3600),
        ..Config::default()
    });
    let (qp, _peer) = connection(&ctx);
    qp.disconnect();
    let socket = link(&qp);
    until("the end is not acknowledged", || {
        socket.stream.unacknowledged_bytes().unwrap() == 0
    });
    let taken = linger::acknowledged(&qp.inner.state.lock().machine, &socket);
    let ending = || {
        let mut g = qp.inner.state.lock();
        g.link.ending_mut().map(|ending| ending.acknowledged)
    };
    // It had taken less at the last look.
    {
        let mut g = qp.inner.state.lock();
        let ending = g.link.ending_mut().expect("it was disconnected");
        ending.acknowledged = taken.wrapping_sub(1);
    }
    qp.inner.linger_timer_expired();
    assert_eq!(ending(), Some(taken));
    assert!(qp.inner.state.lock().link.is_open());
    qp.inner.linger_timer_expired();
    assert!(qp.inner.state.lock().link.is_none());
    qp.destroy();
}

/// Pollers do not read behind a Send that waits for its receive, and would not notice the end of the stream: the engine looks for that.
#[test]
fn a_stream_that_pollers_do_not_read_is_watched() {
    let ctx = context();
    for receive in [false, true] {
        let (qp, mut peer) = connection(&ctx);
        let socket = link(&qp);
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        if receive {
            qp.post_recv(&[wr]).unwrap();
        }
        assert!(qp.inner.rest());
        peer.write_all(&send_fpdu(&[])).unwrap();
        until("it does not arrive", || socket.stream.has_octets().unwrap());
        assert!(qp.inner.drive_rx());
        let interest = {
            let mut g = qp.inner.state.lock();
            let open = open(&mut g);
            assert_eq!(open.driven_by_app, receive);
            open.interest
        };
        assert_eq!(interest.readable, receive);
        // In the set, or not.
        let watched = socket.engine.modify(&socket.stream, socket.token, interest);
        assert_eq!(watched.is_ok(), !receive);
        assert_eq!(qp.inner.rest(), receive);
        qp.destroy();
    }
}

/// Without memory for the Terminate that it owes, a queue pair does not know what of its last FPDU was written. So the peer sees a reset,
/// not the end of the stream.
#[test]
fn destroy_without_memory_resets() {
    let ctx = context();
    let (qp, mut peer) = connection(&ctx);
    // The progress thread cannot send the Terminate.
    let mut turn = None;
    until("another thread sends", || {
        turn = qp.inner.tx.try_take();
        turn.is_some()
    });
    // No message has this operation.
    let mut octets = EMPTY_SEND;
    octets[3] = 0x4f;
    peer.write_all(&octets).unwrap();
    until("it is not refused", || {
        qp.inner.state.lock().machine.owes_terminate()
    });
    pool::FAILS.set(true);
    qp.destroy();
    pool::FAILS.set(false);
    drop(turn);
    let end = peer.read_to_end(&mut Vec::new());
    let end = end.map_err(|error| error.kind());
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
}
