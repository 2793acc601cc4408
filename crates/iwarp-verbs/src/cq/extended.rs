//! Polling of extended completion queues (`ibv_create_cq_ex(3)`): a program advances to the next
//! completion and reads its fields with functions.

use super::completion::{imm_or_stag, service_level, vendor_err, wc_flags, wc_opcode, wc_status};
use super::object::trusted;
use crate::abi::verbs::*;
use crate::border::guard::{Errno, Res, value};
use iwarp_rnic::Cqe;
use parking_lot::lock_api::RawMutex as _;
use std::ffi::c_int;

pub(super) fn fill(cq: &mut ibv_cq_ex) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_zero_u32);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_zero_u8);
    cq.read_completion_ts = Some(read_completion_ts);
    cq.read_completion_wallclock_ns = Some(read_wallclock);
    cq.read_tm_info = Some(read_tm_info);
}

unsafe fn show(c: *mut ibv_cq_ex, cqe: &Cqe) {
    (*c).wr_id = cqe.wr_id;
    (*c).status = wc_status(cqe.status);
    trusted(c).current.set(*cqe);
}

unsafe fn poll_one(c: *mut ibv_cq_ex) -> Res<()> {
    let mut cqe = [Cqe::default()];
    match trusted(c).raw.poll(&mut cqe) {
        Ok(1) => {
            show(c, &cqe[0]);
            Ok(())
        }
        Ok(_) => Err(Errno(libc::ENOENT)),
        Err(_) => Err(Errno(libc::EIO)),
    }
}

unsafe extern "C" fn start_poll(c: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    if !attr.is_null() && (*attr).comp_mask != 0 {
        return libc::EINVAL;
    }
    let cq = trusted(c);
    cq.polling.lock();
    let result = value(Err(Errno(libc::EIO)), || poll_one(c));
    match result {
        Ok(()) => 0,
        Err(e) => {
            cq.polling.unlock();
            e.0
        }
    }
}

unsafe extern "C" fn next_poll(c: *mut ibv_cq_ex) -> c_int {
    // Only the start of a batch reads the sockets.
    if value(true, || trusted(c).raw.is_empty()) {
        return libc::ENOENT;
    }
    match value(Err(Errno(libc::EIO)), || poll_one(c)) {
        Ok(()) => 0,
        Err(e) => e.0,
    }
}

unsafe extern "C" fn end_poll(c: *mut ibv_cq_ex) {
    trusted(c).polling.unlock();
}

unsafe extern "C" fn read_opcode(c: *mut ibv_cq_ex) -> u32 {
    wc_opcode(trusted(c).current.get().opcode)
}

unsafe extern "C" fn read_vendor_err(c: *mut ibv_cq_ex) -> u32 {
    vendor_err(&trusted(c).current.get())
}

unsafe extern "C" fn read_byte_len(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().byte_len
}

unsafe extern "C" fn read_imm_data(c: *mut ibv_cq_ex) -> u32 {
    imm_or_stag(&trusted(c).current.get())
}

unsafe extern "C" fn read_qp_num(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().qp_num
}

unsafe extern "C" fn read_src_qp(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().src_qp()
}

unsafe extern "C" fn read_wc_flags(c: *mut ibv_cq_ex) -> u32 {
    wc_flags(&trusted(c).current.get())
}

unsafe extern "C" fn read_zero_u32(_: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_sl(c: *mut ibv_cq_ex) -> u8 {
    service_level(&trusted(c).current.get())
}

unsafe extern "C" fn read_zero_u8(_: *mut ibv_cq_ex) -> u8 {
    0
}

unsafe extern "C" fn read_tm_info(c: *mut ibv_cq_ex, to: *mut ibv_wc_tm_info) {
    let (tag, app_ctx) = trusted(c).current.get().tag().unwrap_or_default();
    // In the sender's byte order.
    let r#priv = app_ctx.to_be();
    to.write(ibv_wc_tm_info { tag, r#priv });
}

unsafe extern "C" fn read_completion_ts(c: *mut ibv_cq_ex) -> u64 {
    trusted(c).current.get().timestamp_ns
}

unsafe extern "C" fn read_wallclock(c: *mut ibv_cq_ex) -> u64 {
    let now = |clock| {
        let mut t: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(clock, &raw mut t);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    };
    let age = now(libc::CLOCK_MONOTONIC).saturating_sub(trusted(c).current.get().timestamp_ns);
    now(libc::CLOCK_REALTIME).saturating_sub(age)
}
