//! Effects of the peer's Terminate and of its wrong responses on our requests (RFC 5040 §4.8,
//! §7.1).

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest, Terminate, TerminateCode as Code,
};
use std::string::ToString;
use std::vec;
use std::vec::Vec;

fn read_of(mr: &Mr) -> SendOp {
    SendOp::Read {
        remote_addr: 0x1000,
        rkey: mr.stag,
    }
}

/// Returns a rig with three Reads in flight and a Send that was sent.
fn rig_with_reads() -> (Rig, Vec<ReadRequest>) {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    for id in 1..=3 {
        rig.post(id, read_of(&mr), &[mr.part(0, 8)]);
    }
    rig.post(4, SendOp::Send, &[mr.part(0, 4)]);
    rig.recv(9, &[]);
    let sent = rig.sent();
    let requests = sent.iter().filter_map(|(_, p)| ReadRequest::parse(p));
    let requests = requests.collect();
    (rig, requests)
}

fn terminate_octets(t: &Terminate) -> Vec<u8> {
    let mut out = vec![0; Terminate::MAX_LEN];
    let n = t.emit(&mut out);
    out.truncate(n);
    out
}

fn receive_terminate(rig: &mut Rig, octets: &[u8]) {
    let ulpdu = untagged(Opcode::TERMINATE, 2, 1, 0, true, octets);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
    assert!(rig.qp.take_events().contains(Events::FATAL));
    // A Terminate is not answered by another.
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    assert_eq!(rig.qp.counters().terminates_received, 1);
}

#[test]
fn terminate_fails_its_read() {
    let cases = [
        (Code::RDMAP_INVALID_STAG, WcStatus::RemoteAccess),
        (Code::RDMAP_BASE_BOUNDS, WcStatus::RemoteAccess),
        (Code::RDMAP_ACCESS, WcStatus::RemoteAccess),
        (Code::RDMAP_UNEXPECTED_OPCODE, WcStatus::RemoteOperation),
        (
            Code::RDMAP_CATASTROPHIC_STREAM,
            WcStatus::RemoteInvalidRequest,
        ),
        (Code::DDP_UNTAGGED_NO_BUFFER, WcStatus::RemoteInvalidRequest),
        (Code::MPA_CRC, WcStatus::Fatal),
    ];
    for (code, status) in cases {
        // Some peers return the right sink with a wrong sequence number.
        for (by_sink, msn) in [(true, 2), (true, 1), (true, 3), (true, 9), (false, 2)] {
            let (mut rig, requests) = rig_with_reads();
            let header = Header::Untagged(UntaggedHeader {
                last: true,
                opcode: Opcode::READ_REQUEST,
                invalidate_stag: Stag(0),
                qn: 1,
                msn,
                mo: 0,
            });
            let t = Terminate {
                code,
                ddp_segment_len: Some(46),
                ddp_header: Some(header),
                read_request: by_sink.then(|| requests[1]),
            };
            receive_terminate(&mut rig, &terminate_octets(&t));
            rig.assert_ended(Blame::PeerTerminated, code);
            use WcStatus::Flushed;
            assert_eq!(
                brief(&rig.host.sends),
                [(1, Flushed), (2, status), (3, Flushed), (4, Flushed)]
            );
            let others = [0, 2, 3].map(|i| rig.host.sends[i].vendor_err);
            assert_eq!(others, [0; 3]);
            let vendor = rig.host.sends[1].vendor_err;
            let (l, t, c) = (code.layer, code.etype, code.code);
            assert_eq!(
                vendor,
                u32::from(l) << 12 | u32::from(t) << 8 | u32::from(c)
            );
            assert_eq!(brief(&rig.host.recvs), [(9, Flushed)]);
        }
    }
}

#[test]
fn siw_terminate_is_understood() {
    let (mut rig, requests) = rig_with_reads();
    let t = Terminate {
        code: Code::RDMAP_INVALID_STAG,
        ddp_segment_len: Some(46),
        ddp_header: Some(Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::READ_REQUEST,
            qn: 1,
            msn: 1,
            ..UntaggedHeader::default()
        })),
        read_request: Some(requests[0]),
    };
    let mut octets = terminate_octets(&t);
    octets[0] = octets[0].rotate_left(4);
    octets[2] = octets[2].reverse_bits();
    receive_terminate(&mut rig, &octets);
    rig.assert_ended(Blame::PeerTerminated, Code::RDMAP_INVALID_STAG);
    assert_eq!(rig.host.sends[0].status, WcStatus::RemoteAccess);
}

/// Returns a Terminate that refers to message `msn` on queue `qn`, and contains `request`.
fn terminate_about(code: Code, qn: u32, msn: u32, request: Option<ReadRequest>) -> Terminate {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: match qn {
            0 => Opcode::SEND,
            _ => Opcode::READ_REQUEST,
        },
        invalidate_stag: Stag(0),
        qn,
        msn,
        mo: 0,
    });
    Terminate {
        code,
        ddp_segment_len: Some(46),
        ddp_header: Some(header),
        read_request: request,
    }
}

/// Each queue has its own sequence numbers: the first Send and the first Read both have number 1.
#[test]
fn terminate_about_send_blames_no_read() {
    for msn in 1..=3 {
        let (mut rig, _) = rig_with_reads();
        let t = terminate_about(Code::DDP_UNTAGGED_NO_BUFFER, 0, msn, None);
        receive_terminate(&mut rig, &terminate_octets(&t));
        rig.assert_ended(Blame::PeerTerminated, t.code);
        assert_eq!(
            brief(&rig.host.sends),
            [1, 2, 3, 4].map(|id| (id, WcStatus::Flushed))
        );
    }
}

/// An atomic has no sink, so a sink in a Terminate does not identify it.
#[test]
fn atomic_is_found_by_msn() {
    for sink in [None, Some(0), Some(7)] {
        let mut rig = Rig::new();
        let mr = rig.mr(64, Access::LOCAL_WRITE);
        let add = SendOp::FetchAdd {
            remote_addr: 0x1000,
            rkey: 7,
            add: 1,
            mask: 0,
        };
        rig.post(1, read_of(&mr), &[mr.part(0, 8)]);
        for id in 2..=4 {
            rig.post(id, add, &[mr.part(8, 8)]);
        }
        rig.sent();
        let request = sink.map(|sink| ReadRequest {
            sink_stag: Stag(sink),
            sink_to: 0,
            size: 8,
            source_stag: Stag(7),
            source_to: 0x1000,
        });
        let t = terminate_about(Code::RDMAP_ACCESS, 1, 3, request);
        receive_terminate(&mut rig, &terminate_octets(&t));
        use WcStatus::{Flushed, RemoteAccess};
        assert_eq!(
            brief(&rig.host.sends),
            [(1, Flushed), (2, Flushed), (3, RemoteAccess), (4, Flushed)]
        );
    }
}

/// The region of the first of two Read Requests is deregistered before the response is sent. The
/// Terminate contains this request.
#[test]
fn terminate_contains_refused_read() {
    let mut rig = Rig::new();
    let [missing, other] = [0; 2].map(|_| rig.mr(64, ALL));
    for (msn, mr) in [(1, &missing), (2, &other)] {
        let body = read_request(9, 64, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    }
    assert_eq!(rig.qp.take_events(), Events::empty());
    rig.table.deregister(Stag(missing.stag)).unwrap();
    let t = rig.terminate();
    assert_eq!(t.code, Code::RDMAP_INVALID_STAG);
    assert_eq!(t.ddp_segment_len, Some(46));
    let Some(Header::Untagged(h)) = t.ddp_header else {
        panic!("{:?}", t.ddp_header);
    };
    assert_eq!((h.qn, h.msn, h.opcode), (1, 1, Opcode::READ_REQUEST));
    let request = t.read_request.unwrap();
    assert_eq!(
        (request.source_stag, request.size),
        (Stag(missing.stag), 64)
    );
    let events = rig.qp.take_events();
    assert!(events.contains(Events::ACCESS_ERROR | Events::FATAL));
    rig.assert_ended(Blame::Peer, Code::RDMAP_INVALID_STAG);
}

#[test]
fn fault_message_names_blame() {
    let faults = [
        (
            Blame::Peer,
            "terminated because the peer broke the protocol (",
        ),
        (Blame::PeerTerminated, "terminated by the peer ("),
        (Blame::Local, "a local work request failed ("),
        (Blame::Transport, "connection lost ("),
    ];
    for (blame, text) in faults {
        let mut fault = Fault {
            blame,
            code: Code::RDMAP_ACCESS,
        };
        let message = fault.to_string();
        assert!(message.starts_with(text), "{message}");
        assert!(message.contains(Code::RDMAP_ACCESS.description().unwrap()));
        fault.code.code = 0x77;
        let message = fault.to_string();
        assert!(
            message.starts_with(text) && message.ends_with("code 119)"),
            "{message}"
        );
    }
}

/// A probe belongs to no request of the program, so none is blamed.
#[test]
fn terminate_about_probe_blames_no_request() {
    for by_sink in [true, false] {
        let mut rig = Rig::fresh(QpConfig::default());
        rig.qp.complete_when_placed();
        rig.start(STREAM);
        let mr = rig.mr(8, Access::LOCAL_WRITE);
        rig.post(1, SendOp::Send, &[mr.sge()]);
        let sent = rig.sent();
        let probe = ReadRequest::parse(&sent[1].1).unwrap();
        let t = Terminate {
            code: Code::DDP_UNTAGGED_NO_BUFFER,
            ddp_segment_len: Some(46),
            ddp_header: Some(sent[1].0),
            read_request: by_sink.then_some(probe),
        };
        receive_terminate(&mut rig, &terminate_octets(&t));
        rig.assert_ended(Blame::PeerTerminated, t.code);
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Flushed)]);
        assert_eq!(rig.host.sends[0].vendor_err, 0);
    }
}

#[test]
fn empty_terminate_flushes_everything() {
    //= rfc5040 section 5.4
    //= type=test
    //# On a single RDMAP Stream, the RDMAP layer MUST guarantee placement of a
    //# single Terminate Message.
    //= rfc5040 section 5.4
    //= type=test
    //# The RDMAP layer MUST Deliver the Terminate Message to the ULP.
    //= rfc5040 section 5.4
    //= type=test
    //# A Terminate Message MUST be Delivered to the Remote Peer's RDMAP layer.
    for octets in [&[0x02, 0x02, 0, 0][..], &[], &[1]] {
        let (mut rig, _) = rig_with_reads();
        receive_terminate(&mut rig, octets);
        assert!(rig.host.sends.iter().all(|c| c.status == WcStatus::Flushed));
        assert_eq!(rig.host.sends.len(), 4);
        assert_eq!(rig.qp.fault().map(|f| f.blame), Some(Blame::PeerTerminated));
    }
}

/// Octets after a Terminate are dropped, whether or not anything arrived before it.
#[test]
fn data_after_terminate_is_dropped() {
    for before in [0, 1] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        let untouched = rig.read(&mr);
        rig.recv(1, &[]);
        rig.recv(2, &[]);
        let mut add = vec![0; AtomicRequest::LEN];
        AtomicRequest {
            op: AtomicOp::FETCH_ADD,
            request_id: 1,
            stag: Stag(mr.stag),
            to: mr.at,
            add_swap: 1,
            add_swap_mask: 0,
            compare: 0,
            compare_mask: 0,
        }
        .emit(&mut add);
        let terminate = terminate_octets(&Terminate::new(Code::RDMAP_ACCESS));
        let ulpdus = [
            send(1, &[]),
            untagged(Opcode::TERMINATE, 2, 1, 0, true, &terminate),
            untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &add),
            tagged(Opcode::WRITE, mr.stag, mr.at, true, &[9; 8]),
            send(2, &[]),
        ];
        let ulpdus = ulpdus.iter().skip(1 - before);
        let octets: Vec<_> = ulpdus.map(|ulpdu| rig.fpdu(ulpdu)).collect();
        assert_eq!(rig.rx(&octets.concat()), RxStatus::Failed);
        rig.assert_ended(Blame::PeerTerminated, Code::RDMAP_ACCESS);
        assert_eq!(rig.read(&mr), untouched);
        let done = rig
            .host
            .recvs
            .iter()
            .take_while(|c| c.status == WcStatus::Success);
        assert_eq!((done.count(), rig.host.recvs.len()), (before, 2));
    }
}

/// A host that injects faults ends the stream as if a local request had failed or the peer had
/// broken a rule. Program and peer are notified as for a real fault.
#[test]
fn injected_faults_act_like_real_ones() {
    type Inject = fn(&mut Rig);
    let cases: [(Inject, Blame, Code, Events); 3] = [
        (
            |rig| rig.qp.give_up(&mut rig.host),
            Blame::Local,
            Code::RDMAP_LOCAL_CATASTROPHIC,
            Events::empty(),
        ),
        (
            |rig| rig.qp.accuse_peer(true, &mut rig.host),
            Blame::Peer,
            Code::RDMAP_ACCESS,
            Events::ACCESS_ERROR | Events::FATAL,
        ),
        (
            |rig| rig.qp.accuse_peer(false, &mut rig.host),
            Blame::Peer,
            Code::RDMAP_UNEXPECTED_OPCODE,
            Events::REQUEST_ERROR | Events::FATAL,
        ),
    ];
    for (inject, blame, code, events) in cases {
        let (mut rig, _) = rig_with_reads();
        inject(&mut rig);
        rig.assert_ended(blame, code);
        assert_eq!(rig.qp.take_events(), events, "{code:?}");
        let flushed = |id| (id, WcStatus::Flushed);
        assert_eq!(brief(&rig.host.sends), [1, 2, 3, 4].map(flushed));
        assert_eq!(brief(&rig.host.recvs), [flushed(9)]);
        assert_eq!(rig.terminate(), Terminate::new(code));
        assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    }
}

#[test]
fn first_fault_is_kept() {
    type End = fn(&mut Rig);
    let ends: [End; 6] = [
        |rig| rig.qp.give_up(&mut rig.host),
        |rig| rig.qp.accuse_peer(true, &mut rig.host),
        |rig| rig.qp.stream_failed(&mut rig.host),
        |rig| {
            let octets = terminate_octets(&Terminate::new(Code::RDMAP_ACCESS));
            let _ = rig.rx_ulpdu(&untagged(Opcode::TERMINATE, 2, 1, 0, true, &octets));
        },
        |rig| {
            let _ = rig.rx_ulpdu(&send(77, &[]));
        },
        |rig| {
            let _ = rig.rx(&[0, 9]);
            rig.eof();
        },
    ];
    for first in ends {
        for second in ends {
            let (mut rig, _) = rig_with_reads();
            first(&mut rig);
            let reason = rig.qp.fault();
            assert!(reason.is_some());
            second(&mut rig);
            assert_eq!(rig.qp.fault(), reason);
        }
    }
}

#[test]
fn wrong_responses_fail_request() {
    //= rfc5041 section 4.2
    //= type=test
    //# At the Data Sink, DDP MUST provide the RsvdULP field to the ULP when the DDP
    //# Message is delivered.
    //= rfc5041 section 4.2
    //= type=test
    //# At the Data Sink, the DDP MUST provide the STag field when the ULP Message
    //# is delivered.
    type Make = fn(u32) -> Vec<u8>;
    let cases: [(Make, Code); 7] = [
        (
            // Some peers answer a zero-length Read like this.
            |_| tagged(Opcode::READ_RESPONSE, 0, 0, true, &[0; 8]),
            Code::DDP_TAGGED_INVALID_STAG,
        ),
        (
            |s| tagged(Opcode::READ_RESPONSE, s ^ 1, 0, true, &[0; 8]),
            Code::DDP_TAGGED_INVALID_STAG,
        ),
        (
            |s| tagged(Opcode::READ_RESPONSE, s, 1, true, &[0; 7]),
            Code::DDP_TAGGED_BASE_BOUNDS,
        ),
        (
            |s| tagged(Opcode::READ_RESPONSE, s, 0, true, &[0; 9]),
            Code::DDP_TAGGED_BASE_BOUNDS,
        ),
        (
            |s| tagged(Opcode::READ_RESPONSE, s, 0, true, &[0; 7]),
            Code::DDP_TAGGED_BASE_BOUNDS,
        ),
        (
            |s| tagged(Opcode::READ_RESPONSE, s, 0, false, &[0; 8]),
            Code::DDP_TAGGED_BASE_BOUNDS,
        ),
        (
            |_| untagged(Opcode::ATOMIC_RESPONSE, 3, 1, 0, true, &[0; 12]),
            Code::RDMAP_UNEXPECTED_OPCODE,
        ),
    ];
    for (make, code) in cases {
        let (mut rig, requests) = rig_with_reads();
        let ulpdu = make(requests[0].sink_stag.0);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, code);
        assert_eq!(rig.host.sends[0].status, WcStatus::BadResponse);
        assert_eq!(rig.host.sends[1].status, WcStatus::Flushed);
        assert_eq!(brief(&rig.host.recvs), [(9, WcStatus::Flushed)]);
        assert_eq!(rig.terminate().code, code);
    }
}

#[test]
fn deregistered_sink_fails_only_read() {
    let mut rig = Rig::new();
    let sink = rig.mr(8, Access::LOCAL_WRITE);
    let buffer = rig.mr(100, Access::LOCAL_WRITE);
    rig.post(1, read_of(&sink), &[sink.sge()]);
    let sent = rig.sent();
    let request = ReadRequest::parse(&sent[0].1).unwrap();
    rig.recv(2, &[buffer.sge()]);
    // A Send is partly received.
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 1, 0, false, &[1; 10]));
    rig.table.deregister(Stag(sink.stag)).unwrap();
    let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[5; 8]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Failed);
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    // The peer has done nothing wrong.
    assert_eq!(rig.qp.take_events(), Events::FATAL);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
    assert_eq!(brief(&rig.host.recvs), [(2, WcStatus::Flushed)]);
    assert_eq!(rig.read(&sink), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn atomic_response_names_request() {
    for (wrong, status) in [(0, WcStatus::Success), (1, WcStatus::BadResponse)] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, Access::LOCAL_WRITE);
        let add = SendOp::FetchAdd {
            remote_addr: 0x1000,
            rkey: 7,
            add: 1,
            mask: 0,
        };
        rig.post(1, add, &[mr.sge()]);
        let request = AtomicRequest::parse(&rig.sent()[0].1).unwrap();
        let mut body = vec![0; AtomicResponse::LEN];
        AtomicResponse {
            request_id: request.request_id ^ wrong,
            original: 0x55,
        }
        .emit(&mut body);
        let _ = rig.rx_ulpdu(&untagged(Opcode::ATOMIC_RESPONSE, 3, 1, 0, true, &body));
        assert_eq!(brief(&rig.host.sends), [(1, status)]);
        if wrong != 0 {
            rig.assert_ended(Blame::Peer, Code::RDMAP_UNEXPECTED_OPCODE);
            assert_ne!(rig.read(&mr), 0x55u64.to_ne_bytes());
        }
    }
}

#[test]
fn read_into_readonly_memory_fails() {
    for parts in [1, 2] {
        let mut rig = Rig::new();
        let bad = rig.mr(8, Access::empty());
        let good = rig.mr(8, Access::LOCAL_WRITE);
        let sinks = [good.sge(), bad.sge()];
        rig.post(1, read_of(&good), &sinks[2 - parts..]);
        let sent = rig.sent();
        let opcodes: Vec<_> = sent.iter().map(|(h, _)| h.opcode()).collect();
        assert_eq!(opcodes, [Opcode::TERMINATE]);
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
        rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    }
}

#[test]
fn sink_stags_avoid_reserved_values() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, Access::LOCAL_WRITE);
    rig.qp.tx.next_sink = u32::MAX;
    for id in 0..2 {
        rig.post(id, read_of(&mr), &[mr.sge()]);
    }
    let sent = rig.sent();
    let requests = sent.iter().filter_map(|(_, p)| ReadRequest::parse(p));
    let sinks: Vec<_> = requests.map(|r| r.sink_stag).collect();
    // Zero and one are not used: they mean "no STag" and "empty message" in requests.
    assert_eq!(sinks, [Stag(u32::MAX), Stag(2)]);
}
