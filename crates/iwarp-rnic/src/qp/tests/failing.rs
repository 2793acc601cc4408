//! Requests and responses that fail after others in the same plan.

use super::harness::*;
use crate::limits::RESPONSE_BURST;
use crate::qp::*;
use crate::{Access, SendFlags, SendOp, Sge, WcStatus};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::rdmap::{Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

const WRITE: SendOp = SendOp::Write {
    remote_addr: 0,
    rkey: 7,
};
const READ: SendOp = SendOp::Read {
    remote_addr: 0,
    rkey: 7,
};
const ADD: SendOp = SendOp::FetchAdd {
    remote_addr: 0,
    rkey: 7,
    add: 1,
    mask: 0,
};

/// Posts valid requests and, between them, a request with elements in `bad`. Returns the elements
/// of that request.
fn post_between(rig: &mut Rig, op: SendOp, len: u32, several: bool, bad: &Mr) -> Vec<Sge> {
    let good = rig.mr(3000, ALL);
    let sges = match several {
        true => vec![good.part(0, len), bad.part(0, len)],
        false => vec![bad.part(0, len)],
    };
    rig.post(1, SendOp::Send, &[good.part(0, 8)]);
    rig.post(2, WRITE, &[good.sge()]);
    rig.post(3, op, &sges);
    rig.post(4, SendOp::Send, &[good.part(0, 8)]);
    sges
}

/// Earlier requests are sent and succeed. The Terminate replaces the failing one.
#[test]
fn failing_request_spares_earlier_ones() {
    let ops = [
        SendOp::Send,
        SendOp::SendImm(1),
        SendOp::SendInv(5),
        WRITE,
        READ,
        ADD,
    ];
    for (op, len) in ops
        .into_iter()
        .flat_map(|op| [8, 700, 2500].map(|len| (op, len)))
    {
        for several in [false, true] {
            let mut rig = Rig::new();
            let foreign = rig.mr_in(PD + 1, 3000, ALL);
            post_between(&mut rig, op, len, several, &foreign);
            assert_eq!(rig.fill(), TxFill::Ready);
            assert_eq!(
                rig.qp.state(),
                State::Rts,
                "{op:?}: not before they are written"
            );
            let sent = rig.sent();
            let all: Vec<_> = sent.iter().map(|(header, _)| header.opcode()).collect();
            let with_imm = matches!(op, SendOp::SendImm(_)).then_some(Opcode::IMMEDIATE);
            let written = [Opcode::SEND, Opcode::WRITE, Opcode::WRITE, Opcode::WRITE];
            let expected: Vec<_> = written.into_iter().chain(with_imm).collect();
            assert_eq!(all[..expected.len()], expected, "{op:?} {len}");
            assert_eq!(all[expected.len()..], [Opcode::TERMINATE], "{op:?} {len}");
            rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
            use WcStatus::{Flushed, LocalProtection, Success};
            let statuses = [
                (1, Success),
                (2, Success),
                (3, LocalProtection),
                (4, Flushed),
            ];
            assert_eq!(brief(&rig.host.sends), statuses, "{op:?} {len}");
        }
    }
}

/// The memory is checked again when the earlier requests are written. If the program has granted
/// the right meanwhile, the message is sent with the correct number.
#[test]
fn retried_request_keeps_sequence_numbers() {
    for op in [SendOp::Send, SendOp::SendImm(1), SendOp::SendInv(5), WRITE] {
        for (len, several) in [(8, false), (8, true), (2500, false), (2500, true)] {
            let mut rig = Rig::new();
            let foreign = rig.mr_in(PD + 1, 3000, ALL);
            let sges = post_between(&mut rig, op, len, several, &foreign);
            assert_eq!(rig.fill(), TxFill::Ready);
            let stag = Stag(foreign.stag);
            rig.table.reregister(stag, None, Some(PD), None).unwrap();
            let mut sent = rig.write_plan();
            sent.extend(rig.sent());
            let last = |(header, _): &(Header, Vec<u8>)| match header {
                Header::Untagged(h) if h.last => Some(h.msn),
                _ => None,
            };
            let numbers: Vec<_> = sent.iter().filter_map(last).collect();
            let count = match op {
                SendOp::Write { .. } => 2,
                SendOp::SendImm(_) => 4,
                _ => 3,
            };
            assert_eq!(
                numbers,
                (1..=count).collect::<Vec<_>>(),
                "{op:?} {len} {several}"
            );
            let octets: usize = sent.iter().map(|(_, payload)| payload.len()).sum();
            let imm = if count == 4 { 8 } else { 0 };
            assert_eq!(octets, 8 + 3000 + len as usize * sges.len() + 8 + imm);
            let done: Vec<_> = (1..=4).map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(brief(&rig.host.sends), done, "{op:?} {len} {several}");
        }
    }
}

/// A response whose memory was deregistered ends the stream after a request in the same plan.
#[test]
fn failing_response_spares_own_requests() {
    for len in [8, 2500] {
        let stream = StreamConfig { ird: 32, ..STREAM };
        let config = QpConfig {
            max_ird: 32,
            ..QpConfig::default()
        };
        let mut rig = Rig::with(config, stream);
        let (kept, removed) = (rig.mr(64, ALL), rig.mr(3000, Access::REMOTE_READ));
        for i in 0..RESPONSE_BURST {
            let body = read_request(i, 8, kept.stag, kept.at);
            let request = untagged(Opcode::READ_REQUEST, 1, i + 1, 0, true, &body);
            assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        }
        let body = read_request(99, len, removed.stag, removed.at);
        let request = untagged(Opcode::READ_REQUEST, 1, RESPONSE_BURST + 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        rig.table.deregister(Stag(removed.stag)).unwrap();
        rig.post_flags(1, SendOp::Send, SendFlags::SIGNALED, &[kept.part(0, 8)]);
        let sent = rig.sent();
        let tail: Vec<_> = sent.iter().rev().take(2).map(|(h, _)| h.opcode()).collect();
        assert_eq!(tail, [Opcode::TERMINATE, Opcode::SEND]);
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)], "{len}");
        rig.assert_ended(Blame::Peer, Code::RDMAP_INVALID_STAG);
    }
}
