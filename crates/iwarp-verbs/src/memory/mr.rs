//! Memory regions: `ibv_reg_mr(3)` and related calls.

use super::device_memory as dm;
use super::huge;
use super::mapping::Mapping;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, UNSUPPORTED, code, pointer, value};
use crate::border::object::{self, Kind, Object};
use crate::device::handles::{DeviceMemory, Region};
use crate::device::{ContextObject, check_same, context};
use crate::domain::pd;
use iwarp::runtime::{Prefetch, prefetch};
use iwarp_rnic::Access;
use iwarp_rnic::memory::Stag;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Access rights with an effect.
const RIGHTS: c_uint = 0x3f;
const ON_DEMAND: c_uint = 0x40;
const HUGETLB: c_uint = 0x80;
/// Allows remote flushes, for which this library requires no right. Persistence (0x200) is not
/// supported.
const FLUSH_GLOBAL: c_uint = 0x100;
/// Hints that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`); relaxed ordering is one.
const OPTIONAL: c_uint = 0x3ff0_0000;

#[derive(Debug, Default)]
pub(crate) struct Mr {
    dm: Option<Arc<DeviceMemory>>,
    imported: bool,
    dm_object: usize,
    dmabuf: Option<Mapping>,
}

impl Mr {
    pub(crate) fn of_dmabuf(mapping: Mapping) -> Self {
        Self {
            dmabuf: Some(mapping),
            ..Self::default()
        }
    }
}

type MrObject = Object<ibv_mr, Mr>;

unsafe fn find<'a>(mr: *mut ibv_mr) -> Res<&'a MrObject> {
    object::find(Kind::Mr, mr)
}

pub(crate) fn access_rights(access: c_uint) -> Res<Access> {
    if access & !(RIGHTS | ON_DEMAND | HUGETLB | FLUSH_GLOBAL | OPTIONAL) != 0 {
        return Err(EINVAL);
    }
    Ok(Access::from_bits_truncate(access & RIGHTS))
}

pub(crate) fn page_size() -> usize {
    // SAFETY: returns a number and has no effect.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Fails with EINVAL if a page of an on-demand region is not huge although the program passed
/// `IBV_ACCESS_HUGETLB`. If the pages cannot be checked, succeeds, because the library does not
/// rely on huge pages.
fn check_huge(addr: u64, len: usize) -> Res<()> {
    match huge::is_huge(addr, len as u64) {
        Ok(false) => Err(EINVAL),
        Ok(true) | Err(_) => Ok(()),
    }
}

/// Registers memory and creates its object.
///
/// # Safety
/// As `ibv_reg_mr(3)`.
pub(crate) unsafe fn register(
    p: *mut ibv_pd,
    addr: u64,
    len: usize,
    iova: u64,
    access: c_uint,
) -> Res<*mut ibv_mr> {
    register_owned(p, (addr, addr), len, iova, access, Mr::default())
}

/// Registers memory and creates an object with the data `own` and the public address `public_addr`.
///
/// # Safety
/// As [`register`].
pub(crate) unsafe fn register_owned(
    p: *mut ibv_pd,
    (addr, public_addr): (u64, u64),
    len: usize,
    iova: u64,
    access: c_uint,
    own: Mr,
) -> Res<*mut ibv_mr> {
    let pd = pd::find(p)?;
    // As the kernel does (`ib_umem_get`), reject empty ranges and ranges that wrap around.
    if len == 0 || addr.checked_add(len as u64).is_none() {
        return Err(EINVAL);
    }
    let on_demand = access & ON_DEMAND != 0;
    if on_demand && access & HUGETLB != 0 {
        check_huge(addr, len)?;
    }
    let access = access_rights(access)?;
    let ctx = context((*p).context);
    let (size, number) = (len as u64, pd.number);
    let stag = match on_demand {
        true => ctx
            .raw
            .register_on_demand(addr, size, iova, number, access)?,
        false => ctx.raw.register(addr, size, iova, number, access)?,
    };
    pd.users.add();
    let handle = Region {
        stag,
        addr,
        length: len,
    };
    ctx.handles.mrs.lock().insert(Stag(stag).index(), handle);
    Ok(create(p, stag, public_addr as *mut c_void, len, own))
}

unsafe fn create(
    p: *mut ibv_pd,
    stag: u32,
    addr: *mut c_void,
    length: usize,
    own: Mr,
) -> *mut ibv_mr {
    let mr = ibv_mr {
        context: (*p).context,
        pd: p,
        addr,
        length,
        // The index of the STag never changes, unlike its key.
        handle: Stag(stag).index(),
        lkey: stag,
        rkey: stag,
    };
    object::create(Kind::Mr, mr, own)
}

pub(crate) unsafe extern "C" fn ibv_reg_mr(
    p: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    pointer(|| register(p, addr as u64, len, addr as u64, access as c_uint))
}

pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    p: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    pointer(|| register(p, addr as u64, len, iova, access as c_uint))
}

pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    p: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| register(p, addr as u64, len, iova, access & !OPTIONAL))
}

pub(crate) unsafe extern "C" fn ibv_dereg_mr(m: *mut ibv_mr) -> c_int {
    code(|| {
        let mr = find(m)?;
        let ctx = context((*m).context);
        if mr.imported {
            return Err(EINVAL);
        }
        ctx.raw.deregister((*m).lkey)?;
        object::retire(Kind::Mr, m)?;
        ctx.handles.mrs.lock().remove(&(*m).handle);
        if let Ok(pd) = pd::find((*m).pd) {
            pd.users.remove();
        }
        if let Ok(dm) = dm::find(mr.dm_object as *mut ibv_dm) {
            dm.users.remove();
        }
        object::free::<ibv_mr, Mr>(m);
        Ok(())
    })
}

/// `ibv_alloc_null_mr(3)`: a region that discards writes and reads as zeros. The manual promises
/// only the lkey, but programs (perftest) send it to the peer as rkey, so both keys are set.
pub(crate) unsafe extern "C" fn alloc_null_mr(p: *mut ibv_pd) -> *mut ibv_mr {
    pointer(|| {
        let pd = pd::find(p)?;
        let stag = context((*p).context).raw.register_null(pd.number)?;
        pd.users.add();
        Ok(create(p, stag, null_mut(), usize::MAX, Mr::default()))
    })
}

const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 2;
const CHANGE_ACCESS: c_int = 4;
/// `IBV_REREG_MR_ERR_INPUT`: nothing was changed.
const ERR_INPUT: c_int = -1;

pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    m: *mut ibv_mr,
    flags: c_int,
    p: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    let result = code(|| {
        let mr = find(m)?;
        if flags & !(CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS) != 0
            || flags == 0
            || mr.dm.is_some()
            || mr.dmabuf.is_some()
        {
            return Err(EINVAL);
        }
        let translation = flags & CHANGE_TRANSLATION != 0;
        if translation && (len == 0 || addr.is_null()) {
            return Err(EINVAL);
        }
        let new_pd = if flags & CHANGE_PD != 0 {
            let new = pd::find(p)?;
            check_same((*m).context, (*p).context)?;
            Some(new)
        } else {
            None
        };
        let ctx = context((*m).context);
        let access = if flags & CHANGE_ACCESS != 0 {
            check_on_demand_unchanged(ctx, (*m).lkey, access as c_uint)?;
            Some(access_rights(access as c_uint)?)
        } else {
            None
        };
        let stag = ctx.raw.reregister(
            (*m).lkey,
            translation.then_some((addr as u64, len as u64, addr as u64)),
            new_pd.map(|pd| pd.number),
            access,
        )?;
        (*m).lkey = stag;
        (*m).rkey = stag;
        if translation {
            (*m).addr = addr;
            (*m).length = len;
        }
        if let Some(new) = new_pd {
            new.users.add();
            if let Ok(old) = pd::find((*m).pd) {
                old.users.remove();
            }
            (*m).pd = p;
        }
        let (addr, length) = ((*m).addr as u64, (*m).length);
        let handle = Region { stag, addr, length };
        ctx.handles.mrs.lock().insert((*m).handle, handle);
        Ok(())
    });
    if result == 0 { 0 } else { ERR_INPUT }
}

/// Fails with EOPNOTSUPP if re-registration would make the region on-demand, or no longer
/// on-demand. Other devices do not support that either.
fn check_on_demand_unchanged(ctx: &ContextObject, lkey: u32, access: c_uint) -> Res<()> {
    let is_on_demand = ctx.raw.region(lkey).is_some_and(|region| region.on_demand);
    match is_on_demand == (access & ON_DEMAND != 0) {
        true => Ok(()),
        false => Err(UNSUPPORTED),
    }
}

pub(crate) unsafe extern "C" fn ibv_import_mr(p: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    pointer(|| {
        let pd = pd::find(p)?;
        let ctx = context((*p).context);
        let Some(known) = ctx.handles.mrs.lock().get(&handle).copied() else {
            return Err(EINVAL);
        };
        if ctx.raw.region(known.stag).is_none_or(|r| r.pd != pd.number) {
            return Err(EINVAL);
        }
        // As in the kernel's drivers, the address of the memory is unknown.
        Ok(create(
            p,
            known.stag,
            null_mut(),
            known.length,
            Mr {
                imported: true,
                ..Mr::default()
            },
        ))
    })
}

pub(crate) unsafe extern "C" fn ibv_unimport_mr(m: *mut ibv_mr) {
    value((), || {
        if object::retire(Kind::Mr, m).is_ok() {
            object::free::<ibv_mr, Mr>(m);
        }
    });
}

/// `enum ibv_advise_mr_advice`: 0 prefetches for reading, the others for writing, and without page
/// faults.
const PREFETCH_WRITE: c_uint = 1;
const PREFETCH_NO_FAULT: c_uint = 2;
const ADVISE_FLUSH: u32 = 1;

/// Prefetches (`ibv_advise_mr(3)`). Faults in pages of on-demand regions before it returns, with or
/// without `IBV_ADVISE_MR_FLAG_FLUSH`. Has no effect on other regions, or with `NO_FAULT`.
pub(crate) unsafe extern "C" fn advise_mr(
    p: *mut ibv_pd,
    advice: c_uint,
    flags: u32,
    list: *mut ibv_sge,
    n: u32,
) -> c_int {
    code(|| {
        let pd = pd::find(p)?;
        if advice > PREFETCH_NO_FAULT || flags & !ADVISE_FLUSH != 0 {
            return Err(UNSUPPORTED);
        }
        if list.is_null() || n == 0 {
            return Err(EINVAL);
        }
        let ctx = context((*p).context);
        let list = std::slice::from_raw_parts(list, n as usize);
        for sge in list {
            let bad = Errno(libc::EFAULT);
            let region = ctx
                .raw
                .region(sge.lkey)
                .filter(|r| r.stag == Stag(sge.lkey));
            let region = region.ok_or(bad)?;
            if region.pd != pd.number {
                return Err(Errno(libc::EPERM));
            }
            let offset = sge.addr.checked_sub(region.iova).ok_or(bad)?;
            let inside = offset
                .checked_add(u64::from(sge.length))
                .is_some_and(|end| end <= region.len);
            let writable = region.access.contains(Access::LOCAL_WRITE);
            if !inside || (advice == PREFETCH_WRITE && !writable) {
                return Err(bad);
            }
            if region.on_demand && advice != PREFETCH_NO_FAULT {
                let handles = ctx.handles.mrs.lock();
                let start = handles.get(&Stag(sge.lkey).index()).ok_or(bad)?.addr;
                drop(handles);
                fault_in(start.wrapping_add(offset), sge.length.into(), advice)?;
            }
        }
        Ok(())
    })
}

fn fault_in(addr: u64, len: u64, advice: c_uint) -> Res<()> {
    let access = match advice {
        PREFETCH_WRITE => Prefetch::Write,
        _ => Prefetch::Read,
    };
    prefetch(addr, len, access).map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))
}

/// Registers device memory. The region's addresses start at zero.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    p: *mut ibv_pd,
    d: *mut ibv_dm,
    offset: u64,
    len: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        let pd = pd::find(p)?;
        let dm = dm::find(d)?;
        let at = dm::range(d, offset, len, false)? as u64;
        let access = access_rights(access)?;
        if !access.contains(Access::ZERO_BASED) {
            return Err(EINVAL);
        }
        let ctx = context((*p).context);
        let stag = ctx.raw.register(at, len as u64, 0, pd.number, access)?;
        pd.users.add();
        dm.users.add();
        let handle = Region {
            stag,
            addr: at,
            length: len,
        };
        ctx.handles.mrs.lock().insert(Stag(stag).index(), handle);
        let own = Mr {
            dm: Some(Arc::clone(&dm.memory)),
            dm_object: d as usize,
            ..Mr::default()
        };
        Ok(create(p, stag, null_mut(), len, own))
    })
}
