//! Registration of DMA-bufs (`ibv_reg_dmabuf_mr(3)`): the buffer is mapped, and the mapping is registered.
//!
//! A DMA-buf of a GPU or of a capture device can be registered if its exporter lets programs map it. What
//! was mapped here is unmapped when the region is deregistered.

use crate::abi::verbs::*;
use crate::guard::{EINVAL, Errno, Res, UNSUPPORTED, pointer};
use crate::mr::{self, Mr};
use iwarp_rnic::Access;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::ptr::null_mut;

/// Rights that the kernel allows for a DMA-buf; the last one is `IBV_ACCESS_RELAXED_ORDERING`.
const RIGHTS: c_uint = 0xf | 1 << 20;
/// `DMA_BUF_MAGIC`, the type of the file system that DMA-bufs are on.
const FILE_SYSTEM: i64 = 0x444d_4142;
/// `DMA_BUF_IOCTL_SYNC`, and its flags.
const SYNC: u64 = 0x4008_6200;
const SYNC_READ: u64 = 1;
const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;

/// A mapped part of a DMA-buf.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut c_void,
    len: usize,
    /// Kept for the last synchronization, because the program may close its own descriptor.
    fd: c_int,
    sync: u64,
}

impl Mapping {
    /// Maps pages of a DMA-buf. `offset` is a multiple of the page size.
    fn new(fd: c_int, offset: u64, len: usize, write: bool) -> Res<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| EINVAL)?;
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: the descriptor is duplicated, and a new mapping replaces nothing.
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
            return Err(refused(&error));
        }
        mapping.synchronize(0)?;
        Ok(mapping)
    }

    /// Begins or ends the processor's access. On most machines this does nothing.
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
        // SAFETY: the mapping and the descriptor are ours, and the region was deregistered before.
        unsafe {
            if self.len != 0 {
                let _ = self.synchronize(SYNC_END);
                libc::munmap(self.start, self.len);
            }
            libc::close(self.fd);
        }
    }
}

/// Returns the reason why a DMA-buf cannot be mapped. Exporters that do not allow it have several
/// errors for that, and to the program they mean that this device cannot register the buffer.
fn refused(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        Some(e @ (libc::ENOMEM | libc::EAGAIN)) => Errno(e),
        _ => UNSUPPORTED,
    }
}

/// Returns the size of a DMA-buf.
///
/// # Errors
/// As the kernel's: EBADF if the descriptor is not open, EINVAL if it is that of another file.
fn size_of_buffer(fd: c_int) -> Res<u64> {
    // SAFETY: the structure has room for the answer, and the other call takes numbers only.
    let size = unsafe {
        let mut fs: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(fd, &raw mut fs) != 0 {
            return Err(io::Error::last_os_error().into());
        }
        if fs.f_type as i64 != FILE_SYSTEM {
            return Err(EINVAL);
        }
        libc::lseek(fd, 0, libc::SEEK_END)
    };
    u64::try_from(size).map_err(|_| EINVAL)
}

/// Registers a part of a DMA-buf.
///
/// # Safety
/// As `ibv_reg_dmabuf_mr(3)`.
pub(crate) unsafe fn register(
    p: *mut ibv_pd,
    (fd, offset): (c_int, u64),
    len: usize,
    iova: u64,
    access: c_uint,
) -> Res<*mut ibv_mr> {
    let page = mr::page_size() as u64;
    if access & !RIGHTS != 0 || offset % page != iova % page || len == 0 {
        return Err(EINVAL);
    }
    let end = offset.checked_add(len as u64).ok_or(EINVAL)?;
    if end > size_of_buffer(fd)? {
        return Err(EINVAL);
    }
    let before = offset % page;
    let write = mr::rights(access)?.contains(Access::LOCAL_WRITE);
    let whole = (end - offset + before).next_multiple_of(page) as usize;
    let mapping = Mapping::new(fd, offset - before, whole, write)?;
    let at = mapping.start as u64 + before;
    // As libibverbs does, the object shows the offset where others have their address.
    mr::register_owned(p, (at, offset), len, iova, access, Mr::of_dmabuf(mapping))
}

pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    p: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    pointer(|| register(p, (fd, offset), len, iova, access as c_uint))
}
