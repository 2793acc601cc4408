//! Atomic writes (`IBV_WR_ATOMIC_WRITE`): RDMA Writes of eight octets that complete when placed.

use super::harness::*;
use crate::qp::*;
use crate::{Access, PostError, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use std::vec::Vec;

fn to(remote_addr: u64, rkey: u32) -> SendOp {
    SendOp::AtomicWrite { remote_addr, rkey }
}

fn responder() -> Rig {
    let stream = StreamConfig {
        initiator: false,
        ..STREAM
    };
    Rig::with(QpConfig::default(), stream)
}

#[test]
fn atomic_write_completes_with_probe() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    for at in 0..8 {
        rig.write(&mr, at, 0x50 + at as u8);
    }
    // An earlier request still completes when it is written to the stream.
    rig.post(1, SendOp::Send, &[mr.part(0, 4)]);
    let _ = rig.sent();
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    // The octets come from several elements, or inline.
    rig.post(2, to(0x1000, 7), &[mr.part(0, 3), mr.part(3, 5)]);
    let octets = [1, 2, 3, 4, 5, 6, 7, 8];
    let wr = SendWr {
        wr_id: 3,
        op: to(0x1008, 7),
        flags: SendFlags::SIGNALED | SendFlags::INLINE,
        sges: &[],
        inline: &[&octets],
    };
    rig.qp.post_send(&wr, &mut rig.host).unwrap();
    let sent = rig.sent();
    let writes: Vec<_> = sent
        .iter()
        .filter_map(|(header, payload)| match header {
            Header::Tagged(h) => Some((h.opcode, h.stag.0, h.to, h.last, payload.as_slice())),
            Header::Untagged(_) => None,
        })
        .collect();
    let first = [0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57];
    assert_eq!(
        writes,
        [
            (Opcode::WRITE, 7, 0x1000, true, &first[..]),
            (Opcode::WRITE, 7, 0x1008, true, &octets[..])
        ]
    );
    let (last, body) = sent.last().unwrap();
    let probe = ReadRequest::parse(body).unwrap();
    assert_eq!((last.opcode(), probe.size), (Opcode::READ_REQUEST, 0));
    assert_eq!(rig.host.sends.len(), 1);
    let answer = tagged(Opcode::READ_RESPONSE, probe.sink_stag.0, 0, true, &[]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    let completed: Vec<_> = rig.host.sends[1..]
        .iter()
        .map(|c| (c.wr_id, c.status, c.opcode, c.byte_len))
        .collect();
    let opcode = WcOpcode::AtomicWrite;
    assert_eq!(
        completed,
        [
            (2, WcStatus::Success, opcode, 8),
            (3, WcStatus::Success, opcode, 8)
        ]
    );
}

#[test]
fn atomic_write_is_placed_or_refused() {
    let (mut a, mut b) = (Rig::new(), responder());
    let (from, target) = (a.mr(64, ALL), b.mr(64, ALL));
    let before = b.read(&target);
    for at in 0..8 {
        a.write(&from, at, 0xa0 + at as u8);
    }
    a.post(1, to(target.at + 16, target.stag), &[from.part(0, 8)]);
    a.post(2, to(target.at + 64, target.stag), &[from.part(0, 8)]);
    a.post(3, to(target.at, target.stag), &[from.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [
            (1, WcStatus::Success),
            (2, WcStatus::RemoteAccess),
            (3, WcStatus::Flushed)
        ]
    );
    let placed = b.read(&target);
    assert_eq!(
        placed[16..24],
        [0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7]
    );
    assert_eq!(placed[..16], before[..16]);
    assert_eq!(placed[24..], before[24..]);
}

#[test]
fn wrong_length_or_alignment_is_refused() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let refused = Err(PostError::InvalidRequest);
    for (at, len) in [
        (0x1000, 4),
        (0x1000, 0),
        (0x1000, 16),
        (0x1004, 8),
        (0x1001, 8),
    ] {
        let posted = rig.try_post(1, to(at, 7), SendFlags::SIGNALED, &[mr.part(0, len)]);
        assert_eq!(posted, refused, "{len} octets to {at:#x}");
    }
    // Without Reads the placement of an atomic write cannot be detected.
    let config = QpConfig {
        max_ord: 0,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, StreamConfig { ord: 0, ..STREAM });
    let mr = rig.mr(64, ALL);
    let posted = rig.try_post(1, to(0x1000, 7), SendFlags::SIGNALED, &[mr.part(0, 8)]);
    assert_eq!(posted, refused);
}

/// Completions of failed requests contain the posted operation.
#[test]
fn failed_request_keeps_opcode() {
    let (remote_addr, rkey) = (0x1000, 7);
    let write = SendOp::Write { remote_addr, rkey };
    let ops = [
        (to(remote_addr, rkey), WcOpcode::AtomicWrite),
        (write, WcOpcode::Write),
        (SendOp::Send, WcOpcode::Send),
        (SendOp::Read { remote_addr, rkey }, WcOpcode::Read),
    ];
    for (op, opcode) in ops {
        for was_sent in [false, true] {
            let mut rig = Rig::new();
            rig.qp.complete_when_placed();
            let mr = rig.mr(64, Access::LOCAL_WRITE);
            rig.post(1, op, &[mr.part(0, 8)]);
            if was_sent {
                assert!(!rig.sent().is_empty());
            }
            rig.qp.modify(State::Error, &mut rig.host).unwrap();
            let cqe = rig.host.sends[0];
            let completed = (cqe.wr_id, cqe.status, cqe.opcode);
            assert_eq!(
                completed,
                (1, WcStatus::Flushed, opcode),
                "{op:?} {was_sent}"
            );
        }
    }
}
