//! Targets of extended reliable connections (`IBV_QPT_XRC_RECV`) and their handles
//! (`ibv_open_qp(3)`).

use super::used::for_each_dependency;
use crate::abi::verbs::value::QPT_XRC_RECV;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED, pointer};
use crate::border::object::{self, Kind, Unacknowledged, Users};
use crate::device::pending_events::redirect_events;
use crate::device::{ContextObject, checked_context, query};
use crate::domain::xrcd::{self, XrcdObject};
use crate::qp::connected::{self, Qp, QpObject, Target};
use crate::qp::state::state_of;
use iwarp::runtime::{ProcessLock, QueuePair, XrcTargetAttributes};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Held while handles of targets are created or removed.
static HANDLES: ProcessLock<()> = ProcessLock::new("verbs::xrc::HANDLES", ());

pub(super) fn create_target(ctx: &ContextObject, xrcd: &XrcdObject) -> Res<QueuePair> {
    let attributes = |addressable| XrcTargetAttributes {
        max_ird: query::RD_ATOMIC,
        addressable,
    };
    let create = |addressable| {
        ctx.raw
            .create_xrc_target(&xrcd.raw, attributes(addressable))
    };
    Ok(match ctx.is_shared() {
        true => create(false)?,
        false => create(true).or_else(|_| create(false))?,
    })
}

/// Registers a new handle to a target. Does nothing for other queue pairs.
pub(super) unsafe fn add_handle(q: *mut ibv_qp) -> Res<()> {
    if let Some(target) = &connected::find(q)?.target {
        target.handles.lock().push(q as usize);
    }
    Ok(())
}

/// Removes a handle that is being destroyed. Returns `true` if the target has other handles, which
/// keep it alive. The oldest of them receives the target's events from now on.
pub(super) unsafe fn remove_handle(q: *mut ibv_qp, qp: &QpObject) -> bool {
    let _handles = HANDLES.lock();
    let Some(target) = &qp.target else {
        return false;
    };
    let mut handles = target.handles.lock();
    handles.retain(|h| *h != q as usize);
    match handles.first() {
        Some(oldest) => {
            redirect_events(&qp.raw, *oldest as u64);
            true
        }
        None => false,
    }
}

const OPEN_NUM: u32 = 1;
const OPEN_XRCD: u32 = 2;
const OPEN_CONTEXT: u32 = 4;
const OPEN_TYPE: u32 = 8;

unsafe fn open(c: *mut ibv_context, attr: &ibv_qp_open_attr) -> Res<*mut ibv_qp> {
    let ctx = checked_context(c)?;
    let required = OPEN_NUM | OPEN_XRCD | OPEN_TYPE;
    if attr.comp_mask & !(required | OPEN_CONTEXT) != 0 {
        return Err(UNSUPPORTED);
    }
    if attr.comp_mask & required != required || attr.qp_type != QPT_XRC_RECV {
        return Err(EINVAL);
    }
    let xrcd = xrcd::find(attr.xrcd)?;
    let _handles = HANDLES.lock();
    let raw = ctx.raw.queue_pair(attr.qp_num).ok_or(EINVAL)?;
    if !raw.xrc_domain().is_some_and(|d| d.is_same(&xrcd.raw)) {
        return Err(EINVAL);
    }
    // The runtime's user data is the address of one of the target's handles.
    let other = connected::find(raw.user_data() as *mut ibv_qp)?;
    let handles = Arc::clone(&other.target.as_ref().ok_or(EINVAL)?.handles);
    let mut public: ibv_qp_ex = std::mem::zeroed();
    public.qp_base.context = c;
    if attr.comp_mask & OPEN_CONTEXT != 0 {
        public.qp_base.qp_context = attr.qp_context;
    }
    public.qp_base.handle = raw.num();
    public.qp_base.qp_num = raw.num();
    public.qp_base.state = state_of(raw.state());
    public.qp_base.qp_type = QPT_XRC_RECV;
    public.qp_base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    public.qp_base.cond = libc::PTHREAD_COND_INITIALIZER;
    let target = Target {
        xrcd: attr.xrcd as usize,
        handles,
    };
    for_each_dependency(&public.qp_base, Some(&target), Users::add);
    let own = Qp {
        disconnected: AtomicBool::new(false),
        is_new: AtomicBool::new(false),
        raw,
        asynchronous: Unacknowledged::default(),
        attributes: Mutex::new(*other.attributes.lock()),
        sig_all: false,
        max_sge: other.max_sge,
        builder: None,
        target: Some(target),
    };
    let q = object::create(Kind::Qp, public, own).cast();
    add_handle(q)?;
    Ok(q)
}

pub(crate) unsafe extern "C" fn open_qp(
    c: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    pointer(|| open(c, attr.as_ref().ok_or(EINVAL)?))
}
