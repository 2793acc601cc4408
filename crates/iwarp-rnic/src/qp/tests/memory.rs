//! Memory by work requests: windows, fast registration, invalidation, atomics.

use super::harness::*;
use crate::memory::{MemoryError, WindowType};
use crate::qp::*;
use crate::{Access, Bind, FastRegister, SendFlags, SendOp, WcFlags, WcStatus};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

fn window(rig: &mut Rig, ty: WindowType) -> u32 {
    let random = rig.random();
    rig.table.allocate_window(ty, PD, random).unwrap().0
}

fn bind(mw: u32, new: u32, mr: &Mr, off: u64, len: u64) -> Bind {
    Bind {
        mw_stag: Stag(mw),
        new_stag: Stag(new),
        mr_stag: Stag(mr.stag),
        addr: mr.at + off,
        len,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
    }
}

fn write(rig: &mut Rig, stag: u32, to: u64, octets: &[u8]) -> RxStatus {
    rig.rx_ulpdu(&tagged(Opcode::WRITE, stag, to, true, octets))
}

fn send_inv(rig: &mut Rig, msn: u32, stag: u32) -> RxStatus {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND_SE_INV,
        invalidate_stag: Stag(stag),
        qn: 0,
        msn,
        mo: 0,
    });
    rig.rx_ulpdu(&with_payload(&header, &[]))
}

#[test]
fn type_2_window_is_bound_and_invalidated() {
    //= rfc5041 section 8.3
    //= type=test
    //# DDP MUST provide a mechanism for the ULP to communicate the association
    //# between a STag and a specific DDP Stream.
    //= rfc5040 section 5.3
    //= type=test
    //# When the Send with Invalidate and Send with Solicited Event and
    //# Invalidate Message are Delivered to the Remote Peer's RDMAP layer, the
    //# RDMAP layer MUST:
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let mw = window(&mut rig, WindowType::Type2);
    let new = mw ^ 0x5a;
    rig.post(1, SendOp::Bind(bind(mw, new, &mr, 8, 16)), &[]);
    assert!(rig.sent().is_empty());
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    let region = Stag(mr.stag);
    let deregistered = rig.table.deregister(region);
    assert_eq!(deregistered.unwrap_err(), MemoryError::Busy);
    let changed = rig.table.reregister(region, None, None, Some(ALL));
    assert_eq!(changed.unwrap_err(), MemoryError::Busy);
    assert_eq!(write(&mut rig, new, mr.at + 8, &[1; 16]), RxStatus::Ok);
    rig.recv(2, &[]);
    assert_eq!(send_inv(&mut rig, 1, new), RxStatus::Ok);
    let cqe = rig.host.recvs[0];
    assert_eq!(cqe.flags, WcFlags::WITH_INV | WcFlags::SOLICITED);
    assert_eq!(cqe.imm_or_stag, new);
    // The window is bound again, with another key, to another part.
    rig.post(3, SendOp::Bind(bind(new, mw, &mr, 0, 4)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, mw, mr.at, &[2; 4]), RxStatus::Ok);
    assert_eq!(write(&mut rig, new, mr.at, &[3; 4]), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::DDP_TAGGED_INVALID_STAG);
    let memory = rig.read(&mr);
    assert_eq!((&memory[..4], &memory[8..24]), (&[2; 4][..], &[1; 16][..]));
}

#[test]
fn only_type_1_window_is_rebound() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let type_1 = window(&mut rig, WindowType::Type1);
    rig.post(1, SendOp::Bind(bind(type_1, type_1, &mr, 0, 8)), &[]);
    rig.post(2, SendOp::Bind(bind(type_1, type_1 ^ 1, &mr, 8, 8)), &[]);
    // A length of zero unbinds the window.
    rig.post(
        3,
        SendOp::Bind(bind(type_1 ^ 1, type_1 ^ 2, &mr, 0, 0)),
        &[],
    );
    rig.sent();
    assert!(rig.host.sends.iter().all(|c| c.status == WcStatus::Success));
    rig.table.deregister(Stag(mr.stag)).unwrap();
    let mr = rig.mr(64, ALL);
    let type_2 = window(&mut rig, WindowType::Type2);
    rig.post(4, SendOp::Bind(bind(type_2, type_2, &mr, 0, 8)), &[]);
    rig.post(5, SendOp::Bind(bind(type_2, type_2, &mr, 0, 8)), &[]);
    rig.sent();
    assert_eq!(
        brief(&rig.host.sends)[3..],
        [(4, WcStatus::Success), (5, WcStatus::MwBind)]
    );
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
}

#[test]
fn invalid_binds_are_refused() {
    let mut rig = Rig::new();
    let good = rig.mr(64, ALL);
    let unbindable = rig.mr(64, ALL.difference(Access::MW_BIND));
    let read_only = rig.mr(64, Access::MW_BIND);
    let foreign = rig.mr_in(PD + 1, 64, ALL);
    let mw = window(&mut rig, WindowType::Type2);
    let accessor = rig.qp.accessor();
    // The key of an earlier registration of the region.
    let old_key = Bind {
        mr_stag: Stag(good.stag ^ 1),
        ..bind(mw, mw, &good, 0, 8)
    };
    let cases: [(Bind, MemoryError); 8] = [
        (old_key, MemoryError::NoSuchStag),
        (bind(mw, mw ^ 0x100, &good, 0, 8), MemoryError::NoSuchStag),
        (bind(mw ^ 0x100, mw, &good, 0, 8), MemoryError::NoSuchStag),
        (
            bind(good.stag, good.stag, &good, 0, 8),
            MemoryError::NoSuchStag,
        ),
        (bind(mw, mw, &good, 60, 8), MemoryError::OutOfRange),
        (bind(mw, mw, &unbindable, 0, 8), MemoryError::NotBindable),
        (bind(mw, mw, &read_only, 0, 8), MemoryError::NotBindable),
        (
            bind(mw, mw, &foreign, 0, 8),
            MemoryError::WrongProtectionDomain,
        ),
    ];
    for (wr, error) in cases {
        assert_eq!(rig.table.bind(&wr, accessor), Err(error));
    }
    // Each remote right to write needs a region that can be written locally.
    for (access, result) in [
        (Access::REMOTE_WRITE, Err(MemoryError::NotBindable)),
        (Access::REMOTE_ATOMIC, Err(MemoryError::NotBindable)),
        (Access::REMOTE_READ, Ok(())),
    ] {
        let wr = Bind {
            access,
            ..bind(mw, mw, &read_only, 0, 8)
        };
        assert!(!rig.table.info(Stag(mw)).unwrap().valid);
        assert_eq!(rig.table.bind(&wr, accessor), result, "{access:?}");
    }
    // A window has addresses, but a zero-based region has none.
    let zero_based = rig.zero_based(64, ALL);
    let other = window(&mut rig, WindowType::Type2);
    let wr = Bind {
        addr: 0,
        ..bind(other, other, &zero_based, 0, 8)
    };
    let refused = rig.table.bind(&wr, accessor);
    assert_eq!(refused, Err(MemoryError::NotBindable));
}

/// The program knows only the key of the last bind that it posted, even if that bind failed.
#[test]
fn window_is_usable_after_failed_bind() {
    let mut rig = Rig::new();
    let good = rig.mr(64, ALL);
    let unbindable = rig.mr(64, ALL.difference(Access::MW_BIND));
    for ty in [WindowType::Type1, WindowType::Type2] {
        let mw = window(&mut rig, ty);
        let accessor = rig.qp.accessor();
        let refused = rig
            .table
            .bind(&bind(mw, mw ^ 1, &unbindable, 0, 8), accessor);
        assert_eq!(refused, Err(MemoryError::NotBindable));
        rig.table
            .bind(&bind(mw ^ 1, mw ^ 2, &good, 0, 8), accessor)
            .unwrap();
        assert!(rig.table.info(Stag(mw ^ 2)).unwrap().valid);
    }
}

fn fast(rig: &mut Rig, len: u32) -> (Stag, u64) {
    let range = rig.range(len);
    let at = range.addr();
    let random = rig.random();
    (rig.table.allocate_fast(range, PD, random).unwrap(), at)
}

const fn fast_register(stag: Stag, offset: u64, len: u64) -> FastRegister {
    FastRegister {
        new_stag: stag,
        offset,
        len,
        iova: 0x5000,
        access: Access::LOCAL_WRITE
            .union(Access::REMOTE_WRITE)
            .union(Access::MW_BIND),
        pages: None,
    }
}

#[test]
fn fast_registration_is_locally_invalidated() {
    //= rfc5041 section 8.3
    //= type=test
    //# DDP MUST provide a mechanism for the ULP to establish and revoke STag
    //# validity.
    //= rfc5041 section 8.3
    //= type=test
    //# DDP MUST provide a mechanism for the ULP to establish and revoke the TO
    //# range associated with the ULP Buffer referenced by the STag.
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke
    //# read, write, or read and write access to the ULP Buffer referenced by an
    //# STag.
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke the
    //# association of a ULP Buffer to an STag and TO range.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke
    //# read, write, or read and write access to the ULP Buffer referenced by an
    //# STag.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke the
    //# association of a ULP Buffer to an STag and TO range.
    let mut rig = Rig::new();
    let (stag, at) = fast(&mut rig, 64);
    let new = stag.with_key(stag.key() ^ 0x33);
    rig.post(1, SendOp::FastRegister(fast_register(new, 16, 8)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, new.0, 0x5000, &[1; 8]), RxStatus::Ok);
    let mr = Mr {
        stag: stag.0,
        at,
        len: 64,
    };
    assert_eq!(rig.read(&mr)[15..25], [15, 1, 1, 1, 1, 1, 1, 1, 1, 24]);
    rig.post(2, SendOp::LocalInvalidate { stag: new }, &[]);
    rig.post(3, SendOp::FastRegister(fast_register(stag, 60, 4)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, stag.0, 0x5000, &[2; 4]), RxStatus::Ok);
    // The STag is valid, so it must be invalidated before it can be registered again.
    rig.post(4, SendOp::FastRegister(fast_register(stag, 0, 4)), &[]);
    rig.sent();
    use WcStatus::{MwBind, Success};
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Success), (2, Success), (3, Success), (4, MwBind)]
    );
}

#[test]
fn invalidation_waits_for_earlier_writes() {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            crc: false,
            emss: 60_000,
            ..STREAM
        },
    );
    let (stag, _) = fast(&mut rig, 20_000);
    rig.post(1, SendOp::FastRegister(fast_register(stag, 0, 20_000)), &[]);
    let sge = crate::Sge {
        addr: 0x5000,
        len: 20_000,
        lkey: stag.0,
    };
    rig.post(2, SendOp::Send, &[sge]);
    rig.post(3, SendOp::LocalInvalidate { stag }, &[]);
    let sent = rig.sent();
    assert_eq!(sent[0].1.len(), 20_000);
    assert_eq!(rig.host.sends.len(), 3);
    assert!(!rig.table.info(stag).unwrap().valid);
}

#[test]
fn window_does_not_outlive_region() {
    let mut rig = Rig::new();
    let (stag, at) = fast(&mut rig, 64);
    let mw = window(&mut rig, WindowType::Type2);
    rig.post(1, SendOp::FastRegister(fast_register(stag, 0, 64)), &[]);
    let on_fast = Mr {
        stag: stag.0,
        at: 0x5000,
        len: 64,
    };
    rig.post(2, SendOp::Bind(bind(mw, mw, &on_fast, 0, 8)), &[]);
    rig.sent();
    rig.recv(1, &[]);
    assert_eq!(send_inv(&mut rig, 1, stag.0), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::RDMAP_CANNOT_INVALIDATE);
    assert_eq!(
        rig.read(&Mr {
            stag: stag.0,
            at,
            len: 1
        }),
        [0]
    );
}

#[test]
fn ordinary_region_cannot_be_invalidated() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.post_flags(
        1,
        SendOp::LocalInvalidate {
            stag: Stag(mr.stag),
        },
        SendFlags::empty(),
        &[],
    );
    rig.sent();
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
    assert!(rig.table.info(Stag(mr.stag)).unwrap().valid);
}

pub(super) fn atomic(rig: &mut Rig, msn: u32, request: &AtomicRequest) -> u64 {
    let mut body = vec![0; AtomicRequest::LEN];
    request.emit(&mut body);
    let ulpdu = untagged(Opcode::ATOMIC_REQUEST, 1, msn, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    let sent = rig.sent();
    let (header, payload) = sent.last().unwrap();
    let Header::Untagged(h) = header else {
        panic!("an Atomic Response is untagged");
    };
    assert_eq!((h.opcode, h.qn, h.msn), (Opcode::ATOMIC_RESPONSE, 3, msn));
    let response = AtomicResponse::parse(payload).unwrap();
    assert_eq!(response.request_id, request.request_id);
    response.original
}

//= rfc7306 section 5.4
//= type=test
//# Atomic Operation Response Messages MUST be submitted to the DDP layer on
//# the Responder in the order the Atomic Operation Request Messages were
//# Delivered by DDP.
//= rfc7306 section 5.4
//= type=test
//# If more than one outstanding Atomic Request Message is supported by both
//# peers, the Atomic Operation Request Messages MUST be processed in the
//# order they were delivered by the DDP layer on the Responder.
//= rfc7306 section 5.2.2
//= type=test
//# When the Responder receives Atomic Operation Request messages, the
//# Responder RDMAP layer MUST pass Atomic Operation Response Messages to
//# the DDP layer, in the order that the Atomic Operation Request Messages
//# were received by the RDMAP layer, at the Responder.
//= rfc7306 section 5.2.2
//= type=test
//# An Atomic Operation Response Message MUST reference the Queue Number 3.
//= rfc7306 section 5.2.2
//= type=test
//# An Atomic Operation Response Message MUST consume an Untagged Buffer.
//= rfc7306 section 5.2.1
//= type=test
//# If the Responder receives a valid Atomic Operation Request Message, it
//# MUST respond with a valid Atomic Operation Response Message.
//= rfc7306 section 5.2.1
//= type=test
//# The Responder MUST process the Atomic Operation Request Messages in the
//# order they were sent.
//= rfc7306 section 5.2.1
//= type=test
//# A valid Atomic Operation Request Message MUST NOT be delivered to the
//# Responder's ULP (i.e., it is processed by the RDMAP layer).
//= rfc7306 section 5.2.1
//= type=test
//# The Responder's RDMAP layer MUST process an Atomic Operation Request
//# Message.
//= rfc7306 section 5.2.1
//= type=test
//# One Atomic Operation Request Message MUST consume one Untagged Buffer.
//= rfc7306 section 5.1.2
//= type=test
//# After the operation, the remote data Buffer MUST contain the "Original
//# Remote Data Value" (if comparison did not match) or the masked "Swap
//# Data" (if the comparison did match).
//= rfc7306 section 5
//= type=test
//# Atomic Operation Response Messages MUST use the Untagged Buffer model
//# with QN=3.
//= rfc7306 section 5
//= type=test
//# An RNIC that supports Atomic Operations as specified in this document
//# MUST implement both the FetchAdd operation as specified in Section 5.1.1
//# and the CmpSwap operation as specified in Section 5.1.2.
//= rfc5041 section 4.3
//= type=test
//# The initial value for MSN MUST be one.
//= rfc5041 section 4.3
//= type=test
//# The Message Sequence Number specifies a sequence number that MUST be
//# increased by one (modulo 2^32) with each DDP Message targeting the
//# specific Queue Number on the DDP Stream associated with this DDP
//# Segment.
#[test]
fn peer_atomics_are_executed() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let word = |rig: &Rig| u64::from_ne_bytes(rig.read(&mr).try_into().unwrap());
    let start = word(&rig);
    let add = AtomicRequest {
        op: AtomicOp::FETCH_ADD,
        request_id: 77,
        stag: Stag(mr.stag),
        to: mr.at,
        add_swap: 5,
        add_swap_mask: 0,
        compare: 0,
        compare_mask: 0,
    };
    assert_eq!(atomic(&mut rig, 1, &add), start);
    assert_eq!(word(&rig), start + 5);
    let swap = AtomicRequest {
        op: AtomicOp::CMP_SWAP,
        compare: start + 5,
        compare_mask: u64::MAX,
        add_swap: 0xff00,
        add_swap_mask: 0xffff,
        ..add
    };
    assert_eq!(atomic(&mut rig, 2, &swap), start + 5);
    let swapped = (start + 5) & !0xffff | 0xff00;
    assert_eq!(word(&rig), swapped);
    // Now the comparison fails: nothing changes, and the old value is returned.
    assert_eq!(atomic(&mut rig, 3, &swap), swapped);
    assert_eq!(word(&rig), swapped);
}

#[test]
fn local_atomics_complete_with_response() {
    //= rfc7306 section 5.4
    //= type=test
    //# An Atomic Operation MUST NOT be Completed at the Requester until the DDP
    //# layer Delivers the associated incoming Atomic Operation Response
    //# Message.
    //= rfc7306 section 5.4
    //= type=test
    //# For an Atomic Operation, the Requester MUST NOT consider the contents of
    //# the Tagged Buffer at the Responder to be modified by that specific
    //# Atomic Operation until the Atomic Operation Response Message has been
    //# Delivered to RDMAP at the Requester.
    //= rfc7306 section 5.2.2
    //= type=test
    //# The Requester MUST ensure that a sufficient number of Untagged Buffers
    //# are available on the RDMA Atomic Response Queue (Queue with DDP Queue
    //# Number 3) to support the maximum number of Atomic Operation Requests
    //# negotiated by the ULP.
    //= rfc7306 section 5.2.2
    //= type=test
    //# The RDMAP layer MUST Deliver the Atomic Operation Response Message to
    //# the ULP.
    //= rfc7306 section 5.2.1
    //= type=test
    //# The Requester MUST pass to the DDP layer Atomic Operation Request
    //# Messages in the order they were submitted by the ULP.
    //= rfc7306 section 5.2.1
    //= type=test
    //# An Atomic Operation Request Message MUST reference the RDMA Read Request
    //# Queue.
    //= rfc7306 section 5.2.1
    //= type=test
    //# An Atomic Operation Request Message MUST reference an Untagged Buffer.
    let (mut a, mut b) = pair(STREAM);
    let sink = a.mr(16, Access::LOCAL_WRITE);
    let target = b.mr(8, ALL);
    let old: Vec<u8> = b.read(&target);
    let add = SendOp::FetchAdd {
        remote_addr: target.at,
        rkey: target.stag,
        add: 1,
        mask: 0,
    };
    a.post(1, add, &[sink.part(2, 5), sink.part(8, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(a.host.sends[0].byte_len, 8);
    // The old value is in host order, and split across the elements.
    let contents = a.read(&sink);
    assert_eq!([&contents[2..7], &contents[8..11]].concat(), old);
    assert_eq!(b.read(&target)[0], old[0] + 1);
}

#[test]
fn reregistration_keeps_key_unless_memory_changes() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let (same, old) = rig
        .table
        .reregister(Stag(mr.stag), None, Some(PD), Some(Access::REMOTE_READ))
        .unwrap();
    assert_eq!((same, old.is_none()), (Stag(mr.stag), true));
    let range = rig.range(32);
    let at = range.addr();
    let (new, old) = rig
        .table
        .reregister(Stag(mr.stag), Some((range, at)), None, None)
        .unwrap();
    // The old key must not give access to the new memory.
    let known = Stag(mr.stag);
    assert_eq!(new.index(), known.index());
    assert_ne!(new, known);
    assert_eq!(old.map(|o| o.addr()), Some(mr.at));
    let accessor = rig.qp.accessor();
    let read = |stag| {
        rig.table
            .check(stag, at, 8, Access::REMOTE_READ, accessor)
            .is_ok()
    };
    assert_eq!((read(known), read(new)), (false, true));
}

#[test]
fn registered_bytes_are_counted() {
    fn octets(rig: &Rig) -> u64 {
        // Sum in parts, as drivers do.
        let parts = (0..).map(|at| rig.table.bytes_in(at * 10..at * 10 + 10));
        parts.map_while(|part| part).sum()
    }
    let mut rig = Rig::new();
    let before = octets(&rig);
    let (first, second) = (rig.mr(64, ALL), rig.mr(100, ALL));
    window(&mut rig, WindowType::Type2);
    assert_eq!(octets(&rig), before + 164);
    let range = rig.range(32);
    let at = range.addr();
    let (new, _) = rig
        .table
        .reregister(Stag(first.stag), Some((range, at)), None, None)
        .unwrap();
    assert_eq!(octets(&rig), before + 132);
    rig.table.deregister(new).unwrap();
    rig.table.deregister(Stag(second.stag)).unwrap();
    assert_eq!(octets(&rig), before);
}
