//! Shared receive queues: `ibv_create_srq(3)`, `ibv_create_srq_ex(3)` and related calls.

use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, Res, UNSUPPORTED, code, pointer};
use crate::border::object::{self, Kind, Object, Unacknowledged, Users};
use crate::cq;
use crate::device::pending_events::discard;
use crate::device::{check_same, context, query};
use crate::domain::{pd, xrcd};
use iwarp::runtime::SharedReceiveQueue;
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;

pub(crate) struct Srq {
    pub(crate) raw: SharedReceiveQueue,
    pub(crate) max_sge: u32,
    /// The addresses of the XRC domain and of the completion queue, or zero.
    extended: (usize, usize),
    pub(crate) users: Users,
    pub(crate) asynchronous: Unacknowledged,
}

pub(crate) type SrqObject = Object<ibv_srq, Srq>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(srq: *mut ibv_srq) -> Res<&'a SrqObject> {
    object::find(Kind::Srq, srq)
}

/// The additional attributes of an XRC or tag-matching queue: the completion queue for its
/// receives, and the XRC domain or the maximum number of tagged buffers.
#[derive(Clone, Copy)]
struct Extended {
    xrcd: *mut ibv_xrcd,
    cq: *mut ibv_cq,
    max_tags: u32,
}

/// Calls `f` for the user counts of the objects that a queue depends on. These objects cannot be
/// destroyed before the queue.
unsafe fn for_each_dependency(pd: *mut ibv_pd, extended: (usize, usize), f: impl Fn(&Users)) {
    if let Ok(pd) = pd::find(pd) {
        f(&pd.users);
    }
    let (xrcd, cq) = extended;
    if let Ok(xrcd) = xrcd::find(xrcd as *mut ibv_xrcd) {
        f(&xrcd.users);
    }
    if let Ok(cq) = cq::find(cq as *mut ibv_cq) {
        f(&cq.users);
    }
}

unsafe fn create(
    p: *mut ibv_pd,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
    extended: Option<Extended>,
) -> Res<*mut ibv_srq> {
    let pd = pd::find(p)?;
    if let Some(Extended { xrcd, cq, .. }) = extended {
        cq::find(cq)?;
        check_same((*p).context, (*cq).context)?;
        if !xrcd.is_null() {
            check_same((*p).context, (*xrcd).context)?;
        }
    }
    let ctx = &context((*p).context).raw;
    let (depth, max_sge) = (attr.max_wr, attr.max_sge.max(1));
    let raw = match &extended {
        None => ctx.create_srq(pd.number, depth, max_sge)?,
        Some(Extended { xrcd, cq, max_tags }) if xrcd.is_null() => {
            ctx.create_tag_srq(&cq::find(*cq)?.raw, pd.number, depth, max_sge, *max_tags)?
        }
        Some(Extended { xrcd, cq, .. }) => {
            let (domain, cq) = (&xrcd::find(*xrcd)?.raw, &cq::find(*cq)?.raw);
            ctx.create_xrc_srq(domain, cq, pd.number, depth, max_sge)?
        }
    };
    let extended = extended.map_or((0, 0), |e| (e.xrcd as usize, e.cq as usize));
    for_each_dependency(p, extended, Users::add);
    (attr.max_wr, attr.max_sge, _) = raw.attributes();
    let mut srq: ibv_srq = std::mem::zeroed();
    srq.context = (*p).context;
    srq.srq_context = srq_context;
    srq.pd = p;
    srq.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    srq.cond = libc::PTHREAD_COND_INITIALIZER;
    let own = Srq {
        raw: raw.clone(),
        max_sge: attr.max_sge,
        extended,
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
        create(p, (*attr).srq_context, &mut (*attr).attr, None)
    })
}

pub(crate) const ATTR_TYPE: u32 = 1;
pub(crate) const ATTR_PD: u32 = 2;
pub(crate) const ATTR_XRCD: u32 = 4;
pub(crate) const ATTR_CQ: u32 = 8;
const TYPE_BASIC: c_uint = 0;
pub(crate) const TYPE_XRC: c_uint = 1;
const ATTR_TM: u32 = 16;
const TYPE_TM: c_uint = 2;

pub(crate) unsafe extern "C" fn create_srq_ex(
    c: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer(|| {
        let attr = attr.as_mut().ok_or(EINVAL)?;
        let mask = attr.comp_mask;
        let ty = match mask & ATTR_TYPE {
            0 => TYPE_BASIC,
            _ => attr.srq_type,
        };
        let (required, allowed) = match ty {
            TYPE_BASIC => (ATTR_PD, ATTR_PD | ATTR_TYPE),
            TYPE_XRC => {
                let all = ATTR_PD | ATTR_TYPE | ATTR_XRCD | ATTR_CQ;
                (all, all)
            }
            TYPE_TM => {
                let all = ATTR_PD | ATTR_TYPE | ATTR_CQ | ATTR_TM;
                (all, all)
            }
            _ => return Err(UNSUPPORTED),
        };
        if mask & !allowed != 0 {
            return Err(UNSUPPORTED);
        }
        if mask & required != required {
            return Err(EINVAL);
        }
        let extended = match ty {
            TYPE_XRC => {
                xrcd::find(attr.xrcd)?;
                Some(Extended {
                    xrcd: attr.xrcd,
                    cq: attr.cq,
                    max_tags: 0,
                })
            }
            TYPE_TM => Some(tag_matching(attr)?),
            _ => None,
        };
        pd::find(attr.pd)?;
        check_same(c, (*attr.pd).context)?;
        create(attr.pd, attr.srq_context, &mut attr.attr, extended)
    })
}

fn tag_matching(attr: &ibv_srq_init_attr_ex) -> Res<Extended> {
    let [max_tags, max_ops] = attr.tm_cap;
    if max_ops > query::MAX_TAG_OPS {
        return Err(EINVAL);
    }
    Ok(Extended {
        xrcd: null_mut(),
        cq: attr.cq,
        max_tags,
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
        let depth = (mask & MAX_WR != 0).then_some((*attr).max_wr);
        let limit = (mask & LIMIT != 0).then_some((*attr).srq_limit);
        Ok(srq.raw.modify(depth, limit)?)
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
        srq.raw.destroy();
        discard(&context((*s).context).raw, srq.raw.clone());
        // Acknowledging an event must still find the object.
        srq.asynchronous.wait();
        object::retire(Kind::Srq, s)?;
        for_each_dependency((*s).pd, srq.extended, Users::remove);
        object::free::<ibv_srq, Srq>(s);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn get_srq_num(s: *mut ibv_srq, num: *mut u32) -> c_int {
    code(|| {
        let srq = find(s)?;
        if num.is_null() {
            return Err(EINVAL);
        }
        *num = srq.raw.num().ok_or(EINVAL)?;
        Ok(())
    })
}
