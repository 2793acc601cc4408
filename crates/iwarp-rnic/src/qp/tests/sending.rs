//! The send queue: order, fences, limits, flush, drain.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendFlags, SendOp, SendWr, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Immediate, Opcode, ReadRequest, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

const READ: SendOp = SendOp::Read {
    remote_addr: 0,
    rkey: 7,
};

fn opcodes(sent: &[(Header, Vec<u8>)]) -> Vec<Opcode> {
    sent.iter().map(|(h, _)| h.opcode()).collect()
}

/// Answers the read that was sent as the `sent`-th segment with `len` octets.
fn answer(rig: &mut Rig, request: &[u8], len: usize) {
    let sink = ReadRequest::parse(request).unwrap().sink_stag.0;
    let ulpdu = tagged(Opcode::READ_RESPONSE, sink, 0, true, &vec![3; len]);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
}

#[test]
fn completions_keep_the_order_of_posting() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post(2, SendOp::Send, &[mr.part(0, 4)]);
    rig.post_flags(3, SendOp::Send, SendFlags::empty(), &[]);
    rig.post(4, SendOp::Send, &[]);
    let sent = rig.sent();
    assert_eq!(sent.len(), 4);
    // The Sends are written, but the read before them is not answered.
    assert!(rig.host.sends.is_empty());
    answer(&mut rig, &sent[0].1, 4);
    use WcStatus::Success;
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Success), (2, Success), (4, Success)]
    );
    assert_eq!(rig.host.sends[0].byte_len, 4);
    assert_eq!(&rig.read(&mr)[..5], [3, 3, 3, 3, 4]);
}

#[test]
fn at_most_ord_reads_are_outstanding() {
    let mut rig = Rig::with(QpConfig::default(), StreamConfig { ord: 2, ..STREAM });
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    for id in 0..4 {
        rig.post(id, READ, &[mr.part(0, 4)]);
    }
    rig.post(9, SendOp::Send, &[]);
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::READ_REQUEST; 2]);
    assert!(!rig.qp.wants_tx());
    answer(&mut rig, &sent[0].1, 4);
    assert!(rig.qp.wants_tx());
    assert_eq!(opcodes(&rig.sent()), [Opcode::READ_REQUEST]);
    answer(&mut rig, &sent[1].1, 4);
    assert_eq!(opcodes(&rig.sent()), [Opcode::READ_REQUEST, Opcode::SEND]);
}

#[test]
fn no_reads_without_ord() {
    let config = QpConfig {
        max_ord: 0,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    let refused = rig.try_post(1, READ, SendFlags::empty(), &[]);
    assert_eq!(refused, Err(PostError::InvalidRequest));
    let mut rig = Rig::with(QpConfig::default(), StreamConfig { ord: 0, ..STREAM });
    rig.post(1, READ, &[]);
    assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalQpOperation)]);
}

#[test]
fn a_fence_waits_for_reads() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post_flags(2, SendOp::Send, SendFlags::FENCE, &[mr.part(0, 4)]);
    rig.post(3, SendOp::Send, &[]);
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::READ_REQUEST]);
    answer(&mut rig, &sent[0].1, 4);
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::SEND, Opcode::SEND]);
    assert_eq!(sent[0].1, [3, 3, 3, 3]);
}

#[test]
fn a_failing_request_is_named_and_the_rest_is_flushed() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.recv(8, &[]);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post_flags(2, SendOp::Send, SendFlags::empty(), &[]);
    let mut bad = mr.sge();
    bad.lkey ^= 1;
    rig.post_flags(3, SendOp::Send, SendFlags::empty(), &[mr.part(0, 4), bad]);
    rig.post(4, SendOp::Send, &[]);
    let sent = rig.sent();
    // What came before is sent; instead of the bad one there is a Terminate.
    assert_eq!(
        opcodes(&sent),
        [Opcode::READ_REQUEST, Opcode::SEND, Opcode::TERMINATE]
    );
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    use WcStatus::{Flushed, LocalProtection};
    let want = [
        (1, Flushed),
        (2, Flushed),
        (3, LocalProtection),
        (4, Flushed),
    ];
    assert_eq!(brief(&rig.host.sends), want);
    // From now on everything is flushed at once.
    rig.post(5, SendOp::Send, &[]);
    rig.recv(9, &[]);
    assert_eq!(
        rig.host.sends.last().map(|c| (c.wr_id, c.status)),
        Some((5, Flushed))
    );
    assert_eq!(brief(&rig.host.recvs), [(8, Flushed), (9, Flushed)]);
}

#[test]
fn memory_that_goes_away_in_the_middle_of_a_message() {
    let mut rig = Rig::new();
    let mr = rig.mr(600_000, Access::empty());
    rig.post(1, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    while !rig.plan.is_done() {
        rig.write_some(50_000);
    }
    rig.table.deregister(mr.stag).unwrap();
    // The rest cannot be sent; the Terminate can.
    let octets = rig.octets_out();
    assert!(octets.len() < 100);
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
}

#[test]
fn inline_data_are_copied_when_posting() {
    let mut rig = Rig::new();
    let flags = SendFlags::INLINE | SendFlags::SIGNALED | SendFlags::SOLICITED;
    {
        // Gone before anything is sent.
        let data = Vec::from(*b"hello, world");
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::SendImm(0x0102_0304),
            flags,
            sges: &[],
            inline: &[&data[..5], &[], &data[5..]],
        };
        rig.qp.post_send(&wr, &mut rig.host).unwrap();
    }
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::IMMEDIATE, Opcode::SEND_SE]);
    assert_eq!(
        Immediate::parse(&sent[0].1).unwrap(),
        Immediate::before_send(0x0102_0304)
    );
    assert_eq!(sent[1].1, b"hello, world");
    assert_eq!(rig.host.sends[0].byte_len, 12);
    let long = [0; 65];
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags,
        sges: &[],
        inline: &[&long],
    };
    assert_eq!(
        rig.qp.post_send(&wr, &mut rig.host),
        Err(PostError::InlineTooLong)
    );
    let wr = SendWr {
        op: READ,
        inline: &[],
        ..wr
    };
    assert_eq!(
        rig.qp.post_send(&wr, &mut rig.host),
        Err(PostError::InvalidRequest)
    );
}

#[test]
fn a_write_with_immediate_data_sends_them_behind() {
    let mut rig = Rig::new();
    let mr = rig.mr(3000, Access::empty());
    let op = SendOp::WriteImm {
        remote_addr: 0x1_0000,
        rkey: 0x77,
        imm: 9,
    };
    rig.post(1, op, &[mr.part(0, 1000), mr.part(1000, 2000)]);
    let sent = rig.sent();
    use Opcode as O;
    assert_eq!(opcodes(&sent), [O::WRITE, O::WRITE, O::WRITE, O::IMMEDIATE]);
    let data: Vec<u8> = sent[..3].iter().flat_map(|s| s.1.clone()).collect();
    assert_eq!(data, rig.read(&mr));
    let Header::Tagged(second) = sent[1].0 else {
        panic!("a Write is tagged");
    };
    assert_eq!(second.to, 0x1_0000 + sent[0].1.len() as u64);
    assert!(!second.last && sent[2].0.last());
    assert_eq!(Immediate::parse(&sent[3].1), Some(Immediate::plain(9)));
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn what_cannot_be_posted() {
    let config = QpConfig {
        max_send_wr: 2,
        max_send_sge: 1,
        ..QpConfig::default()
    };
    let mut rig = Rig::fresh(config);
    let empty = SendFlags::empty();
    let state = rig.try_post(1, SendOp::Send, empty, &[]);
    assert_eq!(state, Err(PostError::InvalidState));
    rig.start(STREAM);
    let mr = rig.mr(8, ALL);
    let two = [mr.sge(), mr.sge()];
    let sges = rig.try_post(1, SendOp::Send, empty, &two);
    assert_eq!(sges, Err(PostError::TooManySges));
    let mut long = mr.sge();
    long.len = (1 << 31) + 1;
    let length = rig.try_post(1, SendOp::Send, empty, &[long]);
    assert_eq!(length, Err(PostError::MessageTooLong));
    let add = SendOp::FetchAdd {
        remote_addr: 0,
        rkey: 1,
        add: 1,
        mask: 0,
    };
    let atomic = rig.try_post(1, add, empty, &[mr.part(0, 4)]);
    assert_eq!(atomic, Err(PostError::InvalidRequest));
    rig.post(1, SendOp::Send, &[]);
    rig.post(2, SendOp::Send, &[]);
    let full = rig.try_post(3, SendOp::Send, empty, &[]);
    assert_eq!(full, Err(PostError::QueueFull));
}

#[test]
fn draining_waits_for_answers() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.post(1, READ, &[mr.part(0, 4)]);
    let sent = rig.sent();
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    rig.post(2, SendOp::Send, &[]);
    // Queued, not started; and an answer is still to come.
    assert!(!rig.qp.wants_tx());
    assert!(!rig.qp.take_events().contains(Events::SQ_DRAINED));
    answer(&mut rig, &sent[0].1, 4);
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
    rig.qp.modify(State::Rts, &mut rig.host).unwrap();
    assert_eq!(opcodes(&rig.sent()), [Opcode::SEND]);
    assert_eq!(rig.host.sends.len(), 2);
    // Drained already.
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
}

#[test]
fn answers_come_between_requests() {
    let mut rig = Rig::with(
        QpConfig {
            max_ird: 64,
            max_send_wr: 64,
            ..QpConfig::default()
        },
        StreamConfig { ird: 64, ..STREAM },
    );
    let mr = rig.mr(8, ALL);
    for msn in 1..=40 {
        let body = read_request(msn, 8, mr.stag, mr.at);
        let _ = rig.rx_ulpdu(&untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body));
        rig.post(u64::from(msn), SendOp::Send, &[]);
    }
    let sent = opcodes(&rig.sent());
    assert_eq!(sent.len(), 80);
    // Neither starves the other.
    let first_send = sent.iter().position(|o| *o == Opcode::SEND).unwrap();
    assert!(first_send <= 16);
    assert_eq!(
        sent.iter().filter(|o| **o == Opcode::READ_RESPONSE).count(),
        40
    );
}
