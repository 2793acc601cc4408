//! Memory windows: `ibv_alloc_mw(3)`. `post` binds them.

use super::mr;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code, pointer};
use crate::border::object::{self, Kind, Object};
use crate::device::{check_same, context};
use crate::domain::pd;
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Bind, SendOp};
use std::ffi::{c_int, c_uint};

/// A window with its initial STag. Binding changes only the key of the STag.
#[derive(Debug)]
pub(crate) struct Mw {
    stag: Stag,
}

unsafe fn find<'a>(mw: *mut ibv_mw) -> Res<&'a Object<ibv_mw, Mw>> {
    object::find(Kind::Mw, mw)
}

pub(crate) const TYPE_1: c_uint = 1;
const TYPE_2: c_uint = 2;

pub(crate) unsafe extern "C" fn alloc_mw(p: *mut ibv_pd, ty: c_uint) -> *mut ibv_mw {
    pointer(|| {
        let pd = pd::find(p)?;
        let kind = match ty {
            TYPE_1 => WindowType::Type1,
            TYPE_2 => WindowType::Type2,
            _ => return Err(EINVAL),
        };
        let stag = context((*p).context).raw.allocate_window(kind, pd.number)?;
        pd.users.add();
        let mw = ibv_mw {
            context: (*p).context,
            pd: p,
            rkey: stag.0,
            handle: stag.index(),
            r#type: ty,
        };
        Ok(object::create(Kind::Mw, mw, Mw { stag }))
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(m: *mut ibv_mw) -> c_int {
    code(|| {
        let mw = find(m)?;
        context((*m).context).raw.deallocate_window(mw.stag)?;
        object::retire(Kind::Mw, m)?;
        if let Ok(pd) = pd::find((*m).pd) {
            pd.users.remove();
        }
        object::free::<ibv_mw, Mw>(m);
        Ok(())
    })
}

/// The access rights of a window, as in rxe: remote rights and zero-based addresses. Local write is
/// accepted and ignored.
const RIGHTS: c_uint = 0x2f;

/// Returns the operation that binds `m` as requested, for a queue pair of the context `c`. Fails
/// with EINVAL for an unknown window or region, one of another context, or an unsupported right.
///
/// # Safety
/// `m` and the region in `info` are living objects or NULL; `c` is an open context.
pub(crate) unsafe fn bind_op(
    c: *mut ibv_context,
    m: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Res<SendOp> {
    if m.is_null() || (info.mr.is_null() && info.length != 0) {
        return Err(EINVAL);
    }
    let window = find(m)?;
    check_same(c, (*m).context)?;
    if !info.mr.is_null() {
        check_same(c, (*info.mr).context)?;
    }
    if info.mw_access_flags & !RIGHTS != 0 {
        return Err(EINVAL);
    }
    Ok(SendOp::Bind(Bind {
        mw_stag: window.stag,
        new_stag: Stag(rkey),
        mr_stag: Stag(if info.mr.is_null() {
            0
        } else {
            (*info.mr).lkey
        }),
        addr: info.addr,
        len: info.length,
        access: mr::access_rights(info.mw_access_flags)?,
    }))
}
