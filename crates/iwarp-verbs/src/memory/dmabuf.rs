//! Registration of DMA-bufs (`ibv_reg_dmabuf_mr(3)`): the buffer is mapped, and the mapping is registered.
//!
//! A DMA-buf of a GPU or of a capture device can be registered if its exporter lets programs map it. What
//! was mapped here is unmapped when the region is deregistered.

use super::mapping::Mapping;
use super::mr::{self, Mr};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, pointer};
use iwarp_rnic::Access;
use std::ffi::{c_int, c_uint};
use std::io;

/// Rights that the kernel allows for a DMA-buf; the last one is `IBV_ACCESS_RELAXED_ORDERING`.
const RIGHTS: c_uint = 0xf | 1 << 20;
/// `DMA_BUF_MAGIC`, the type of the file system that DMA-bufs are on.
const FILE_SYSTEM: i64 = 0x444d_4142;

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
