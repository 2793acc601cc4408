//! The atomics and locks of the engine: those of `std`, or replacements by a model checker. `loom`
//! checks the smallest protocols, `shuttle` the whole engine (`crates/iwarp-sim/threads`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};

#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(not(shuttle))]
pub(crate) use parking_lot as parking;
#[cfg(not(shuttle))]
pub(crate) use std::sync::atomic::AtomicBool;
#[cfg(not(shuttle))]
pub(crate) use std::thread::yield_now;
#[cfg(not(shuttle))]
pub(crate) use std::thread_local;

#[cfg(shuttle)]
pub(crate) use crate::sync::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, fence,
    parking, thread_local, yield_now,
};
