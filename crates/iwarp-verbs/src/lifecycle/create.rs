//! Creation of queue pairs of all types: `ibv_create_qp(3)`, `ibv_create_qp_ex(3)`.
//!
//! This file checks the program's attributes and creates the public object. `xrc` creates the
//! runtime's part of an XRC target.

use super::used::for_each_dependency;
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

struct InitAttributes {
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

/// Checks that the device supports the sizes. Ignores the sizes of a receive queue if the queue
/// pair has none.
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
const UNSUPPORTED_TYPES: [c_uint; 2] = [8, 0xff];

/// Checks the type. Unreliable connections exist only by GID and number, so their queue pairs
/// cannot have an identifier. As siw does, an iWARP NIC refuses to create them on an identifier's
/// context (`is_managed`); a RoCE NIC allows that.
fn check_type(qp_type: c_uint, ops: Option<u64>, is_managed: bool) -> Res<()> {
    match qp_type {
        QPT_RC | QPT_XRC_SEND => Ok(()),
        QPT_UC if !is_managed && ops.unwrap_or_default() & !UC_OPS == 0 => Ok(()),
        QPT_UD if ops.unwrap_or_default() & !datagram::OPS == 0 => Ok(()),
        QPT_XRC_RECV if ops.unwrap_or_default() == 0 => Ok(()),
        QPT_UC | QPT_UD | QPT_XRC_RECV => Err(UNSUPPORTED),
        _ if UNSUPPORTED_TYPES.contains(&qp_type) => Err(UNSUPPORTED),
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

/// Replaces the requested sizes by the actual sizes.
fn set_actual_sizes(cap: &mut ibv_qp_cap, qp_type: c_uint, shared_receive: bool) {
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
struct Dependencies<'a> {
    pd: &'a PdObject,
    send_cq: &'a CqObject,
    recv_cq: &'a CqObject,
    srq: Option<&'a SrqObject>,
}

impl Dependencies<'_> {
    unsafe fn find<'a>(init: &InitAttributes) -> Res<Dependencies<'a>> {
        let send_cq = cq::find(init.send_cq)?;
        // An initiator has no receives, so the program's `recv_cq` and `srq` are ignored.
        let receives = init.qp_type != QPT_XRC_SEND;
        let recv_cq = match receives {
            true => cq::find(init.recv_cq)?,
            false => send_cq,
        };
        let srq = match init.srq.is_null() || !receives {
            true => None,
            false => Some(srq::queue::find(init.srq)?),
        };
        // An XRC domain's shared receive queues are for XRC targets.
        if srq.is_some_and(|srq| srq.raw.num().is_some()) {
            return Err(EINVAL);
        }
        let matches_tags = srq.is_some_and(|srq| srq.raw.tag_cq().is_some());
        if matches_tags && init.qp_type != QPT_RC {
            return Err(EINVAL);
        }
        let srq_context = srq.map(|srq| (*srq.c()).context);
        let recv_context = receives.then(|| (*init.recv_cq).context);
        for other in [Some((*init.send_cq).context), recv_context, srq_context] {
            check_same(init.context, other.unwrap_or(init.context))?;
        }
        Ok(Dependencies {
            pd: pd::find(init.pd)?,
            send_cq,
            recv_cq,
            srq,
        })
    }

    fn attributes(&self, init: &InitAttributes, cap: &ibv_qp_cap) -> QpAttributes {
        QpAttributes {
            pd: self.pd.number,
            send_cq: self.send_cq.raw.clone(),
            recv_cq: self.recv_cq.raw.clone(),
            srq: self.srq.map(|s| s.raw.clone()),
            unreliable: init.qp_type == QPT_UC,
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge.max(1),
            max_inline: cap.max_inline_data,
            signal_all: init.sig_all,
            max_ird: query::RD_ATOMIC,
            max_ord: query::RD_ATOMIC,
        }
    }

    fn ud_attributes(&self, init: &InitAttributes, cap: &ibv_qp_cap) -> UdAttributes {
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
            signal_all: init.sig_all,
        }
    }
}

/// Creates the runtime's part of a connected queue pair with its own queues.
unsafe fn connected(
    ctx: &ContextObject,
    init: &InitAttributes,
    cap: &ibv_qp_cap,
) -> Res<QueuePair> {
    let parts = Dependencies::find(init)?;
    let attributes = parts.attributes(init, cap);
    // If the program opened the context, the queue pair may be connected by GID and number. The
    // connection manager's contexts are for identifiers only.
    let create_raw = |addressable: bool| match init.qp_type {
        QPT_XRC_SEND => match ctx.raw.create_xrc_initiator(&attributes, addressable) {
            Err(_) if addressable => ctx.raw.create_xrc_initiator(&attributes, false),
            created => created,
        },
        _ if addressable => ctx.raw.create_reachable_qp(&attributes),
        _ => ctx.raw.create_qp(&attributes),
    };
    let raw = create_raw(!ctx.is_shared())?;
    raw.set_snapshot(ctx.raw.config().snapshot);
    Ok(raw)
}

unsafe fn new_public(init: &InitAttributes, num: u32) -> ibv_qp_ex {
    let mut c: ibv_qp_ex = std::mem::zeroed();
    c.qp_base.context = init.context;
    c.qp_base.qp_context = init.qp_context;
    c.qp_base.pd = init.pd;
    c.qp_base.send_cq = init.send_cq;
    c.qp_base.recv_cq = init.recv_cq;
    c.qp_base.srq = init.srq;
    c.qp_base.handle = num;
    c.qp_base.qp_num = num;
    c.qp_base.state = QPS_RESET;
    c.qp_base.qp_type = init.qp_type;
    c.qp_base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    c.qp_base.cond = libc::PTHREAD_COND_INITIALIZER;
    if init.ops.is_some() {
        batch::fill(&mut c);
    }
    c
}

/// Returns the initial attributes that `ibv_query_qp` reports.
fn initial_attributes(cap: ibv_qp_cap, path_mtu: c_uint) -> Mutex<ibv_qp_attr> {
    // SAFETY: integers only, for which zero is valid.
    let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.cap = cap;
    attributes.path_mtu = path_mtu;
    attributes.port_num = 1;
    Mutex::new(attributes)
}

unsafe fn create(init: &InitAttributes, cap: &mut ibv_qp_cap) -> Res<*mut ibv_qp> {
    let ctx = context(init.context);
    let shared_receive = !init.srq.is_null();
    check_sizes(cap, has_receive_queue(init.qp_type, shared_receive))?;
    let is_managed = ctx.is_shared() && ctx.device.face == Face::Rnic;
    check_type(init.qp_type, init.ops, is_managed)
        .inspect_err(|_| face::hint_unsupported_type(ctx.device.face, init.qp_type))?;
    let builder = init.ops.map(Builder::new).transpose()?;
    set_actual_sizes(cap, init.qp_type, shared_receive);
    if init.qp_type == QPT_UD {
        return create_ud(ctx, init, cap, builder);
    }
    let (raw, target) = match init.qp_type {
        QPT_XRC_RECV => {
            let domain = xrcd::find(init.xrcd)?;
            let raw = xrc::create_target(ctx, domain)?;
            (raw, Some(Target::new(init.xrcd)))
        }
        _ => (connected(ctx, init, cap)?, None),
    };
    if face::allows_receives_in_reset(ctx.device.face) {
        raw.modify(State::Init)?;
    }
    let c = new_public(init, raw.num());
    for_each_dependency(&c.qp_base, target.as_ref(), Users::add);
    let own = Qp {
        disconnected: AtomicBool::new(false),
        is_new: AtomicBool::new(true),
        raw: raw.clone(),
        asynchronous: Unacknowledged::default(),
        attributes: initial_attributes(*cap, 3),
        sig_all: init.sig_all,
        max_sge: MaxSge::from_cap(cap),
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
    init: &InitAttributes,
    cap: &ibv_qp_cap,
    builder: Option<Builder>,
) -> Res<*mut ibv_qp> {
    let attributes = Dependencies::find(init)?.ud_attributes(init, cap);
    let raw = ctx.raw.create_ud_qp(&attributes)?;
    if face::allows_receives_in_reset(ctx.device.face) {
        raw.modify(State::Init)?;
    }
    let c = new_public(init, raw.num());
    for_each_dependency(&c.qp_base, None, Users::add);
    let own = UdQp {
        raw: raw.clone(),
        asynchronous: Unacknowledged::default(),
        attributes: initial_attributes(*cap, 0),
        sig_all: init.sig_all,
        max_inline: cap.max_inline_data,
        max_sge: MaxSge::from_cap(cap),
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
        let init = InitAttributes {
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
        create(&init, &mut a.cap)
    })
}

/// Returns the owner and its context: a target's XRC domain, or another queue pair's protection
/// domain.
unsafe fn find_owner(
    a: &ibv_qp_init_attr_ex,
) -> Res<(*mut ibv_context, *mut ibv_pd, *mut ibv_xrcd)> {
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
        let blocks_loopback = flags == BLOCK_SELF_MCAST_LB && a.qp_type == QPT_UD;
        if flags != 0 && !blocks_loopback {
            return Err(UNSUPPORTED);
        }
        let (context, pd, xrcd) = find_owner(a)?;
        check_same(c, context)?;
        let init = InitAttributes {
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
        let q = create(&init, &mut a.cap)?;
        if blocks_loopback {
            datagram::find(q)?.raw.set_block_self_multicast(true);
        }
        Ok(q)
    })
}
