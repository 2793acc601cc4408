//! `ibv_reg_mr_ex(3)`, which takes a structure of attributes, and buffers from `ibv_alloc_buf(3)`.
//!
//! rdma-core 59 to 65 introduced these functions. A buffer is page-aligned ordinary memory without
//! a DMA-buf. [`super::dmabuf`] registers DMA-bufs of the program.

use super::{dmabuf, mr};
use crate::abi::recent::*;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, UNSUPPORTED, minus_one, pointer, value};
use crate::border::object::{self, Kind, Object};
use crate::device::handles::DeviceMemory;
use crate::domain::pd;
use std::ffi::{c_int, c_uint, c_void};

const IOVA: u64 = 1;
const ADDR: u64 = 1 << 1;
const FD: u64 = 1 << 2;
const FD_OFFSET: u64 = 1 << 3;
const DMAH: u64 = 1 << 4;
const BUF: u64 = 1 << 5;

struct Buf {
    memory: DeviceMemory,
    pd: *mut ibv_pd,
}

type BufObject = Object<ibv_buf, Buf>;

unsafe fn find<'a>(buf: *mut ibv_buf) -> Res<&'a BufObject> {
    object::find(Kind::Buf, buf)
}

/// Registers memory as described by the attributes. Refuses DMA handles, which are for PCIe
/// devices.
pub(crate) unsafe extern "C" fn ibv_reg_mr_ex(
    p: *mut ibv_pd,
    attr: *mut ibv_mr_init_attr,
) -> *mut ibv_mr {
    pointer(|| {
        let attr = attr.as_ref().ok_or(EINVAL)?;
        let mask = attr.comp_mask;
        if mask & !(IOVA | ADDR | FD | FD_OFFSET | DMAH | BUF) != 0 {
            return Err(UNSUPPORTED);
        }
        if mask & BUF != 0 {
            check_buf_range(p, attr)?;
        }
        if (mask & ADDR != 0) == (mask & FD != 0) || mask & (FD | FD_OFFSET) == FD_OFFSET {
            return Err(EINVAL);
        }
        if mask & FD != 0 && mask & (FD_OFFSET | IOVA) != FD_OFFSET | IOVA {
            return Err(EINVAL);
        }
        if mask & DMAH != 0 {
            return Err(UNSUPPORTED);
        }
        if mask & FD != 0 {
            let buffer = (attr.fd, attr.fd_offset);
            return dmabuf::register(p, buffer, attr.length, attr.iova, attr.access as c_uint);
        }
        let addr = attr.addr as u64;
        let iova = if mask & IOVA != 0 { attr.iova } else { addr };
        mr::register(p, addr, attr.length, iova, attr.access as c_uint)
    })
}

/// Fails with EINVAL unless the range is in the buffer and `p` is the buffer's domain.
unsafe fn check_buf_range(p: *mut ibv_pd, attr: &ibv_mr_init_attr) -> Res<()> {
    let buf = find(attr.buf)?;
    let (start, size) = buf.memory.range();
    let offset = (attr.addr as usize).checked_sub(start).ok_or(EINVAL)?;
    let end = offset.checked_add(attr.length).ok_or(EINVAL)?;
    if attr.comp_mask & ADDR == 0 || attr.comp_mask & (FD | FD_OFFSET) != 0 {
        return Err(EINVAL);
    }
    if buf.pd != p || end > size {
        return Err(EINVAL);
    }
    Ok(())
}

/// Allocates a zeroed buffer, which keeps its domain in use until it is freed.
pub(crate) unsafe extern "C" fn ibv_alloc_buf(
    p: *mut ibv_pd,
    size: usize,
    to: *mut *mut ibv_buf,
) -> *mut c_void {
    pointer(|| {
        let pd = pd::find(p)?;
        if size == 0 || to.is_null() {
            return Err(EINVAL);
        }
        let memory = DeviceMemory::new(size, mr::page_size())?;
        let (start, _) = memory.range();
        pd.users.add();
        *to = object::create(Kind::Buf, ibv_buf::new((*p).context), Buf { memory, pd: p });
        Ok(start as *mut c_void)
    })
}

pub(crate) unsafe extern "C" fn ibv_free_buf(b: *mut ibv_buf) {
    value((), || {
        let Ok(buf) = find(b) else { return };
        if object::retire(Kind::Buf, b).is_ok() {
            if let Ok(pd) = pd::find(buf.pd) {
                pd.users.remove();
            }
            object::free::<ibv_buf, Buf>(b);
        }
    });
}

pub(crate) unsafe extern "C" fn ibv_reg_buf_mr(
    p: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let mut attr: ibv_mr_init_attr = std::mem::zeroed();
    attr.comp_mask = BUF | ADDR;
    (attr.buf, attr.addr, attr.length, attr.access) = (buf, addr, length, access);
    ibv_reg_mr_ex(p, &raw mut attr)
}

/// Fails with ENODATA, because buffers are not DMA-bufs.
pub(crate) unsafe extern "C" fn ibv_export_buf_dmabuf_fd(b: *mut ibv_buf) -> c_int {
    minus_one(|| {
        find(b)?;
        Err(Errno(libc::ENODATA))
    })
}
