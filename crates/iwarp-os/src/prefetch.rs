//! Hints to the processor that memory will be accessed soon.
//!
//! Invariant of the `unsafe`: a hint is not an access and cannot fault, so any address is allowed.

use std::sync::Arc;

/// Size of a cache line in bytes.
const LINE: usize = 64;

/// Prefetches the cache line of this address.
#[inline]
pub fn line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint may have any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches the reference counts of an `Arc`, which are before its object in memory.
#[inline]
pub fn counts<T: ?Sized>(arc: &Arc<T>) {
    line(Arc::as_ptr(arc).cast::<u8>().wrapping_sub(1));
}

/// Prefetches all lines of an object.
#[inline]
pub fn object<T: ?Sized>(object: &T) {
    let from = std::ptr::from_ref(object).cast::<u8>();
    for at in (0..size_of_val(object)).step_by(LINE) {
        line(from.wrapping_add(at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_is_allowed() {
        line(std::ptr::null());
        line(std::ptr::without_provenance(usize::MAX));
        object(&[0u8; 1000]);
        object::<[u8]>(&[]);
        counts(&Arc::new(1));
    }
}
