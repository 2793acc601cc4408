//! Flushes of the peer's memory (`ibv_wr_flush`): zero-length RDMA Reads with their own opcode.

use super::harness::*;
use crate::qp::*;
use crate::{Access, PostError, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use std::vec::Vec;

const FLUSH: SendOp = SendOp::Flush {
    remote_addr: 0x1234,
    rkey: 77,
};

#[test]
fn flush_completes_with_response() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    let write = SendOp::Write {
        remote_addr: 0x1000,
        rkey: 7,
    };
    rig.post_flags(1, write, SendFlags::empty(), &[mr.part(0, 8)]);
    rig.post(2, FLUSH, &[]);
    let sent = rig.sent();
    let opcodes: Vec<Opcode> = sent.iter().map(|(h, _)| h.opcode()).collect();
    assert_eq!(opcodes, [Opcode::WRITE, Opcode::READ_REQUEST]);
    assert!(matches!(sent[1].0, Header::Untagged(h) if h.qn == 1 && h.last));
    let request = ReadRequest::parse(&sent[1].1).unwrap();
    assert_eq!(request.size, 0);
    assert!(rig.host.sends.is_empty());
    let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    let [cqe] = rig.host.sends[..] else {
        panic!("{:?}", rig.host.sends);
    };
    let completed = (cqe.wr_id, cqe.status, cqe.opcode, cqe.byte_len);
    assert_eq!(completed, (2, WcStatus::Success, WcOpcode::Flush, 0));
}

/// Some peers answer a zero-length Read that follows another Read with the data of that Read, so a
/// flush waits until nothing else is outstanding.
#[test]
fn flush_waits_for_other_reads() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    let read = SendOp::Read {
        remote_addr: 0x1000,
        rkey: 7,
    };
    rig.post(1, read, &[mr.part(0, 4)]);
    rig.post(2, FLUSH, &[]);
    rig.post(3, FLUSH, &[]);
    for (id, payload) in [(1, &[9; 4][..]), (2, &[]), (3, &[])] {
        let sent = rig.sent();
        assert_eq!(sent.len(), 1, "{id}");
        let request = ReadRequest::parse(&sent[0].1).unwrap();
        let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, payload);
        assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
        assert_eq!(rig.host.sends.last().map(|c| c.wr_id), Some(id));
    }
}

#[test]
fn invalid_flush_is_refused() {
    let refused = Err(PostError::InvalidRequest);
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    let signaled = SendFlags::SIGNALED;
    assert_eq!(rig.try_post(1, FLUSH, signaled, &[mr.part(0, 8)]), refused);
    let inline = SendWr {
        wr_id: 1,
        op: FLUSH,
        flags: SendFlags::INLINE,
        sges: &[],
        inline: &[&[1]],
    };
    assert_eq!(rig.qp.post_send(&inline, &mut rig.host), refused);
    let config = QpConfig {
        max_ord: 0,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, StreamConfig { ord: 0, ..STREAM });
    assert_eq!(rig.try_post(1, FLUSH, signaled, &[]), refused);
}

#[test]
fn failed_flush_keeps_opcode() {
    let mut rig = Rig::new();
    rig.post(1, FLUSH, &[]);
    assert!(!rig.sent().is_empty());
    rig.post(2, FLUSH, &[]);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(
        brief(&rig.host.sends),
        [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]
    );
    assert!(rig.host.sends.iter().all(|c| c.opcode == WcOpcode::Flush));
}
