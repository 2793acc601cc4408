//! Page-aligned anonymous memory: staging buffers, and regions that the library allocates for
//! programs.
//!
//! Invariant: a [`Mapping`] owns the pages `[ptr, ptr + mapped)`. No other code accesses them until
//! the mapping has returned their address. The mapping unmaps them exactly once, and never creates
//! references to them. Code that creates a reference must ensure that nothing else writes there.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};

/// Returns the size of a page in bytes; a power of two.
#[inline]
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Why memory could not be mapped.
#[derive(Debug)]
pub enum MappingError {
    /// The length exceeds the address space of a process.
    TooLong {
        /// The requested length in bytes.
        len: usize,
    },
    /// The kernel refused, usually with `ENOMEM`.
    Refused {
        /// The requested length in bytes.
        len: usize,
        /// The kernel's error.
        source: io::Error,
    },
}

impl fmt::Display for MappingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { len } => {
                write!(f, "{len} octets exceed the address space of a process")
            }
            Self::Refused { len, source } => write!(f, "cannot map {len} octets: {source}"),
        }
    }
}

impl std::error::Error for MappingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::TooLong { .. } => None,
            Self::Refused { source, .. } => Some(source),
        }
    }
}

impl From<MappingError> for io::Error {
    fn from(error: MappingError) -> Self {
        let kind = match &error {
            MappingError::TooLong { .. } => io::ErrorKind::InvalidInput,
            MappingError::Refused { source, .. } => source.kind(),
        };
        Self::new(kind, error)
    }
}

/// Zeroed, readable, writable memory that begins at a page boundary. The kernel allocates a page
/// when it is first accessed.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// `len` rounded up to pages; 0 for an empty mapping, which owns nothing.
    mapped: usize,
}

// SAFETY: a `Mapping` is a pair of numbers that owns pages; it gives no access to them by itself.
unsafe impl Send for Mapping {}
// SAFETY: as above; all functions on `&Mapping` only return numbers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of zeros. A length of 0 is allowed and takes no memory.
    ///
    /// # Errors
    /// [`MappingError`].
    pub fn new(len: usize) -> Result<Self, MappingError> {
        let page = page_size();
        if len == 0 {
            // A pointer that is aligned to a page, and never accessed.
            let ptr =
                NonNull::new(ptr::without_provenance_mut(page)).unwrap_or(NonNull::dangling());
            return Ok(Self {
                ptr,
                len,
                mapped: 0,
            });
        }
        let mapped = len
            .checked_next_multiple_of(page)
            .filter(|&mapped| isize::try_from(mapped).is_ok())
            .ok_or(MappingError::TooLong { len })?;
        let refused = |source: io::Error| MappingError::Refused { len, source };
        // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|error| refused(error.into()))?;
        let ptr =
            NonNull::new(start.cast()).ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { ptr, len, mapped })
    }

    /// Returns the address of the first byte. It is valid for reads and writes of
    /// [`len`](Self::len) bytes until `self` is dropped.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Returns the address as a number, and exposes its provenance: pointers may be created from
    /// the number.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    /// Returns the usable length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the length is 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.mapped > 0 {
            // SAFETY: we own these pages, and nobody may use the address any longer (see `as_ptr`).
            // The call cannot fail for a complete mapping.
            let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.mapped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::probe_range;

    #[test]
    fn mapping_is_aligned_and_zeroed() {
        let page = page_size();
        for len in [1, page - 1, page, page + 1, 3 << 20] {
            let mapping = Mapping::new(len).expect("memory");
            assert_eq!(mapping.len(), len);
            assert_eq!(mapping.addr() as usize % page, 0);
            // SAFETY: nothing else accesses the memory, and both bytes are inside the mapping.
            unsafe {
                assert_eq!(mapping.as_ptr().add(len - 1).read(), 0);
                mapping.as_ptr().write(1);
                mapping.as_ptr().add(len - 1).write(2);
            }
        }
    }

    #[test]
    fn empty_and_excessive_lengths() {
        let empty = Mapping::new(0).expect("empty");
        assert!(empty.is_empty() && (empty.addr() as usize).is_multiple_of(page_size()));
        assert!(matches!(
            Mapping::new(usize::MAX),
            Err(MappingError::TooLong { .. })
        ));
        assert!(matches!(
            Mapping::new(isize::MAX as usize),
            Err(MappingError::TooLong { .. })
        ));
        let huge = 1usize << 62;
        match Mapping::new(huge) {
            Err(MappingError::Refused { len, source }) => {
                assert_eq!(len, huge);
                assert_eq!(source.kind(), io::ErrorKind::OutOfMemory);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn drop_unmaps_pages() {
        // Large, so that no other test thread gets the same range immediately.
        let len = 1 << 30;
        let mapping = Mapping::new(len).expect("memory");
        let addr = mapping.addr();
        assert!(probe_range(addr, len as u64, true));
        drop(mapping);
        assert!(!probe_range(addr, len as u64, true));
    }
}
