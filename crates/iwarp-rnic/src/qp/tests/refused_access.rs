//! Refused memory accesses (RFC 5040 §7.2, RFC 5041 §7.1, RFC 7306 §8.2), and who may invalidate
//! what.

use super::harness::*;
use super::refused::assert_refused;
use crate::memory::{Accessor, WindowType};
use crate::qp::*;
use crate::{Access, Bind, WcStatus};
use iwarp_proto::ddp::Stag;
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

/// Returns invalid accesses, each with the code for a Write and the code for other operations.
fn invalid_accesses(rig: &mut Rig, need: Access) -> Vec<(u32, u64, Code, Code)> {
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
        mr_stag: Stag(good.stag),
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
            window.0,
            good.at,
            Code::DDP_TAGGED_NOT_ASSOCIATED,
            Code::RDMAP_STAG_NOT_ASSOCIATED,
        ),
    ]
}

#[test]
fn invalid_write_is_refused() {
    //= rfc5041 section 8.2
    //= type=test
    //# DDP MUST support Protection Domain association and DDP Stream
    //# association mechanisms for associating an STag and a DDP Stream.
    //= rfc5041 section 8.2
    //= type=test
    //# In this case, for an incoming DDP Segment of a Tagged DDP Message on a
    //# DDP Stream, if the DDP Stream ID of the DDP Stream is not the same as
    //# the DDP Stream ID of the STag targeted by the Tagged DDP Message, then
    //# the DDP Segment is not Placed and the DDP layer MUST surface a local
    //# error to the ULP.
    //= rfc5041 section 8.2
    //= type=test
    //# For an incoming DDP Segment of a Tagged DDP Message on a DDP Stream, if
    //# the PD ID of the DDP Stream is not the same as the PD ID of the STag
    //# targeted by the Tagged DDP Message, then the DDP Segment is not Placed,
    //# and the DDP layer MUST surface a local error to the ULP.
    //= rfc5041 section 7.1
    //= type=test
    //# The DDP layer SHOULD include in the error report the DDP Header, the
    //# type of error, and the length of the DDP segment, if available.
    //= rfc5041 section 7.1
    //= type=test
    //# For non-zero-length Tagged DDP Segments, the segment MUST be validated
    //# before Placement by verifying:
    //= rfc5041 section 4.2
    //= type=test
    //# The STag MUST be valid for this DDP Stream.
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST ensure that if an STag is limited in scope to a single DDP
    //# Stream, no other DDP Stream can use the STag.
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST ensure that a specific DDP Stream in a specific Protection
    //# Domain cannot access an STag in a different Protection Domain.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST ensure that if an STag is limited in scope to a single
    //# Stream, no other Stream can use the STag.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST ensure that a specific Stream in a specific Protection
    //# Domain cannot access an STag in a different Protection Domain.
    //= rfc5040 section 7.2
    //= type=test
    //# The STag MUST be associated to this RDMAP Stream.
    //= rfc5040 section 7.2
    //= type=test
    //# The DDP layer MUST validate all DDP Segment fields.
    for case in 0..8 {
        let mut rig = Rig::new();
        let (stag, to, code, _) = invalid_accesses(&mut rig, Access::REMOTE_WRITE)[case];
        assert_refused(
            &mut rig,
            &tagged(Opcode::WRITE, stag, to, true, &[9; 8]),
            code,
        );
    }
}

#[test]
fn invalid_read_is_refused() {
    //= rfc5041 section 8.3
    //= type=test
    //# If an STag is not valid on a DDP Stream, DDP MUST pass the invalid
    //# access attempt to the ULP.
    //= rfc5040 section 7.2
    //= type=test
    //# The sum of the Data Source Tagged Offset and the RDMA Read Message Size
    //# MUST NOT cause the Data Source Tagged Offset to wrap.
    //= rfc5040 section 7.2
    //= type=test
    //# The sum of the Data Source Tagged Offset and the RDMA Read Message Size
    //# MUST fall in the range of legal offsets associated with the Data Source
    //# STag.
    //= rfc5040 section 7.2
    //= type=test
    //# The Data Source Tagged Offset MUST fall in the range of legal offsets
    //# associated with the Data Source STag.
    //= rfc5040 section 7.2
    //= type=test
    //# The Data Source STag MUST be associated to this RDMAP Stream.
    //= rfc5040 section 7.2
    //= type=test
    //# The Data Source STag MUST be valid.
    //= rfc5040 section 5.2.1
    //= type=test
    //# If the Data Source receives a non-zero-length RDMA Read Message Size,
    //# the Data Source RDMAP MUST validate the Data Source STag and Data Source
    //# Tagged Offset contained in the RDMA Read Request Header.
    for case in 0..8 {
        let mut rig = Rig::new();
        let (stag, to, _, code) = invalid_accesses(&mut rig, Access::REMOTE_READ)[case];
        let body = read_request(5, 8, stag, to);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, code);
        let t = rig.terminate();
        // The Terminate includes the Read Request.
        assert_eq!(t.read_request.map(|r| r.source_to), Some(to));
        assert!(rig.qp.take_events().contains(Events::ACCESS_ERROR));
    }
}

//= rfc7306 section 5.2.1
//= type=test
//# The Remote Tagged Offset MAY start at an arbitrary offset but MUST represent
//# a ULP Buffer address that is 64-bit aligned.
//= rfc7306 section 8.2
//= type=test
//# In the case of an error, the RDMAP layer MUST generate a Terminate
//# Message indicating RDMA Layer Remote Operation Error with Error Code
//# Name "Catastrophic error, localized to RDMAP Stream" as described in
//# Section 4.8 of RFC 5040.
//= rfc7306 section 8.2
//= type=test
//# On incoming Atomic requests the following additional validation MUST be
//# performed:
//= rfc7306 section 5.2.1
//= type=test
//# All Atomic Operation Codes from Figure 5 MUST be implemented by an RNIC
//# that supports Atomic Operations.
//= rfc7306 section 5.2.1
//= type=test
//# At the Responder, an error MUST be surfaced in response to delivery to
//# the Remote Peer's RDMAP layer of an Atomic Operation Request Message
//# with an Atomic Operation Code that the RNIC does not support.
//= rfc7306 section 5.1.2
//= type=test
//# A terminate message MUST be generated.
//= rfc7306 section 5.1.2
//= type=test
//# The result MUST be surfaced as an error, and
//= rfc7306 section 5.1.2
//= type=test
//# The Responder's memory MUST NOT be modified,
//= rfc7306 section 5.1.2
//= type=test
//# The operation MUST NOT be performed,
//= rfc7306 section 5.1.2
//= type=test
//# CmpSwap Atomic Operations MUST target ULP Buffer addresses that are
//# 64-bit aligned.
//= rfc7306 section 5.1.1
//= type=test
//# Additionally, an error MUST be surfaced and a terminate message MUST be
//# generated.
//= rfc7306 section 5.1.1
//= type=test
//# FetchAdd Atomic Operations that target ULP Buffer addresses that are not
//# 64-bit aligned MUST be surfaced as errors, and the Responder's memory
//# MUST NOT be modified in such cases.
//= rfc7306 section 5.1.1
//= type=test
//# FetchAdd Atomic Operations MUST target ULP Buffer addresses that are
//# 64-bit aligned.
#[test]
fn invalid_atomic_is_refused() {
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
        let (stag, to, _, code) = invalid_accesses(&mut rig, Access::REMOTE_ATOMIC)[case];
        assert_refused(&mut rig, &body(stag, to, AtomicOp::FETCH_ADD), code);
    }
    //= rfc7306 section 8.2
    //= type=test
    //# The RDMAP layer MUST validate that the Remote Peer's Tagged ULP
    //# Buffer address references a ULP Buffer address that is 64-bit
    //# aligned.
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    assert_refused(
        &mut rig,
        &body(mr.stag, mr.at + 4, AtomicOp::FETCH_ADD),
        Code::RDMAP_CATASTROPHIC_STREAM,
    );
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    assert_refused(
        &mut rig,
        &body(mr.stag, mr.at, AtomicOp(7)),
        Code::RDMAP_UNEXPECTED_OPCODE,
    );
}

#[test]
fn invalid_invalidation_is_refused() {
    //= rfc5040 section 7.2
    //= type=test
    //# 4. The Invalidate STag MUST be valid.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST ensure that a Remote Peer is not able to invalidate an STag
    //# enabled for remote access, if the STag is shared on multiple streams.
    for case in 0..4 {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let random = rig.random();
        let unbound = rig
            .table
            .allocate_window(WindowType::Type2, PD, random)
            .unwrap();
        let stag = [mr.stag, mr.stag ^ 1, unbound.0, 0x55_0000][case];
        rig.recv(4, &[mr.sge()]);
        assert_refused(
            &mut rig,
            &send_inv(stag, &[1]),
            Code::RDMAP_CANNOT_INVALIDATE,
        );
        assert_eq!(brief(&rig.host.recvs), [(4, WcStatus::LocalAccess)]);
    }
}

#[test]
fn refused_write_stays_inside_region() {
    //= rfc5041 section 7.1
    //= type=test
    //# If the DDP layer detects any of the receive errors listed in this
    //# section, it MUST cease placing the remainder of the DDP Segment and
    //# report the error(s) to the ULP.
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST ensure that a Remote Peer is not able to access memory
    //# outside the buffer specified when the STag was enabled for remote
    //# access.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST ensure that a Remote Peer is not able to access memory
    //# outside of the buffer specified when the STag was enabled for remote
    //# access.
    let mut rig = Rig::new();
    let mr = rig.mr(16, ALL);
    assert_eq!(
        rig.rx_ulpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, false, &[9; 8])),
        RxStatus::Ok
    );
    assert_refused(
        &mut rig,
        &tagged(Opcode::WRITE, mr.stag, mr.at + 8, true, &[9; 9]),
        Code::DDP_TAGGED_BASE_BOUNDS,
    );
    assert_eq!(
        rig.read(&mr),
        [9, 9, 9, 9, 9, 9, 9, 9, 8, 9, 10, 11, 12, 13, 14, 15]
    );
}
