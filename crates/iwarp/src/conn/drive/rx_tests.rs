//! When a look at the socket is the first of its turn, and what the end of a stream is to a queue pair.

use super::super::super::qp::QpAttributes;
use super::*;
use crate::testing::{
    attributes, break_off, connected, context, queue_pair, send_fpdu_of, until, unwatched_link,
};
use iwarp_rnic::RecvWr;
use iwarp_rnic::limits::RX_READ_MAX;
use std::io::Write;

#[test]
fn a_look_is_the_first_if_nothing_has_happened() {
    for (left, resumed, first) in [
        (RX_BUDGET, false, true),
        (RX_BUDGET, true, false),
        (RX_BUDGET - 1, false, false),
        (RX_BUDGET - 1, true, false),
        (0, false, false),
    ] {
        let turn = Turn {
            left,
            resumed,
            more: false,
            unfinished: false,
        };
        assert_eq!(turn.is_first(), first, "{left} {resumed}");
    }
}

/// The program does not see that the peer of a queue pair that is connected by number has left, in whichever way it does. Others end.
#[test]
fn the_peer_of_a_queue_pair_by_number_leaves_unseen() {
    let ctx = context();
    for by_number in [false, true] {
        for reset in [false, true] {
            let cq = ctx.create_cq(4, None).unwrap();
            let qp = queue_pair(&ctx, &cq, &cq);
            let peer = connected(&qp);
            let socket = unwatched_link(&qp);
            if by_number {
                qp.inner.state.lock().machine.hide_connection();
            }
            if reset {
                break_off(&socket, peer);
            } else {
                drop(peer);
                until("it is not closed", || socket.stream.peer_closed());
            }
            // Once more: what has left stays unseen.
            for _ in 0..2 {
                assert!(qp.inner.drive_rx());
                let g = qp.inner.state.lock();
                let up = (g.machine.state(), g.link.is_open());
                assert_eq!(up == (State::Rts, true), by_number, "{reset} {up:?}");
                assert_eq!(g.link.is_read_to_end(), by_number);
            }
            qp.destroy();
        }
    }
}

/// All that has come is taken in one turn, also if a read has no room for it: nobody may look again.
#[test]
fn a_turn_takes_all_that_has_come() {
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
        .map(|at| RecvWr {
            wr_id: at.into(),
            sges,
        })
        .collect();
    qp.post_recv(&wrs).unwrap();
    let octets: Vec<u8> = (1..=messages)
        .flat_map(|msn| send_fpdu_of(msn, &[]))
        .collect();
    assert!(octets.len() > RX_READ_MAX && octets.len() < RX_BUDGET);
    peer.write_all(&octets).unwrap();
    until("it does not arrive", || {
        rustix::io::ioctl_fionread(&socket.stream).unwrap() == octets.len() as u64
    });
    assert!(qp.inner.drive_rx());
    assert_eq!(qp.counters().rx_messages, u64::from(messages));
    qp.destroy();
}
