//! A pool of transmit plans and receive buffers (staging), shared by all queue pairs of a process.
//!
//! Each driving thread keeps one plan and one buffer. A queue pair keeps a plan only while the
//! socket has taken a part of it, and a buffer only while it holds an incomplete FPDU. Idle queue
//! pairs keep neither.

use crate::sys::guarded;
use crate::sys::process_lock::ProcessLock;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::AllocError;
use iwarp_rnic::qp::{RxBuffer, RxPlan, TxPlan};
use std::cell::Cell;
use std::thread::LocalKey;

/// Maximum number of spare plans, and of spare buffers, that all threads share.
const SPARE_MAX: usize = 16;
/// Maximum number of runs (ranges of memory) of a receive plan: for direct placement into several
/// SGEs, and for staging.
const RX_RUNS: usize = 40;
/// Maximum number of runs of a transmit plan. One system call takes at most 1024.
pub(crate) const TX_RUNS: usize = iwarp_rnic::limits::TX_PLAN_PIECES;
const _: () = assert!(RX_RUNS <= TX_RUNS);

// Callers pass boxes. Moving the contents out of the boxes would copy them.
#[allow(clippy::vec_box)]
static TX_SPARE: ProcessLock<Vec<Box<TxPlan>>> =
    ProcessLock::new("conn::pool::TX_SPARE", Vec::new());
#[allow(clippy::vec_box)]
static RX_SPARE: ProcessLock<Vec<Box<RxBuffer>>> =
    ProcessLock::new("conn::pool::RX_SPARE", Vec::new());

thread_local! {
    static TX: Cell<Option<Box<TxPlan>>> = const { Cell::new(None) };
    static RX: Cell<Option<Box<RxBuffer>>> = const { Cell::new(None) };
    static RUNS: Cell<Vec<RawSlice>> = const { Cell::new(Vec::new()) };
}

#[cfg(test)]
thread_local! {
    pub(crate) static FAILS: Cell<bool> = const { Cell::new(false) };
}

/// Takes this thread's value. Returns the default if thread-local values were dropped already: a
/// program may destroy its queue pairs in an exit handler, after the main thread's values.
#[inline]
fn take_local<T: Default>(key: &'static LocalKey<Cell<T>>) -> T {
    key.try_with(Cell::take).unwrap_or_default()
}

#[inline]
pub(crate) fn take_tx() -> Result<Box<TxPlan>, AllocError> {
    #[cfg(test)]
    if FAILS.get() {
        return Err(AllocError);
    }
    match take_local(&TX).or_else(|| TX_SPARE.lock().pop()) {
        Some(plan) => Ok(plan),
        None => TxPlan::new(),
    }
}

#[inline]
pub(crate) fn give_tx(mut plan: Box<TxPlan>) {
    plan.clear();
    if let Ok(Some(other)) = TX.try_with(|cell| cell.replace(Some(plan))) {
        let mut spare = TX_SPARE.lock();
        if spare.len() < SPARE_MAX {
            spare.push(other);
        }
    }
}

#[inline]
pub(crate) fn take_rx() -> Result<Box<RxBuffer>, AllocError> {
    match take_local(&RX).or_else(|| RX_SPARE.lock().pop()) {
        Some(buffer) => Ok(buffer),
        None => RxBuffer::new(),
    }
}

#[inline]
pub(crate) fn give_rx(mut buffer: Box<RxBuffer>) {
    buffer.clear();
    if let Ok(Some(other)) = RX.try_with(|cell| cell.replace(Some(buffer))) {
        let mut spare = RX_SPARE.lock();
        if spare.len() < SPARE_MAX {
            spare.push(other);
        }
    }
}

#[inline]
pub(crate) fn take_runs() -> Vec<RawSlice> {
    let mut runs = take_local(&RUNS);
    runs.clear();
    if runs.capacity() == 0 {
        // This is the thread's first drive. The thread may block the signals of memory faults,
        // which this call unblocks.
        guarded::keep_installed();
        runs.reserve_exact(TX_RUNS);
    }
    runs
}

#[inline]
pub(crate) fn give_runs(runs: Vec<RawSlice>) {
    let _ = RUNS.try_with(|cell| cell.set(runs));
}

#[inline]
pub(crate) const fn rx_plan() -> RxPlan {
    RxPlan::new(RX_RUNS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_run_list_is_empty_with_capacity() {
        for _ in 0..2 {
            let mut runs = take_runs();
            assert!(runs.is_empty() && runs.capacity() >= TX_RUNS);
            runs.push(RawSlice::of(b"run"));
            give_runs(runs);
        }
    }

    #[test]
    fn thread_reuses_returned_memory() {
        let plan = take_tx().unwrap();
        let address = &raw const *plan;
        give_tx(plan);
        let second = take_tx().unwrap();
        assert!(std::ptr::eq(address, &raw const *second));
        give_tx(second);
        assert!(TX.take().is_some());

        let buffer = take_rx().unwrap();
        let address = &raw const *buffer;
        give_rx(buffer);
        let second = take_rx().unwrap();
        assert!(std::ptr::eq(address, &raw const *second));
        give_rx(second);
        assert!(RX.take().is_some());

        let runs = take_runs();
        let address = runs.as_ptr();
        give_runs(runs);
        let second = take_runs();
        assert_eq!(second.as_ptr(), address);
        give_runs(second);
        assert!(RUNS.take().capacity() >= TX_RUNS);
    }
}
