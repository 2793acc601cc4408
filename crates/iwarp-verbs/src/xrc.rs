//! Extended reliable connections: `ibv_open_xrcd(3)`, the targets (`IBV_QPT_XRC_RECV`) and who else has them open (`ibv_open_qp(3)`), and
//! posting of requests that name a shared receive queue.
//!
//! A domain belongs to an opened device of this process: here no memory is shared with other processes through an RNIC. A program that opens the
//! same file again on that device gets the same domain.

use crate::abi::verbs::value::QPT_XRC_RECV;
use crate::abi::verbs::*;
use crate::device::{ContextObject, checked_context};
use crate::guard::{EBUSY, EINVAL, Errno, Res, UNSUPPORTED, code, pointer};
use crate::object::{self, Kind, Object, Unacknowledged, Users};
use crate::qp::{Qp, QpObject};
use crate::{events, post, qp, qp_create, query, srq};
use iwarp::runtime::{
    PostFailed, ProcessLock, QueuePair, XrcDomain, XrcSendWr, XrcTargetAttributes,
};
use iwarp_rnic::SendWr;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) struct Xrcd {
    pub(crate) raw: XrcDomain,
    pub(crate) users: Users,
}

pub(crate) type XrcdObject = Object<ibv_xrcd, Xrcd>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(xrcd: *mut ibv_xrcd) -> Res<&'a XrcdObject> {
    object::find(Kind::Xrcd, xrcd)
}

const XRCD_FD: u32 = 1;
const XRCD_OFLAGS: u32 = 2;

pub(crate) unsafe extern "C" fn open_xrcd(
    c: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    pointer(|| {
        let ctx = checked_context(c)?;
        let attr = attr.as_ref().ok_or(EINVAL)?;
        if attr.comp_mask & !(XRCD_FD | XRCD_OFLAGS) != 0 {
            return Err(UNSUPPORTED);
        }
        if attr.comp_mask != XRCD_FD | XRCD_OFLAGS {
            return Err(EINVAL);
        }
        if attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(EINVAL);
        }
        let file = match attr.fd {
            -1 => None,
            fd if libc::fcntl(fd, libc::F_GETFD) < 0 => return Err(Errno(libc::EBADF)),
            fd => Some(BorrowedFd::borrow_raw(fd)),
        };
        let (create, exclusive) = (
            attr.oflags & libc::O_CREAT != 0,
            attr.oflags & libc::O_EXCL != 0,
        );
        let raw = ctx.raw.open_xrc_domain(file, create, exclusive)?;
        let users = Users::default();
        let xrcd = ibv_xrcd { context: c };
        Ok(object::create(Kind::Xrcd, xrcd, Xrcd { raw, users }))
    })
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    code(|| {
        if find(xrcd)?.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Xrcd, xrcd)?;
        object::free::<ibv_xrcd, Xrcd>(xrcd);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn get_srq_num(s: *mut ibv_srq, num: *mut u32) -> c_int {
    code(|| {
        let srq = srq::find(s)?;
        if num.is_null() {
            return Err(EINVAL);
        }
        *num = srq.raw.num().ok_or(EINVAL)?;
        Ok(())
    })
}

/// What the target of an extended reliable connection has besides other queue pairs.
pub(crate) struct Target {
    xrcd: usize,
    /// All handles to it, the oldest first. It lives as long as there is one.
    handles: Arc<Mutex<Vec<usize>>>,
}

impl Target {
    pub(crate) fn new(xrcd: *mut ibv_xrcd) -> Self {
        Self {
            xrcd: xrcd as usize,
            handles: Arc::default(),
        }
    }

    pub(crate) const fn xrcd(&self) -> *mut ibv_xrcd {
        self.xrcd as *mut ibv_xrcd
    }
}

/// Held while a handle is added or removed.
static HANDLES: ProcessLock<()> = ProcessLock::new("verbs::xrc::HANDLES", ());

/// Makes what is behind a target.
pub(crate) fn create_target(ctx: &ContextObject, xrcd: &XrcdObject) -> Res<QueuePair> {
    let attributes = |addressable| XrcTargetAttributes {
        max_ird: query::RD_ATOMIC,
        addressable,
    };
    let make = |addressable| {
        ctx.raw
            .create_xrc_target(&xrcd.raw, attributes(addressable))
    };
    Ok(match ctx.is_shared() {
        true => make(false)?,
        false => make(true).or_else(|_| make(false))?,
    })
}

/// Enters a new handle, if it is one to a target.
pub(crate) unsafe fn add_handle(q: *mut ibv_qp) -> Res<()> {
    if let Some(target) = &qp::find(q)?.target {
        target.handles.lock().push(q as usize);
    }
    Ok(())
}

/// A handle is being destroyed. Returns `true` if it is one of several to a target, which then lives on, and tells its events to another handle.
pub(crate) unsafe fn has_other_handles(q: *mut ibv_qp, qp: &QpObject) -> bool {
    let _turn = HANDLES.lock();
    let Some(target) = &qp.target else {
        return false;
    };
    let mut handles = target.handles.lock();
    handles.retain(|h| *h != q as usize);
    match handles.first() {
        Some(oldest) => {
            events::hand_over(&qp.raw, *oldest as u64);
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
    let xrcd = find(attr.xrcd)?;
    let _turn = HANDLES.lock();
    let raw = ctx.raw.queue_pair(attr.qp_num).ok_or(EINVAL)?;
    if !raw.xrc_domain().is_some_and(|d| d.is_same(&xrcd.raw)) {
        return Err(EINVAL);
    }
    // Of those that the program has, one is the program's view of it.
    let other = qp::find(raw.user_data() as *mut ibv_qp)?;
    let handles = Arc::clone(&other.target.as_ref().ok_or(EINVAL)?.handles);
    let mut public: ibv_qp_ex = std::mem::zeroed();
    public.qp_base.context = c;
    if attr.comp_mask & OPEN_CONTEXT != 0 {
        public.qp_base.qp_context = attr.qp_context;
    }
    public.qp_base.handle = raw.num();
    public.qp_base.qp_num = raw.num();
    public.qp_base.state = qp::state_of(raw.state());
    public.qp_base.qp_type = QPT_XRC_RECV;
    public.qp_base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    public.qp_base.cond = libc::PTHREAD_COND_INITIALIZER;
    let target = Target {
        xrcd: attr.xrcd as usize,
        handles,
    };
    qp_create::each_used(&public.qp_base, Some(&target), Users::add);
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

/// Posts requests of the program, with the numbers of the shared receive queues that they name.
pub(crate) unsafe fn post_some<const W: usize>(
    qp: &QpObject,
    wrs: &[SendWr<'_>],
    first: *mut ibv_send_wr,
) -> Result<(), PostFailed> {
    let mut room = [const { MaybeUninit::<XrcSendWr<'_>>::uninit() }; W];
    let mut at = first;
    for (to, wr) in room.iter_mut().zip(wrs) {
        // The only member of the union `qp_type` is `xrc.remote_srqn`.
        let srq = (*at).qp_type;
        to.write(XrcSendWr { wr: *wr, srq });
        at = (*at).next;
    }
    qp.raw.post_send_xrc(post::written(&room[..wrs.len()]))
}
