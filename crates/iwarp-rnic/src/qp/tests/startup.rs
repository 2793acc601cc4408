//! The first FPDU, which the initiator sends, and the RTR message (RFC 5044 §7.1.2, RFC 6581 §9.2).

use super::harness::*;
use crate::qp::*;
use crate::{Access, FastRegister, PostError, RecvWr, SendFlags, SendOp, WcStatus};
use iwarp_proto::ddp::Stag;
use iwarp_proto::mpa::negotiate::Agreed;
use iwarp_proto::rdmap::{Opcode, TerminateCode as Code};

const RESPONDER: StreamConfig = StreamConfig {
    initiator: false,
    ..STREAM
};

#[test]
fn responder_waits_for_first_fpdu() {
    //= rfc5041 section 5.2
    //= type=test
    //# Only the DDP Control and RsvdULP Fields MUST be valid for a zero-length
    //# Tagged DDP Segment.
    //= rfc5041 section 5.2
    //= type=test
    //# The STag and TO fields MUST NOT be checked for a zero-length Tagged DDP
    //# Message.
    //= rfc5044 section 7.1.2
    //= type=test
    //# MPA Responder mode implementations MUST receive and validate at least one FPDU before sending any FPDUs or Markers.
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    rig.post(1, SendOp::Send, &[]);
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.fill(), TxFill::Idle);
    let first = rig.fpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
    for octet in &first {
        assert!(!rig.qp.wants_tx());
        assert_eq!(rig.qp.take_events(), Events::empty());
        let _ = rig.rx(&[*octet]);
    }
    assert_eq!(rig.qp.take_events(), Events::ESTABLISHED);
    assert_eq!(rig.sent().len(), 1);
}

#[test]
fn responder_without_valid_fpdu_resets() {
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let mut first = rig.fpdu(&send(1, &[]));
    first[5] ^= 1;
    assert_eq!(rig.rx(&first), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::MPA_CRC);
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.qp.stream_wish(), StreamWish::Abort);
    // After a valid FPDU the responder may send a Terminate, even if RDMAP refuses the FPDU.
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let _ = rig.rx_ulpdu(&send(9, &[]));
    assert_eq!(rig.terminate().code, Code::DDP_UNTAGGED_INVALID_MSN);
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let _ = rig.rx_ulpdu(&[0x41, 0x43]);
    assert_eq!(rig.terminate().code, Code::MPA_MARKER);
}

#[test]
fn every_rtr_kind_establishes_responder() {
    //= rfc6581 section 5
    //= type=test
    //# The RDMA connection initiator MUST NOT allow any later FULPDUs to be
    //# transmitted before the RTR indication.
    //= rfc5041 section 5.2
    //= type=test
    //# A zero-length DDP Message is allowed and MUST consume exactly one DDP
    //# Segment.
    for rtr in [Rtr::Send, Rtr::Write, Rtr::Read] {
        for ord in [0, 1, 4] {
            let (mut a, mut b) = pair(StreamConfig {
                rtr: Some(rtr),
                ord,
                ..STREAM
            });
            let mr = b.mr(8, ALL);
            b.post(1, SendOp::Send, &[]);
            b.recv(2, &[]);
            a.recv(3, &[]);
            a.post(4, SendOp::Send, &[]);
            if ord > 0 {
                let sink = a.mr(8, Access::LOCAL_WRITE);
                let read = SendOp::Read {
                    remote_addr: mr.at,
                    rkey: mr.stag,
                };
                a.post(5, read, &[sink.sge()]);
                a.post(6, read, &[sink.sge()]);
            }
            shuttle(&mut a, &mut b, 7);
            // The RTR message itself takes no receive and has no completion.
            assert_eq!(brief(&b.host.recvs), [(2, WcStatus::Success)]);
            assert_eq!(brief(&a.host.recvs), [(3, WcStatus::Success)]);
            assert_eq!(a.host.sends.len(), if ord > 0 { 3 } else { 1 });
            assert_eq!((a.qp.fault(), b.qp.fault()), (None, None));
            assert!(b.qp.take_events().contains(Events::ESTABLISHED));
            assert!(!a.qp.take_events().contains(Events::ESTABLISHED));
        }
    }
}

#[test]
fn rtr_read_counts_as_read() {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            rtr: Some(Rtr::Read),
            ord: 1,
            ..STREAM
        },
    );
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 9,
    };
    rig.post(1, read, &[mr.sge()]);
    assert_eq!(rig.sent().len(), 1);
    let _ = rig.rx_ulpdu(&tagged(Opcode::READ_RESPONSE, 1, 0, true, &[]));
    assert_eq!(rig.sent().len(), 1);
}

#[test]
fn empty_fpdu_is_rtr() {
    let expected = StreamConfig {
        rtr_send_expected: true,
        ..RESPONDER
    };
    let mut rig = Rig::with(QpConfig::default(), expected);
    assert_eq!(rig.rx_ulpdu(&[]), RxStatus::Ok);
    assert!(rig.qp.take_events().contains(Events::ESTABLISHED));
    // The empty FPDU has no message sequence number.
    rig.recv(1, &[]);
    assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
}

#[test]
fn later_empty_send_is_no_rtr() {
    let expected = StreamConfig {
        rtr_send_expected: true,
        ..RESPONDER
    };
    let mut rig = Rig::with(QpConfig::default(), expected);
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.sge()]);
    rig.recv(2, &[]);
    let _ = rig.rx_ulpdu(&send(1, &[5]));
    let _ = rig.rx_ulpdu(&send(2, &[]));
    assert_eq!(rig.host.recvs.len(), 2);
    // The first Send is no RTR message either, if another message was the first FPDU.
    for crc in [true, false] {
        let mut rig = Rig::with(QpConfig::default(), StreamConfig { crc, ..expected });
        let mr = rig.mr(20_000, ALL);
        rig.recv(1, &[]);
        let write = tagged(Opcode::WRITE, mr.stag, mr.at, true, &[1; 20_000]);
        let write = rig.fpdu(&write);
        for part in write.chunks(5000) {
            assert_eq!(rig.rx(part), RxStatus::Ok);
        }
        assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
        assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
    }
}

/// An RTR message is a Send of one empty segment without a solicited event. Any other first message
/// consumes a receive.
#[test]
fn other_first_message_is_no_rtr() {
    let expected = StreamConfig {
        rtr_send_expected: true,
        ..RESPONDER
    };
    let first = |opcode, segments: &[(u32, bool, &[u8])]| {
        let mut rig = Rig::with(QpConfig::default(), expected);
        let mr = rig.mr(8, ALL);
        rig.recv(1, &[mr.sge()]);
        for &(offset, last, payload) in segments {
            let segment = untagged(opcode, 0, 1, offset, last, payload);
            assert_eq!(rig.rx_ulpdu(&segment), RxStatus::Ok);
        }
        brief(&rig.host.recvs)
    };
    let taken = [(1, WcStatus::Success)];
    assert_eq!(first(Opcode::SEND, &[(0, true, &[])]), []);
    assert_eq!(first(Opcode::SEND, &[(0, true, &[5])]), taken);
    assert_eq!(first(Opcode::SEND_SE, &[(0, true, &[])]), taken);
    let two: [(u32, bool, &[u8]); 2] = [(0, false, &[]), (0, true, &[5])];
    assert_eq!(first(Opcode::SEND, &two), taken);
}

#[test]
fn ungranted_read_is_rtr_only() {
    //= rfc5040 section 5.2.1
    //= type=test
    //# MUST respond with a zero-length RDMA Read Response Message.
    //= rfc5040 section 5.2.1
    //= type=test
    //# MUST NOT validate the Data Source STag and Data Source Tagged Offset
    //# contained in the RDMA Read Request Header, and
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            ird: 0,
            ..RESPONDER
        },
    );
    let body = read_request(1, 0, 1, 0);
    let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    let sent = rig.sent();
    assert_eq!(
        (sent[0].0.opcode(), sent[0].1.len()),
        (Opcode::READ_RESPONSE, 0)
    );
}

/// Returns a fast region of 64 bytes, and the requests that register and invalidate it.
fn fast_region(rig: &mut Rig) -> (Stag, SendOp, SendOp) {
    let range = rig.range(64);
    let (iova, random) = (range.addr(), rig.random());
    let stag = rig.table.allocate_fast(range, PD, random).unwrap();
    let register = SendOp::FastRegister(FastRegister {
        new_stag: stag,
        offset: 0,
        len: 64,
        iova,
        access: Access::LOCAL_WRITE,
        pages: None,
    });
    (stag, register, SendOp::LocalInvalidate { stag })
}

#[test]
fn local_requests_precede_first_fpdu() {
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let (stag, register, invalidate) = fast_region(&mut rig);
    let valid = |rig: &Rig| rig.table.info(stag).unwrap().valid;
    rig.post(1, register, &[]);
    assert!(rig.qp.wants_tx());
    assert!(rig.octets_out().is_empty());
    assert!(valid(&rig));
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    rig.post(2, invalidate, &[]);
    // Requests start in posting order: the registration waits behind the Send.
    rig.post(3, SendOp::Send, &[]);
    rig.post(4, register, &[]);
    assert!(rig.octets_out().is_empty());
    assert_eq!(rig.host.sends.len(), 2);
    assert!(!valid(&rig) && !rig.qp.wants_tx());
    let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.host.sends.len(), 4);
    assert!(valid(&rig));
}

#[test]
fn early_close_finishes_local_requests() {
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let (_, register, invalidate) = fast_region(&mut rig);
    rig.post(1, register, &[]);
    rig.post(2, invalidate, &[]);
    rig.post(3, SendOp::Send, &[]);
    rig.qp.close(&mut rig.host);
    assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
    assert!(rig.octets_out().is_empty());
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    rig.qp.shutdown_done(&mut rig.host);
    use WcStatus::{Flushed, Success};
    let expected = [(1, Success), (2, Success), (3, Flushed)];
    assert_eq!(brief(&rig.host.sends), expected);
}

#[test]
fn early_local_failure_sends_nothing() {
    let mut rig = Rig::with(QpConfig::default(), RESPONDER);
    let (_, _, invalidate) = fast_region(&mut rig);
    rig.post(1, invalidate, &[]);
    rig.post(2, invalidate, &[]);
    assert!(rig.octets_out().is_empty(), "no Terminate either");
    use WcStatus::{Flushed, LocalProtection};
    assert_eq!(brief(&rig.host.sends), [(1, LocalProtection), (2, Flushed)]);
    assert_eq!(rig.qp.stream_wish(), StreamWish::Abort);
}

#[test]
fn rtr_read_response_is_empty() {
    for (last, payload) in [(false, &[][..]), (true, &[0; 4]), (false, &[0; 4])] {
        let rtr_by_read = StreamConfig {
            rtr: Some(Rtr::Read),
            ..STREAM
        };
        let mut rig = Rig::with(QpConfig::default(), rtr_by_read);
        assert_eq!(rig.sent().len(), 1);
        let answer = tagged(Opcode::READ_RESPONSE, 1, 0, last, payload);
        assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, Code::RDMAP_UNEXPECTED_OPCODE);
    }
}

#[test]
fn agreement_is_mirrored() {
    let agreed = Agreed {
        revision: 2,
        enhanced: true,
        crc: false,
        markers_tx: true,
        markers_rx: false,
        ird: 3,
        ord: 5,
        peer_ird: 7,
        peer_ord: 9,
        rtr: Some(Rtr::Send),
        peer_to_peer: true,
    };
    let config_of = |agreed: &Agreed, initiator| {
        StreamConfig::agreed(agreed, initiator, 1460, StreamTimes::NONE)
    };
    let first = StreamConfig {
        initiator: true,
        crc: false,
        markers_tx: true,
        markers_rx: false,
        ird: 3,
        ord: 5,
        rtr: Some(Rtr::Send),
        rtr_send_expected: false,
        emss: 1460,
        times: StreamTimes::NONE,
    };
    assert_eq!(config_of(&agreed, true), first);
    let second = StreamConfig {
        initiator: false,
        rtr: None,
        rtr_send_expected: true,
        ..first
    };
    assert_eq!(config_of(&agreed, false), second);
    // Only an RTR message by Send could be mistaken for a message of the program.
    for rtr in [None, Some(Rtr::Write), Some(Rtr::Read)] {
        assert!(!config_of(&Agreed { rtr, ..agreed }, false).rtr_send_expected);
    }
}

#[test]
fn queue_pair_sizes_are_limited() {
    use crate::limits::{MAX_INLINE, MAX_IRD, MAX_ORD, MAX_QP_WR, MAX_SGE};
    let sizes: [fn(&mut QpConfig); 7] = [
        |c| c.max_send_wr = MAX_QP_WR + 1,
        |c| c.max_recv_wr = MAX_QP_WR + 1,
        |c| c.max_send_sge = MAX_SGE + 1,
        |c| c.max_recv_sge = MAX_SGE + 1,
        |c| c.max_inline = MAX_INLINE + 1,
        |c| c.max_ird = MAX_IRD + 1,
        |c| c.max_ord = MAX_ORD + 1,
    ];
    for (i, change) in sizes.into_iter().enumerate() {
        let mut config = QpConfig::default();
        change(&mut config);
        let refused = QueuePair::new(config).err();
        assert_eq!(refused, Some(CreateError::Invalid), "size {i}");
    }
}

#[test]
fn reset_accepts_no_requests() {
    let mut rig = Rig::fresh(QpConfig::default());
    let wr = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    let receive = |rig: &mut Rig| rig.qp.post_recv(&wr, &mut rig.host);
    let refused = Err(PostError::InvalidState);
    assert_eq!(receive(&mut rig), refused);
    let send = rig.try_post(1, SendOp::Send, SendFlags::empty(), &[]);
    assert_eq!(send, refused);
    // Receives may be posted before a stream is attached; Sends may not.
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    assert_eq!(receive(&mut rig), Ok(()));
    let send = rig.try_post(1, SendOp::Send, SendFlags::empty(), &[]);
    assert_eq!(send, refused);
}

/// A message that arrives before the program's change to RTS raises an event, once per stream.
/// Protocol messages do not.
#[test]
fn message_in_rtr_raises_one_event() {
    let note = tagged(Opcode::WRITE, 1, 0, true, &[]);
    for (to, message, is_raised) in [
        (State::Rtr, None, false),
        (State::Rts, Some(send(1, &[1])), false),
        (State::Rtr, Some(send(1, &[1])), true),
    ] {
        let mut rig = Rig::fresh(QpConfig::default());
        rig.qp.modify(State::Init, &mut rig.host).unwrap();
        rig.qp.await_stream().unwrap();
        rig.qp.modify(to, &mut rig.host).ok();
        rig.start(STREAM);
        assert_eq!(rig.qp.state(), to);
        let mr = rig.mr(64, ALL);
        rig.recv(1, &[mr.sge()]);
        rig.recv(2, &[mr.sge()]);
        assert_eq!(rig.rx_ulpdu(&note), RxStatus::Ok);
        if let Some(message) = message {
            assert_eq!(rig.rx_ulpdu(&message), RxStatus::Ok);
        }
        let events = rig.qp.take_events();
        assert_eq!(events.contains(Events::MESSAGE_IN_RTR), is_raised, "{to:?}");
        if is_raised {
            assert_eq!(rig.rx_ulpdu(&send(2, &[1])), RxStatus::Ok);
            assert!(!rig.qp.take_events().contains(Events::MESSAGE_IN_RTR));
        }
    }
}
