//! Creation of queue pairs of all types: `ibv_create_qp(3)`, `ibv_create_qp_ex(3)`.
//!
//! This file checks the program's attributes and creates the public object. `xrc` creates the
//! runtime's part of an XRC target.

use super::used::each_used;
use super::xrc;
use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED, pointer};
use crate::border::object::{self, Kind, Unacknowledged, Users};
use crate::cq::{self, CqObject};
use crate::device::{ContextObject, check_same, checked_context, context, face, query};
use crate::domain::pd::{self, PdObject};
use crate::domain::xrcd;
use crate::post::batch;
use crate::qp::batch::Builder;
use crate::qp::connected::{Qp, Target};
use crate::qp::datagram::{self, UdQp};
use crate::qp::limits::{INLINE_MIN, MaxSge};
use crate::srq::{self, queue::SrqObject};
use iwarp::runtime::{QpAttributes, QueuePair, UdAttributes};
use iwarp::{Face, LIMITS};
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;

const ATTR_PD: u32 = 1;
const ATTR_XRCD: u32 = 1 << 1;
const ATTR_CREATE_FLAGS: u32 = 1 << 2;
const ATTR_SEND_OPS_FLAGS: u32 = 1 << 6;
/// `IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`: a datagram queue pair does not receive its own multicasts.
const BLOCK_SELF_MCAST_LB: u32 = 1 << 1;

struct Wanted {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    xrcd: *mut ibv_xrcd,
    qp_context: *mut c_void,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    qp_type: c_uint,
    sig_all: bool,
    ops: Option<u64>,
}

/// Checks that the device supports the sizes. Sizes of a queue that does not exist are ignored.
fn check_sizes(cap: &ibv_qp_cap, has_receive_queue: bool) -> Res<()> {
    let mut wrs = cap.max_send_wr;
    let mut sges = cap.max_send_sge;
    if has_receive_queue {
        wrs = wrs.max(cap.max_recv_wr);
        sges = sges.max(cap.max_recv_sge);
    }
    if wrs > LIMITS.max_qp_wr || sges > LIMITS.max_sge || cap.max_inline_data > LIMITS.max_inline {
        return Err(EINVAL);
    }
    Ok(())
}

/// `ibv_wr_*` operations of unreliable connections: Write and Send, with and without immediate
/// data, and local operations.
const UC_OPS: u64 = 0x38f;

/// `IBV_QPT_RAW_PACKET` and `IBV_QPT_DRIVER`, which the device does not support.
const KNOWN_TYPES: [c_uint; 2] = [8, 0xff];

/// Checks the type. Unreliable connections are connected by GID and number only. As with siw, an
/// identifier of an iWARP NIC cannot have one. On a RoCE NIC, a program may create them with an
/// identifier's context.
fn check_type(qp_type: c_uint, ops: Option<u64>, is_managed: bool) -> Res<()> {
    match qp_type {
        QPT_RC | QPT_XRC_SEND => Ok(()),
        QPT_UC if !is_managed && ops.unwrap_or_default() & !UC_OPS == 0 => Ok(()),
        QPT_UD if ops.unwrap_or_default() & !datagram::OPS == 0 => Ok(()),
        QPT_XRC_RECV if ops.unwrap_or_default() == 0 => Ok(()),
        QPT_UC | QPT_UD | QPT_XRC_RECV => Err(UNSUPPORTED),
        _ if KNOWN_TYPES.contains(&qp_type) => Err(UNSUPPORTED),
        _ => Err(EINVAL),
    }
}

/// The sizes of an XRC target, which has no queues.
const NO_CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 0,
    max_recv_wr: 0,
    max_send_sge: 0,
    max_recv_sge: 0,
    max_inline_data: 0,
};

/// Returns `true` if receives are posted to the queue pair itself.
const fn has_receive_queue(qp_type: c_uint, shared_receive: bool) -> bool {
    !shared_receive && !matches!(qp_type, QPT_XRC_SEND | QPT_XRC_RECV)
}

/// Updates the sizes to the actual ones.
fn adjust(cap: &mut ibv_qp_cap, qp_type: c_uint, shared_receive: bool) {
    cap.max_inline_data = cap.max_inline_data.max(INLINE_MIN);
    cap.max_send_sge = cap.max_send_sge.max(1);
    cap.max_recv_sge = cap.max_recv_sge.max(1);
    match qp_type {
        QPT_XRC_RECV => *cap = NO_CAP,
        _ if !has_receive_queue(qp_type, shared_receive) => {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
        }
        _ => {}
    }
}

/// The objects that a queue pair with its own queues depends on.
struct Parts<'a> {
    pd: &'a PdObject,
    send_cq: &'a CqObject,
    recv_cq: &'a CqObject,
    srq: Option<&'a SrqObject>,
}

impl Parts<'_> {
    unsafe fn find<'a>(wanted: &Wanted) -> Res<Parts<'a>> {
        let send_cq = cq::find(wanted.send_cq)?;
        // An initiator has no receives, so the program's value is ignored.
        let receives = wanted.qp_type != QPT_XRC_SEND;
        let recv_cq = match receives {
            true => cq::find(wanted.recv_cq)?,
            false => send_cq,
        };
        let srq = match wanted.srq.is_null() || !receives {
            true => None,
            false => Some(srq::queue::find(wanted.srq)?),
        };
        // An XRC domain's shared receive queues are for XRC targets.
        if srq.is_some_and(|srq| srq.raw.num().is_some()) {
            return Err(EINVAL);
        }
        let matches_tags = srq.is_some_and(|srq| srq.raw.tag_cq().is_some());
        if matches_tags && wanted.qp_type != QPT_RC {
            return Err(EINVAL);
        }
        let srq_context = srq.map(|srq| (*srq.c()).context);
        let recv_context = receives.then(|| (*wanted.recv_cq).context);
        for other in [Some((*wanted.send_cq).context), recv_context, srq_context] {
            check_same(wanted.context, other.unwrap_or(wanted.context))?;
        }
        Ok(Parts {
            pd: pd::find(wanted.pd)?,
            send_cq,
            recv_cq,
            srq,
        })
    }

    fn attributes(&self, wanted: &Wanted, cap: &ibv_qp_cap) -> QpAttributes {
        QpAttributes {
            pd: self.pd.number,
            send_cq: self.send_cq.raw.clone(),
            recv_cq: self.recv_cq.raw.clone(),
            srq: self.srq.map(|s| s.raw.clone()),
            unreliable: wanted.qp_type == QPT_UC,
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge.max(1),
            max_inline: cap.max_inline_data,
            signal_all: wanted.sig_all,
            max_ird: query::RD_ATOMIC,
            max_ord: query::RD_ATOMIC,
        }
    }

    fn ud_attributes(&self, wanted: &Wanted, cap: &ibv_qp_cap) -> UdAttributes {
        UdAttributes {
            pd: self.pd.number,
            send_cq: self.send_cq.raw.clone(),
            recv_cq: self.recv_cq.raw.clone(),
            srq: self.srq.map(|s| s.raw.clone()),
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge,
            max_inline: cap.max_inline_data,
            signal_all: wanted.sig_all,
        }
    }
}

/// Creates the runtime's part of a connected queue pair with its own queues.
unsafe fn connected(ctx: &ContextObject, wanted: &Wanted, cap: &ibv_qp_cap) -> Res<QueuePair> {
    let parts = Parts::find(wanted)?;
    let attributes = parts.attributes(wanted, cap);
    // On a context of the program's own, a queue pair may be connected by GID and number. The
    // connection manager's contexts are for identifiers.
    let make = |addressable: bool| match wanted.qp_type {
        QPT_XRC_SEND => match ctx.raw.create_xrc_initiator(&attributes, addressable) {
            Err(_) if addressable => ctx.raw.create_xrc_initiator(&attributes, false),
            made => made,
        },
        _ if addressable => ctx.raw.create_reachable_qp(&attributes),
        _ => ctx.raw.create_qp(&attributes),
    };
    let raw = make(!ctx.is_shared())?;
    raw.set_snapshot(ctx.raw.config().snapshot);
    Ok(raw)
}

unsafe fn public(wanted: &Wanted, num: u32) -> ibv_qp_ex {
    let mut c: ibv_qp_ex = std::mem::zeroed();
    c.qp_base.context = wanted.context;
    c.qp_base.qp_context = wanted.qp_context;
    c.qp_base.pd = wanted.pd;
    c.qp_base.send_cq = wanted.send_cq;
    c.qp_base.recv_cq = wanted.recv_cq;
    c.qp_base.srq = wanted.srq;
    c.qp_base.handle = num;
    c.qp_base.qp_num = num;
    c.qp_base.state = QPS_RESET;
    c.qp_base.qp_type = wanted.qp_type;
    c.qp_base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    c.qp_base.cond = libc::PTHREAD_COND_INITIALIZER;
    if wanted.ops.is_some() {
        batch::fill(&mut c);
    }
    c
}

/// Returns the initial attributes that `ibv_query_qp` reports.
fn first_attributes(cap: ibv_qp_cap, path_mtu: c_uint) -> Mutex<ibv_qp_attr> {
    // SAFETY: integers only, for which zero is valid.
    let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.cap = cap;
    attributes.path_mtu = path_mtu;
    attributes.port_num = 1;
    Mutex::new(attributes)
}

unsafe fn create(wanted: &Wanted, cap: &mut ibv_qp_cap) -> Res<*mut ibv_qp> {
    let ctx = context(wanted.context);
    let shared_receive = !wanted.srq.is_null();
    check_sizes(cap, has_receive_queue(wanted.qp_type, shared_receive))?;
    let is_managed = ctx.is_shared() && ctx.device.face == Face::Rnic;
    check_type(wanted.qp_type, wanted.ops, is_managed)
        .inspect_err(|_| face::type_refused(ctx.device.face, wanted.qp_type))?;
    let builder = wanted.ops.map(Builder::new).transpose()?;
    adjust(cap, wanted.qp_type, shared_receive);
    if wanted.qp_type == QPT_UD {
        return create_ud(ctx, wanted, cap, builder);
    }
    let (raw, target) = match wanted.qp_type {
        QPT_XRC_RECV => {
            let domain = xrcd::find(wanted.xrcd)?;
            let raw = xrc::create_target(ctx, domain)?;
            (raw, Some(Target::new(wanted.xrcd)))
        }
        _ => (connected(ctx, wanted, cap)?, None),
    };
    if face::receives_at_once(ctx.device.face) {
        raw.modify(State::Init)?;
    }
    let c = public(wanted, raw.num());
    each_used(&c.qp_base, target.as_ref(), Users::add);
    let own = Qp {
        disconnected: AtomicBool::new(false),
        is_new: AtomicBool::new(true),
        raw: raw.clone(),
        asynchronous: Unacknowledged::default(),
        attributes: first_attributes(*cap, 3),
        sig_all: wanted.sig_all,
        max_sge: MaxSge::of(cap),
        builder,
        target,
    };
    let qp = object::create(Kind::Qp, c, own).cast();
    raw.set_user_data(qp as u64);
    xrc::add_handle(qp)?;
    Ok(qp)
}

unsafe fn create_ud(
    ctx: &ContextObject,
    wanted: &Wanted,
    cap: &ibv_qp_cap,
    builder: Option<Builder>,
) -> Res<*mut ibv_qp> {
    let attributes = Parts::find(wanted)?.ud_attributes(wanted, cap);
    let raw = ctx.raw.create_ud_qp(&attributes)?;
    if face::receives_at_once(ctx.device.face) {
        raw.modify(State::Init)?;
    }
    let c = public(wanted, raw.num());
    each_used(&c.qp_base, None, Users::add);
    let own = UdQp {
        raw: raw.clone(),
        asynchronous: Unacknowledged::default(),
        attributes: first_attributes(*cap, 0),
        sig_all: wanted.sig_all,
        max_inline: cap.max_inline_data,
        max_sge: MaxSge::of(cap),
        builder,
    };
    let qp = object::create(Kind::UdQp, c, own);
    raw.set_user_data(qp as u64);
    Ok(qp.cast())
}

pub(crate) unsafe extern "C" fn ibv_create_qp(
    p: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    pointer(|| {
        if attr.is_null() {
            return Err(EINVAL);
        }
        pd::find(p)?;
        let a = &mut *attr;
        let wanted = Wanted {
            context: (*p).context,
            pd: p,
            xrcd: null_mut(),
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            qp_type: a.qp_type,
            sig_all: a.sq_sig_all != 0,
            ops: None,
        };
        create(&wanted, &mut a.cap)
    })
}

/// Returns the owning object: the XRC domain of a target, otherwise the protection domain.
unsafe fn owner(a: &ibv_qp_init_attr_ex) -> Res<(*mut ibv_context, *mut ibv_pd, *mut ibv_xrcd)> {
    let pd = match a.comp_mask & ATTR_PD {
        0 => null_mut(),
        _ => a.pd,
    };
    if a.qp_type == QPT_XRC_RECV {
        if a.comp_mask & ATTR_XRCD == 0 {
            return Err(EINVAL);
        }
        xrcd::find(a.xrcd)?;
        return Ok(((*a.xrcd).context, pd, a.xrcd));
    }
    if a.comp_mask & ATTR_PD == 0 || a.comp_mask & ATTR_XRCD != 0 {
        return Err(EINVAL);
    }
    pd::find(pd)?;
    Ok(((*pd).context, pd, null_mut()))
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    c: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    pointer(|| {
        checked_context(c)?;
        if attr.is_null() {
            return Err(EINVAL);
        }
        let a = &mut *attr;
        let known = ATTR_PD | ATTR_XRCD | ATTR_SEND_OPS_FLAGS | ATTR_CREATE_FLAGS;
        if a.comp_mask & !known != 0 {
            return Err(UNSUPPORTED);
        }
        let flags = match a.comp_mask & ATTR_CREATE_FLAGS {
            0 => 0,
            _ => a.create_flags,
        };
        let deaf_to_itself = flags == BLOCK_SELF_MCAST_LB && a.qp_type == QPT_UD;
        if flags != 0 && !deaf_to_itself {
            return Err(UNSUPPORTED);
        }
        let (context, pd, xrcd) = owner(a)?;
        check_same(c, context)?;
        let wanted = Wanted {
            context,
            pd,
            xrcd,
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            qp_type: a.qp_type,
            sig_all: a.sq_sig_all != 0,
            ops: (a.comp_mask & ATTR_SEND_OPS_FLAGS != 0).then_some(a.send_ops_flags),
        };
        let q = create(&wanted, &mut a.cap)?;
        if deaf_to_itself {
            datagram::find(q)?.raw.set_deaf_to_itself(true);
        }
        Ok(q)
    })
}
