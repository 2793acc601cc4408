//! Tests of the start of a stream, and of requests whose operation a fault changes.

use super::effects::{DriveHost, Effects};
use super::post::Request;
use crate::testing;
use crate::xrc::XrcSendWr;
use iwarp_rnic::{SendFlags, SendOp, SendWr, Sge};

/// MPA start-up does not exchange the MSS, so it is read from the socket. The segments of loopback
/// are large.
#[test]
fn mss_comes_from_socket() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let _peer = testing::connected(&qp);
    let sges = [Sge {
        addr: 0,
        len: 4000,
        lkey: 1,
    }];
    let write = SendWr::write(1, 0x1000, 7, &sges);
    let mut effects = Effects::default();
    // The request is not sent, because the lock is held until the queue pair has failed.
    let mut g = qp.inner.state.lock();
    let mut host = DriveHost::new(&qp.inner, &mut effects);
    g.machine.post_send(&write, &mut host).unwrap();
    assert!(!g.machine.is_segmenting());
    g.machine.set_emss(1460);
    assert!(g.machine.is_segmenting());
    g.machine.abort(&mut host);
    drop(host);
    drop(g);
    effects.apply(&qp.inner);
    qp.destroy();
}

#[test]
fn changed_operation_keeps_other_fields() {
    let wr = SendWr {
        wr_id: 5,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges: &[],
        inline: &[],
    };
    let changed = wr.with_op(SendOp::SendInv(9));
    assert_eq!((changed.wr_id, changed.op), (5, SendOp::SendInv(9)));
    assert_eq!(changed.flags, SendFlags::SIGNALED);
    let changed = XrcSendWr { wr, srq: 3 }.with_op(SendOp::SendInv(9));
    assert_eq!((changed.wr.wr_id, changed.srq), (5, 3));
    assert_eq!(changed.wr.op, SendOp::SendInv(9));
}
