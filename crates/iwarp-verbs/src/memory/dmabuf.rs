//! DMA-bufs (`ibv_reg_dmabuf_mr(3)`): maps the buffer, and registers the mapping.
//!
//! The DMA-buf of a GPU or capture device can be registered if its exporter allows mapping.
//! Deregistering the region unmaps it.

use super::mapping::Mapping;
use super::mr::{self, Mr};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, pointer};
use iwarp_rnic::Access;
use std::ffi::{c_int, c_uint};
use std::io;

/// Access rights that the kernel allows for a DMA-buf. Bit 20 is `IBV_ACCESS_RELAXED_ORDERING`.
const RIGHTS: c_uint = 0xf | 1 << 20;
/// The type of the file system that contains all DMA-bufs.
const DMABUF_MAGIC: i64 = 0x444d_4142;

/// Returns the size of a DMA-buf. As the kernel does, fails with EBADF if the descriptor is not
/// open, and with EINVAL if it is not a DMA-buf.
fn size_of_buffer(fd: c_int) -> Res<u64> {
    // SAFETY: the structure has room for the result; the other call takes only numbers.
    let size = unsafe {
        let mut fs: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(fd, &raw mut fs) != 0 {
            return Err(io::Error::last_os_error().into());
        }
        if fs.f_type as i64 != DMABUF_MAGIC {
            return Err(EINVAL);
        }
        libc::lseek(fd, 0, libc::SEEK_END)
    };
    u64::try_from(size).map_err(|_| EINVAL)
}

/// Maps and registers `len` bytes of a DMA-buf, from an offset.
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
    let page_offset = offset % page;
    let write = mr::access_rights(access)?.contains(Access::LOCAL_WRITE);
    let mapped_len = (end - offset + page_offset).next_multiple_of(page) as usize;
    let mapping = Mapping::new(fd, offset - page_offset, mapped_len, write)?;
    let start = mapping.start as u64 + page_offset;
    // As in libibverbs, the object's public address is the offset.
    mr::register_owned(
        p,
        (start, offset),
        len,
        iova,
        access,
        Mr::of_dmabuf(mapping),
    )
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
