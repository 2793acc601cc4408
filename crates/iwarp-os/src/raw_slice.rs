//! A range of memory by address and length, with the layout of the kernel's `iovec`.
//!
//! The application, a peer or the RNIC may write registered memory at any time, so a `&[u8]` must
//! never refer to it. Invariant: only the `unsafe` functions access memory through the address.
//! Their callers guarantee that the range is mapped, or the kernel checks it. The layout equals
//! that of `libc::iovec` (checked at compile time), so a list of these ranges can be passed to the
//! kernel.

use super::guarded;
use iwarp_rnic::memory::Fragment;
use std::mem::{align_of, offset_of, size_of};

/// A range of this process's memory. It is only a pair of numbers; the memory need not be mapped.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RawSlice {
    addr: usize,
    len: usize,
}

const _: () = {
    assert!(size_of::<RawSlice>() == size_of::<libc::iovec>());
    assert!(align_of::<RawSlice>() == align_of::<libc::iovec>());
    assert!(offset_of!(RawSlice, addr) == offset_of!(libc::iovec, iov_base));
    assert!(offset_of!(RawSlice, len) == offset_of!(libc::iovec, iov_len));
};

impl RawSlice {
    /// Returns the range of a fragment of a plan.
    #[inline]
    pub fn of_fragment(fragment: &Fragment<'_>) -> Self {
        Self {
            addr: fragment.as_ptr().expose_provenance(),
            len: fragment.len(),
        }
    }

    /// Creates the range `[addr, addr + len)`. If the address does not fit into a pointer, the
    /// range is empty.
    #[cfg(test)]
    #[inline]
    pub fn new(addr: u64, len: usize) -> Self {
        match usize::try_from(addr) {
            Ok(addr) => Self { addr, len },
            Err(_) => Self::default(),
        }
    }

    /// Creates the range of a slice, for the kernel to read.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        Self {
            addr: bytes.as_ptr().expose_provenance(),
            len: bytes.len(),
        }
    }

    /// Creates the range of a slice, for the kernel to write.
    #[inline]
    pub fn of_mut(bytes: &mut [u8]) -> Self {
        Self {
            addr: bytes.as_mut_ptr().expose_provenance(),
            len: bytes.len(),
        }
    }

    #[cfg(test)]
    fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Returns the address of the first octet, for the kernel.
    #[inline]
    pub fn as_ptr(&self) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.addr)
    }

    /// Returns the length in octets.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the range is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the range without its first `count` octets, or an empty range if it is not longer.
    #[inline]
    pub fn after(&self, count: usize) -> Self {
        let count = count.min(self.len);
        Self {
            addr: self.addr.wrapping_add(count),
            len: self.len - count,
        }
    }

    /// Returns the first `count` octets of the range, or all if it is not longer.
    #[inline]
    pub fn first(&self, count: usize) -> Self {
        Self {
            addr: self.addr,
            len: self.len.min(count),
        }
    }

    /// Appends the contents of the range to `out`. Appends nothing and returns `false` if a part of
    /// the range is not mapped, or if the kernel refuses the system call.
    ///
    /// # Safety
    /// The caller may access the range. It may change concurrently.
    pub unsafe fn append_if_mapped(&self, out: &mut Vec<u8>) -> bool {
        let before = out.len();
        out.resize(before + self.len, 0);
        let to = Self::of_mut(&mut out[before..]);
        let mut done = 0;
        while done < self.len {
            let (local, remote) = (to.after(done), self.after(done));
            // SAFETY: both ranges have the layout of `iovec`. The kernel only writes to `out`,
            // which is borrowed, and checks whether the other range is mapped. The caller
            // guarantees that it may be read.
            let copied = unsafe {
                let local = (&raw const local).cast::<libc::iovec>();
                let remote = (&raw const remote).cast::<libc::iovec>();
                libc::process_vm_readv(libc::getpid(), local, 1, remote, 1, 0)
            };
            match usize::try_from(copied) {
                Ok(copied @ 1..) => done += copied,
                _ => {
                    out.truncate(before);
                    return false;
                }
            }
        }
        true
    }

    /// Appends at most `limit` bytes of the range to `out`, and returns their number. If registered
    /// memory was unmapped, the appended bytes are arbitrary.
    ///
    /// # Safety
    /// The range is registered memory, or mapped and readable during the call. If other threads or
    /// the kernel write to it concurrently, the copy contains old and new bytes.
    pub unsafe fn append_to(&self, out: &mut Vec<u8>, limit: usize) -> usize {
        let count = self.len.min(limit);
        if count == 0 {
            return 0;
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(self.addr);
        let before = out.len();
        out.resize(before + count, 0);
        // SAFETY: the caller guarantees that `count` bytes may be read. `resize` made room for as
        // many, which do not overlap the range.
        unsafe { guarded::copy(from, out[before..].as_mut_ptr(), count) };
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn append_to_respects_limit() {
        let source = *b"octets";
        let slice = RawSlice::of(&source);
        assert_eq!(slice.len(), 6);
        assert_eq!(slice.addr(), source.as_ptr() as u64);
        assert_eq!(slice.after(2).addr(), slice.addr() + 2);
        assert_eq!(slice.after(2).len(), 4);
        assert!(slice.after(7).is_empty());
        assert_eq!([2, 7].map(|count| slice.first(count).len()), [2, 6]);
        let mut out = vec![b'>'];
        // SAFETY: the ranges are in `source`, or empty.
        unsafe {
            assert_eq!(slice.append_to(&mut out, 3), 3);
            assert_eq!(slice.append_to(&mut out, 0), 0);
            assert_eq!(slice.append_to(&mut out, 100), 6);
            assert_eq!(RawSlice::new(0, 0).append_to(&mut out, 9), 0);
        }
        assert_eq!(out, b">octoctets");
    }

    #[test]
    fn append_if_mapped_detects_unmapped_memory() {
        let source = *b"octets";
        let mut out = vec![b'>'];
        // SAFETY: `source` may be read, and nothing is mapped at address 1.
        unsafe {
            assert!(RawSlice::of(&source).append_if_mapped(&mut out));
            assert!(!RawSlice::new(1, 3).append_if_mapped(&mut out));
            assert!(RawSlice::new(1, 0).append_if_mapped(&mut out));
        }
        assert_eq!(out, b">octets");
    }
}
