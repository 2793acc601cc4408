//! Rules of single regions and windows: invalidation, rights, offsets, local keys.

use super::harness::*;
use super::memory::atomic;
use crate::memory::{AccessError, Accessor, MemoryError, WindowType};
use crate::qp::*;
use crate::{Access, Bind, FastRegister, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::mpa::framing::{MarkerClock, decode_fpdu};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, ReadRequest, TerminateCode as Code};
use std::vec::Vec;

const BASE: u64 = 0x5000;

/// Returns a fast-registration region with bytes `offset` to `offset + len` at `BASE`.
fn fast_region(rig: &mut Rig, offset: u64, len: u64, access: Access) -> Mr {
    let range = rig.range(64);
    let at = range.addr();
    let random = rig.random();
    let stag = rig.table.allocate_fast(range, PD, random).unwrap();
    let wr = FastRegister {
        new_stag: stag,
        offset,
        len,
        iova: BASE,
        access,
        pages: None,
    };
    rig.table.fast_register(&wr, PD).unwrap();
    Mr {
        stag: stag.0,
        at,
        len: 64,
    }
}

/// Returns a window of all rights on `len` bytes from `addr` on.
fn window(rig: &mut Rig, mr: &Mr, addr: u64, len: u64) -> u32 {
    let random = rig.random();
    let ty = WindowType::Type2;
    let mw = rig.table.allocate_window(ty, PD, random).unwrap();
    let bind = Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: Stag(mr.stag),
        addr,
        len,
        access: ALL.difference(Access::MW_BIND),
    };
    rig.post(77, SendOp::Bind(bind), &[]);
    assert!(rig.octets_out().is_empty());
    assert_eq!(brief(&rig.host.sends), [(77, WcStatus::Success)]);
    rig.host.sends.clear();
    mw.0
}

#[test]
fn region_invalidation_needs_protection_domain() {
    for remote in [true, false] {
        let mut rig = Rig::new();
        let mr = fast_region(&mut rig, 0, 64, ALL);
        let other = Accessor {
            pd: PD + 1,
            ..rig.qp.accessor()
        };
        let refused = rig.table.invalidate(Stag(mr.stag), other, remote);
        assert_eq!(refused, Err(AccessError::NotAssociated));
        assert!(rig.table.info(Stag(mr.stag)).unwrap().valid);
        let own = rig
            .table
            .invalidate(Stag(mr.stag), rig.qp.accessor(), remote);
        assert_eq!(own, Ok(true));
        assert!(!rig.table.info(Stag(mr.stag)).unwrap().valid);
    }
}

/// Ordinary regions are deregistered only while nobody borrows the table, so accesses to them need
/// no user. Accesses to other regions and to windows do.
#[test]
fn ordinary_regions_need_no_user() {
    let mut rig = Rig::new();
    let (mr, accessor) = (rig.mr(64, ALL), rig.qp.accessor());
    let fast_mr = fast_region(&mut rig, 0, 64, ALL);
    let mw = window(&mut rig, &mr, mr.at, 64);
    let need = Access::REMOTE_READ;
    let ordinary = |stag, at, len| {
        let span = rig
            .table
            .check_ordinary((Stag(stag), at, len), need, accessor);
        span.map(|span| span.len())
    };
    assert_eq!(ordinary(mr.stag, mr.at, 64), Some(64));
    assert_eq!(ordinary(mr.stag, mr.at + 63, 1), Some(1));
    assert_eq!(ordinary(mr.stag, mr.at, 65), None);
    assert_eq!(ordinary(fast_mr.stag, BASE, 64), None);
    assert_eq!(ordinary(mw, mr.at, 64), None);
    // Counted accesses are allowed.
    for (stag, at) in [(fast_mr.stag, BASE), (mw, mr.at)] {
        assert_eq!(
            rig.table.permits((Stag(stag), at, 64), need, accessor),
            Ok(())
        );
    }
}

#[test]
fn peer_needs_rights_to_invalidate() {
    for (access, allowed) in [
        (Access::LOCAL_WRITE, false),
        (Access::LOCAL_WRITE.union(Access::MW_BIND), false),
        (Access::REMOTE_READ, true),
        (Access::LOCAL_WRITE.union(Access::REMOTE_WRITE), true),
        (Access::LOCAL_WRITE.union(Access::REMOTE_ATOMIC), true),
    ] {
        let mut rig = Rig::new();
        let mr = fast_region(&mut rig, 0, 64, access);
        rig.recv(1, &[]);
        let status = rig.rx_ulpdu(&send_inv(mr.stag, &[]));
        let valid = rig.table.info(Stag(mr.stag)).unwrap().valid;
        if allowed {
            assert_eq!((status, valid), (RxStatus::Ok, false), "{access:?}");
        } else {
            assert_eq!((status, valid), (RxStatus::Failed, true), "{access:?}");
            rig.assert_ended(Blame::Peer, Code::RDMAP_CANNOT_INVALIDATE);
        }
    }
}

#[test]
fn window_offset_adds_to_region_offset() {
    let mut rig = Rig::new();
    // The region begins 16 bytes into its memory, and the window 4 bytes into the region.
    let mr = fast_region(&mut rig, 16, 32, ALL);
    let mw = window(&mut rig, &mr, BASE + 4, 8);
    let write = tagged(Opcode::WRITE, mw, BASE + 4, true, &[0xaa; 8]);
    assert_eq!(rig.rx_ulpdu(&write), RxStatus::Ok);
    let mut expected: Vec<u8> = (0..64).collect();
    expected[20..28].fill(0xaa);
    assert_eq!(rig.read(&mr), expected);
}

#[test]
fn window_is_no_local_key() {
    for kind in 0..3 {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let mw = window(&mut rig, &mr, mr.at, 64);
        let sge = crate::Sge {
            lkey: mw,
            ..mr.part(0, 8)
        };
        rig.recv(1, &[sge]);
        let read = SendOp::Read {
            remote_addr: 0,
            rkey: 7,
        };
        match kind {
            0 => rig.post(1, SendOp::Send, &[sge]),
            1 => rig.post(1, read, &[sge]),
            _ => assert_eq!(rig.rx_ulpdu(&send(1, &[9; 8])), RxStatus::Failed),
        }
        assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
        use WcStatus::{Flushed, LocalProtection};
        let (sends, recv) = match kind {
            2 => (&[][..], LocalProtection),
            _ => (&[(1, LocalProtection)][..], Flushed),
        };
        assert_eq!(brief(&rig.host.sends), sends);
        assert_eq!(brief(&rig.host.recvs), [(1, recv)]);
        assert_eq!(rig.read(&mr)[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn reregistration_changes_zero_based() {
    let mut rig = Rig::new();
    let range = rig.range(64);
    let at = range.addr();
    let random = rig.random();
    let zero_based = Access::LOCAL_WRITE | Access::ZERO_BASED;
    let registered = rig.table.register(range, at, PD, zero_based, random);
    let stag = registered.unwrap();
    let iova = |rig: &Rig| rig.table.info(stag).unwrap().iova;
    assert_eq!(iova(&rig), 0);
    for (access, expected) in [
        (Access::LOCAL_WRITE, at),
        (zero_based, 0),
        (Access::LOCAL_WRITE, at),
    ] {
        let changed = rig.table.reregister(stag, None, None, Some(access));
        assert_eq!(changed.map(|(stag, _)| stag), Ok(stag));
        assert_eq!(iova(&rig), expected, "{access:?}");
    }
    // New memory has its own address.
    let range = rig.range(32);
    let (new, _) = rig
        .table
        .reregister(stag, Some((range, 0x7000)), None, Some(zero_based))
        .unwrap();
    let changed = rig
        .table
        .reregister(new, None, None, Some(Access::LOCAL_WRITE));
    assert_eq!(changed.map(|(stag, _)| stag), Ok(new));
    assert_eq!(rig.table.info(new).unwrap().iova, 0x7000);
}

#[test]
fn refused_change_changes_nothing() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE | Access::MW_BIND);
    let stag = Stag(mr.stag);
    let before = rig.table.info(stag);
    let none: Access = Access::empty();
    let bad = Access::REMOTE_WRITE;
    let (out, bad_access) = (MemoryError::OutOfRange, MemoryError::BadAccess);
    let cases = [
        (None, bad, bad_access),
        (Some(0x7000), bad, bad_access),
        (Some(u64::MAX - 10), none, out),
        (Some(u64::MAX - 10), Access::REMOTE_READ, out),
    ];
    for (iova, access, error) in cases {
        for pd in [None, Some(PD + 1)] {
            let memory = iova.map(|iova| (rig.range(64), iova));
            let refused = rig.table.reregister(stag, memory, pd, Some(access));
            assert_eq!(refused.err(), Some(error));
            assert_eq!(rig.table.info(stag), before, "{error:?}");
        }
    }
    // A region with a bound window cannot change.
    let accessor = rig.qp.accessor();
    let bound = rig.table.allocate_window(WindowType::Type1, PD, 7).unwrap();
    let bind = Bind {
        mw_stag: bound,
        new_stag: bound,
        mr_stag: stag,
        addr: mr.at,
        len: 8,
        access: none,
    };
    rig.table.bind(&bind, accessor).unwrap();
    let refused = rig.table.reregister(stag, None, Some(PD + 1), Some(none));
    assert_eq!(refused.err(), Some(MemoryError::Busy));
    assert_eq!(rig.table.info(stag), before);
    rig.table.deallocate_window(bound).unwrap();
    let changed = rig.table.reregister(stag, None, Some(PD + 1), Some(none));
    assert_eq!(changed.map(|(stag, _)| stag), Ok(stag));
    let now = rig.table.info(stag).unwrap();
    assert_eq!((now.pd, now.access), (PD + 1, none));
}

/// Returns regions of these lengths for which Read Requests have arrived. Small and large responses
/// take different code paths.
fn receive_read_requests(rig: &mut Rig, lens: &[u32]) -> Vec<Mr> {
    let mrs: Vec<Mr> = lens.iter().map(|len| rig.mr(*len, ALL)).collect();
    for (i, mr) in mrs.iter().enumerate() {
        let body = read_request(100 + i as u32, mr.len, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, i as u32 + 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    }
    mrs
}

#[test]
fn response_checks_rights_again() {
    for len in [8, 1000, 40_000] {
        let mut rig = Rig::new();
        let mrs = receive_read_requests(&mut rig, &[16, len]);
        let less = Some(ALL.difference(Access::REMOTE_READ));
        let changed = rig.table.reregister(Stag(mrs[1].stag), None, None, less);
        changed.unwrap();
        let sent = rig.sent();
        let opcodes: Vec<_> = sent.iter().map(|(h, _)| h.opcode()).collect();
        assert_eq!(opcodes, [Opcode::READ_RESPONSE, Opcode::TERMINATE]);
        assert_eq!(sent[0].1.len(), 16);
        rig.assert_ended(Blame::Peer, Code::RDMAP_ACCESS);
    }
}

#[test]
fn read_request_needs_right() {
    for first in [true, false] {
        let mut rig = Rig::new();
        if !first {
            // An earlier request has arrived on the stream.
            receive_read_requests(&mut rig, &[8]);
        }
        let mr = rig.mr(64, ALL.difference(Access::REMOTE_READ));
        let body = read_request(5, 8, mr.stag, mr.at);
        let msn = if first { 1 } else { 2 };
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, Code::RDMAP_ACCESS);
    }
}

#[test]
fn failed_response_names_request() {
    for len in [8, 40_000] {
        let mut rig = Rig::new();
        let mrs = receive_read_requests(&mut rig, &[16, len, 8]);
        rig.table.deregister(Stag(mrs[1].stag)).unwrap();
        let terminate = rig.terminate();
        assert_eq!(terminate.code, Code::RDMAP_INVALID_STAG);
        let header = UntaggedHeader {
            last: true,
            opcode: Opcode::READ_REQUEST,
            invalidate_stag: Stag(0),
            qn: 1,
            msn: 2,
            mo: 0,
        };
        assert_eq!(terminate.ddp_header, Some(Header::Untagged(header)));
        assert_eq!(terminate.ddp_segment_len, Some(18 + 28));
        let request = terminate.read_request;
        let named = |r: ReadRequest| (r.sink_stag.0, r.source_stag.0, r.size);
        assert_eq!(request.map(named), Some((101, mrs[1].stag, len)));
    }
}

#[test]
fn failed_partial_response_names_rest() {
    let mut rig = Rig::new();
    let len = 1 << 20;
    let mrs = receive_read_requests(&mut rig, &[len]);
    assert_eq!(rig.fill(), TxFill::Ready);
    let octets = rig.write_some(len as usize);
    let answered: usize = segments_of(&rig, &octets).iter().map(Vec::len).sum();
    let answered = answered as u32;
    assert!((1..len).contains(&answered) && rig.plan.is_done());
    rig.table.deregister(Stag(mrs[0].stag)).unwrap();
    let request = ReadRequest {
        sink_stag: Stag(100),
        sink_to: u64::from(answered),
        size: len - answered,
        source_stag: Stag(mrs[0].stag),
        source_to: mrs[0].at + u64::from(answered),
    };
    assert_eq!(rig.terminate().read_request, Some(request));
}

fn segments_of(rig: &Rig, mut octets: &[u8]) -> Vec<Vec<u8>> {
    let (mut clock, mut ulpdu) = (MarkerClock::new(), [0; 1 << 16]);
    let mut payloads = Vec::new();
    while !octets.is_empty() {
        let fpdu = decode_fpdu(octets, &rig.options, &mut clock, &mut ulpdu).unwrap();
        let header = Header::decode(&ulpdu).unwrap();
        payloads.push(ulpdu[header.len()..fpdu.ulpdu_len].to_vec());
        octets = &octets[fpdu.consumed..];
    }
    payloads
}

#[test]
fn refused_fast_registration_changes_nothing() {
    let mut rig = Rig::new();
    let range = rig.range(64);
    let random = rig.random();
    let new_stag = rig.table.allocate_fast(range, PD, random).unwrap();
    let wr = FastRegister {
        new_stag,
        offset: 0,
        len: 64,
        iova: BASE,
        access: ALL,
        pages: None,
    };
    let other = rig.table.fast_register(&wr, PD + 1);
    assert_eq!(other, Err(MemoryError::WrongProtectionDomain));
    let long = FastRegister { len: 65, ..wr };
    let refused = rig.table.fast_register(&long, PD);
    assert_eq!(refused, Err(MemoryError::OutOfRange));
    assert!(!rig.table.info(new_stag).unwrap().valid);
    // The refused registration does not prevent another one.
    assert_eq!(rig.table.fast_register(&wr, PD), Ok(()));
}

#[test]
fn window_invalidation_needs_queue_pair() {
    for remote in [true, false] {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let mw = Stag(window(&mut rig, &mr, mr.at, 8));
        let own = rig.qp.accessor();
        let other = Accessor {
            qp: own.qp + 1,
            ..own
        };
        let refused = rig.table.invalidate(mw, other, remote);
        assert_eq!(refused, Err(AccessError::NotAssociated));
        assert!(rig.table.info(mw).unwrap().valid);
        assert_eq!(rig.table.invalidate(mw, own, remote), Ok(true));
    }
}

#[test]
fn region_may_belong_to_one_queue_pair() {
    for remote in [true, false] {
        let mut rig = Rig::new();
        let (range, random, own) = (rig.range(64), rig.random(), rig.qp.accessor());
        let stag = rig.table.allocate_fast_for(range, own, random).unwrap();
        let wr = FastRegister {
            new_stag: stag,
            offset: 0,
            len: 64,
            iova: BASE,
            access: ALL,
            pages: None,
        };
        rig.table.fast_register(&wr, PD).unwrap();
        let other = Accessor {
            qp: own.qp + 1,
            ..own
        };
        let write = |rig: &Rig, accessor| {
            let range = (stag, BASE, 64);
            rig.table.permits(range, Access::REMOTE_WRITE, accessor)
        };
        assert_eq!(write(&rig, other), Err(AccessError::NotAssociated));
        assert_eq!(write(&rig, own), Ok(()));
        let refused = rig.table.invalidate(stag, other, remote);
        assert_eq!(refused, Err(AccessError::NotAssociated));
        assert_eq!(rig.table.invalidate(stag, own, remote), Ok(true));
        assert_eq!(write(&rig, own), Err(AccessError::InvalidStag));
    }
}

/// Returns a null region and its two ranges of 64 bytes, for reads and for writes. In these tests,
/// both ranges contain a pattern.
fn null_region(rig: &mut Rig) -> (Stag, [Mr; 2]) {
    let (zeros, sink) = (rig.range(64), rig.range(64));
    let (from, to) = (zeros.addr(), sink.addr());
    let random = rig.random();
    let stag = rig.table.register_null(zeros, sink, PD, random).unwrap();
    let ranges = [from, to].map(|at| Mr {
        stag: stag.0,
        at,
        len: 64,
    });
    (stag, ranges)
}

#[test]
fn null_region_discards_and_reads_zeros() {
    let mut rig = Rig::new();
    let (null_region, [zeros, sink]) = null_region(&mut rig);
    let (source, before) = (rig.read(&zeros), rig.read(&sink));
    let info = rig.table.info(null_region).unwrap();
    assert_eq!((info.len, info.valid), (u64::MAX, true));
    let access = |rig: &Rig, to, len, need, pd| {
        let accessor = Accessor {
            pd,
            ..rig.qp.accessor()
        };
        rig.table
            .access((null_region, to, len), need, accessor, |span| {
                let mut out = std::vec![7; len as usize];
                assert!(span.read(&mut out));
                assert!(span.write(&[9; 64][..len as usize]));
                out
            })
    };
    // Any offset is valid, and written octets are not read back.
    for to in [0, 1 << 40, u64::MAX - 3] {
        let written = access(&rig, to, 3, Access::LOCAL_WRITE, PD);
        assert_eq!(written.map(|octets| octets.len()), Ok(3));
    }
    assert_eq!(rig.read(&sink)[..3], [9; 3]);
    assert_eq!(rig.read(&sink)[3..], before[3..]);
    {
        let accessor = rig.qp.accessor();
        let read = rig
            .table
            .check(null_region, 5, 64, Access::empty(), accessor);
        let mut out = [7; 64];
        assert!(read.unwrap().span().read(&mut out));
        assert_eq!(out[..], source);
    }
    let too_long = access(&rig, 0, 65, Access::LOCAL_WRITE, PD);
    assert_eq!(too_long, Err(AccessError::BaseOrBounds));
    let other_domain = access(&rig, 0, 1, Access::LOCAL_WRITE, PD + 1);
    assert_eq!(other_domain, Err(AccessError::NotAssociated));
    // The peer also writes to the sink and reads the zeros.
    assert!(access(&rig, 9, 4, Access::REMOTE_WRITE, PD).is_ok());
    assert_eq!(rig.read(&sink)[..4], [9; 4]);
    let accessor = rig.qp.accessor();
    let mut out = [7; 64];
    let read = Access::REMOTE_READ;
    rig.table
        .read((null_region, 1 << 50, 64), read, accessor, &mut out)
        .unwrap();
    assert_eq!(out[..], source);
}

#[test]
fn null_region_cannot_be_changed() {
    let mut rig = Rig::new();
    let (null_region, _) = null_region(&mut rig);
    for remote in [true, false] {
        let ended = rig.table.invalidate(null_region, rig.qp.accessor(), remote);
        assert_eq!(ended, Err(AccessError::AccessDenied));
    }
    let changed = rig.table.reregister(null_region, None, None, Some(ALL));
    assert_eq!(changed.unwrap_err(), MemoryError::NoSuchStag);
    // No window can be bound to it.
    let random = rig.random();
    let mw = rig
        .table
        .allocate_window(WindowType::Type2, PD, random)
        .unwrap();
    let bind = Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: null_region,
        addr: 0,
        len: 8,
        access: Access::REMOTE_READ,
    };
    rig.post(1, SendOp::Bind(bind), &[]);
    rig.sent();
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::MwBind)]);
    assert!(rig.table.deregister(null_region).is_ok());
    assert!(rig.table.info(null_region).is_none_or(|info| !info.valid));
}

/// A peer's Write goes to the sink, its Read returns `zeros`, and its atomics return zero and
/// change nothing: the data of another peer must not leave the region.
#[test]
fn peer_uses_null_region() {
    let mut rig = Rig::new();
    let (null_region, [zeros, sink]) = null_region(&mut rig);
    let source = rig.read(&zeros);
    for to in [0, u64::MAX - 8] {
        let write = tagged(Opcode::WRITE, null_region.0, to, true, &[1; 8]);
        assert_eq!(rig.rx_ulpdu(&write), RxStatus::Ok);
    }
    let written = rig.read(&sink);
    assert_eq!(written[..8], [1; 8]);
    let mut request = AtomicRequest {
        op: AtomicOp::FETCH_ADD,
        request_id: 1,
        stag: null_region,
        to: 8,
        add_swap: 5,
        add_swap_mask: 0,
        compare: 0,
        compare_mask: u64::MAX,
    };
    assert_eq!(atomic(&mut rig, 1, &request), 0);
    request.op = AtomicOp::CMP_SWAP;
    request.add_swap_mask = u64::MAX;
    assert_eq!(atomic(&mut rig, 2, &request), 0);
    let body = read_request(5, 64, null_region.0, 1 << 40);
    let read = untagged(Opcode::READ_REQUEST, 1, 3, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&read), RxStatus::Ok);
    assert_eq!(rig.sent().pop().unwrap().1, source);
    assert_eq!(rig.read(&sink), written);
    assert_eq!(rig.read(&zeros), source);
    // As in any other region, an unaligned atomic is refused.
    request.to = 12;
    let mut body = std::vec![0; AtomicRequest::LEN];
    request.emit(&mut body);
    let unaligned = untagged(Opcode::ATOMIC_REQUEST, 1, 4, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&unaligned), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::RDMAP_CATASTROPHIC_STREAM);
}

#[test]
fn null_region_of_other_domain_is_refused() {
    let mut rig = Rig::new();
    let (zeros, sink) = (rig.range(64), rig.range(64));
    let random = rig.random();
    let null_region = rig
        .table
        .register_null(zeros, sink, PD + 1, random)
        .unwrap();
    let write = tagged(Opcode::WRITE, null_region.0, 0, true, &[1; 8]);
    assert_eq!(rig.rx_ulpdu(&write), RxStatus::Failed);
}

/// The description of an unregistered region or window does not depend on the previous entry of its
/// slot.
#[test]
fn slot_keeps_nothing_of_earlier_entry() {
    type Make = fn(&mut Rig) -> Stag;
    const RANDOM: u32 = 0x0001_2345;
    let earlier: [Make; 4] = [
        |rig| {
            let range = rig.range(64);
            let at = range.addr();
            rig.table.register(range, at, PD, ALL, RANDOM).unwrap()
        },
        |rig| {
            let (zeros, sink) = (rig.range(64), rig.range(64));
            rig.table.register_null(zeros, sink, PD, RANDOM).unwrap()
        },
        |rig| {
            let range = rig.range(64);
            let stag = rig.table.allocate_fast(range, PD, RANDOM).unwrap();
            let wr = FastRegister {
                new_stag: stag,
                offset: 8,
                len: 32,
                iova: BASE,
                access: ALL,
                pages: None,
            };
            rig.table.fast_register(&wr, PD).unwrap();
            stag
        },
        |rig| {
            let mr = rig.mr(64, ALL);
            let ty = WindowType::Type1;
            let mw = rig.table.allocate_window(ty, PD, RANDOM).unwrap();
            let bind = Bind {
                mw_stag: mw,
                new_stag: mw,
                mr_stag: Stag(mr.stag),
                addr: mr.at,
                len: 64,
                access: Access::REMOTE_READ,
            };
            rig.table.bind(&bind, rig.qp.accessor()).unwrap();
            mw
        },
    ];
    let later: [Make; 2] = [
        |rig| {
            let range = rig.range(64);
            rig.table.allocate_fast(range, PD, RANDOM).unwrap()
        },
        |rig| {
            let ty = WindowType::Type2;
            rig.table.allocate_window(ty, PD, RANDOM).unwrap()
        },
    ];
    for (i, make) in earlier.into_iter().enumerate() {
        for next in later {
            let mut rig = Rig::new();
            let old = make(&mut rig);
            if rig.table.deallocate_window(old).is_err() {
                rig.table.deregister(old).unwrap();
            }
            let new = next(&mut rig);
            assert_eq!(new.index(), old.index());
            let info = rig.table.info(new).unwrap();
            let nothing = (Access::empty(), 0, 0, false);
            let info = (info.access, info.iova, info.len, info.valid);
            assert_eq!(info, nothing, "{i}");
        }
    }
}
