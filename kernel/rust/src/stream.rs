//! Sending and receiving on the stream of a queue pair.
//!
//! Without an [area](crate::area), these functions send nothing and consume no bytes.
//!
//! Invariant: the same as in [`queue_pair`](crate::queue_pair).

use core::ffi::c_int;
use core::slice;

use iwarp_rnic::qp::{Env, Run, RxInterest, RxStatus, TxFill};

use crate::area::RUNS;
use crate::device::Device;
use crate::error::{EFAULT, EPROTO};
use crate::queue_pair::{Kvec, Qp};
use crate::runtime::CRC32C;

/// Returns `true` if there is something to send.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_wants_tx(qp: &Qp) -> bool {
    qp.area.as_ref().is_some_and(|area| !area.tx.is_done()) || qp.machine.wants_tx()
}

/// Fills the plan if all its bytes were written. Returns `enum rk_fill`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_fill(qp: &mut Qp, device: &Device) -> c_int {
    let Some(area) = &mut qp.area else {
        return 0;
    };
    if !area.tx.is_done() {
        return 1;
    }
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    match qp.machine.tx_fill(&mut area.tx, &mut env) {
        TxFill::Idle => 0,
        TxFill::Ready => 1,
        TxFill::Memory => 2,
        TxFill::More => 3,
    }
}

/// Executes the request that needs exclusive access to the memory table.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_memory(qp: &mut Qp, device: &mut Device) {
    qp.machine.tx_memory(&mut device.table, &mut qp.owner);
}

/// Stores a pointer to the plan's runs in `runs`. Returns their number, or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_runs(qp: &mut Qp, device: &Device, runs: &mut *const Kvec) -> c_int {
    let accessor = qp.machine.accessor();
    let Some(area) = qp.area.as_deref_mut() else {
        return 0;
    };
    let mut count = 0;
    let mut slots = area.tx_runs.iter_mut();
    let visit = |run: Run<'_>| {
        if let Some(slot) = slots.next() {
            *slot = Kvec::from_run(&run);
            count += 1;
        }
    };
    match area.tx.runs(&device.table, accessor, RUNS, visit) {
        Ok(()) => {
            *runs = area.tx_runs.as_ptr();
            count
        }
        Err(_) => EFAULT,
    }
}

/// Reports that the socket took `octets` bytes of the runs. The caller no longer uses the runs.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_written(qp: &mut Qp, device: &Device, octets: usize) {
    if let Some(area) = &mut qp.area {
        area.tx.release(&device.table);
        qp.machine.tx_written(&mut area.tx, octets, &mut qp.owner);
    }
}

/// Returns `true` if an invalidation or a fast registration waits until its memory is unused.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_waits_for_memory(qp: &Qp) -> bool {
    qp.machine.waits_for_memory()
}

/// Makes the next call retry a request that waits until its memory is unused.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_retry_memory(qp: &mut Qp) {
    qp.machine.retry_memory();
}

/// Stores in `runs` a pointer to the runs into which to read the next bytes. Returns their number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_plan(qp: &mut Qp, device: &Device, runs: &mut *const Kvec) -> c_int {
    let Some(area) = qp.area.as_deref_mut() else {
        return 0;
    };
    let mut count = 0;
    let mut slots = area.rx_runs.iter_mut();
    let visit = |run: Run<'_>| {
        if let Some(slot) = slots.next() {
            *slot = Kvec::from_run(&run);
            count += 1;
        }
    };
    qp.machine
        .rx_plan(&mut area.staging, &device.table, &mut area.rx, visit);
    *runs = area.rx_runs.as_ptr();
    count
}

/// Processes bytes that were read into the runs. Returns `enum rk_rx` or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_filled(qp: &mut Qp, device: &Device, mut octets: usize) -> c_int {
    let Some(area) = qp.area.as_deref_mut() else {
        return 0;
    };
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    loop {
        let status = qp
            .machine
            .rx_filled(&mut area.staging, &mut area.rx, octets, &mut env);
        // The loop terminates, because C reads at most as much as the staging buffer holds.
        if status != RxStatus::More {
            return status_code(status);
        }
        octets = 0;
    }
}

/// Processes bytes in memory. Stores in `taken` how many were consumed. Returns `enum rk_rx` or an
/// error number.
///
/// # Safety
/// `len` bytes at `ptr` are readable, or `len` is 0.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_rx_input(
    qp: &mut Qp,
    device: &Device,
    ptr: *const u8,
    len: usize,
    taken: &mut usize,
) -> c_int {
    *taken = 0;
    let Some(area) = &mut qp.area else {
        return 0;
    };
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    let mut octets: &[u8] = match len {
        0 => &[],
        // SAFETY: guaranteed by the caller.
        _ => unsafe { slice::from_raw_parts(ptr, len) },
    };
    loop {
        let (count, status) = qp.machine.rx_input(octets, &mut area.staging, &mut env);
        *taken = taken.wrapping_add(count);
        // The loop terminates at the end of the packet.
        if status != RxStatus::More {
            return status_code(status);
        }
        octets = octets.get(count..).unwrap_or(&[]);
    }
}

/// Returns whether the stream should be read now, as `enum rk_rx_interest`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_interest(qp: &Qp) -> c_int {
    match qp.machine.rx_interest() {
        RxInterest::Read => 0,
        RxInterest::Held | RxInterest::Waits => 1,
        RxInterest::Discard => 2,
        RxInterest::None => 3,
    }
}

const fn status_code(status: RxStatus) -> c_int {
    match status {
        RxStatus::Ok | RxStatus::More => 0,
        RxStatus::Held => 1,
        RxStatus::Waits => 2,
        RxStatus::Failed => EPROTO,
    }
}

/// Reports that the peer has closed its direction, after all its bytes were read.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_eof(qp: &mut Qp) {
    if let Some(area) = &mut qp.area {
        qp.machine.rx_eof(&mut area.staging, &mut qp.owner);
    }
}
