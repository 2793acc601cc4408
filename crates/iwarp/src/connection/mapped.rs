//! Regions of mapped memory: files and huge pages.
//!
//! A file can change at any time, by other processes. So a region of a file offers copies and
//! atomic words only, as any region that peers may write does. If the file is truncated, accesses
//! fail: those of the RNIC as if the memory were not registered, and those of the program with
//! [`MapError::NoPage`]. The pages are accessed only by system calls and by guarded functions
//! (`iwarp_os::guarded`), so no fault ends the process.

use super::endpoint::Endpoint;
use super::region::Region;
use crate::error::{Error, Result};
use crate::failure::MapError;
use crate::sys::guarded;
use crate::sys::mapping::{HugePage, Mapping, MappingError};
use crate::verbs::Pages;
use bytemuck::Pod;
use iwarp_rnic::Access;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Pages that are larger than usual: the processor looks up fewer addresses in large regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Pages that the kernel combines if it can (`madvise(2)`, `MADV_HUGEPAGE`). Nothing needs to
    /// be reserved, and the region takes only the memory that is used.
    Transparent,
    /// Reserved pages of 2 MiB. The region takes whole pages, at once.
    Mib2,
    /// Reserved pages of 1 GiB. The region takes whole pages, at once.
    Gib1,
}

impl HugePages {
    fn map(self, len: usize) -> Result<Mapping, MappingError> {
        match self {
            Self::Transparent => Mapping::transparent_huge(len),
            Self::Mib2 => Mapping::huge(len, HugePage::Mib2),
            Self::Gib1 => Mapping::huge(len, HugePage::Gib1),
        }
    }
}

impl From<MappingError> for Error {
    fn from(error: MappingError) -> Self {
        match error {
            MappingError::TooLong { .. } => Self::InvalidArgument("the region is too long"),
            MappingError::Refused { source, .. } => match source.kind() {
                io::ErrorKind::OutOfMemory => Self::OutOfMemory,
                _ => Self::Io(Arc::new(source)),
            },
            MappingError::OutsideFile { end, len } => Self::Map(MapError::OutsideFile { end, len }),
            MappingError::NoHugePages { pages, size } => {
                Self::Map(MapError::NoHugePages { pages, size })
            }
            MappingError::NoSuchHugePage { size } => Self::Map(MapError::NoSuchHugePage { size }),
        }
    }
}

/// Resolves a range of a file's bytes; returns its offset and its length.
fn resolve(file: BorrowedFd<'_>, range: impl RangeBounds<u64>) -> Result<(u64, u64)> {
    let start = match range.start_bound() {
        Bound::Included(s) => *s,
        Bound::Excluded(s) => s.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(e) => e.saturating_add(1),
        Bound::Excluded(e) => *e,
        Bound::Unbounded => {
            let len = rustix::fs::fstat(file).map_err(io::Error::from)?.st_size;
            u64::try_from(len).unwrap_or(0).max(start)
        }
    };
    match end.checked_sub(start) {
        Some(len) => Ok((start, len)),
        None => Err(Error::InvalidArgument(
            "the range of the file ends before it begins",
        )),
    }
}

/// Whether the program and peers can change a mapped file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    ReadOnly,
    ReadWrite,
}

impl Endpoint {
    /// Allocates a region of `len` zeroed elements in huge pages. Peers can access them with these
    /// rights, as in [`share`](Self::share).
    ///
    /// ```
    /// use iwarp::{Access, HugePages};
    /// # fn main() -> iwarp::Result<()> {
    /// # let endpoint = iwarp::Endpoint::local([127, 0, 0, 1].into())?;
    /// let (len, rights) = (1 << 18, Access::REMOTE_READ);
    /// let table = match endpoint.share_huge::<u64>(len, HugePages::Mib2, rights) {
    ///     // The text says how to reserve them.
    ///     Err(iwarp::Error::Map(error)) => {
    ///         eprintln!("{error}");
    ///         endpoint.share_huge(len, HugePages::Transparent, rights)?
    ///     }
    ///     table => table?,
    /// };
    /// assert_eq!(table.get(1000)?, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`share`](Self::share); [`MapError::NoHugePages`], [`MapError::NoSuchHugePage`].
    pub fn share_huge<T: Pod>(
        &self,
        len: usize,
        pages: HugePages,
        rights: Access,
    ) -> Result<Region<T>> {
        let access = Region::<T>::access(rights)?;
        let octets = len.checked_mul(size_of::<T>());
        let octets = octets.ok_or(Error::InvalidArgument("the region is too long"))?;
        let mapping = pages.map(octets)?;
        Region::of_pages(self.pd(), Pages::Mapped(mapping), len, access)
    }

    /// Maps a range of a file's bytes as a read-only region, without reading it. Peers can access
    /// it with `REMOTE_READ`, or not at all.
    ///
    /// The range may begin at any offset, and must be inside the file. The file may be closed
    /// afterwards. The region shows all changes of the file, by any process, so it is never
    /// [viewed](Region::view). If the file is truncated, an access to the missing part fails: that
    /// of a peer, or a request of this end, ends the connection, and a call fails with
    /// [`MapError::NoPage`]. The process continues, unless it replaces the handlers of SIGSEGV and
    /// SIGBUS later ([`Config::memory_guard`](crate::Config::memory_guard)).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let endpoint = iwarp::Endpoint::local([127, 0, 0, 1].into())?;
    /// let file = std::fs::File::open("/proc/self/exe")?;
    /// let program = endpoint.map_file::<u8>(&file, .., iwarp::Access::REMOTE_READ)?;
    /// assert_eq!(program.slice(1..4)?.to_vec()?, b"ELF");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Map`]: outside the file, not a whole number of elements, not open for reading, or
    /// faults are not caught; [`Error::Io`]: the file cannot be mapped;
    /// [`Error::InvalidArgument`]: other rights, or elements of size zero; [`Error::Memory`]: too
    /// many regions.
    pub fn map_file<T: Pod>(
        &self,
        file: impl AsFd,
        range: impl RangeBounds<u64>,
        rights: Access,
    ) -> Result<Region<T>> {
        self.map(file.as_fd(), range, rights, Mode::ReadOnly)
    }

    /// Maps a range of a file's bytes as a region that can be written, by this end and by peers
    /// with these rights. Writes change the file; `File::sync_data` waits until they are on disk.
    ///
    /// See [`map_file`](Self::map_file). If the file has holes, a write also fails when its file
    /// system is full.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let endpoint = iwarp::Endpoint::local([127, 0, 0, 1].into())?;
    /// # let path = std::env::temp_dir().join(format!("iwarp-doc-{}", std::process::id()));
    /// let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    /// # std::fs::remove_file(&path)?;
    /// file.set_len(1 << 20)?;
    /// let log = endpoint.map_file_mut::<u64>(&file, 4096.., iwarp::Access::REMOTE_WRITE)?;
    /// log.store(0, 1)?;
    /// file.sync_data()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`map_file`](Self::map_file); the file must be open for reading and writing.
    pub fn map_file_mut<T: Pod>(
        &self,
        file: impl AsFd,
        range: impl RangeBounds<u64>,
        rights: Access,
    ) -> Result<Region<T>> {
        self.map(file.as_fd(), range, rights, Mode::ReadWrite)
    }

    fn map<T: Pod>(
        &self,
        file: BorrowedFd<'_>,
        range: impl RangeBounds<u64>,
        rights: Access,
        mode: Mode,
    ) -> Result<Region<T>> {
        let writable = mode == Mode::ReadWrite;
        let mut access = Region::<T>::access(rights)?;
        if !writable {
            if !Access::REMOTE_READ.contains(rights) {
                return Err(Error::Map(MapError::ReadOnly));
            }
            access -= Access::LOCAL_WRITE;
        }
        if !guarded::IS_SUPPORTED || !self.pd().context().config().memory_guard {
            return Err(Error::Map(MapError::Unguarded));
        }
        let (offset, octets) = resolve(file, range)?;
        let element = size_of::<T>();
        if !octets.is_multiple_of(element as u64) {
            return Err(Error::Map(MapError::PartialElement { octets, element }));
        }
        let Ok(octets) = usize::try_from(octets) else {
            return Err(Error::InvalidArgument("the region is too long"));
        };
        let mapping = match Mapping::of_file(file, offset, octets, writable) {
            Err(MappingError::Refused { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                return Err(Error::Map(MapError::NotOpened { writable }));
            }
            mapping => mapping?,
        };
        let pages = Pages::Mapped(mapping);
        Region::of_pages(self.pd(), pages, octets / element, access)
    }
}
