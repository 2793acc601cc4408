//! Mappings of DMA-bufs, and CPU access to them (`DMA_BUF_IOCTL_SYNC`).

use crate::border::guard::{EINVAL, Errno, Res, UNSUPPORTED};
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::null_mut;

/// `DMA_BUF_IOCTL_SYNC`, and its flags.
const SYNC: u64 = 0x4008_6200;
const SYNC_READ: u64 = 1;
const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(super) start: *mut c_void,
    len: usize,
    /// Kept for the final synchronization, because the program may close its own descriptor.
    fd: c_int,
    sync: u64,
}

impl Mapping {
    /// Maps pages of a DMA-buf. `offset` is a multiple of the page size.
    pub(super) fn new(fd: c_int, offset: u64, len: usize, write: bool) -> Res<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| EINVAL)?;
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: the new mapping does not replace another, because its address is NULL.
        let (own, start) = unsafe {
            let own = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0);
            if own < 0 {
                return Err(io::Error::last_os_error().into());
            }
            let start = libc::mmap(null_mut(), len, protection, libc::MAP_SHARED, own, offset);
            (own, start)
        };
        let failed = (start == libc::MAP_FAILED).then(io::Error::last_os_error);
        let mut mapping = Self {
            start,
            len,
            fd: own,
            sync: SYNC_READ | if write { SYNC_WRITE } else { 0 },
        };
        if let Some(error) = failed {
            mapping.len = 0;
            return Err(map_errno(&error));
        }
        mapping.synchronize(0)?;
        Ok(mapping)
    }

    /// Begins or ends CPU access, which has no effect on most machines.
    fn synchronize(&self, end: u64) -> Res<()> {
        let flags = self.sync | end;
        loop {
            // SAFETY: the request takes a pointer to 64 bits of flags.
            if unsafe { libc::ioctl(self.fd, SYNC as _, &raw const flags) } == 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                Some(error) => return Err(Errno(error)),
                None => return Err(Errno(libc::EIO)),
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping and the descriptor; the region was deregistered.
        unsafe {
            if self.len != 0 {
                let _ = self.synchronize(SYNC_END);
                libc::munmap(self.start, self.len);
            }
            libc::close(self.fd);
        }
    }
}

/// Returns the errno for a DMA-buf that cannot be mapped. Exporters that do not support mapping
/// return various errors, which are all converted to EOPNOTSUPP.
fn map_errno(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        Some(e @ (libc::ENOMEM | libc::EAGAIN)) => Errno(e),
        _ => UNSUPPORTED,
    }
}
