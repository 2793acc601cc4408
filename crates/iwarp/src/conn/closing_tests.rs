//! Tests of the end of a connection: what it waits for, what the peer receives, and which events
//! the connection manager gets.

use super::super::attributes::QpAttributes;
use super::super::link::Report;
use super::super::pool;
use super::super::qp::{CmSink, QueuePair};
use super::*;
use crate::config::Config;
use crate::engine::Source;
use crate::objects::any_qp::EventQp;
use crate::objects::context::Context;
use crate::objects::events::AsyncEventKind;
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
struct TestSink(Mutex<Events>);

impl CmSink for TestSink {
    fn qp_event(&self, events: Events, _: Option<Fault>) {
        *self.0.lock() |= events;
    }

    fn first_message_overdue(&self) {}
}

/// The thread that has processed the first message may not have reported it yet. The report of the
/// end therefore includes that the connection was established.
#[test]
fn end_reports_established_connection() {
    let ctx = context();
    let ends: [fn(&QueuePair); 3] = [QueuePair::disconnect, QueuePair::abort, |qp| {
        qp.modify(State::Error).unwrap()
    }];
    for end in ends {
        for established in [false, true] {
            let (qp, _peer) = connection(&ctx);
            // This receive is flushed before the report.
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            let sink = Arc::new(TestSink::default());
            let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
            {
                let mut g = qp.inner.state.lock();
                *g.link.report_mut() = Report {
                    cm: Some(cm),
                    established,
                };
            }
            end(&qp);
            let events = *sink.0.lock();
            assert!(events.contains(Events::DISCONNECTED), "{events:?}");
            let reported = events.contains(Events::ESTABLISHED);
            assert_eq!(reported, established, "{events:?}");
            qp.destroy();
        }
    }
}

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
    let sink = Arc::new(TestSink::default());
    let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
    qp.inner.state.lock().link.report_mut().cm = Some(cm);
    qp.modify(State::Error).unwrap();
    assert_eq!(cq.len(), receives as usize);
    assert!(sink.0.lock().contains(Events::DISCONNECTED));
    qp.destroy();
}

/// A queue pair that is connected by number receives messages that have arrived before it ends,
/// because its peer relies on that. Other queue pairs flush their receives.
#[test]
fn by_number_end_receives_arrived_messages() {
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
            let received = qp.counters().rx_messages;
            assert_eq!(received, u64::from(by_number), "{by_number} {to:?}");
            qp.destroy();
        }
    }
}

/// Before RESET detaches the stream, it waits for a thread that is sending, whose plan may contain
/// the Terminate.
#[test]
fn reset_waits_for_sending_thread() {
    let ctx = context();
    let (qp, _peer) = connection(&ctx);
    qp.disconnect();
    assert!(qp.inner.state.lock().machine.is_ending());
    let [is_driving, returned, early] = [(); 3].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            qp.inner.tx.drive(|| {
                if is_driving.swap(true, Ordering::SeqCst) {
                    // This is the second call, after another thread has left a note.
                    return;
                }
                let start = Instant::now();
                loop {
                    let has_returned = returned.load(Ordering::SeqCst);
                    // The waiting thread gives up at `DRIVE_WAIT_MAX`.
                    if start.elapsed() > DRIVE_WAIT_MAX / 4 {
                        break;
                    }
                    early.fetch_or(has_returned, Ordering::SeqCst);
                    std::thread::yield_now();
                }
            });
        });
        until("the other thread does not start", || {
            is_driving.load(Ordering::SeqCst)
        });
        qp.modify(State::Reset).unwrap();
        returned.store(true, Ordering::SeqCst);
    });
    assert!(!early.load(Ordering::SeqCst), "the reset did not wait");
    qp.destroy();
}

/// After the program has ended a connection, the rest of the stream is read and discarded. If data
/// remained unread, TCP would reset the connection.
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
    // The peer still reads a FIN, and no reset.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    assert_eq!(qp.counters().rx_messages, 0);
    qp.destroy();
}

#[test]
fn only_abort_sends_reset() {
    let ctx = context();
    type End = fn(&QueuePair);
    let ends: [(End, bool); 5] = [
        (QueuePair::disconnect, false),
        (QueuePair::destroy, false),
        (|qp| qp.modify(State::Error).unwrap(), false),
        (|qp| qp.modify(State::Reset).unwrap(), false),
        (QueuePair::abort, true),
    ];
    for (i, (end, reset)) in ends.into_iter().enumerate() {
        let (qp, mut peer) = connection(&ctx);
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        end(&qp);
        match peer.read(&mut [0; 64]) {
            Ok(n) => assert!(n == 0 && !reset, "end {i}"),
            Err(error) => assert!(
                reset && error.kind() == ErrorKind::ConnectionReset,
                "end {i}: {error}"
            ),
        }
        qp.destroy();
    }
}

#[test]
fn reset_detaches_ending_stream() {
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

/// A peer may receive the queued data slowly, but it must acknowledge some data between two
/// expiries of the linger timer.
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
    let acknowledged = linger::acknowledged(&qp.inner.state.lock().machine, &socket);
    let at_last_expiry = || {
        let mut g = qp.inner.state.lock();
        g.link.ending_mut().map(|ending| ending.acknowledged)
    };
    // Pretend that less was acknowledged at the last expiry.
    {
        let mut g = qp.inner.state.lock();
        let ending = g.link.ending_mut().expect("the connection is ending");
        ending.acknowledged = acknowledged.wrapping_sub(1);
    }
    qp.inner.linger_timer_expired();
    assert_eq!(at_last_expiry(), Some(acknowledged));
    assert!(qp.inner.state.lock().link.is_open());
    qp.inner.linger_timer_expired();
    assert!(qp.inner.state.lock().link.is_none());
    qp.destroy();
}

/// While a Send is held, pollers read nothing, and so would miss the end of the stream. So the
/// engine watches the socket again.
#[test]
fn held_send_returns_socket_to_engine() {
    let ctx = context();
    for has_receive in [false, true] {
        let (qp, mut peer) = connection(&ctx);
        let socket = link(&qp);
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        if has_receive {
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
            assert_eq!(open.driven_by_app, has_receive);
            open.interest
        };
        assert_eq!(interest.readable, has_receive);
        let watched = socket.engine.modify(&socket.stream, socket.token, interest);
        assert_eq!(watched.is_ok(), !has_receive);
        assert_eq!(qp.inner.pause_watch(), has_receive);
        qp.destroy();
    }
}

/// If no plan can be allocated for a pending Terminate, the last FPDU may be cut. So the peer must
/// receive a reset, and not a FIN.
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
    // No message has this opcode.
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

/// A pending event would keep the queue pair and the device alive.
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

/// If the peer has acknowledged data, the linger timer is set again. If not, the stream is given
/// up.
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
        // Pretend that less was acknowledged when the timer was set.
        ending.acknowledged = ending.acknowledged.wrapping_sub(1);
    }
    until("the stream is not given up", || {
        qp.inner.state.lock().link.is_none()
    });
    qp.destroy();
}
