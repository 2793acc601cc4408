//! Copies between registered memory and private memory.
//!
//! Invariant: callers guarantee that both ranges are mapped and do not overlap. Registered memory
//! may change during the copy.
#![allow(unsafe_code)]

/// Copies `len` bytes; one of the two sides is registered memory.
///
/// The copy calls the platform's `memcpy` from an assembly block. Other threads may write
/// registered memory at any time. If the compiler generated the access, this would be a data race,
/// which is undefined behaviour. An assembly block is bound only by the rules of the processor:
/// each copied byte is a value that was stored in the memory.
///
/// # Safety
/// `len` bytes at `from` are readable and as many at `to` are writable; the two do not overlap.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use core::ffi::c_void;

    unsafe extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void;
    }

    // SAFETY: this calls `memcpy` by the platform's convention, with an aligned stack. The caller
    // guarantees valid ranges.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        core::arch::asm!(
            "call {memcpy}",
            memcpy = sym memcpy,
            in("rdi") to,
            in("rsi") from,
            in("rdx") len,
            clobber_abi("C"),
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::asm!(
            "bl {memcpy}",
            memcpy = sym memcpy,
            in("x0") to,
            in("x1") from,
            in("x2") len,
            clobber_abi("C"),
        );
    }
}

/// Copies bytes out of registered memory.
///
/// # Safety
/// Like [`copy`]; nobody else accesses `to`.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { copy(from, to, len) }
}

/// Copies bytes into registered memory.
///
/// # Safety
/// Like [`copy`]; nobody writes to `from`.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
pub(super) unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { copy(from, to, len) }
}

/// Copies byte by byte on platforms without the assembly version. Only the access to registered
/// memory is atomic: private memory may be read-only, which atomics do not allow.
///
/// # Safety
/// Like the assembly version.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, Ordering};

    for i in 0..len {
        // SAFETY: byte `i` is inside both ranges; bytes are always aligned.
        unsafe {
            let octet = AtomicU8::from_ptr(from.add(i).cast_mut()).load(Ordering::Relaxed);
            to.add(i).write(octet);
        }
    }
}

/// Copies byte by byte, in the other direction.
///
/// # Safety
/// Like the assembly version.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
pub(super) unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, Ordering};

    for i in 0..len {
        // SAFETY: byte `i` is inside both ranges; bytes are always aligned.
        unsafe { AtomicU8::from_ptr(to.add(i)).store(from.add(i).read(), Ordering::Relaxed) };
    }
}
