//! What the end of a connection waits for, what it sends, and what it reports.

use super::super::link::Report;
use super::super::pool;
use super::super::qp::{CmSink, QpAttributes, QueuePair};
use super::*;
use crate::config::Config;
use crate::engine::Source;
use crate::objects::context::Context;
use crate::objects::events::AsyncEventKind;
use crate::objects::member::EventQp;
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

fn connection(ctx: &Context) -> (QueuePair, TcpStream) {
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = queue_pair(ctx, &cq, &cq);
    let peer = connected(&qp);
    (qp, peer)
}

#[derive(Default)]
struct Notified(Mutex<Events>);

impl CmSink for Notified {
    fn qp_event(&self, events: Events, _: Option<Fault>) {
        *self.0.lock() |= events;
    }

    fn first_message_overdue(&self) {}
}

/// The thread that saw the first message may be slow, so the end is reported together with the
/// beginning.
#[test]
fn end_is_reported_after_begin() {
    let ctx = context();
    let ends: [fn(&QueuePair); 3] = [QueuePair::disconnect, QueuePair::abort, |qp| {
        qp.modify(State::Error).unwrap()
    }];
    for end in ends {
        for begun in [false, true] {
            let (qp, _peer) = connection(&ctx);
            // Flushing it takes place before any report.
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            let sink = Arc::new(Notified::default());
            let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
            {
                let mut g = qp.inner.state.lock();
                *g.link.report_mut() = Report {
                    cm: Some(cm),
                    established: begun,
                };
            }
            end(&qp);
            let events = *sink.0.lock();
            assert!(events.contains(Events::DISCONNECTED), "{events:?}");
            assert_eq!(events.contains(Events::ESTABLISHED), begun, "{events:?}");
            qp.destroy();
        }
    }
}

/// A responder's connection begins with the peer's first message.
#[test]
fn first_message_establishes_responder() {
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
    until("the connection is not established", is_established);
    qp.destroy();
}

/// Completions are written in steps, and the events are reported after the last one.
#[test]
fn end_is_reported_after_many_completions() {
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
    let sink = Arc::new(Notified::default());
    let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
    qp.inner.state.lock().link.report_mut().cm = Some(cm);
    qp.modify(State::Error).unwrap();
    assert_eq!(cq.len(), receives as usize);
    assert!(sink.0.lock().contains(Events::DISCONNECTED));
    qp.destroy();
}

/// A queue pair that is connected by number takes what has arrived before it ends, because its peer
/// relies on that. Others flush their receives.
#[test]
fn by_number_end_takes_arrived_messages() {
    let ctx = context();
    for by_number in [false, true] {
        for to in [State::Error, State::Reset] {
            let (qp, mut peer) = connection(&ctx);
            let socket = unwatched_link(&qp);
            if by_number {
                qp.inner.state.lock().machine.set_by_number();
            }
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            peer.write_all(&send_fpdu(&[])).unwrap();
            until("the message does not arrive", || {
                socket.stream.has_octets().unwrap()
            });
            assert_eq!(qp.counters().rx_messages, 0);
            qp.modify(to).unwrap();
            let taken = qp.counters().rx_messages;
            assert_eq!(taken, u64::from(by_number), "{by_number} {to:?}");
            qp.destroy();
        }
    }
}

/// A reset detaches the stream from the thread that is sending, which may hold a Terminate.
#[test]
fn reset_waits_for_sending_thread() {
    let ctx = context();
    let (qp, _peer) = connection(&ctx);
    qp.disconnect();
    assert!(qp.inner.state.lock().machine.is_ending());
    let [holds, returned, early] = [(); 3].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            qp.inner.tx.drive(|| {
                if holds.swap(true, Ordering::SeqCst) {
                    // Called again, because another thread left a note.
                    return;
                }
                let begin = Instant::now();
                loop {
                    let has_returned = returned.load(Ordering::SeqCst);
                    // The waiting thread gives up at `DRIVE_WAIT_MAX`.
                    if begin.elapsed() > DRIVE_WAIT_MAX / 4 {
                        break;
                    }
                    early.fetch_or(has_returned, Ordering::SeqCst);
                    std::thread::yield_now();
                }
            });
        });
        until("the other thread does not start", || {
            holds.load(Ordering::SeqCst)
        });
        qp.modify(State::Reset).unwrap();
        returned.store(true, Ordering::SeqCst);
    });
    assert!(!early.load(Ordering::SeqCst), "the reset did not wait");
    qp.destroy();
}

/// After the program has ended a connection, the rest of the stream is read and discarded.
/// Otherwise TCP would reset it.
#[test]
fn data_after_end_is_discarded() {
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
    until("the peer's end is not noticed", || {
        qp.inner.state.lock().link.is_none()
    });
    // There is no reset even now.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    assert_eq!(qp.counters().rx_messages, 0);
    qp.destroy();
}

#[test]
fn each_end_is_fin_or_reset() {
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

#[test]
fn ending_connection_may_be_reset() {
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

/// A peer may take the queued data slowly, but it must take something between two expiries of the
/// linger timer.
#[test]
fn slow_peer_keeps_ending_connection() {
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
    // As if less had been acknowledged at the last expiry.
    {
        let mut g = qp.inner.state.lock();
        let ending = g.link.ending_mut().expect("the connection is ending");
        ending.acknowledged = taken.wrapping_sub(1);
    }
    qp.inner.linger_timer_expired();
    assert_eq!(ending(), Some(taken));
    assert!(qp.inner.state.lock().link.is_open());
    qp.inner.linger_timer_expired();
    assert!(qp.inner.state.lock().link.is_none());
    qp.destroy();
}

/// Pollers do not read past a Send that waits for its receive and would miss the end of the stream,
/// so the engine watches the socket.
#[test]
fn held_send_returns_socket_to_engine() {
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
        assert!(qp.inner.pause_watch());
        peer.write_all(&send_fpdu(&[])).unwrap();
        until("the message does not arrive", || {
            socket.stream.has_octets().unwrap()
        });
        assert!(qp.inner.drive_rx());
        let interest = {
            let mut g = qp.inner.state.lock();
            let open = open(&mut g);
            assert_eq!(open.driven_by_app, receive);
            open.interest
        };
        assert_eq!(interest.readable, receive);
        // `modify` fails if the socket is not in the poller's set.
        let watched = socket.engine.modify(&socket.stream, socket.token, interest);
        assert_eq!(watched.is_ok(), !receive);
        assert_eq!(qp.inner.pause_watch(), receive);
        qp.destroy();
    }
}

/// Without memory for the Terminate that it owes, a queue pair does not know how much of its last
/// FPDU was written. So the peer must see a reset, not a FIN.
#[test]
fn destroy_without_memory_resets() {
    let ctx = context();
    let (qp, mut peer) = connection(&ctx);
    // Keep the progress thread from sending the Terminate.
    let mut baton = None;
    until("another thread holds the baton", || {
        baton = qp.inner.tx.try_take();
        baton.is_some()
    });
    // An opcode that no message has.
    // No message has this operation.
    let mut octets = EMPTY_SEND;
    octets[3] = 0x4f;
    peer.write_all(&octets).unwrap();
    until("the message is not refused", || {
        qp.inner.state.lock().machine.owes_terminate()
    });
    pool::FAILS.set(true);
    qp.destroy();
    pool::FAILS.set(false);
    drop(baton);
    let end = peer.read_to_end(&mut Vec::new());
    let end = end.map_err(|error| error.kind());
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
}

/// An event that is not taken would keep the queue pair, and through it the device.
#[test]
fn destroy_drops_pending_events() {
    let ctx = context();
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let event = || AsyncEventKind::QpFatal(EventQp(Arc::clone(&qp.inner) as _));
    ctx.inner.raise(event());
    assert_eq!(ctx.inner.async_events.len(), 1);
    qp.destroy();
    assert!(ctx.try_async_event().is_none());
}

/// A peer that takes something gets more time, but not forever.
#[test]
fn linger_timer_is_set_again() {
    let ctx = context_with(Config {
        linger: Duration::from_millis(200),
        ..Config::default()
    });
    let (qp, _peer) = connection(&ctx);
    qp.disconnect();
    {
        let mut g = qp.inner.state.lock();
        let ending = g.link.ending_mut().expect("the connection is ending");
        // As if less had been acknowledged when the timer was set.
        ending.acknowledged = ending.acknowledged.wrapping_sub(1);
    }
    until("the stream is not given up", || {
        qp.inner.state.lock().link.is_none()
    });
    qp.destroy();
}
