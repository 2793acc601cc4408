//! Users of memory: an invalidation completes when the last user is gone, and deregistration is
//! refused until then.

use super::harness::*;
use crate::memory::{AccessError, Crc32c, HostRange, MemoryError, Users, WindowType};
use crate::qp::{RxInterest, RxPlan, RxStatus, StreamConfig, TxFill};
use crate::{
    Access, Bind, FastRegister, PostError, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use std::vec;
use std::vec::Vec;

const PLAIN: StreamConfig = StreamConfig {
    crc: false,
    emss: 65483,
    ..STREAM
};

/// Returns a valid fast-registration region: its STag, and its address, which is its tagged offset.
fn fast_region(rig: &mut Rig, len: u32) -> (Stag, u64) {
    let range: HostRange = rig.range(len);
    let at = range.addr();
    let random = rig.random();
    let stag = rig.table.allocate_fast(range, PD, random).unwrap();
    register(rig, stag, at, len).unwrap();
    (stag, at)
}

fn register(rig: &Rig, stag: Stag, at: u64, len: u32) -> Result<(), MemoryError> {
    let wr = FastRegister {
        new_stag: stag,
        offset: 0,
        len: u64::from(len),
        iova: at,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        pages: None,
    };
    rig.table.fast_register(&wr, PD)
}

/// Starts a direct read to memory, and returns its plan.
fn start_direct_read(rig: &mut Rig, stag: Stag, at: u64) -> RxPlan {
    let ulpdu = tagged(Opcode::WRITE, stag.0, at, true, &vec![9; 40_000]);
    let fpdu = rig.fpdu(&ulpdu);
    assert_eq!(rig.rx(&fpdu[..100]), RxStatus::Ok);
    let mut plan = RxPlan::new(8);
    rig.qp
        .rx_plan(&mut rig.buffer, &rig.table, &mut plan, |_| ());
    assert!(plan.direct() > 30_000);
    plan
}

fn invalidate(rig: &mut Rig, wr_id: u64, stag: Stag) {
    let wr = SendWr::new(wr_id, SendOp::LocalInvalidate { stag }, &[]).signaled();
    rig.qp.post_send(&wr, &mut rig.host).unwrap();
}

fn send_inv(msn: u32, stag: Stag) -> Vec<u8> {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND_INV,
        invalidate_stag: stag,
        qn: 0,
        msn,
        mo: 0,
    });
    let mut octets = vec![0; header.len()];
    header.emit(&mut octets);
    octets
}

#[test]
fn invalidation_waits_for_direct_read() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 65536);
    let mut plan = start_direct_read(&mut a, stag, at);
    invalidate(&mut a, 1, stag);
    a.post(2, SendOp::Send, &[]);
    assert_eq!(a.fill(), TxFill::Idle);
    // The STag is invalid immediately, but the request is not done, and later ones wait.
    assert!(!a.table.info(stag).unwrap().valid);
    assert_eq!(brief(&a.host.sends), []);
    assert!(a.qp.waits_for_memory() && !a.qp.wants_tx());
    assert_eq!(register(&a, stag, at, 64), Err(MemoryError::InUse));
    assert!(!a.table.take_unused());
    // The read is finished.
    plan.release(&a.table);
    assert!(a.table.take_unused() && !a.table.take_unused());
    a.qp.retry_memory();
    assert!(a.qp.wants_tx());
    assert_eq!(a.fill(), TxFill::Ready);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
    assert!(!a.qp.waits_for_memory());
    assert_eq!(register(&a, stag, at, 64), Ok(()));
    // The next request invalidates its own STag.
    let (other, _) = fast_region(&mut a, 64);
    invalidate(&mut a, 3, other);
    a.sent();
    let done = [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success));
    let signaled = brief(&a.host.sends);
    assert_eq!(signaled, done);
    assert!(!a.table.info(other).unwrap().valid);
    assert!(a.table.info(stag).unwrap().valid);
}

#[test]
fn processing_ends_use_by_read() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 65536);
    let mut plan = start_direct_read(&mut a, stag, at);
    assert_eq!(a.table.deregister(stag).err(), Some(MemoryError::InUse));
    let mut env = crate::qp::Env {
        memory: &a.table,
        crc32c: Crc32c::new(iwarp_proto::crc32c::append),
        host: &mut a.host,
    };
    let status = a.qp.rx_filled(&mut a.buffer, &mut plan, 0, &mut env);
    assert_eq!(status, RxStatus::Ok);
    // Between two reads a partial FPDU uses no memory, so the peer cannot delay the invalidation.
    invalidate(&mut a, 1, stag);
    assert_eq!(a.fill(), TxFill::Idle);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
    assert!(a.table.deregister(stag).is_ok());
}

#[test]
fn ongoing_write_uses_memory_once() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 200_000);
    let sge = Sge {
        addr: at,
        len: 190_000,
        lkey: stag.0,
    };
    let wr = SendWr::write(1, 0x1000, 77, core::slice::from_ref(&sge));
    a.qp.post_send(&wr, &mut a.host).unwrap();
    assert_eq!(a.fill(), TxFill::Ready);
    let accessor = a.qp.accessor();
    for _ in 0..2 {
        // A second call of `runs` after a partial write does not add a second user.
        let mut runs = 0;
        a.plan.runs(&a.table, accessor, 512, |_| runs += 1).unwrap();
        assert!(runs > 5);
    }
    assert_eq!(a.table.deregister(stag).err(), Some(MemoryError::InUse));
    // The program invalidates the STag meanwhile.
    assert_eq!(a.table.invalidate(stag, accessor, false), Ok(false));
    a.plan.release(&a.table);
    assert!(a.table.take_unused());
    let refused = a.plan.runs(&a.table, accessor, 512, |_| ());
    assert!(refused.is_err());
    a.plan.release(&a.table);
    assert!(a.table.deregister(stag).is_ok());
}

#[test]
fn send_with_invalidate_waits_for_users() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 65536);
    let sge = Sge {
        addr: at,
        len: 40_000,
        lkey: stag.0,
    };
    let wr = SendWr::write(1, 0x1000, 77, core::slice::from_ref(&sge));
    a.qp.post_send(&wr, &mut a.host).unwrap();
    assert_eq!(a.fill(), TxFill::Ready);
    let accessor = a.qp.accessor();
    // Another thread is in `sendmsg`.
    a.plan.runs(&a.table, accessor, 512, |_| ()).unwrap();
    a.recv(5, &[]);
    a.recv(6, &[]);
    let first = a.fpdu(&send_inv(1, stag));
    let second = a.fpdu(&send(2, &[]));
    assert_eq!(a.rx(&[first, second].concat()), RxStatus::Waits);
    assert_eq!(a.qp.rx_interest(), RxInterest::Waits);
    assert!(a.qp.waits_for_memory() && !a.table.info(stag).unwrap().valid);
    assert_eq!(brief(&a.host.recvs), []);
    assert_eq!(a.offer_again(), RxStatus::Waits);
    a.plan.release(&a.table);
    assert!(a.table.take_unused());
    a.qp.retry_memory();
    assert_eq!(a.offer_again(), RxStatus::Ok);
    let done: Vec<_> = a.host.recvs.iter().map(|c| (c.wr_id, c.flags)).collect();
    assert_eq!(done, [(5, WcFlags::WITH_INV), (6, WcFlags::empty())]);
    assert_eq!(a.host.recvs[0].imm_or_stag, stag.0);
    assert_eq!(a.qp.rx_interest(), RxInterest::Read);
}

/// Messages that arrive in one piece with a waiting message also wait. The first FPDU of a stream
/// is processed separately, so another message is sent first.
#[test]
fn messages_after_pending_invalidation_wait() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 64);
    let accessor = a.qp.accessor();
    let mut user = Users::new([Stag(0)]);
    let used = user.check(&a.table, (stag, at, 8), Access::REMOTE_WRITE, accessor);
    assert!(used.is_ok());
    let target = a.mr(8, ALL);
    for wr_id in 5..8 {
        a.recv(wr_id, &[]);
    }
    let write = tagged(Opcode::WRITE, target.stag, target.at, true, &[9; 8]);
    let ulpdus = [send(1, &[]), send_inv(2, stag), send(3, &[]), write];
    let octets = ulpdus.map(|ulpdu| a.fpdu(&ulpdu)).concat();
    assert_eq!(a.rx(&octets), RxStatus::Waits);
    assert_eq!(brief(&a.host.recvs), [(5, WcStatus::Success)]);
    assert_eq!(a.read(&target), [0, 1, 2, 3, 4, 5, 6, 7]);
    user.release(&a.table);
    a.qp.retry_memory();
    assert_eq!(a.offer_again(), RxStatus::Ok);
    let all = [5, 6, 7].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(brief(&a.host.recvs), all);
    assert_eq!(a.read(&target), [9; 8]);
}

/// Posts a Read with Invalidate of `len` octets into a fast-registration region, and sends the
/// request. Returns the STag and the response.
fn send_read_with_invalidate(rig: &mut Rig, wr_id: u64, len: u32) -> (Stag, Vec<u8>) {
    let (stag, at) = fast_region(rig, len);
    let sink = Sge {
        addr: at,
        len,
        lkey: stag.0,
    };
    rig.post(wr_id, READ_INV, &[sink]);
    (stag, response_to(rig, len))
}

fn response_to(rig: &mut Rig, len: u32) -> Vec<u8> {
    let (_, payload) = rig.sent().remove(0);
    let request = ReadRequest::parse(&payload).unwrap();
    let sink = request.sink_stag.0;
    let payload = vec![7; len as usize];
    let ulpdu = tagged(Opcode::READ_RESPONSE, sink, 0, true, &payload);
    rig.fpdu(&ulpdu)
}

const READ_INV: SendOp = SendOp::ReadInv {
    remote_addr: 0x1000,
    rkey: 77,
};

#[test]
fn read_with_invalidate_invalidates_sink() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, answer) = send_read_with_invalidate(&mut a, 1, 300);
    // The sink's STag is valid until the last octet has arrived.
    assert_eq!(a.rx(&answer[..200]), RxStatus::Ok);
    assert!(a.table.info(stag).unwrap().valid);
    assert_eq!(a.rx(&answer[200..]), RxStatus::Ok);
    assert!(!a.table.info(stag).unwrap().valid);
    let done: Vec<_> = a.host.sends.iter().map(|c| (c.wr_id, c.opcode)).collect();
    assert_eq!(done, [(1, WcOpcode::Read)]);
    assert_eq!(a.host.sends[0].status, WcStatus::Success);
    assert_eq!(a.host.sends[0].byte_len, 300);
    // A plain Read does not invalidate its sink.
    let mr = a.mr(64, ALL);
    a.post(
        2,
        SendOp::Read {
            remote_addr: 0,
            rkey: 77,
        },
        &[mr.sge()],
    );
    let answer = response_to(&mut a, 64);
    assert_eq!(a.rx(&answer), RxStatus::Ok);
    assert!(a.table.info(Stag(mr.stag)).unwrap().valid);
    assert_eq!(brief(&a.host.sends)[1..], [(2, WcStatus::Success)]);
}

#[test]
fn read_with_invalidate_waits_for_users() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, answer) = send_read_with_invalidate(&mut a, 1, 300);
    let accessor = a.qp.accessor();
    // Another queue pair uses the memory in a system call.
    let mut user = Users::new([Stag(0)]);
    let at = a.table.info(stag).unwrap().iova;
    let used = user.check(&a.table, (stag, at, 8), Access::LOCAL_WRITE, accessor);
    assert!(used.is_ok());
    a.recv(6, &[]);
    let later = a.fpdu(&send(1, &[]));
    assert_eq!(a.rx(&[answer, later].concat()), RxStatus::Waits);
    assert_eq!(a.qp.rx_interest(), RxInterest::Waits);
    assert!(a.qp.waits_for_memory() && !a.table.info(stag).unwrap().valid);
    // The Read is not complete, and later messages are not delivered.
    assert_eq!(brief(&a.host.sends), []);
    assert_eq!(brief(&a.host.recvs), []);
    assert_eq!(a.offer_again(), RxStatus::Waits);
    user.release(&a.table);
    assert!(a.table.take_unused());
    a.qp.retry_memory();
    assert_eq!(a.offer_again(), RxStatus::Ok);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
    assert_eq!(brief(&a.host.recvs), [(6, WcStatus::Success)]);
    assert!(!a.qp.waits_for_memory());
}

#[test]
fn stream_end_flushes_waiting_read() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, answer) = send_read_with_invalidate(&mut a, 1, 300);
    let accessor = a.qp.accessor();
    let mut user = Users::new([Stag(0)]);
    let at = a.table.info(stag).unwrap().iova;
    let used = user.check(&a.table, (stag, at, 8), Access::LOCAL_WRITE, accessor);
    assert!(used.is_ok());
    assert_eq!(a.rx(&answer), RxStatus::Waits);
    a.qp.stream_failed(&mut a.host);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Flushed)]);
    assert!(!a.qp.waits_for_memory());
    user.release(&a.table);
    assert_eq!(brief(&a.host.sends).len(), 1);
}

#[test]
fn read_with_invalid_sink_fails() {
    // The program has already invalidated the STag, or the STag belongs to an ordinary region.
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, answer) = send_read_with_invalidate(&mut a, 1, 64);
    let accessor = a.qp.accessor();
    assert_eq!(a.table.invalidate(stag, accessor, false), Ok(true));
    assert_eq!(a.rx(&answer), RxStatus::Failed);
    assert_eq!(a.host.sends[0].status, WcStatus::LocalProtection);

    let mut a = Rig::with(Default::default(), PLAIN);
    let mr = a.mr(64, ALL);
    a.post(1, READ_INV, &[mr.sge()]);
    let answer = response_to(&mut a, 64);
    assert_eq!(a.rx(&answer), RxStatus::Failed);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::LocalProtection)]);
    assert!(a.table.info(Stag(mr.stag)).unwrap().valid);
}

#[test]
fn read_with_invalidate_has_one_element() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 64);
    let sink = Sge {
        addr: at,
        len: 8,
        lkey: stag.0,
    };
    for sinks in [&[][..], &[sink, sink]] {
        let wr = SendWr::new(1, READ_INV, sinks);
        let refused = a.qp.post_send(&wr, &mut a.host);
        assert_eq!(refused, Err(PostError::InvalidRequest));
    }
    let wr = SendWr::new(1, READ_INV, core::slice::from_ref(&sink));
    assert_eq!(a.qp.post_send(&wr, &mut a.host), Ok(()));
}

#[test]
fn stream_end_flushes_waiting_invalidation() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 65536);
    let mut plan = start_direct_read(&mut a, stag, at);
    invalidate(&mut a, 1, stag);
    assert_eq!(a.fill(), TxFill::Idle);
    a.qp.stream_failed(&mut a.host);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Flushed)]);
    plan.release(&a.table);
    assert_eq!(register(&a, stag, at, 64), Ok(()));
}

#[test]
fn fast_registration_needs_no_table_lock() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 64);
    assert_eq!(a.table.invalidate(stag, a.qp.accessor(), false), Ok(true));
    let wr = FastRegister {
        new_stag: stag,
        offset: 0,
        len: 64,
        iova: at,
        access: Access::LOCAL_WRITE,
        pages: None,
    };
    let wr = SendWr::new(1, SendOp::FastRegister(wr), &[]).with_flags(SendFlags::SIGNALED);
    a.qp.post_send(&wr, &mut a.host).unwrap();
    a.post(2, SendOp::Send, &[]);
    // One call executes the registration and plans the Send.
    assert_eq!(a.fill(), TxFill::Ready);
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
    assert!(a.table.info(stag).unwrap().valid);
}

#[test]
fn planned_memory_is_not_replaced() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let mr = a.mr(100_000, ALL);
    let write = SendOp::Write {
        remote_addr: 0,
        rkey: 7,
    };
    a.post(1, write, &[mr.sge()]);
    assert_eq!(a.fill(), TxFill::Ready);
    let accessor = a.qp.accessor();
    a.plan.runs(&a.table, accessor, 512, |_| ()).unwrap();
    let stag = Stag(mr.stag);
    let changed = a.table.reregister(stag, None, None, Some(Access::empty()));
    assert_eq!(changed.err(), Some(MemoryError::InUse));
    a.plan.release(&a.table);
    let changed = a.table.reregister(stag, None, None, Some(Access::empty()));
    assert!(changed.is_ok());
}

/// Returns a region of 64 KiB, and a bind of a window to all of it.
fn bound_window(a: &mut Rig, kind: WindowType) -> (Mr, Bind) {
    let mr = a.mr(65536, ALL);
    let random = a.random();
    let mw = a.table.allocate_window(kind, PD, random);
    let mw = mw.unwrap();
    let bind = Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: Stag(mr.stag),
        addr: mr.at,
        len: 65536,
        access: Access::REMOTE_WRITE,
    };
    a.table.bind(&bind, a.qp.accessor()).unwrap();
    (mr, bind)
}

#[test]
fn window_is_kept_during_direct_read() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (mr, bind) = bound_window(&mut a, WindowType::Type1);
    let (mw, accessor) = (bind.mw_stag, a.qp.accessor());
    let mut plan = start_direct_read(&mut a, mw, mr.at);
    let refused = a.table.deallocate_window(mw);
    assert_eq!(refused, Err(MemoryError::InUse));
    assert_eq!(a.table.bind(&bind, accessor), Err(MemoryError::InUse));
    plan.release(&a.table);
    assert_eq!(a.table.deallocate_window(mw), Ok(()));
    assert!(a.table.deregister(Stag(mr.stag)).is_ok());
}

/// A bind of a type 1 window replaces the earlier bind by itself.
#[test]
fn bind_waits_for_direct_read() {
    assert_bind_waits(WindowType::Type1);
    assert_bind_waits(WindowType::Type2);
}

fn assert_bind_waits(kind: WindowType) {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (mr, bind) = bound_window(&mut a, kind);
    let (mw, accessor) = (bind.mw_stag, a.qp.accessor());
    let mut plan = start_direct_read(&mut a, mw, mr.at);
    if kind == WindowType::Type2 {
        assert_eq!(a.table.invalidate(mw, accessor, false), Ok(false));
    }
    a.post(1, SendOp::Bind(bind), &[]);
    a.post(2, SendOp::Send, &[]);
    assert_eq!(a.fill(), TxFill::Memory);
    a.qp.tx_memory(&mut a.table, &mut a.host);
    // The bind is not refused, and the later Send waits as well.
    assert!(a.qp.waits_for_memory() && !a.qp.wants_tx());
    assert_eq!(brief(&a.host.sends), []);
    assert!(!a.table.info(mw).unwrap().valid);
    plan.release(&a.table);
    assert!(a.table.take_unused());
    a.qp.retry_memory();
    assert_eq!(a.sent().len(), 1);
    let done = [1, 2].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(brief(&a.host.sends), done);
    assert!(a.table.info(mw).unwrap().valid);
    // Only the second bind holds the region.
    assert_eq!(a.table.deallocate_window(mw), Ok(()));
    assert!(a.table.deregister(Stag(mr.stag)).is_ok());
}

#[test]
fn registration_waits_for_direct_read() {
    let mut a = Rig::with(Default::default(), PLAIN);
    let (stag, at) = fast_region(&mut a, 65536);
    let mut plan = start_direct_read(&mut a, stag, at);
    let accessor = a.qp.accessor();
    assert_eq!(a.table.invalidate(stag, accessor, false), Ok(false));
    let wr = FastRegister {
        new_stag: stag,
        offset: 0,
        len: 64,
        iova: at,
        access: Access::LOCAL_WRITE,
        pages: None,
    };
    a.post(1, SendOp::FastRegister(wr), &[]);
    a.post(2, SendOp::Send, &[]);
    assert_eq!(a.fill(), TxFill::Idle);
    assert!(a.qp.waits_for_memory() && !a.qp.wants_tx());
    assert_eq!(brief(&a.host.sends), []);
    plan.release(&a.table);
    assert!(a.table.take_unused());
    a.qp.retry_memory();
    assert_eq!(a.sent().len(), 1);
    let done = [1, 2].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(brief(&a.host.sends), done);
    assert!(a.table.info(stag).unwrap().valid);
}

/// A zero-length access is not checked, and nobody waits for its end.
#[test]
fn empty_access_has_no_user() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let (stag, accessor) = (Stag(mr.stag), rig.qp.accessor());
    let mut user = Users::new([Stag(0)]);
    for at in [mr.at, 0] {
        let span = user.check(&rig.table, (stag, at, 0), ALL, accessor);
        assert!(span.unwrap().unwrap().is_empty());
        assert!(user.is_empty());
    }
    assert!(
        user.check(&rig.table, (stag, mr.at, 8), ALL, accessor)
            .is_ok()
    );
    assert!(!user.is_empty());
    user.release(&rig.table);
    assert!(user.is_empty());
    assert!(rig.table.deregister(stag).is_ok());
    let span = user.check(&rig.table, (stag, mr.at, 0), ALL, accessor);
    assert!(span.unwrap().unwrap().is_empty());
}

/// A blocked stream uses no memory, so a region may be registered again under a plan with the same
/// STag. The rest of a partly sent message must not come from the new registration.
#[test]
fn rest_of_message_ignores_new_registration() {
    const LEN: u32 = 9000;
    for written in [1, 100, 5000, 8999] {
        // The new registration contains the rest of the message, but not all of it.
        for (begin, len) in [(written, LEN - written), (0, LEN - 1), (1, LEN - 1)] {
            let mut a = Rig::with(Default::default(), PLAIN);
            let (stag, at) = fast_region(&mut a, LEN);
            let sge = Sge {
                addr: at,
                len: LEN,
                lkey: stag.0,
            };
            a.post(1, SendOp::Send, &[sge]);
            assert_eq!(a.fill(), TxFill::Ready);
            // The length field and the header precede the payload.
            a.write_some(20 + written as usize);
            let accessor = a.qp.accessor();
            assert_eq!(a.table.invalidate(stag, accessor, false), Ok(true));
            let wr = FastRegister {
                new_stag: stag,
                offset: u64::from(begin),
                len: u64::from(len),
                iova: at + u64::from(begin),
                access: Access::LOCAL_WRITE,
                pages: None,
            };
            assert_eq!(a.table.fast_register(&wr, PD), Ok(()));
            let refused = Err(AccessError::BaseOrBounds);
            let copied = a.plan.copy_to(&a.table, accessor, &mut [0; 64]);
            assert_eq!(copied.map(drop), refused, "{written} {begin}");
            assert_eq!(a.plan.runs(&a.table, accessor, 512, |_| ()), refused);
            assert_eq!(a.plan.all_runs(&a.table, accessor, |_| ()), refused);
            // The refused accesses have added no user.
            assert_eq!(a.table.invalidate(stag, accessor, false), Ok(true));
        }
    }
}
