//! After a reset in any situation, a queue pair behaves like a new one.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader};
use iwarp_proto::rdmap::{Immediate, Opcode, ReadRequest, Terminate, TerminateCode};
use std::vec;
use std::vec::Vec;

type Prepare = fn(&mut Rig, &Mr);

const WRITE: SendOp = SendOp::Write {
    remote_addr: 0x1000,
    rkey: 7,
};

/// Situations of a queue pair with a stream.
const SITUATIONS: [Prepare; 12] = [
    |_, _| {},
    |rig, mr| {
        // An unanswered Read of the peer.
        let body = read_request(9, 8, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    },
    |rig, mr| {
        // A partly answered Read of the peer.
        let body = read_request(9, mr.len, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
        assert_eq!(rig.fill(), TxFill::Ready);
    },
    |rig, mr| {
        rig.recv(1, &[mr.sge()]);
        rig.recv(2, &[]);
        let first = untagged(Opcode::SEND, 0, 1, 0, false, &[7; 60]);
        assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    },
    |rig, _| assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Held),
    |rig, mr| {
        let ulpdu = tagged(Opcode::WRITE, mr.stag, mr.at, false, &[1; 9]);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    },
    |rig, _| {
        let mut body = vec![0; Immediate::LEN];
        Immediate::before_send(5).emit(&mut body);
        let ulpdu = untagged(Opcode::IMMEDIATE, 0, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    },
    |rig, mr| {
        // A partly planned message, and a queued one.
        rig.post(1, WRITE, &[mr.sge()]);
        rig.post(2, SendOp::Send, &[]);
        assert_eq!(rig.fill(), TxFill::Ready);
    },
    |rig, mr| {
        let read = SendOp::Read {
            remote_addr: 0x1000,
            rkey: 7,
        };
        rig.post(1, read, &[mr.part(0, 8)]);
        rig.post(2, SendOp::Send, &[]);
        assert_eq!(rig.sent().len(), 2);
    },
    |rig, mr| {
        // One response completes more requests than one call reports.
        rig.qp.complete_when_placed();
        for wr_id in 0..200 {
            rig.post(wr_id, WRITE, &[mr.part(0, 8)]);
        }
        // The first probe covers a burst of requests, the second all others.
        for _ in 0..2 {
            let sent = rig.sent();
            let probe = sent.iter().find_map(|(_, body)| ReadRequest::parse(body));
            let sink = probe.unwrap().sink_stag.0;
            let answer = tagged(Opcode::READ_RESPONSE, sink, 0, true, &[]);
            assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
        }
        assert!(rig.qp.completions_due());
        assert!(!rig.host.sends.is_empty());
    },
    |rig, mr| {
        // The peer has refused a Write, and the search is not finished. None of these Writes
        // matches, but one after the reset would.
        rig.qp.complete_when_placed();
        let other = SendOp::Write {
            remote_addr: 0x9000,
            rkey: 7,
        };
        for wr_id in 0..200 {
            rig.post(wr_id, other, &[mr.part(0, 8)]);
        }
        rig.sent();
        let refused = Header::Tagged(TaggedHeader {
            last: true,
            opcode: Opcode::WRITE,
            stag: Stag(7),
            to: 0x1000,
        });
        let terminate = Terminate {
            code: TerminateCode::DDP_TAGGED_BASE_BOUNDS,
            ddp_segment_len: None,
            ddp_header: Some(refused),
            read_request: None,
        };
        let mut body = vec![0; Terminate::MAX_LEN];
        let n = terminate.emit(&mut body);
        let ulpdu = untagged(Opcode::TERMINATE, 2, 1, 0, true, &body[..n]);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        assert!(brief(&rig.host.sends).is_empty() && rig.qp.completions_due());
    },
    |rig, _| {
        // The queue pair has failed and notified the peer.
        assert_eq!(rig.rx_ulpdu(&send(7, &[])), RxStatus::Failed);
        rig.terminate();
    },
];

/// Returns a queue pair that was reset in a situation, and a large region.
fn reset(prepare: Prepare) -> (Rig, Mr) {
    let config = QpConfig {
        max_send_wr: 200,
        budget: Budget {
            completions: 10,
            ..Budget::DEFAULT
        },
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    let mr = rig.mr(1 << 20, Access::all() - Access::ZERO_BASED);
    prepare(&mut rig, &mr);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    // The driver discards its part of the stream.
    rig.plan = TxPlan::new().unwrap();
    rig.buffer = RxBuffer::new().unwrap();
    rig.offered.clear();
    rig.host = TestHost::default();
    assert_eq!(rig.qp.sends_outstanding(), 0);
    assert_eq!(rig.qp.receives_posted(), 0);
    assert_eq!((rig.qp.state(), rig.qp.fault()), (State::Reset, None));
    assert_eq!(rig.qp.take_events(), Events::empty());
    assert_eq!(rig.qp.poll_at(), None);
    assert!(!rig.qp.completions_due() && !rig.qp.waits_for_memory());
    (rig, mr)
}

#[test]
fn reset_discards_completions() {
    for (i, prepare) in SITUATIONS.into_iter().enumerate() {
        let (mut rig, _) = reset(prepare);
        rig.qp.modify(State::Error, &mut rig.host).unwrap();
        assert!(!rig.qp.completions_due(), "{i}");
        assert!(brief(&rig.host.sends).is_empty(), "{i}");
        assert!(brief(&rig.host.recvs).is_empty(), "{i}");
    }
}

#[test]
fn reset_queue_pair_behaves_like_new() {
    for (i, prepare) in SITUATIONS.into_iter().enumerate() {
        let (mut rig, mr) = reset(prepare);
        rig.start(STREAM);
        assert!(!rig.qp.wants_tx() && rig.sent().is_empty(), "{i}");
        rig.recv(5, &[mr.part(0, 8)]);
        assert_eq!(rig.rx_ulpdu(&send(1, &[3; 8])), RxStatus::Ok, "{i}");
        assert_eq!(brief(&rig.host.recvs), [(5, WcStatus::Success)], "{i}");
        let (flags, len) = (rig.host.recvs[0].flags, rig.host.recvs[0].byte_len);
        assert_eq!((flags.is_empty(), len), (true, 8), "{i}");
        // An incomplete message of the old stream is not continued.
        assert!(rig.qp.fault().is_none());
        let sent = rig.sent();
        assert!(sent.is_empty(), "{i}");
        rig.post(6, SendOp::Send, &[]);
        rig.post(7, WRITE, &[mr.part(0, 8)]);
        assert!(rig.host.sends.is_empty(), "{i}: nothing is sent");
        let opcodes: Vec<_> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
        assert_eq!(opcodes[..2], [Opcode::SEND, Opcode::WRITE], "{i}");
        // In acknowledged mode, a probe was sent and is unanswered.
        let probed = opcodes.len() == 3;
        let done = [(6, WcStatus::Success), (7, WcStatus::Success)];
        let expected = if probed { &[][..] } else { &done };
        assert_eq!(brief(&rig.host.sends), expected, "{i}");
        rig.eof();
        let end = rig.qp.fault();
        assert!(end.is_none(), "{i}: no message was cut: {end:?}");
        while rig.qp.completions_due() {
            let _ = rig.qp.complete_due(&mut rig.host);
        }
        let expected = if probed {
            WcStatus::Flushed
        } else {
            WcStatus::Success
        };
        let expected = [(6, expected), (7, expected)];
        assert_eq!(brief(&rig.host.sends), expected, "{i}");
    }
}

/// Requests on the next stream are flushed in order. None gets the status of an earlier failure.
#[test]
fn next_requests_are_flushed_in_order() {
    for (i, prepare) in SITUATIONS.into_iter().enumerate() {
        let (mut rig, mr) = reset(prepare);
        rig.start(STREAM);
        for wr_id in 0..50 {
            rig.post(wr_id, WRITE, &[mr.part(0, 8)]);
        }
        // In acknowledged mode the requests wait for the peer; otherwise they are still to be
        // written.
        if rig.qp.acknowledge.enabled {
            assert!(!rig.sent().is_empty());
        }
        rig.qp.modify(State::Error, &mut rig.host).unwrap();
        while rig.qp.completions_due() {
            let _ = rig.qp.complete_due(&mut rig.host);
        }
        let expected: Vec<_> = (0..50).map(|wr_id| (wr_id, WcStatus::Flushed)).collect();
        assert_eq!(brief(&rig.host.sends), expected, "{i}");
    }
}
