//! Registered memory that is unmapped while it is in use: the access fails, and the stream ends
//! with the reason.
#![allow(unsafe_code)]

use super::harness::*;
use crate::limits::SUM_COPY_MIN;
use crate::memory::{Crc32c, unmapped};
use crate::qp::*;
use crate::{SendOp, WcStatus};
use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

/// Like [`SharedCrc32cFn`](crate::memory::SharedCrc32cFn), for memory that may be unmapped.
///
/// # Safety
/// Like [`SharedCrc32cFn`](crate::memory::SharedCrc32cFn).
unsafe fn sum_in_place(crc: u32, from: *const u8, len: usize) -> Option<u32> {
    // SAFETY: the caller guarantees that the bytes are readable, and a test runs on one thread.
    let octets = unsafe { core::slice::from_raw_parts(from, len) };
    (unmapped::before(from, len) == len).then(|| crc32c::append(crc, octets))
}

/// Like [`CopyingCrc32cFn`](crate::memory::CopyingCrc32cFn), for memory that may be unmapped.
///
/// # Safety
/// Like [`CopyingCrc32cFn`](crate::memory::CopyingCrc32cFn).
unsafe fn sum_and_copy(crc: u32, from: *const u8, to: *mut u8, len: usize) -> Option<u32> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        to.copy_from_nonoverlapping(from, unmapped::before(from, len));
        sum_in_place(crc, from, len)
    }
}

/// Returns all ways to compute CRCs of registered memory.
fn crcs() -> [Crc32c; 3] {
    let copied = Crc32c::new(crc32c::append);
    // SAFETY: the functions read and write only the given bytes.
    unsafe {
        [
            copied,
            copied.with_shared(sum_in_place),
            copied.with_shared(sum_in_place).with_copying(sum_and_copy),
        ]
    }
}

fn fill(rig: &mut Rig, crc32c: Crc32c) -> TxFill {
    let mut env = Env {
        memory: &rig.table,
        crc32c,
        host: &mut rig.host,
    };
    rig.qp.tx_fill(&mut rig.plan, &mut env)
}

/// Fills and writes plans until one contains the Terminate.
fn fill_until_failed(rig: &mut Rig, crc: Crc32c) {
    loop {
        assert_eq!(fill(rig, crc), TxFill::Ready);
        if rig.plan.has_terminate() {
            return;
        }
        rig.write_plan();
    }
}

/// Returns a rig whose stream has these properties.
fn rig(crc: bool, markers: bool, snapshot: bool, emss: u32) -> Rig {
    let config = QpConfig {
        snapshot,
        ..QpConfig::default()
    };
    let stream = StreamConfig {
        crc,
        markers_tx: markers,
        markers_rx: markers,
        emss,
        ..STREAM
    };
    Rig::with(config, stream)
}

/// The last octet of the source is unmapped. Earlier messages are sent completely, and the
/// Terminate is the last message.
#[test]
fn unreadable_source_fails_request() {
    let long = 4 * SUM_COPY_MIN;
    let write = SendOp::Write {
        remote_addr: 0,
        rkey: 7,
    };
    for (markers, snapshot, emss) in [
        (false, false, 1460),
        (false, true, 1460),
        (false, false, 65_000),
        (false, true, 65_000),
        (true, false, 1460),
    ] {
        for (crc, op) in crcs()
            .into_iter()
            .flat_map(|crc| [(crc, write), (crc, SendOp::Send)])
        {
            for len in [1, 8, 1000, long] {
                for parts in [1, 2] {
                    let mut rig = rig(true, markers, snapshot, emss);
                    let mr = rig.mr(len, ALL);
                    let scattered = [mr.part(0, len / 2), mr.part(len / 2, len - len / 2)];
                    let sges = match parts {
                        1 => &[mr.sge()][..],
                        _ => &scattered,
                    };
                    unmapped::unmap(mr.at + u64::from(len) - 1, 1);
                    rig.post(5, op, sges);
                    fill_until_failed(&mut rig, crc);
                    unmapped::unmap(0, 0);
                    assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
                    assert_eq!(brief(&rig.host.sends), [(5, WcStatus::LocalProtection)]);
                    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
                }
            }
        }
    }
}

/// The source of a Read is unmapped between request and response.
#[test]
fn unreadable_response_is_refused() {
    for (crc, len) in crcs()
        .into_iter()
        .flat_map(|crc| [(crc, 8), (crc, 5000), (crc, 100_000)])
    {
        let mut rig = rig(true, false, false, 65_000);
        let mr = rig.mr(len, ALL);
        let body = read_request(9, len, mr.stag, mr.at);
        let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        unmapped::unmap(mr.at + u64::from(len) - 1, 1);
        fill_until_failed(&mut rig, crc);
        unmapped::unmap(0, 0);
        let terminate = rig.terminate();
        assert_eq!(terminate.code, Code::RDMAP_BASE_BOUNDS);
        assert_eq!(terminate.read_request.unwrap().sink_stag, Stag(9));
        rig.assert_ended(Blame::Peer, Code::RDMAP_BASE_BOUNDS);
    }
}

/// A Write into memory of which one octet is unmapped: the first, one in the middle, or the last.
/// The last octet is stored separately, unless the payload has eight octets, which are stored
/// together.
#[test]
fn unwritable_target_refuses_write() {
    for len in [1, 2, 8, 9, 100] {
        for at in [0, len / 2, len - 1] {
            let mut rig = Rig::new();
            let mr = rig.mr(len, ALL);
            unmapped::unmap(mr.at + u64::from(at), 1);
            let payload = vec![0xee; len as usize];
            let ulpdu = tagged(Opcode::WRITE, mr.stag, mr.at, true, &payload);
            assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
            unmapped::unmap(0, 0);
            let terminate = rig.terminate();
            assert_eq!(
                terminate.code,
                Code::DDP_TAGGED_BASE_BOUNDS,
                "{at} of {len}"
            );
            rig.assert_ended(Blame::Peer, Code::DDP_TAGGED_BASE_BOUNDS);
            assert!(
                rig.read(&mr)[at as usize..]
                    .iter()
                    .all(|octet| *octet != 0xee)
            );
        }
    }
}

#[test]
fn unwritable_receive_fails() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    rig.recv(3, &[mr.part(0, 32), mr.part(32, 32)]);
    rig.recv(4, &[mr.sge()]);
    unmapped::unmap(mr.at + 40, 1);
    assert_eq!(rig.rx_ulpdu(&send(1, &[7; 50])), RxStatus::Failed);
    unmapped::unmap(0, 0);
    assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
    let statuses = [(3, WcStatus::LocalProtection), (4, WcStatus::Flushed)];
    assert_eq!(brief(&rig.host.recvs), statuses);
}

#[test]
fn unwritable_sinks_fail_their_requests() {
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    let add = SendOp::FetchAdd {
        remote_addr: 0,
        rkey: 7,
        add: 1,
        mask: 0,
    };
    for op in [read, add] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.post(3, op, &[mr.sge()]);
        let sent = rig.sent();
        let answer = match op {
            SendOp::Read { .. } => {
                let request = iwarp_proto::rdmap::ReadRequest::parse(&sent[0].1).unwrap();
                tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[1; 8])
            }
            _ => {
                let request = AtomicRequest::parse(&sent[0].1).unwrap();
                let mut body = vec![0; AtomicResponse::LEN];
                let (request_id, original) = (request.request_id, 5);
                AtomicResponse {
                    request_id,
                    original,
                }
                .emit(&mut body);
                untagged(Opcode::ATOMIC_RESPONSE, 3, 1, 0, true, &body)
            }
        };
        unmapped::unmap(mr.at + 7, 1);
        assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Failed);
        unmapped::unmap(0, 0);
        assert_eq!(brief(&rig.host.sends), [(3, WcStatus::LocalProtection)]);
        assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
    }
}

#[test]
fn unreadable_word_refuses_atomic() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let mut body = vec![0; AtomicRequest::LEN];
    AtomicRequest {
        op: AtomicOp::FETCH_ADD,
        request_id: 1,
        stag: Stag(mr.stag),
        to: mr.at + 8,
        add_swap: 1,
        add_swap_mask: 0,
        compare: 0,
        compare_mask: 0,
    }
    .emit(&mut body);
    unmapped::unmap(mr.at + 15, 1);
    let ulpdu = untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
    unmapped::unmap(0, 0);
    assert_eq!(rig.terminate().code, Code::RDMAP_BASE_BOUNDS);
    assert_eq!(rig.read(&mr)[8], 8);
}

/// Returns a rig whose driver has written `written` octets of a plan, but could not read the memory
/// for the rest. The plan consists of a large message between small ones, or of two large
/// responses (`is_responses`).
fn unreadable_plan(is_responses: bool, written: usize) -> (Rig, Vec<u8>) {
    let mut rig = rig(false, false, false, 65_000);
    let mr = rig.mr(50_000, ALL);
    if is_responses {
        for (msn, sink) in [(1, 8), (2, 9)] {
            let body = read_request(sink, 50_000, mr.stag, mr.at);
            let request = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
            assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        }
    } else {
        let to = SendOp::Write {
            remote_addr: 0,
            rkey: 7,
        };
        rig.post(1, to, &[mr.part(0, 10)]);
        rig.post(2, to, &[mr.sge()]);
        rig.post(3, to, &[mr.part(0, 10)]);
    }
    assert_eq!(rig.fill(), TxFill::Ready);
    let octets = rig.write_some(written);
    rig.qp.tx_unreadable(&mut rig.plan, &mut rig.host);
    assert!(rig.plan.is_empty());
    (rig, octets)
}

/// If only complete messages were written, the request that owns the memory fails, and the peer
/// gets a Terminate.
#[test]
fn unreadable_plan_fails_its_owner() {
    let first_fpdu_len = 2 + 14 + 10 + 4 + 2;
    for written in [0, first_fpdu_len] {
        let (mut rig, _) = unreadable_plan(false, written);
        assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
        let first = match written {
            0 => WcStatus::Flushed,
            _ => WcStatus::Success,
        };
        let rest = [(2, WcStatus::LocalProtection), (3, WcStatus::Flushed)];
        assert_eq!(brief(&rig.host.sends), [&[(1, first)][..], &rest].concat());
    }
    let first_fpdu_len = 2 + 14 + 50_000 + 4;
    for (written, msn) in [(0, 1), (first_fpdu_len, 2)] {
        let (mut rig, _) = unreadable_plan(true, written);
        let terminate = rig.terminate();
        assert_eq!(terminate.code, Code::RDMAP_BASE_BOUNDS);
        let Some(Header::Untagged(header)) = terminate.ddp_header else {
            panic!("no header");
        };
        assert_eq!((header.qn, header.msn), (1, msn), "{written}");
    }
}

/// The plan contains only the beginning of a message, whose memory is unmapped.
#[test]
fn unreadable_beginning_fails_its_message() {
    for is_responses in [false, true] {
        let mut rig = rig(false, false, false, 32_768);
        let mr = rig.mr(65_536, ALL);
        if is_responses {
            let body = read_request(9, 65_536, mr.stag, mr.at);
            let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
            assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        } else {
            rig.post(1, SendOp::Send, &[mr.sge()]);
        }
        unmapped::unmap(mr.at, 65_536);
        assert_eq!(rig.fill(), TxFill::Ready);
        unmapped::unmap(0, 0);
        assert!(!rig.plan.has_terminate() && rig.plan.len() > 60_000);
        rig.qp.tx_unreadable(&mut rig.plan, &mut rig.host);
        let code = match is_responses {
            true => Code::RDMAP_BASE_BOUNDS,
            false => Code::RDMAP_LOCAL_CATASTROPHIC,
        };
        let sent = rig.sent();
        assert_eq!(sent.len(), 1);
        let terminate = iwarp_proto::rdmap::Terminate::parse(&sent[0].1).unwrap().0;
        assert_eq!(terminate.code, code);
        let failed = (!is_responses).then_some((1, WcStatus::LocalProtection));
        assert!(brief(&rig.host.sends).into_iter().eq(failed));
    }
}

/// Inside an FPDU no Terminate can be sent, so the stream is to be reset.
#[test]
fn unreadable_plan_cuts_stream() {
    for is_responses in [false, true] {
        let (mut rig, _) = unreadable_plan(is_responses, 1000);
        assert!(rig.octets_out().is_empty());
        assert_eq!(rig.qp.state(), State::Error);
        let wish = rig.qp.stream_wish();
        assert!(matches!(wish, StreamWish::Leave { cut: true, .. }));
    }
}
