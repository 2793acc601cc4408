//! Protection domains, thread domains, parent domains.

use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, Res, UNSUPPORTED, code, pointer, value};
use crate::border::object::{self, Kind, Object, Users};
use crate::device::{check_same, checked_context, context};
use std::ffi::c_int;

#[derive(Debug)]
pub(crate) struct Pd {
    /// The runtime's number. A parent domain has the number of its protection domain.
    pub(crate) number: u32,
    pub(crate) users: Users,
    /// A parent domain's protection domain and thread domain.
    parent: Option<(usize, usize)>,
    /// The domain was imported: deallocating it does not free the number.
    imported: bool,
}

pub(crate) type PdObject = Object<ibv_pd, Pd>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(pd: *mut ibv_pd) -> Res<&'a PdObject> {
    object::find(Kind::Pd, pd)
}

fn create(
    c: *mut ibv_context,
    number: u32,
    parent: Option<(usize, usize)>,
    imported: bool,
) -> *mut ibv_pd {
    let own = Pd {
        number,
        users: Users::default(),
        parent,
        imported,
    };
    let pd = ibv_pd {
        context: c,
        handle: number,
    };
    object::create(Kind::Pd, pd, own)
}

pub(crate) unsafe extern "C" fn ibv_alloc_pd(c: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        let ctx = checked_context(c)?;
        let number = ctx.raw.try_allocate_pd()?;
        ctx.handles.pds.lock().insert(number, number);
        Ok(create(c, number, None, false))
    })
}

pub(crate) unsafe extern "C" fn ibv_dealloc_pd(p: *mut ibv_pd) -> c_int {
    code(|| {
        let pd = find(p)?;
        if pd.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Pd, p)?;
        match pd.parent {
            Some((parent, td)) => {
                find(parent as *mut ibv_pd)?.users.remove();
                if let Ok(td) = find_td(td as *mut ibv_td) {
                    td.remove();
                }
            }
            None if !pd.imported => {
                context((*p).context).handles.pds.lock().remove(&pd.number);
            }
            None => {}
        }
        object::free::<ibv_pd, Pd>(p);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_import_pd(c: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    pointer(|| {
        let ctx = checked_context(c)?;
        if !ctx.handles.pds.lock().contains_key(&handle) {
            return Err(EINVAL);
        }
        Ok(create(c, handle, None, true))
    })
}

pub(crate) unsafe extern "C" fn ibv_unimport_pd(p: *mut ibv_pd) {
    value((), || {
        if object::retire(Kind::Pd, p).is_ok() {
            object::free::<ibv_pd, Pd>(p);
        }
    });
}

unsafe fn find_td<'a>(td: *mut ibv_td) -> Res<&'a Object<ibv_td, Users>> {
    object::find(Kind::Td, td)
}

pub(crate) unsafe extern "C" fn alloc_td(
    c: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer(|| {
        checked_context(c)?;
        if !attr.is_null() && (*attr).comp_mask != 0 {
            return Err(UNSUPPORTED);
        }
        Ok(object::create(
            Kind::Td,
            ibv_td { context: c },
            Users::default(),
        ))
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    code(|| {
        if find_td(td)?.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Td, td)?;
        object::free::<ibv_td, Users>(td);
        Ok(())
    })
}

/// `enum ibv_parent_domain_init_attr_mask`: custom allocators, their context, and buffers in memory
/// that a confidential guest shares with its host (since rdma-core 65).
const PARENT_ATTRIBUTES: u32 = 7;

/// Ignores the attributes: custom allocators are for buffers shared with hardware, and all memory
/// is shared with the host.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    c: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    pointer(|| {
        checked_context(c)?;
        let attr = &*attr;
        if attr.comp_mask & !PARENT_ATTRIBUTES != 0 {
            return Err(UNSUPPORTED);
        }
        let parent = find(attr.pd)?;
        check_same(c, (*attr.pd).context)?;
        if !attr.td.is_null() {
            let td = find_td(attr.td)?;
            check_same(c, (*attr.td).context)?;
            td.add();
        }
        parent.users.add();
        Ok(create(
            c,
            parent.number,
            Some((attr.pd as usize, attr.td as usize)),
            false,
        ))
    })
}
