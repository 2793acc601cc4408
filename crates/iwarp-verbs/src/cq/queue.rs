//! Completion queues: `ibv_create_cq(3)`, `ibv_create_cq_ex(3)`, `ibv_resize_cq(3)`,
//! `ibv_destroy_cq(3)`, `ibv_req_notify_cq(3)`.

use super::channel::change_refcnt;
use super::extended;
use super::object::{Cq, DELIVERY, find, find_channel, trusted};
use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, Res, UNSUPPORTED, code, pointer};
use crate::border::object::{self, Kind, Unacknowledged, Users};
use crate::device::pending_events::discard;
use crate::device::{check_same, checked_context, context};
use crate::domain::pd;
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use std::cell::Cell;
use std::ffi::{c_int, c_void};

#[derive(Default)]
struct CqAttributes {
    cqe: u32,
    cq_context: usize,
    channel: usize,
    comp_vector: u32,
    wc_flags: u64,
    parent_domain: usize,
}

/// All fields that completions of connected queue pairs support.
const WC_FLAGS: u64 = 0x7f | 1 << 7 | WC_TM_INFO | 1 << 11;
const WC_TIMESTAMP: u64 = 1 << 7 | 1 << 11;
/// A message's tag. A completion contains either a tag or a timestamp.
const WC_TM_INFO: u64 = 1 << 10;

unsafe fn create(c: *mut ibv_context, attributes: &CqAttributes) -> Res<*mut ibv_cq_ex> {
    let ctx = checked_context(c)?;
    if attributes.comp_vector >= 1 || attributes.cqe == 0 || attributes.cqe > iwarp::LIMITS.max_cqe
    {
        return Err(EINVAL);
    }
    let channel = attributes.channel as *mut ibv_comp_channel;
    let raw_channel = if channel.is_null() {
        None
    } else {
        let found = find_channel(channel)?;
        check_same(c, (*channel).context)?;
        Some(found)
    };
    let domain = match attributes.parent_domain {
        0 => None,
        p => {
            let p = p as *mut ibv_pd;
            let domain = pd::find(p)?;
            check_same(c, (*p).context)?;
            Some(domain)
        }
    };
    let raw = ctx
        .raw
        .create_cq(attributes.cqe, raw_channel.map(|c| &c.raw))?;
    if attributes.wc_flags & WC_TIMESTAMP != 0 {
        raw.enable_timestamps();
    }
    if let Some(channel) = raw_channel {
        channel.users.add();
        change_refcnt(channel, 1);
    }
    if let Some(domain) = domain {
        domain.users.add();
    }
    let mut cq: ibv_cq_ex = std::mem::zeroed();
    cq.context = c;
    cq.channel = channel;
    cq.cq_context = attributes.cq_context as *mut c_void;
    cq.cqe = raw.capacity() as c_int;
    cq.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    cq.cond = libc::PTHREAD_COND_INITIALIZER;
    extended::fill(&mut cq);
    let own = Cq {
        raw: raw.clone(),
        users: Users::default(),
        comp: Unacknowledged::default(),
        asynchronous: Unacknowledged::default(),
        parent_domain: attributes.parent_domain,
        polling: RawMutex::INIT,
        current: Cell::default(),
    };
    let cq = object::create(Kind::Cq, cq, own);
    raw.set_user_data(cq as u64);
    Ok(cq)
}

pub(crate) unsafe extern "C" fn ibv_create_cq(
    c: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer(|| {
        let attributes = CqAttributes {
            cqe: u32::try_from(cqe).map_err(|_| EINVAL)?,
            cq_context: cq_context as usize,
            channel: channel as usize,
            comp_vector: u32::try_from(comp_vector).map_err(|_| EINVAL)?,
            ..CqAttributes::default()
        };
        Ok(create(c, &attributes)?.cast())
    })
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    c: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer(|| {
        let attr = &*attr;
        if attr.comp_mask & !3 != 0 || attr.wc_flags & !WC_FLAGS != 0 {
            return Err(UNSUPPORTED);
        }
        if attr.wc_flags & WC_TM_INFO != 0 && attr.wc_flags & WC_TIMESTAMP != 0 {
            return Err(UNSUPPORTED);
        }
        // Single-threaded use is a hint. Ignoring overruns is not supported.
        if attr.comp_mask & 1 != 0 && attr.flags & !1 != 0 {
            return Err(UNSUPPORTED);
        }
        let attributes = CqAttributes {
            cqe: attr.cqe,
            cq_context: attr.cq_context as usize,
            channel: attr.channel as usize,
            comp_vector: attr.comp_vector,
            wc_flags: attr.wc_flags,
            parent_domain: if attr.comp_mask & 2 != 0 {
                attr.parent_domain as usize
            } else {
                0
            },
        };
        create(c, &attributes)
    })
}

pub(crate) unsafe extern "C" fn ibv_resize_cq(c: *mut ibv_cq, cqe: c_int) -> c_int {
    code(|| {
        let cq = find(c)?;
        let cqe = u32::try_from(cqe).map_err(|_| EINVAL)?;
        cq.raw.resize(cqe)?;
        (*c).cqe = cq.raw.capacity() as c_int;
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_destroy_cq(c: *mut ibv_cq) -> c_int {
    code(|| {
        let cq = find(c)?;
        if cq.users.any() {
            return Err(EBUSY);
        }
        {
            let _delivery = DELIVERY.lock();
            cq.raw.set_user_data(0);
            cq.raw.forget_events();
        }
        discard(&context((*c).context).raw, cq.raw.clone());
        cq.comp.wait();
        cq.asynchronous.wait();
        object::retire(Kind::Cq, c.cast::<ibv_cq_ex>())?;
        if let Ok(channel) = find_channel((*c).channel) {
            // The channel may be destroyed as soon as it has no users.
            change_refcnt(channel, -1);
            channel.users.remove();
        }
        if let Ok(pd) = pd::find(cq.parent_domain as *mut ibv_pd) {
            pd.users.remove();
        }
        object::free::<ibv_cq_ex, Cq>(c.cast());
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    code(|| {
        trusted(cq.cast()).raw.arm(solicited_only != 0);
        Ok(())
    })
}
