//! Refused segments and their Terminates: RFC 5040 §4.8 and §7.2, RFC 5041 §7, RFC 5044 §8, RFC
//! 7306 §8.2.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, ReadRequest, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

/// Checks that a ULPDU ends the stream with this code.
#[track_caller]
pub(super) fn assert_refused(rig: &mut Rig, ulpdu: &[u8], code: Code) {
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

fn invalid_segments() -> Vec<(Vec<u8>, Code)> {
    use Opcode as O;
    let bad_version = |mut u: Vec<u8>, at: usize, mask: u8| {
        u[at] ^= mask;
        u
    };
    let write = || tagged(O::WRITE, 1, 0, true, &[]);
    vec![
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
    ]
}

#[test]
fn invalid_segments_are_refused() {
    //= rfc5040 section 7.1
    //= type=test
    //# If an error occurs at the Local Peer, the RDMAP layer MUST attempt to inform
    //# the local ULP that the error has occurred.
    //= rfc5041 section 6.2.2
    //= type=test
    //# Thus, any of the following fatal errors on a DDP Stream MUST cause DDP to
    //# indicate to the ULP that a fatal error has occurred:
    //= rfc7306 section 8.2
    //= type=test
    //# On incoming Atomic Requests, Atomic Responses, Immediate Data, and Immediate
    //# Data with Solicited Event, the following MUST be validated:
    //= rfc7306 section 8.2
    //= type=test
    //# o The DDP layer MUST validate all DDP Segment fields.
    //= rfc5040 section 4.2
    //= type=test
    //# The following figure defines which RDMA Headers MUST be used on each RDMA
    //# Message and which RDMA Messages are allowed to carry ULP Payload:
    //= rfc5041 section 7.1
    //= type=test
    //# Since each of these errors represents a failure of the sending ULP or
    //# protocol, DDP SHOULD enable the ULP to send one additional DDP Message
    //# before terminating the DDP Stream.
    //= rfc5041 section 7.1
    //= type=test
    //# For non-zero-length Untagged DDP Segments, the DDP Segment MUST be
    //# validated before Placement by verifying:
    //= rfc5041 section 5.3
    //= type=test
    //# MUST Deliver DDP Messages to the ULP in the order they were sent by the
    //# Data Source.
    //= rfc5041 section 5.3
    //= type=test
    //# MUST Deliver a DDP Message to the ULP at most once,
    //= rfc5040 section 7.2
    //= type=test
    //# The DDP layer MUST validate all Untagged DDP Segment fields.
    for (ulpdu, code) in invalid_segments() {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.recv(1, &[mr.sge()]);
        assert_refused(&mut rig, &ulpdu, code);
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
fn ulpdu_without_header_is_refused() {
    let mut rig = Rig::new();
    assert_refused(&mut rig, &[0x41], Code::MPA_MARKER);
}

#[test]
fn crc_error_ends_stream() {
    //= rfc5044 section 6
    //= type=test
    //# An MPA receiver MUST first verify the FPDU before passing the ULPDU to DDP.
    //= rfc5044 section 8
    //= type=test
    //# For Error codes 2 and 3, MPA MUST NOT close the TCP connection following
    //# a reported error.
    //= rfc5044 section 8
    //= type=test
    //# Once MPA delivers an error of any type, it MUST NOT pass or deliver any
    //# additional FPDUs on that half connection.
    //= rfc5040 section 6.2.1
    //= type=test
    //# Thus, the state of all outstanding RDMA Messages is indeterminate, and
    //# the Messages SHOULD be considered Completed in error.
    //= rfc5040 section 6.2.1
    //= type=test
    //# RDMAP defines a Terminate operation that SHOULD be invoked when either
    //# an RDMAP error is encountered or an LLP error is surfaced to the RDMAP
    //# layer by the LLP.
    //= rfc5040 section 5.4
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
    //# set the Queue Number field to two.
    //= rfc5040 section 5.4
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
    //# mark the Message as Untagged.
    //= rfc5040 section 5.4
    //= type=test
    //# A Terminate Message MUST reference an Untagged Buffer.
    for at in 0..30 {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.recv(1, &[mr.sge()]);
        let mut fpdu = rig.fpdu(&send(1, b"12345678"));
        // Do not change the length field: the receiver would wait for a longer FPDU.
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
fn marker_error_ends_stream() {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            markers_rx: true,
            // The CRC covers markers; without it the markers themselves are checked.
            crc: false,
            ..STREAM
        },
    );
    rig.options.markers = true;
    let mut fpdu = rig.fpdu(&send(1, &[]));
    fpdu[3] = 8;
    assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::MPA_MARKER);
    let counters = rig.qp.counters();
    assert_eq!((counters.marker_errors, counters.crc_errors), (1, 0));
    // With CRCs the same octet is a CRC error.
    let crc_and_markers = StreamConfig {
        markers_tx: true,
        markers_rx: true,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), crc_and_markers);
    let mut fpdu = rig.fpdu(&send(1, &[]));
    fpdu[3] = 8;
    assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::MPA_CRC);
    let counters = rig.qp.counters();
    assert_eq!((counters.marker_errors, counters.crc_errors), (0, 1));
}

#[test]
fn reads_beyond_ird_are_refused() {
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC implementation SHOULD provide a mechanism to cap the number of
    //# outstanding RDMA Read Requests.
    //= rfc5040 section 6.1
    //= type=test
    //# The RDMAP layer MUST provide the maximum number of outstanding, inbound
    //# RDMA Read Requests per RDMAP Stream direction that were negotiated
    //# between the ULP and the Local Peer's RDMAP layer.
    //= rfc5040 section 5.2.2
    //= type=test
    //# The Data Source MUST ensure that a sufficient number of Untagged Buffers
    //# are available on the RDMA Read Request Queue (Queue with DDP Queue
    //# Number 1) to support the maximum number of RDMA Read Requests negotiated
    //# by the ULP.
    //= rfc5040 section 5.2.1
    //= type=test
    //# One RDMA Read Request Message MUST consume one Untagged Buffer.
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
        assert_refused(&mut rig, &one_more, Code::DDP_UNTAGGED_NO_BUFFER);
    }
    // A queue pair serves no more than it was created for, whatever start-up agreed on.
    let config = QpConfig {
        max_ird: 2,
        ..QpConfig::default()
    };
    for size in [8, 0] {
        let mut rig = Rig::with(config, StreamConfig { ird: 9, ..STREAM });
        let mr = rig.mr(64, ALL);
        let body = read_request(5, size, mr.stag, mr.at);
        let request = |msn| untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        for msn in 1..=2 {
            assert_eq!(rig.rx_ulpdu(&request(msn)), RxStatus::Ok);
        }
        assert_refused(&mut rig, &request(3), Code::DDP_UNTAGGED_NO_BUFFER);
    }
}

/// The octets after a ULPDU that is shorter than a header (pad or CRC) may look like the rest of
/// the header. A receiver that parsed them as a header would loop.
#[test]
fn short_ulpdu_is_refused() {
    for valid in [tagged(Opcode::WRITE, 1, 0, true, &[]), send(1, &[])] {
        for len in 0u8..2 {
            for first in [false, true] {
                let mut rig = Rig::new();
                if !first {
                    // The first FPDU of a stream takes another code path.
                    let mr = rig.mr(8, Access::LOCAL_WRITE);
                    rig.recv(1, &[mr.sge()]);
                    assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
                }
                let octets = [&[0, len], &valid[..8]].concat();
                assert_eq!(rig.rx(&octets), RxStatus::Failed);
                assert!(rig.qp.fault().is_some());
            }
        }
    }
}

/// The segments of a response are in order, and end at the requested length.
#[test]
fn misplaced_response_is_refused() {
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    // The number of octets received in order, then offset, length and L bit of the next segment.
    for (first, to, len, last) in [
        (0, 4, 4, false),
        (0, 4, 8, true),
        (0, u64::MAX, 8, true),
        (4, 0, 4, true),
        (4, 8, 4, true),
        (4, 4, 4, false),
        (4, 4, 5, true),
        (0, 0, 4, true),
    ] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, Access::LOCAL_WRITE);
        let before = rig.read(&mr);
        rig.post(1, read, &[mr.sge()]);
        let request = rig.sent();
        let sink = ReadRequest::parse(&request[0].1).unwrap().sink_stag.0;
        let answer = |to, len, last| tagged(Opcode::READ_RESPONSE, sink, to, last, &vec![9; len]);
        if first > 0 {
            assert_eq!(rig.rx_ulpdu(&answer(0, first, false)), RxStatus::Ok);
        }
        assert_refused(
            &mut rig,
            &answer(to, len, last),
            Code::DDP_TAGGED_BASE_BOUNDS,
        );
        assert_eq!(rig.read(&mr)[first..], before[first..], "{to} {len}");
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::BadResponse)]);
    }
}
