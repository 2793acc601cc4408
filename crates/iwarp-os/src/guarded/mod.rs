//! Accesses to registered memory that the program may have unmapped, protected or truncated.
//!
//! A program must keep registered memory mapped, but some do not: a registration cache misses an
//! `munmap`, or a file is truncated. A hardware RNIC has pinned the pages and does not notice. In
//! software, the access must fail, and the process and its other connections must continue.
//!
//! # How an access fails
//!
//! The access runs in an assembly function of this crate (`x86`, `aarch64`, and the CRCs in
//! `crc/x86.rs`). These functions are in one section of the library, and each is a leaf without a
//! stack frame. If the processor reports a fault inside that section, the signal handler
//! (`handler`) sets the program counter to the function `failed`, which returns 0 to the caller. No
//! other code is interrupted, so no frame with a destructor is skipped, and no lock remains held.
//!
//! A copy takes 0.8 to 1.1 times as long as `memcpy` (`cargo test -p iwarp-os --release --lib
//! copy_cost -- --ignored --nocapture`). Other architectures have no such functions, so a fault
//! ends the process.
//!
//! The alternative is a call of `memcpy` with a recovery point in thread-local storage
//! (`sigsetjmp`). It costs two stores and a look-up for each access. A fault may also interrupt a
//! sanitizer's `memcpy`, whose frames and state would be skipped.
//!
//! System calls do not need this: they fail with `EFAULT`.

use crate::clock::now_ns;
use iwarp_rnic::memory::{Fragment, HostRange, Memory};
use std::cell::Cell;

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[path = "aarch64.rs"]
mod machine;
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "x86.rs"]
mod machine;

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod handler;

/// Whether faults can be caught on this processor.
pub const IS_SUPPORTED: bool = cfg!(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(miri)
));

/// The table of registered memory of a device.
pub type MemoryTable = iwarp_rnic::memory::MemoryTable<ProcessRange>;

/// A range of this process's memory whose pages may be unmapped while it is registered.
#[derive(Debug, Default)]
pub struct ProcessRange(HostRange);

impl ProcessRange {
    /// Returns the range of `len` octets at address `addr`, or `None` if it wraps around the
    /// address space.
    ///
    /// # Safety
    /// As for [`HostRange::new`], except that the memory need not stay mapped. Until the range has
    /// been removed from every table, the program must not map other memory there, unless the RNIC
    /// and its peers may access it.
    pub const unsafe fn new(addr: u64, len: u64) -> Option<Self> {
        // SAFETY: all accesses go through the functions below, which detect unmapped memory.
        match unsafe { HostRange::new(addr, len) } {
            Some(range) => Some(Self(range)),
            None => None,
        }
    }
}

// SAFETY: a range is one fragment, which its creator has made accessible to the RNIC. Each access
// detects whether the memory is mapped.
unsafe impl Memory for ProcessRange {
    type Place = u64;

    const NOWHERE: u64 = HostRange::NOWHERE;

    #[inline]
    fn len(&self) -> u64 {
        self.0.len()
    }

    #[inline]
    fn place(&self, offset: u64) -> u64 {
        self.0.place(offset)
    }

    #[inline]
    fn after(place: u64, count: u32) -> u64 {
        HostRange::after(place, count)
    }

    fn address(place: u64) -> Option<u64> {
        HostRange::address(place)
    }

    #[inline]
    unsafe fn fragment<'t>(place: u64, len: u32) -> Fragment<'t> {
        // SAFETY: guaranteed by the caller.
        unsafe { HostRange::fragment(place, len) }
    }

    #[inline(always)]
    unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { copy(from, to, len) }
    }

    #[inline(always)]
    unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { copy(from, to, len) }
    }

    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[inline(always)]
    unsafe fn store_octet(at: *mut u8, octet: u8) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { machine::store_octet(at, octet) != 0 }
    }

    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[inline(always)]
    unsafe fn store_word(at: *mut u64, word: u64) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { machine::store_word(at, word) != 0 }
    }

    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[inline(always)]
    unsafe fn exchange(at: *mut u64, old: u64, new: u64) -> Option<u64> {
        // SAFETY: guaranteed by the caller.
        let exchanged = unsafe { machine::exchange(at, old, new) };
        (exchanged.done != 0).then_some(exchanged.found)
    }
}

/// Copies `len` bytes from or to registered memory. Returns `false` if some of them could not be
/// accessed; the others may have been copied.
///
/// # Safety
/// The RNIC and its peers may access the registered range, or it is not mapped at all. The other
/// range is mapped, and nothing else accesses it. The two ranges do not overlap.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> bool {
    // SAFETY: guaranteed by the caller. A fault ends the function. CPU support for AVX is checked
    // before it is used.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if len > machine::SHORT && std::arch::is_x86_feature_detected!("avx") {
            return machine::copy_avx(to, from, len) != 0;
        }
        machine::copy(to, from, len) != 0
    }
}

/// Copies `len` bytes from or to registered memory. A fault ends the process.
///
/// # Safety
/// Both ranges are mapped, and do not overlap. The RNIC and its peers may access the registered
/// range. Nothing else accesses the other range.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> bool {
    // SAFETY: guaranteed by the caller. `copy_out` reads one range and writes the other, so either
    // may be the registered one.
    unsafe { HostRange::copy_out(from, to, len) }
}

/// Catches faults of guarded accesses from now on, by a handler for SIGSEGV and SIGBUS.
pub fn enable() {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    handler::enable();
}

/// Keeps the handler installed: installs it again if the program has replaced it. Also unblocks the
/// two signals in this thread, because the kernel kills a process if a thread faults while it
/// blocks the signal.
///
/// It takes three system calls, so it is called rarely: when a device is opened, memory is
/// registered, and a queue pair is created or connected. [`keep_regularly`] is called when the
/// progress thread wakes, when a polling thread yields, and at each 64th read and write of a queue
/// pair.
#[cold]
pub fn keep_installed() {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    handler::keep_installed();
}

/// Calls [`keep_installed`] if this thread has not done so for a millisecond. `now` is the
/// monotonic time in nanoseconds.
pub fn keep_regularly(now: u64) {
    thread_local! {
        static LAST: Cell<Option<u64>> = const { Cell::new(None) };
    }
    // A thread that is ending has no such cell any more.
    let _ = LAST.try_with(|last| {
        if last
            .get()
            .is_none_or(|last| now.saturating_sub(last) >= KEEP_INTERVAL_NS)
        {
            last.set(Some(now));
            keep_installed();
        }
    });
}

/// How long a thread may serve queue pairs without another check, in nanoseconds. A check at each
/// wake-up cost 4 to 8 % of the latency of peers that sleep between operations.
const KEEP_INTERVAL_NS: u64 = 1_000_000;

/// Counts reads and writes of a queue pair, and calls [`keep_regularly`] at each 64th.
#[derive(Debug, Default)]
pub struct PeriodicKeep(u8);

impl PeriodicKeep {
    /// Counts one read or write.
    #[inline]
    pub fn count(&mut self) {
        self.0 = self.0.wrapping_add(1);
        if self.0.is_multiple_of(64) {
            keep_regularly(now_ns());
        }
    }
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
pub mod tests;
