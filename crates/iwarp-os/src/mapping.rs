//! Mapped memory: anonymous pages for staging buffers and for regions of programs, huge pages, and
//! files.
//!
//! Invariant: a [`Mapping`] owns the `mapped` bytes of address space that begin `skipped` bytes
//! before `ptr`. No other code of this process accesses them until the mapping has returned their
//! address. The mapping unmaps them exactly once, and never creates references to them. Code that
//! creates a reference must ensure that nothing else writes there.
//!
//! A mapped file is shared with other processes. They can change it at any time, so code must never
//! create a reference to it. They can also truncate it. Then an access raises SIGBUS, so only
//! system calls and the functions of [`guarded`](super::guarded) may access it.

use rustix::fs::{fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// Magic number of the file system for huge pages, whose block size is the size of its pages.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// Size of a transparent huge page on most machines, in bytes. Memory that is aligned to it can
/// consist of such pages entirely.
const TRANSPARENT: usize = 2 << 20;

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
    /// The range is not inside the file.
    OutsideFile {
        /// Offset of the byte after the range.
        end: u64,
        /// Length of the file in bytes.
        len: u64,
    },
    /// Not enough huge pages are reserved.
    NoHugePages {
        /// Number of pages that the mapping needs.
        pages: usize,
        /// Size of a page in bytes.
        size: usize,
    },
    /// The kernel or the processor has no huge pages of this size.
    NoSuchHugePage {
        /// Size of a page in bytes.
        size: usize,
    },
}

/// Sizes of reserved huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePage {
    /// 2 MiB.
    Mib2,
    /// 1 GiB.
    Gib1,
}

impl HugePage {
    /// Returns the size of a page in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::Mib2 => 2 << 20,
            Self::Gib1 => 1 << 30,
        }
    }

    const fn flag(self) -> MapFlags {
        match self {
            Self::Mib2 => MapFlags::HUGE_2MB,
            Self::Gib1 => MapFlags::HUGE_1GB,
        }
    }
}

impl fmt::Display for MappingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { len } => {
                write!(f, "{len} octets exceed the address space of a process")
            }
            Self::Refused { len, source } => write!(f, "cannot map {len} octets: {source}"),
            Self::OutsideFile { end, len } => {
                write!(f, "the range ends at octet {end}, and the file has {len}")
            }
            Self::NoHugePages { pages, size } => {
                write!(f, "{pages} huge pages of {size} octets are not free")
            }
            Self::NoSuchHugePage { size } => {
                write!(f, "there are no huge pages of {size} octets")
            }
        }
    }
}

impl std::error::Error for MappingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<MappingError> for io::Error {
    fn from(error: MappingError) -> Self {
        let kind = match &error {
            MappingError::TooLong { .. } | MappingError::OutsideFile { .. } => {
                io::ErrorKind::InvalidInput
            }
            MappingError::Refused { source, .. } => source.kind(),
            MappingError::NoHugePages { .. } => io::ErrorKind::OutOfMemory,
            MappingError::NoSuchHugePage { .. } => io::ErrorKind::Unsupported,
        };
        Self::new(kind, error)
    }
}

/// Mapped memory. Anonymous memory is zeroed, readable and writable, and begins at a page boundary;
/// a file's bytes may begin anywhere in a page. The kernel allocates a page when it is first
/// accessed.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// Bytes between the first page and `ptr`.
    skipped: usize,
    /// Length of the pages; 0 for an empty mapping, which owns nothing.
    mapped: usize,
    is_file: bool,
}

// SAFETY: a `Mapping` is a pair of numbers that owns pages; it gives no access to them by itself.
unsafe impl Send for Mapping {}
// SAFETY: as above; all functions on `&Mapping` only return numbers.
unsafe impl Sync for Mapping {}

fn refused(len: usize, error: Errno) -> MappingError {
    let source = error.into();
    MappingError::Refused { len, source }
}

/// Returns the size of the pages that a mapping of the file consists of, in bytes.
fn page_size_of(file: impl AsFd) -> Result<usize, Errno> {
    let system = fstatfs(file)?;
    // The types of the fields differ between architectures.
    #[allow(
        clippy::unnecessary_cast,
        reason = "the type depends on the architecture"
    )]
    let (kind, block) = (system.f_type as i64, system.f_bsize as usize);
    Ok(match kind & 0xffff_ffff {
        HUGETLBFS_MAGIC if block.is_power_of_two() => block,
        _ => page_size(),
    })
}

/// Returns the length of the pages of `size` bytes for `len` bytes.
fn pages_length(len: usize, size: usize) -> Result<usize, MappingError> {
    len.checked_next_multiple_of(size)
        .filter(|&mapped| isize::try_from(mapped).is_ok())
        .ok_or(MappingError::TooLong { len })
}

/// Maps `mapped` bytes of zeros, a multiple of the page size.
fn anonymous(mapped: usize, flags: MapFlags) -> Result<NonNull<u8>, Errno> {
    // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
    let start = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            mapped,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | flags,
        )
    }?;
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
}

impl Mapping {
    /// Maps `len` bytes of zeros. A length of 0 is allowed and takes no memory.
    ///
    /// # Errors
    /// [`MappingError::TooLong`], [`MappingError::Refused`].
    pub fn new(len: usize) -> Result<Self, MappingError> {
        if len == 0 {
            return Ok(Self::empty());
        }
        let mapped = pages_length(len, page_size())?;
        match anonymous(mapped, MapFlags::empty()) {
            Ok(ptr) => Ok(Self::private(ptr, len, mapped)),
            Err(error) => Err(refused(len, error)),
        }
    }

    /// Returns a mapping without pages. Its pointer is aligned to a page, and never accessed.
    fn empty() -> Self {
        let ptr = NonNull::new(ptr::without_provenance_mut(page_size()));
        Self::private(ptr.unwrap_or(NonNull::dangling()), 0, 0)
    }

    const fn private(ptr: NonNull<u8>, len: usize, mapped: usize) -> Self {
        Self {
            ptr,
            len,
            skipped: 0,
            mapped,
            is_file: false,
        }
    }

    /// Maps `len` bytes of zeros in reserved huge pages, and populates them: later accesses cannot
    /// fail. The mapping takes whole pages.
    ///
    /// # Errors
    /// All [`MappingError`]s of anonymous memory.
    pub fn huge(len: usize, page: HugePage) -> Result<Self, MappingError> {
        if len == 0 {
            return Ok(Self::empty());
        }
        let size = page.size();
        let mapped = pages_length(len, size)?;
        let pages = mapped / size;
        let ptr = match anonymous(mapped, MapFlags::HUGETLB | page.flag()) {
            Ok(ptr) => ptr,
            Err(Errno::NOMEM) => return Err(MappingError::NoHugePages { pages, size }),
            Err(Errno::INVAL | Errno::NOSYS) => return Err(MappingError::NoSuchHugePage { size }),
            Err(error) => return Err(refused(len, error)),
        };
        let mapping = Self::private(ptr, len, mapped);
        // The reservation does not include a limit of the control group, so an access could raise
        // SIGBUS.
        // SAFETY: the pages are owned, and populating them does not change their contents.
        match unsafe { madvise(ptr.as_ptr().cast(), mapped, Advice::LinuxPopulateWrite) } {
            // Before Linux 5.14, pages are populated when they are first accessed.
            Ok(()) | Err(Errno::INVAL) => Ok(mapping),
            Err(_) => Err(MappingError::NoHugePages { pages, size }),
        }
    }

    /// Maps `len` bytes of zeros, aligned for transparent huge pages, and asks the kernel to use
    /// them. A kernel without them uses pages of the usual size.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn transparent_huge(len: usize) -> Result<Self, MappingError> {
        if len == 0 {
            return Ok(Self::empty());
        }
        let mapped = pages_length(len, page_size())?;
        let all = mapped.checked_add(TRANSPARENT);
        let all = all.ok_or(MappingError::TooLong { len })?;
        let start = anonymous(all, MapFlags::empty()).map_err(|error| refused(len, error))?;
        let unused = start.as_ptr().align_offset(TRANSPARENT);
        // SAFETY: `unused` is below the additional length, so the pages are inside the mapping. The
        // pages before and after them are owned, and nothing refers to them. The advice does not
        // change contents.
        let ptr = unsafe {
            let ptr = start.add(unused);
            let after = ptr.add(mapped).as_ptr();
            // Neither call can fail for a part of a mapping. If one did, it would stay mapped.
            if unused > 0 {
                let _ = munmap(start.as_ptr().cast(), unused);
            }
            if unused < TRANSPARENT {
                let _ = munmap(after.cast(), TRANSPARENT - unused);
            }
            // Fails on a kernel without transparent huge pages.
            let _ = madvise(ptr.as_ptr().cast(), mapped, Advice::LinuxHugepage);
            ptr
        };
        Ok(Self::private(ptr, len, mapped))
    }

    /// Maps `len` bytes of a file at `offset`, shared with all processes that use the file. The
    /// memory is readable, and writable if `writable` is set.
    ///
    /// # Errors
    /// [`MappingError::OutsideFile`]; [`MappingError::TooLong`]; [`MappingError::Refused`]: usually
    /// the file is not open for reading, or not for writing, too.
    pub fn of_file(
        file: impl AsFd,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Result<Self, MappingError> {
        let file = file.as_fd();
        let size = fstat(file).map_err(|error| refused(len, error))?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        let end = offset.saturating_add(len as u64);
        if end > size {
            return Err(MappingError::OutsideFile { end, len: size });
        }
        if len == 0 {
            return Ok(Self::empty());
        }
        let page = page_size_of(file).map_err(|error| refused(len, error))?;
        // The remainder is less than the size of a page.
        let skipped = (offset % page as u64) as usize;
        let length = len.checked_add(skipped);
        let mapped = pages_length(length.ok_or(MappingError::TooLong { len })?, page)?;
        let rights = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        let from = offset - skipped as u64;
        // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                mapped,
                rights,
                MapFlags::SHARED,
                file,
                from,
            )
        };
        let start = start.map_err(|error| refused(len, error))?;
        // SAFETY: the first byte is inside the first page.
        let ptr = NonNull::new(unsafe { start.cast::<u8>().add(skipped) });
        Ok(Self {
            ptr: ptr.ok_or_else(|| refused(len, Errno::NOMEM))?,
            len,
            skipped,
            mapped,
            is_file: true,
        })
    }

    /// Returns `true` if the bytes are those of a file: they may change or disappear at any time.
    #[inline]
    pub const fn is_file(&self) -> bool {
        self.is_file
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
            let _ = unsafe {
                let start = self.ptr.as_ptr().sub(self.skipped);
                munmap(start.cast(), self.mapped)
            };
        }
    }
}

#[cfg(test)]
#[path = "mapping_tests.rs"]
mod tests;
