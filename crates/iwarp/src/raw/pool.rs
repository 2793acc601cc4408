//! Transmit plans and receive staging, shared by all queue pairs of a process.
//!
//! Each driving thread keeps one of each. A queue pair keeps its own only while the stream is blocked in the middle of a plan, or
//! while a part of an FPDU has come. Idle queue pairs own none.

use iwarp_rnic::AllocError;
use iwarp_rnic::qp::{IoRun, RxBuffer, RxPlan, TxPlan};
use parking_lot::Mutex;
use std::cell::Cell;
use std::thread::LocalKey;

/// Spare ones kept for all threads. More than these are freed.
const SPARE_MAX: usize = 16;
/// Runs of a receive plan: direct placement into many elements, and staging.
const RX_RUNS: usize = 40;

// They come in boxes; moving them in and out of boxes would copy them.
#[allow(clippy::vec_box)]
static TX_SPARE: Mutex<Vec<Box<TxPlan>>> = Mutex::new(Vec::new());
#[allow(clippy::vec_box)]
static RX_SPARE: Mutex<Vec<Box<RxBuffer>>> = Mutex::new(Vec::new());

thread_local! {
    static TX: Cell<Option<Box<TxPlan>>> = const { Cell::new(None) };
    static RX: Cell<Option<Box<RxBuffer>>> = const { Cell::new(None) };
    static RUNS: Cell<Vec<IoRun>> = const { Cell::new(Vec::new()) };
    static RX_PLAN: Cell<Option<RxPlan>> = const { Cell::new(None) };
}

/// What this thread keeps. Nothing if the thread is ending: a program may destroy its queue pairs in an exit handler, which
/// runs after the main thread's values are gone.
#[inline]
fn local<T: Default>(key: &'static LocalKey<Cell<T>>) -> T {
    key.try_with(Cell::take).unwrap_or_default()
}

/// An empty transmit plan.
#[inline]
pub(super) fn take_tx() -> Result<Box<TxPlan>, AllocError> {
    match local(&TX).or_else(|| TX_SPARE.lock().pop()) {
        Some(plan) => Ok(plan),
        None => TxPlan::new(),
    }
}

#[inline]
pub(super) fn give_tx(mut plan: Box<TxPlan>) {
    plan.clear();
    if let Ok(Some(other)) = TX.try_with(|cell| cell.replace(Some(plan))) {
        let mut spare = TX_SPARE.lock();
        if spare.len() < SPARE_MAX {
            spare.push(other);
        }
    }
}

/// Empty staging.
#[inline]
pub(super) fn take_rx() -> Result<Box<RxBuffer>, AllocError> {
    match local(&RX).or_else(|| RX_SPARE.lock().pop()) {
        Some(buffer) => Ok(buffer),
        None => RxBuffer::new(),
    }
}

#[inline]
pub(super) fn give_rx(mut buffer: Box<RxBuffer>) {
    buffer.clear();
    if let Ok(Some(other)) = RX.try_with(|cell| cell.replace(Some(buffer))) {
        let mut spare = RX_SPARE.lock();
        if spare.len() < SPARE_MAX {
            spare.push(other);
        }
    }
}

/// A list for the runs of a plan.
#[inline]
pub(super) fn take_runs() -> Vec<IoRun> {
    let mut runs = local(&RUNS);
    if runs.capacity() == 0 {
        runs.reserve_exact(iwarp_rnic::limits::TX_PLAN_PIECES);
    }
    runs
}

#[inline]
pub(super) fn give_runs(runs: Vec<IoRun>) {
    let _ = RUNS.try_with(|cell| cell.set(runs));
}

#[inline]
pub(super) fn take_rx_plan() -> Result<RxPlan, AllocError> {
    match local(&RX_PLAN) {
        Some(plan) => Ok(plan),
        None => RxPlan::new(RX_RUNS),
    }
}

#[inline]
pub(super) fn give_rx_plan(plan: RxPlan) {
    let _ = RX_PLAN.try_with(|cell| cell.set(Some(plan)));
}
