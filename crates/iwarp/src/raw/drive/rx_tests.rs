//! When a look at the socket is the first of its turn, and what the end of a stream is to a queue pair.

use super::super::super::testing::{
    break_off, connected, context, queue_pair, until, unwatched_link,
};
use super::*;

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
            let link = unwatched_link(&qp);
            if by_number {
                qp.inner.state.lock().machine.hide_connection();
            }
            if reset {
                break_off(&link, peer);
            } else {
                drop(peer);
                until("it is not closed", || link.stream.peer_closed());
            }
            // Once more: what has left stays unseen.
            for _ in 0..2 {
                assert!(qp.inner.drive_rx());
                let g = qp.inner.state.lock();
                let up = (g.machine.state(), g.link.is_some());
                assert_eq!(up == (State::Rts, true), by_number, "{reset} {up:?}");
                assert_eq!(g.conn.left.rx, by_number);
            }
            qp.destroy();
        }
    }
}
