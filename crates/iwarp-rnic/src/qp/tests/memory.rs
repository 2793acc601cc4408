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
    rig.table.allocate_window(ty, PD, random).unwrap()
}

fn bind(mw: u32, new: u32, mr: &Mr, off: u64, len: u64) -> Bind {
    Bind {
        mw_stag: mw,
        new_stag: new,
        mr_stag: mr.stag,
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
fn a_type_2_window_lives_from_bind_to_invalidation() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let mw = window(&mut rig, WindowType::Type2);
    let new = mw ^ 0x5a;
    rig.post(1, SendOp::Bind(bind(mw, new, &mr, 8, 16)), &[]);
    assert!(rig.sent().is_empty());
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    assert_eq!(
        rig.table.deregister(mr.stag).unwrap_err(),
        MemoryError::Busy
    );
    assert_eq!(write(&mut rig, new, mr.at + 8, &[1; 16]), RxStatus::Ok);
    rig.recv(2, &[]);
    assert_eq!(send_inv(&mut rig, 1, new), RxStatus::Ok);
    let cqe = rig.host.recvs[0];
    assert_eq!(cqe.flags, WcFlags::WITH_INV | WcFlags::SOLICITED);
    assert_eq!(cqe.imm_or_stag, new);
    // Bound again, with another key, to another part.
    rig.post(3, SendOp::Bind(bind(new, mw, &mr, 0, 4)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, mw, mr.at, &[2; 4]), RxStatus::Ok);
    assert_eq!(write(&mut rig, new, mr.at, &[3; 4]), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::DDP_TAGGED_INVALID_STAG);
    let memory = rig.read(&mr);
    assert_eq!((&memory[..4], &memory[8..24]), (&[2; 4][..], &[1; 16][..]));
}

#[test]
fn a_valid_type_2_window_is_not_bound_again_and_a_type_1_window_is() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let one = window(&mut rig, WindowType::Type1);
    rig.post(1, SendOp::Bind(bind(one, one, &mr, 0, 8)), &[]);
    rig.post(2, SendOp::Bind(bind(one, one ^ 1, &mr, 8, 8)), &[]);
    // Of length zero: bound to nothing.
    rig.post(3, SendOp::Bind(bind(one ^ 1, one ^ 2, &mr, 0, 0)), &[]);
    rig.sent();
    assert!(rig.host.sends.iter().all(|c| c.status == WcStatus::Success));
    rig.table.deregister(mr.stag).unwrap();
    let mr = rig.mr(64, ALL);
    let two = window(&mut rig, WindowType::Type2);
    rig.post(4, SendOp::Bind(bind(two, two, &mr, 0, 8)), &[]);
    rig.post(5, SendOp::Bind(bind(two, two, &mr, 0, 8)), &[]);
    rig.sent();
    assert_eq!(
        brief(&rig.host.sends)[3..],
        [(4, WcStatus::Success), (5, WcStatus::MwBind)]
    );
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
}

#[test]
fn binds_that_are_refused() {
    let mut rig = Rig::new();
    let good = rig.mr(64, ALL);
    let unbindable = rig.mr(64, ALL.difference(Access::MW_BIND));
    let read_only = rig.mr(64, Access::MW_BIND);
    let foreign = rig.mr_in(PD + 1, 64, ALL);
    let mw = window(&mut rig, WindowType::Type2);
    let who = rig.qp.accessor();
    let cases: [(Bind, MemoryError); 7] = [
        (bind(mw, mw ^ 0x100, &good, 0, 8), MemoryError::NoSuchStag),
        (bind(mw ^ 1, mw, &good, 0, 8), MemoryError::NoSuchStag),
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
        assert_eq!(rig.table.bind(&wr, who), Err(error));
    }
    assert!(!rig.table.info(mw).unwrap().valid);
}

fn fast(rig: &mut Rig, len: u32) -> (u32, u64) {
    let range = rig.range(len);
    let at = range.addr();
    let random = rig.random();
    (rig.table.allocate_fast(range, PD, random).unwrap(), at)
}

const fn fast_register(stag: u32, offset: u64, len: u64) -> FastRegister {
    FastRegister {
        new_stag: stag,
        offset,
        len,
        iova: 0x5000,
        access: Access::LOCAL_WRITE
            .union(Access::REMOTE_WRITE)
            .union(Access::MW_BIND),
    }
}

#[test]
fn fast_registration_and_local_invalidation() {
    let mut rig = Rig::new();
    let (stag, at) = fast(&mut rig, 64);
    let new = stag ^ 0x33;
    rig.post(1, SendOp::FastRegister(fast_register(new, 16, 8)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, new, 0x5000, &[1; 8]), RxStatus::Ok);
    let mr = Mr { stag, at, len: 64 };
    assert_eq!(rig.read(&mr)[15..25], [15, 1, 1, 1, 1, 1, 1, 1, 1, 24]);
    rig.post(2, SendOp::LocalInvalidate { stag: new }, &[]);
    rig.post(3, SendOp::FastRegister(fast_register(stag, 60, 4)), &[]);
    rig.sent();
    assert_eq!(write(&mut rig, stag, 0x5000, &[2; 4]), RxStatus::Ok);
    // Valid: it has to be invalidated before it is registered again.
    rig.post(4, SendOp::FastRegister(fast_register(stag, 0, 4)), &[]);
    rig.sent();
    use WcStatus::{MwBind, Success};
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Success), (2, Success), (3, Success), (4, MwBind)]
    );
}

#[test]
fn an_invalidation_waits_until_what_it_takes_away_is_written() {
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
        lkey: stag,
    };
    rig.post(2, SendOp::Send, &[sge]);
    rig.post(3, SendOp::LocalInvalidate { stag }, &[]);
    let sent = rig.sent();
    assert_eq!(sent[0].1.len(), 20_000);
    assert_eq!(rig.host.sends.len(), 3);
    assert!(!rig.table.info(stag).unwrap().valid);
}

#[test]
fn a_window_does_not_outlive_what_it_is_bound_to() {
    let mut rig = Rig::new();
    let (stag, at) = fast(&mut rig, 64);
    let mw = window(&mut rig, WindowType::Type2);
    rig.post(1, SendOp::FastRegister(fast_register(stag, 0, 64)), &[]);
    let on_fast = Mr {
        stag,
        at: 0x5000,
        len: 64,
    };
    rig.post(2, SendOp::Bind(bind(mw, mw, &on_fast, 0, 8)), &[]);
    rig.sent();
    rig.recv(1, &[]);
    assert_eq!(send_inv(&mut rig, 1, stag), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::RDMAP_CANNOT_INVALIDATE);
    assert_eq!(rig.read(&Mr { stag, at, len: 1 }), [0]);
}

#[test]
fn an_ordinary_region_cannot_be_invalidated_locally() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.post_flags(
        1,
        SendOp::LocalInvalidate { stag: mr.stag },
        SendFlags::empty(),
        &[],
    );
    rig.sent();
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
    assert!(rig.table.info(mr.stag).unwrap().valid);
}

fn atomic(rig: &mut Rig, msn: u32, request: &AtomicRequest) -> u64 {
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

#[test]
fn atomics_of_the_peer() {
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
    // The comparison fails now: nothing changes, and the old value comes back.
    assert_eq!(atomic(&mut rig, 3, &swap), swapped);
    assert_eq!(word(&rig), swapped);
}

#[test]
fn atomics_of_our_own() {
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
    // In host order, cut as the elements say.
    let got = a.read(&sink);
    assert_eq!([&got[2..7], &got[8..11]].concat(), old);
    assert_eq!(b.read(&target)[0], old[0] + 1);
}
