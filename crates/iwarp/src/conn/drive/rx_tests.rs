//! Tests of reading: the first read of a call, several reads in a call, and the end of a stream.

use super::super::super::attributes::QpAttributes;
use super::super::super::qp::QueuePair;
use super::*;
use crate::testing::{
    attributes, break_off, connected, context, queue_pair, send_fpdu_of, until, unwatched_link,
};
use iwarp_rnic::RecvWr;
use iwarp_rnic::limits::RX_READ_MAX;
use std::io::Write;

#[test]
fn read_is_first_before_any_progress() {
    for (budget, processed, first) in [
        (RX_BUDGET, false, true),
        (RX_BUDGET, true, false),
        (RX_BUDGET - 1, false, false),
        (RX_BUDGET - 1, true, false),
        (0, false, false),
    ] {
        let reading = Reading {
            budget,
            processed,
            more: false,
            unfinished: false,
        };
        assert_eq!(reading.is_first(), first, "{budget} {processed}");
    }
}

/// The end of the stream is hidden from a queue pair that is connected by number. Other queue pairs
/// fail.
#[test]
fn by_number_end_is_hidden() {
    let ctx = context();
    for by_number in [false, true] {
        for reset in [false, true] {
            let cq = ctx.create_cq(4, None).unwrap();
            let qp = queue_pair(&ctx, &cq, &cq);
            let peer = connected(&qp);
            let socket = unwatched_link(&qp);
            if by_number {
                qp.inner.state.lock().machine.set_by_number();
            }
            if reset {
                break_off(&socket, peer);
            } else {
                drop(peer);
                until("the stream is not closed", || socket.stream.peer_closed());
            }
            // Reading the end again changes nothing.
            for _ in 0..2 {
                assert!(qp.inner.drive_rx());
                let g = qp.inner.state.lock();
                let state = (g.machine.state(), g.link.is_open());
                assert_eq!(state == (State::Rts, true), by_number, "{reset} {state:?}");
                assert_eq!(g.link.is_read_to_end(), by_number);
            }
            qp.destroy();
        }
    }
}

/// One call reads all data of the socket, even if that takes several reads: there may be no further
/// call.
#[test]
fn call_reads_all_data() {
    let ctx = context();
    let messages = 8000;
    let cq = ctx.create_cq(messages, None).unwrap();
    let qp = ctx
        .create_qp(&QpAttributes {
            max_recv_wr: messages,
            ..attributes(&ctx, &cq, &cq)
        })
        .unwrap();
    let mut peer = connected(&qp);
    let socket = unwatched_link(&qp);
    let buffer = 1 << 20;
    socket.stream.socket().set_recv_buffer_size(buffer).unwrap();
    let sges = &[];
    let wrs: Vec<_> = (0..messages)
        .map(|wr_id| RecvWr {
            wr_id: wr_id.into(),
            sges,
        })
        .collect();
    qp.post_recv(&wrs).unwrap();
    let octets: Vec<u8> = (1..=messages)
        .flat_map(|msn| send_fpdu_of(msn, &[]))
        .collect();
    assert!(octets.len() > RX_READ_MAX && octets.len() < RX_BUDGET);
    peer.write_all(&octets).unwrap();
    until("the messages do not arrive", || {
        rustix::io::ioctl_fionread(&socket.stream).unwrap() == octets.len() as u64
    });
    assert!(qp.inner.drive_rx());
    assert_eq!(qp.counters().rx_messages, u64::from(messages));
    qp.destroy();
}

/// A partial FPDU of an old stream must not be combined with data of the next stream.
#[test]
fn partial_fpdu_of_old_stream_is_dropped() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qps = [0; 2].map(|_| queue_pair(&ctx, &cq, &cq));
    let mut peers = qps.each_ref().map(connected);
    let [ours, old] = qps.each_ref().map(unwatched_link);
    peers[0].write_all(&send_fpdu_of(1, &[])[..4]).unwrap();
    let partial = || {
        let mut g = qps[0].inner.state.lock();
        g.link.open_mut().and_then(|open| open.partial.take())
    };
    let mut part = None;
    until("the part does not arrive", || {
        qps[0].inner.drive_rx();
        part = partial();
        part.is_some()
    });
    let part = part.expect("a partial FPDU");
    keep_partial(&qps[0].inner, &ours, part);
    let part = partial().expect("a partial FPDU of the current stream is kept");
    keep_partial(&qps[0].inner, &old, part);
    assert!(partial().is_none());
    qps.iter().for_each(QueuePair::destroy);
}
