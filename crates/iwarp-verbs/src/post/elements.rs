//! Common parts of work request lists: operations, flags, scatter elements.

use crate::abi::verbs::value::{SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res};
use iwarp_rnic::SendOp;
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;

pub(super) const WR_SEND: c_uint = 2;
pub(super) const WR_SEND_WITH_IMM: c_uint = 3;

pub(super) const fn fetch_add(remote_addr: u64, rkey: u32, add: u64) -> SendOp {
    SendOp::FetchAdd {
        remote_addr,
        rkey,
        add,
        mask: 0,
    }
}

pub(super) const fn cmp_swap(remote_addr: u64, rkey: u32, compare: u64, swap: u64) -> SendOp {
    SendOp::CmpSwap {
        remote_addr,
        rkey,
        compare,
        swap,
        compare_mask: u64::MAX,
        swap_mask: u64::MAX,
    }
}

pub(super) const FLAGS: c_uint = SEND_FENCE | SEND_SIGNALED | SEND_SOLICITED | SEND_INLINE;

pub(super) unsafe fn sge_bytes<'a>(sge: &ibv_sge) -> &'a [u8] {
    if sge.length == 0 {
        return &[];
    }
    std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize)
}

/// Returns the number of a request's elements. If it is negative or above `max`, fails with EINVAL,
/// and the list must not be read.
#[inline]
pub(super) fn checked_num_sge(n: c_int, max: u32) -> Res<usize> {
    // A negative number is too large when unsigned.
    match n as u32 <= max {
        true => Ok(n as usize),
        false => Err(EINVAL),
    }
}

/// Returns an initialized list.
///
/// # Safety
/// Every element is initialized.
#[inline]
pub(super) const unsafe fn assume_all_init<T>(list: &[MaybeUninit<T>]) -> &[T] {
    &*(std::ptr::from_ref(list) as *const [T])
}
