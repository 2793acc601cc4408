//! What is refused, with the right Terminate: RFC 5040 §4.8 and §7.2, RFC 5041 §7, RFC 5044 §8, RFC 7306 §8.2.

use super::harness::*;
use crate::memory::{Accessor, WindowType};
use crate::qp::*;
use crate::{Access, Bind, WcStatus};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

/// A ULPDU that must end the stream with this code.
#[track_caller]
fn refused(rig: &mut Rig, ulpdu: &[u8], code: Code) {
    assert_eq!(rig.rx_ulpdu(ulpdu), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, code);
    let terminate = rig.terminate();
    assert_eq!(terminate.code, code);
    //= rfc5040 section 7.1
    //= type=test
    //# the first RDMA
    //# Message (and its associated DDP Segment) that experienced an
    //# error MUST be captured by the Terminate Message
    if code.wants_ddp_header() {
        assert_eq!(terminate.ddp_header, Header::decode(ulpdu));
        assert_eq!(terminate.ddp_segment_len, Some(ulpdu.len() as u16));
    }
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    assert!(rig.qp.take_events().contains(Events::FATAL));
}

#[test]
fn segments_that_are_wrong_by_themselves() {
    use Opcode as O;
    let bad_version = |mut u: Vec<u8>, at: usize, mask: u8| {
        u[at] ^= mask;
        u
    };
    let write = || tagged(O::WRITE, 1, 0, true, &[]);
    let cases: Vec<(Vec<u8>, Code)> = vec![
        (bad_version(write(), 0, 3), Code::DDP_TAGGED_INVALID_VERSION),
        (
            bad_version(send(1, &[]), 0, 3),
            Code::DDP_UNTAGGED_INVALID_VERSION,
        ),
        (
            bad_version(send(1, &[]), 1, 0xc0),
            Code::RDMAP_INVALID_VERSION,
        ),
        (
            untagged(Opcode(12), 0, 1, 0, true, &[]),
            Code::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            untagged(O::SEND, 4, 1, 0, true, &[]),
            Code::DDP_UNTAGGED_INVALID_QN,
        ),
        (
            untagged(O::SEND, 1, 1, 0, true, &[]),
            Code::RDMAP_UNEXPECTED_OPCODE,
        ),
        (send(2, &[]), Code::DDP_UNTAGGED_INVALID_MSN),
        (send(0, &[]), Code::DDP_UNTAGGED_INVALID_MSN),
        (
            untagged(O::SEND, 0, 1, 4, true, &[]),
            Code::DDP_UNTAGGED_INVALID_MO,
        ),
        (
            untagged(O::READ_REQUEST, 1, 2, 0, true, &[0; 28]),
            Code::DDP_UNTAGGED_INVALID_MSN,
        ),
        (
            untagged(O::READ_REQUEST, 1, 1, 1, true, &[0; 28]),
            Code::DDP_UNTAGGED_INVALID_MO,
        ),
        (
            untagged(O::READ_REQUEST, 1, 1, 0, true, &[0; 27]),
            Code::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            untagged(O::READ_REQUEST, 1, 1, 0, false, &[0; 28]),
            Code::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            untagged(O::IMMEDIATE, 0, 1, 0, true, &[0; 7]),
            Code::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            untagged(O::ATOMIC_REQUEST, 1, 1, 0, true, &[0; 51]),
            Code::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            untagged(O::ATOMIC_RESPONSE, 3, 1, 0, true, &[0; 12]),
            Code::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            tagged(O::READ_RESPONSE, 1, 0, true, &[]),
            Code::RDMAP_UNEXPECTED_OPCODE,
        ),
        (send(1, &[0; 9]), Code::DDP_UNTAGGED_TOO_LONG),
    ];
    for (ulpdu, code) in cases {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.recv(1, &[mr.sge()]);
        refused(&mut rig, &ulpdu, code);
        let status = if code == Code::DDP_UNTAGGED_TOO_LONG {
            WcStatus::LocalLength
        } else {
            WcStatus::Flushed
        };
        assert_eq!(brief(&rig.host.recvs), [(1, status)], "{code:?}");
        assert_eq!(rig.read(&mr), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn a_ulpdu_without_a_header() {
    let mut rig = Rig::new();
    refused(&mut rig, &[0x41], Code::MPA_MARKER);
}

#[test]
fn wrong_crc() {
    for at in 0..30 {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.recv(1, &[mr.sge()]);
        let mut fpdu = rig.fpdu(&send(1, b"12345678"));
        // Not the length: a longer FPDU is waited for.
        let at = at % (fpdu.len() - 2) + 2;
        fpdu[at] ^= 1;
        assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, Code::MPA_CRC);
        assert_eq!(rig.qp.counters().crc_errors, 1);
        assert_eq!(rig.terminate().code, Code::MPA_CRC);
        assert_eq!(rig.read(&mr), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn wrong_marker() {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            markers_rx: true,
            // The CRC covers markers; without it they are looked at alone.
            crc: false,
            ..STREAM
        },
    );
    rig.options.markers = true;
    let mut fpdu = rig.fpdu(&send(1, &[]));
    fpdu[3] = 8;
    assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::MPA_MARKER);
    assert_eq!(rig.qp.counters().marker_errors, 1);
}

/// The ways in which an access can be wrong, with the codes for a Write and for the others.
fn accesses(rig: &mut Rig, need: Access) -> Vec<(u32, u64, Code, Code)> {
    let good = rig.mr(64, ALL);
    let no_right = rig.mr(64, ALL.difference(need | Access::MW_BIND));
    let other_pd = rig.mr_in(PD + 1, 64, ALL);
    let random = rig.random();
    let window = rig
        .table
        .allocate_window(WindowType::Type2, PD, random)
        .unwrap();
    let bind = Bind {
        mw_stag: window,
        new_stag: window,
        mr_stag: good.stag,
        addr: good.at,
        len: 64,
        access: need,
    };
    let other = Accessor { pd: PD, qp: 77 };
    rig.table.bind(&bind, other).unwrap();
    vec![
        (
            good.stag ^ 0x100,
            good.at,
            Code::DDP_TAGGED_INVALID_STAG,
            Code::RDMAP_INVALID_STAG,
        ),
        (
            good.stag ^ 1,
            good.at,
            Code::DDP_TAGGED_INVALID_STAG,
            Code::RDMAP_INVALID_STAG,
        ),
        (
            good.stag,
            good.at + 57,
            Code::DDP_TAGGED_BASE_BOUNDS,
            Code::RDMAP_BASE_BOUNDS,
        ),
        (
            good.stag,
            good.at - 1,
            Code::DDP_TAGGED_BASE_BOUNDS,
            Code::RDMAP_BASE_BOUNDS,
        ),
        (
            good.stag,
            u64::MAX - 3,
            Code::DDP_TAGGED_TO_WRAP,
            Code::RDMAP_TO_WRAP,
        ),
        (
            no_right.stag,
            no_right.at,
            Code::RDMAP_ACCESS,
            Code::RDMAP_ACCESS,
        ),
        (
            other_pd.stag,
            other_pd.at,
            Code::DDP_TAGGED_NOT_ASSOCIATED,
            Code::RDMAP_STAG_NOT_ASSOCIATED,
        ),
        (
            window,
            good.at,
            Code::DDP_TAGGED_NOT_ASSOCIATED,
            Code::RDMAP_STAG_NOT_ASSOCIATED,
        ),
    ]
}

#[test]
fn writes_to_where_they_may_not() {
    for case in 0..8 {
        let mut rig = Rig::new();
        let (stag, to, code, _) = accesses(&mut rig, Access::REMOTE_WRITE)[case];
        refused(
            &mut rig,
            &tagged(Opcode::WRITE, stag, to, true, &[9; 8]),
            code,
        );
    }
}

#[test]
fn reads_from_where_they_may_not() {
    for case in 0..8 {
        let mut rig = Rig::new();
        let (stag, to, _, code) = accesses(&mut rig, Access::REMOTE_READ)[case];
        let body = read_request(5, 8, stag, to);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, code);
        let t = rig.terminate();
        // The Read Request comes along.
        assert_eq!(t.read_request.map(|r| r.source_to), Some(to));
        assert!(rig.qp.take_events().contains(Events::ACCESS_ERROR));
    }
}

#[test]
fn atomics_on_what_they_may_not() {
    let body = |stag, to, op| {
        let mut body = vec![0; AtomicRequest::LEN];
        AtomicRequest {
            op,
            request_id: 1,
            stag: Stag(stag),
            to,
            add_swap: 1,
            add_swap_mask: 0,
            compare: 0,
            compare_mask: 0,
        }
        .emit(&mut body);
        untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &body)
    };
    for case in 0..8 {
        let mut rig = Rig::new();
        let (stag, to, _, code) = accesses(&mut rig, Access::REMOTE_ATOMIC)[case];
        refused(&mut rig, &body(stag, to, AtomicOp::FETCH_ADD), code);
    }
    //= rfc7306 section 8.2
    //= type=test
    //# The RDMAP layer MUST validate that the Remote Peer's Tagged ULP
    //# Buffer address references a ULP Buffer address that is 64-bit
    //# aligned.
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    refused(
        &mut rig,
        &body(mr.stag, mr.at + 4, AtomicOp::FETCH_ADD),
        Code::RDMAP_CATASTROPHIC_STREAM,
    );
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    refused(
        &mut rig,
        &body(mr.stag, mr.at, AtomicOp(7)),
        Code::RDMAP_UNEXPECTED_OPCODE,
    );
}

#[test]
fn invalidations_that_may_not_be() {
    for case in 0..4 {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let random = rig.random();
        let unbound = rig
            .table
            .allocate_window(WindowType::Type2, PD, random)
            .unwrap();
        let stag = [mr.stag, mr.stag ^ 1, unbound, 0x55_0000][case];
        rig.recv(4, &[mr.sge()]);
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::SEND_INV,
            invalidate_stag: Stag(stag),
            qn: 0,
            msn: 1,
            mo: 0,
        });
        refused(
            &mut rig,
            &with_payload(&header, &[1]),
            Code::RDMAP_CANNOT_INVALIDATE,
        );
        assert_eq!(brief(&rig.host.recvs), [(4, WcStatus::LocalAccess)]);
    }
}

#[test]
fn more_reads_than_granted() {
    //= rfc5040 section 6.1
    //= type=test
    //# For inbound RDMA Read Requests, the RDMAP layer MUST NOT exceed
    //# the maximum number of outstanding, inbound RDMA Read Requests that
    //# were negotiated between the ULP and the Local Peer's RDMAP layer.
    for ird in [0, 1, 4] {
        let mut rig = Rig::with(QpConfig::default(), StreamConfig { ird, ..STREAM });
        let mr = rig.mr(64, ALL);
        let request = |msn| {
            let body = read_request(5, 8, mr.stag, mr.at);
            untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body)
        };
        for msn in 1..=u32::from(ird) {
            assert_eq!(rig.rx_ulpdu(&request(msn)), RxStatus::Ok);
        }
        let one_more = request(u32::from(ird) + 1);
        refused(&mut rig, &one_more, Code::DDP_UNTAGGED_NO_BUFFER);
    }
}

#[test]
fn the_first_segments_of_a_refused_write_stay_inside() {
    let mut rig = Rig::new();
    let mr = rig.mr(16, ALL);
    assert_eq!(
        rig.rx_ulpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, false, &[9; 8])),
        RxStatus::Ok
    );
    refused(
        &mut rig,
        &tagged(Opcode::WRITE, mr.stag, mr.at + 8, true, &[9; 9]),
        Code::DDP_TAGGED_BASE_BOUNDS,
    );
    assert_eq!(
        rig.read(&mr),
        [9, 9, 9, 9, 9, 9, 9, 9, 8, 9, 10, 11, 12, 13, 14, 15]
    );
}
