//! Device memory (`ibv_alloc_dm(3)`), emulated by ordinary memory. `mr` registers it.

use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, ENOMEM, Res, code, pointer, value};
use crate::border::object::{self, Kind, Object, Users};
use crate::device::handles::DeviceMemory;
use crate::device::{checked_context, context, query};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Dm {
    pub(super) memory: Arc<DeviceMemory>,
    pub(super) users: Users,
    imported: bool,
}

pub(super) unsafe fn find<'a>(dm: *mut ibv_dm) -> Res<&'a Object<ibv_dm, Dm>> {
    object::find(Kind::Dm, dm)
}

unsafe fn create(
    c: *mut ibv_context,
    handle: u32,
    memory: Arc<DeviceMemory>,
    imported: bool,
) -> *mut ibv_dm {
    let dm = ibv_dm {
        context: c,
        memcpy_to_dm: Some(memcpy_to_dm),
        memcpy_from_dm: Some(memcpy_from_dm),
        comp_mask: 1,
        handle,
    };
    let own = Dm {
        memory,
        users: Users::default(),
        imported,
    };
    object::create(Kind::Dm, dm, own)
}

pub(crate) unsafe extern "C" fn alloc_dm(
    c: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer(|| {
        let ctx = checked_context(c)?;
        let attr = &*attr;
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > 20 {
            return Err(EINVAL);
        }
        if attr.length as u64 > query::MAX_DM {
            return Err(ENOMEM);
        }
        let memory = Arc::new(DeviceMemory::new(attr.length, 1 << attr.log_align_req)?);
        let mut dms = ctx.handles.dms.lock();
        let handle = (1..).find(|h| !dms.contains_key(h)).unwrap_or(0);
        dms.insert(handle, Arc::clone(&memory));
        Ok(create(c, handle, memory, false))
    })
}

pub(crate) unsafe extern "C" fn free_dm(d: *mut ibv_dm) -> c_int {
    code(|| {
        let dm = find(d)?;
        if dm.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Dm, d)?;
        if !dm.imported {
            context((*d).context)
                .handles
                .dms
                .lock()
                .remove(&(*d).handle);
        }
        object::free::<ibv_dm, Dm>(d);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_import_dm(c: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    pointer(|| {
        let ctx = checked_context(c)?;
        let memory = ctx.handles.dms.lock().get(&handle).cloned().ok_or(EINVAL)?;
        Ok(create(c, handle, memory, true))
    })
}

pub(crate) unsafe extern "C" fn ibv_unimport_dm(d: *mut ibv_dm) {
    value((), || {
        if object::retire(Kind::Dm, d).is_ok() {
            object::free::<ibv_dm, Dm>(d);
        }
    });
}

/// Returns the address of `len` bytes at `offset` of device memory, to be copied or registered.
pub(super) unsafe fn range(d: *mut ibv_dm, offset: u64, len: usize, copied: bool) -> Res<*mut u8> {
    let (start, size) = find(d)?.memory.range();
    let offset = usize::try_from(offset).map_err(|_| EINVAL)?;
    // Hardware copies device memory word by word, so this emulation requires the same alignment.
    if copied && !(offset.is_multiple_of(4) && len.is_multiple_of(4)) {
        return Err(EINVAL);
    }
    let end = offset.checked_add(len).ok_or(EINVAL)?;
    if end > size {
        return Err(EINVAL);
    }
    Ok((start + offset) as *mut u8)
}

unsafe extern "C" fn memcpy_to_dm(
    d: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    code(|| {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), range(d, offset, len, true)?, len);
        Ok(())
    })
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    d: *mut ibv_dm,
    offset: u64,
    len: usize,
) -> c_int {
    code(|| {
        std::ptr::copy_nonoverlapping(range(d, offset, len, true)?, to.cast::<u8>(), len);
        Ok(())
    })
}
