//! Work areas: the plan and the staging buffer that a queue pair needs while data of its stream are
//! in transit.
//!
//! Areas are large, and empty between messages, so queue pairs share them. C lends an area to a
//! queue pair that is about to send or receive, and takes it back when it contains no data.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: an area was returned by
//! `rk_area_new`, and is lent to at most one queue pair, which alone uses it then.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use core::ptr::{NonNull, null_mut};
use core::slice;

use iwarp_rnic::qp::{CreateError, RxBuffer, RxPlan, RxSizes, TxPlan, TxSizes};

use crate::queue_pair::{Kvec, Qp};
use crate::runtime::{free_object, new_object};

/// Maximum number of runs that one call of the socket writes.
pub(crate) const RUNS: usize = 512;
/// Maximum number of runs that one call of the socket reads into.
const RX_RUNS: usize = 64;
/// Size 0 is the minimum, which holds any FPDU; a read takes at most 32 KiB.
const STAGING: RxSizes = RxSizes {
    staging: 0,
    read_max: 32 * 1024,
};

/// The plan holds as many bytes as one call may send (`SEND_AT_ONCE` of stream.c).
const PLAN: TxSizes = TxSizes {
    scratch: 0,
    bytes: 256 * 1024,
    pieces: RUNS,
    messages: RUNS,
    cuts: 256,
    ..TxSizes::DEFAULT
};

/// A work area, owned by C.
#[derive(Debug)]
pub struct Area {
    pub(crate) staging: Box<RxBuffer>,
    pub(crate) rx: RxPlan,
    pub(crate) tx: Box<TxPlan>,
    pub(crate) tx_runs: Vec<Kvec>,
    pub(crate) rx_runs: Vec<Kvec>,
}

impl Area {
    fn new() -> Result<Self, CreateError> {
        Ok(Self {
            staging: RxBuffer::with(STAGING)?,
            rx: RxPlan::new(RX_RUNS),
            tx: TxPlan::with(PLAN)?,
            tx_runs: allocate_runs(RUNS)?,
            rx_runs: allocate_runs(RX_RUNS)?,
        })
    }

    /// Returns `true` if the area contains no data of a stream.
    fn is_unused(&self) -> bool {
        self.tx.is_done() && self.staging.is_empty()
    }
}

fn allocate_runs(count: usize) -> Result<Vec<Kvec>, CreateError> {
    let mut runs = Vec::new();
    runs.try_reserve_exact(count)
        .map_err(|_| CreateError::OutOfMemory)?;
    runs.resize_with(count, || Kvec::EMPTY);
    Ok(runs)
}

/// An area that C has lent to a queue pair.
#[derive(Debug)]
pub(crate) struct Lent(NonNull<Area>);

impl Lent {
    /// Discards the data, because the stream is gone. The plan no longer uses registered memory.
    pub(crate) fn clear(&mut self) {
        self.tx.clear();
        self.staging.clear();
    }
}

impl Deref for Lent {
    type Target = Area;

    fn deref(&self) -> &Area {
        // SAFETY: C has lent the area to the queue pair that owns this value, and does not use the
        // area until it is returned.
        unsafe { self.0.as_ref() }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Area {
        // SAFETY: the area is lent to the queue pair that owns this value, and C serializes the
        // calls with a queue pair.
        unsafe { self.0.as_mut() }
    }
}

/// Creates an area. Returns null if there is no memory.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_area_new() -> *mut Area {
    Area::new().map_or(null_mut(), |area| new_object(move || area))
}

/// Frees an area that is not lent to a queue pair.
///
/// # Safety
/// `area` is null or came from [`rk_area_new`], and is not lent.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_area_free(area: *mut Area) {
    // SAFETY: guaranteed by the caller.
    unsafe { free_object(area) }
}

/// Lends an area to a queue pair that has none.
///
/// # Safety
/// `area` came from [`rk_area_new`]; C does not use it until [`rk_area_take_back`] returns it.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_area_lend(qp: &mut Qp, area: *mut Area) {
    qp.area = NonNull::new(area).map(Lent);
}

/// Returns `true` if the queue pair has an area.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_area_is_lent(qp: &Qp) -> bool {
    qp.area.is_some()
}

/// Returns the number of bytes of a partial FPDU if the area contains nothing else, or 0.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_area_partial(qp: &Qp) -> usize {
    match &qp.area {
        Some(area) if area.tx.is_done() => area.staging.len(),
        _ => 0,
    }
}

/// Moves the partial FPDU out of the area, which is then unused. If `to` is null, C will pass the
/// bytes again.
///
/// # Safety
/// [`rk_area_partial`] bytes at `to` are writable, or `to` is null.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_area_save(qp: &mut Qp, to: *mut u8) {
    if let Some(area) = &mut qp.area {
        let octets = area.staging.contents();
        if !to.is_null() {
            // SAFETY: the caller guarantees the room; C's memory is not part of the area.
            unsafe { octets.as_ptr().copy_to_nonoverlapping(to, octets.len()) };
        }
        area.staging.clear();
    }
}

/// Moves a saved partial FPDU into the queue pair's area. Returns `false` if the area contains
/// received data.
///
/// # Safety
/// `len` bytes at `from` are readable.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_area_restore(qp: &mut Qp, from: *const u8, len: usize) -> bool {
    // SAFETY: guaranteed by the caller.
    let octets = unsafe { slice::from_raw_parts(from, len) };
    match &mut qp.area {
        Some(area) => area.staging.restore(octets),
        None => false,
    }
}

/// Takes the area back, and returns it. Returns null if the queue pair has no area, or keeps its
/// area because it contains data of the stream.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_area_take_back(qp: &mut Qp) -> *mut Area {
    match qp.area.take_if(|area| area.is_unused()) {
        Some(Lent(area)) => area.as_ptr(),
        None => null_mut(),
    }
}
