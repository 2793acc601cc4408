//! Memory windows.

use crate::abi::verbs::value::QPT_UD;
use crate::abi::verbs::*;
use crate::device::{check_same, context};
use crate::guard::{EINVAL, Res, code, pointer};
use crate::object::{self, Kind, Object};
use crate::{mr, pd, post};
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Bind, SendFlags, SendOp, SendWr};
use std::ffi::{c_int, c_uint};

/// The STag that it was allocated with. Binds change only the key.
#[derive(Debug)]
pub(crate) struct Mw {
    stag: Stag,
}

unsafe fn find<'a>(mw: *mut ibv_mw) -> Res<&'a Object<ibv_mw, Mw>> {
    object::find(Kind::Mw, mw)
}

const TYPE_1: c_uint = 1;
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

/// The rights that a window can have, as with rxe: those of peers, and addresses that begin at zero. Local write access is
/// accepted and has no meaning for a window.
const RIGHTS: c_uint = 0x2f;

/// Returns the operation that binds `m` as asked, for a queue pair of the context `c`.
///
/// # Errors
/// EINVAL: no such window or region, or of another context; a right that windows cannot have.
///
/// # Safety
/// `m` and the region in `info` are living objects, or NULL; `c` is an open context.
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
        access: mr::rights(info.mw_access_flags)?,
    }))
}

/// `ibv_bind_mw(3)`, for windows of type 1. The new key is the old one plus one.
pub(crate) unsafe extern "C" fn bind_mw(
    q: *mut ibv_qp,
    m: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    code(|| {
        let bind = &*bind;
        // Datagrams have no windows, and what is behind their queue pairs is no connection.
        if (*m).r#type != TYPE_1 || (*q).qp_type == QPT_UD {
            return Err(EINVAL);
        }
        let old = Stag((*m).rkey);
        let rkey = old.with_key(old.key().wrapping_add(1)).0;
        let op = bind_op((*q).context, m, rkey, &bind.bind_info)?;
        let wr = SendWr {
            wr_id: bind.wr_id,
            op,
            flags: SendFlags::from_bits_truncate(bind.send_flags & 0x7),
            sges: &[],
            inline: &[],
        };
        post::qp(q).raw.post_send(&[wr])?;
        (*m).rkey = rkey;
        Ok(())
    })
}
