//! A range of memory by address and length, laid out as the kernel's `iovec`.
//!
//! RDMA moves registered memory: the application, a peer or the RNIC may write it at any time, so
//! it must never be seen as `&[u8]`. Invariant: nothing here accesses memory through the address
//! except the `unsafe` functions, whose callers guarantee that the range is mapped, or which ask
//! the kernel. The layout equals `libc::iovec` (checked at compile time), so a list of slices is
//! passed to the kernel as it is.

use super::guarded;
use iwarp_rnic::memory::Fragment;
use std::mem::{align_of, offset_of, size_of};

/// A range of this process's memory. It is only a pair of numbers, and gives no right to access the
/// memory.
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

    /// Creates the range `[addr, addr + len)`. An address that does not fit a pointer cannot be
    /// mapped, and becomes an empty range at 0.
    #[cfg(test)]
    #[inline]
    pub fn new(addr: u64, len: usize) -> Self {
        match usize::try_from(addr) {
            Ok(addr) => Self { addr, len },
            Err(_) => Self::default(),
        }
    }

    /// Creates the range of a slice that the caller keeps alive and, for receiving, unaliased.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        Self {
            addr: bytes.as_ptr().expose_provenance(),
            len: bytes.len(),
        }
    }

    /// Creates the range of a slice that the kernel writes.
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

    /// First address, for the kernel.
    #[inline]
    pub fn as_ptr(&self) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.addr)
    }

    /// Length in octets.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the range without its first `count` octets; empty if it has no more.
    #[inline]
    pub fn after(&self, count: usize) -> Self {
        let count = count.min(self.len);
        Self {
            addr: self.addr.wrapping_add(count),
            len: self.len - count,
        }
    }

    /// Returns the first `count` octets of the range; all if it has no more.
    #[inline]
    pub fn first(&self, count: usize) -> Self {
        Self {
            addr: self.addr,
            len: self.len.min(count),
        }
    }

    /// Appends the range to `out`. Returns `false`, and appends nothing, if it is not mapped or the
    /// kernel refuses to copy for this process.
    ///
    /// # Safety
    /// The caller has the right to let the range be read during the call. It may change
    /// concurrently.
    pub unsafe fn append_if_mapped(&self, out: &mut Vec<u8>) -> bool {
        let before = out.len();
        out.resize(before + self.len, 0);
        let to = Self::of_mut(&mut out[before..]);
        let mut done = 0;
        while done < self.len {
            let (local, remote) = (to.after(done), self.after(done));
            // SAFETY: both have the layout of `iovec`. The kernel writes only to `out`, which is
            // borrowed, and checks whether the range, which the caller allows to be read, is
            // mapped.
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

    /// Appends at most `limit` bytes of the range to `out`, and returns their number. Bytes of
    /// registered memory that was unmapped are arbitrary.
    ///
    /// # Safety
    /// The range is registered memory, or mapped and readable during the call. Other threads and
    /// the kernel may write to it: the copy may then be a mix of old and new bytes, as it would be
    /// on a wire.
    pub unsafe fn append_to(&self, out: &mut Vec<u8>, limit: usize) -> usize {
        let count = self.len.min(limit);
        if count == 0 {
            return 0;
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(self.addr);
        let before = out.len();
        out.resize(before + count, 0);
        // SAFETY: the caller promises that `count` bytes may be read, and `resize` made room for as
        // many, which cannot overlap other allocations.
        unsafe { guarded::copy(from, out[before..].as_mut_ptr(), count) };
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_up_to_the_limit() {
        let source = *b"octets";
        let slice = RawSlice::of(&source);
        assert_eq!(slice.len(), 6);
        assert_eq!(slice.addr(), source.as_ptr() as u64);
        assert_eq!(slice.after(2).addr(), slice.addr() + 2);
        assert_eq!(slice.after(2).len(), 4);
        assert!(slice.after(7).is_empty());
        let mut out = vec![b'>'];
        // SAFETY: `source` lives on.
        unsafe {
            assert_eq!(slice.append_to(&mut out, 3), 3);
            assert_eq!(slice.append_to(&mut out, 0), 0);
            assert_eq!(slice.append_to(&mut out, 100), 6);
            assert_eq!(RawSlice::new(0, 0).append_to(&mut out, 9), 0);
        }
        assert_eq!(out, b">octoctets");
    }

    #[test]
    fn appends_what_is_mapped() {
        let source = *b"octets";
        let mut out = vec![b'>'];
        // SAFETY: `source` lives on. The kernel does not read at address 1.
        unsafe {
            assert!(RawSlice::of(&source).append_if_mapped(&mut out));
            assert!(!RawSlice::new(1, 3).append_if_mapped(&mut out));
            assert!(RawSlice::new(1, 0).append_if_mapped(&mut out));
        }
        assert_eq!(out, b">octets");
    }
}
