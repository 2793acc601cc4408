//! Shared receive queues.

use crate::abi::verbs::*;
use crate::device::context;
use crate::guard::{EBUSY, EINVAL, Res, UNSUPPORTED, code, pointer};
use crate::object::{self, Kind, Object, Unacknowledged, Users};
use crate::{events, pd};
use iwarp::raw::SharedReceiveQueue;
use std::ffi::{c_int, c_uint};

pub(crate) struct Srq {
    pub(crate) raw: SharedReceiveQueue,
    pub(crate) users: Users,
    pub(crate) asynchronous: Unacknowledged,
}

pub(crate) type SrqObject = Object<ibv_srq, Srq>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(srq: *mut ibv_srq) -> Res<&'a SrqObject> {
    object::find(Kind::Srq, srq)
}

unsafe fn create(
    p: *mut ibv_pd,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
) -> Res<*mut ibv_srq> {
    let pd = pd::find(p)?;
    let raw = context((*p).context)
        .raw
        .create_srq(pd.number, attr.max_wr, attr.max_sge.max(1))?;
    pd.users.add();
    (attr.max_wr, attr.max_sge, _) = raw.attributes();
    let mut srq: ibv_srq = std::mem::zeroed();
    srq.context = (*p).context;
    srq.srq_context = srq_context;
    srq.pd = p;
    srq.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    srq.cond = libc::PTHREAD_COND_INITIALIZER;
    let own = Srq {
        raw: raw.clone(),
        users: Users::default(),
        asynchronous: Unacknowledged::default(),
    };
    let srq = object::create(Kind::Srq, srq, own);
    raw.set_user_data(srq as u64);
    Ok(srq)
}

pub(crate) unsafe extern "C" fn ibv_create_srq(
    p: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    pointer(|| {
        if attr.is_null() {
            return Err(EINVAL);
        }
        create(p, (*attr).srq_context, &mut (*attr).attr)
    })
}

const ATTR_TYPE: u32 = 1;
const ATTR_PD: u32 = 2;
/// The basic type only. Extended reliable connections and tag matching have others.
const TYPE_BASIC: c_uint = 0;

pub(crate) unsafe extern "C" fn create_srq_ex(
    _: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer(|| {
        let mask = (*attr).comp_mask;
        if mask & !(ATTR_TYPE | ATTR_PD) != 0
            || (mask & ATTR_TYPE != 0 && (*attr).srq_type != TYPE_BASIC)
        {
            return Err(UNSUPPORTED);
        }
        if mask & ATTR_PD == 0 {
            return Err(EINVAL);
        }
        create((*attr).pd, (*attr).srq_context, &mut (*attr).attr)
    })
}

const MAX_WR: c_int = 1;
const LIMIT: c_int = 2;

pub(crate) unsafe extern "C" fn ibv_modify_srq(
    s: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    code(|| {
        let srq = find(s)?;
        if mask & !(MAX_WR | LIMIT) != 0 {
            return Err(EINVAL);
        }
        if mask & MAX_WR != 0 {
            srq.raw.resize((*attr).max_wr)?;
        }
        if mask & LIMIT != 0 {
            srq.raw.set_limit((*attr).srq_limit)?;
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_query_srq(s: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    code(|| {
        let (max_wr, max_sge, srq_limit) = find(s)?.raw.attributes();
        *attr = ibv_srq_attr {
            max_wr,
            max_sge,
            srq_limit,
        };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_destroy_srq(s: *mut ibv_srq) -> c_int {
    code(|| {
        let srq = find(s)?;
        if srq.users.any() {
            return Err(EBUSY);
        }
        events::forget(&context((*s).context).raw, srq.raw.clone());
        // Acknowledging an event finds the object, so it is retired only afterwards.
        srq.asynchronous.wait();
        object::retire(Kind::Srq, s)?;
        if let Ok(pd) = pd::find((*s).pd) {
            pd.users.remove();
        }
        object::free::<ibv_srq, Srq>(s);
        Ok(())
    })
}
