//! Copies between registered memory and memory of our own.
//!
//! Invariant: callers promise that both ranges are mapped and do not overlap. The octets of registered memory may change during
//! the copy.
#![allow(unsafe_code)]

/// Copies `len` octets, one of whose sides is registered memory.
///
/// It is the machine that copies, by the platform's `memcpy` called from an assembly block, because the compiler must not draw
/// conclusions from an access to memory that somebody else may be writing. To the compiler such an access of its own would
/// be a data race, which is undefined behaviour; an assembly block only has to do what the machine allows. Each octet
/// that arrives is one that was stored there at some time.
///
/// # Safety
/// `len` octets at `from` are readable, as many at `to` are writable, and the two do not overlap.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use core::ffi::c_void;

    unsafe extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void;
    }

    // SAFETY: a call of `memcpy` by the platform's convention, with a stack that is aligned for it. The caller promises the
    // rest.
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

/// Copies octets out of registered memory.
///
/// # Safety
/// As [`copy`]; nobody else accesses `to`.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, len) }
}

/// Copies octets into registered memory.
///
/// # Safety
/// As [`copy`]; nobody writes to `from`.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[inline(always)]
pub(super) unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, len) }
}

/// As above, octet by octet, where there is no assembly. Registered memory is accessed atomically, and memory of our own is not: it may be
/// read-only, where an atomic may not be.
///
/// # Safety
/// As above.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, Ordering};

    for i in 0..len {
        // SAFETY: inside both ranges; octets are always aligned.
        unsafe {
            let octet = AtomicU8::from_ptr(from.add(i).cast_mut()).load(Ordering::Relaxed);
            to.add(i).write(octet);
        }
    }
}

/// As above, in the other direction.
///
/// # Safety
/// As above.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
pub(super) unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, Ordering};

    for i in 0..len {
        // SAFETY: inside both ranges; octets are always aligned.
        unsafe { AtomicU8::from_ptr(to.add(i)).store(from.add(i).read(), Ordering::Relaxed) };
    }
}
