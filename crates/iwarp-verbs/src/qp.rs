//! Queue pairs: creation, `ibv_modify_qp(3)`, `ibv_query_qp(3)`.

use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::device::{ContextObject, context};
use crate::guard::{EINVAL, Res, UNSUPPORTED, code, pointer};
use crate::object::{self, Kind, Object, Unacknowledged};
use crate::qp_ex::Builder;
use crate::{cq, events, face, pd, qp_ex, query, srq, ud};
use iwarp::raw::{QpAttributes, QueuePair, Retry};
use iwarp::{Face, LIMITS};
use iwarp_rnic::Access;
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

pub(crate) struct Qp {
    pub(crate) raw: QueuePair,
    pub(crate) asynchronous: Unacknowledged,
    /// What `ibv_query_qp` reports besides the state.
    attributes: Mutex<ibv_qp_attr>,
    sig_all: bool,
    /// The `ibv_wr_*` interface, if it was asked for.
    pub(crate) builder: Option<Builder>,
}

// SAFETY: the attributes hold integers only; everything else is shared already.
unsafe impl Sync for Qp {}

pub(crate) type QpObject = Object<ibv_qp_ex, Qp>;

impl Qp {
    /// The value that `ibv_query_qp` reports as time-out.
    pub(crate) fn set_timeout(&self, timeout: u8) {
        self.attributes.lock().timeout = timeout;
    }
}

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(qp: *mut ibv_qp) -> Res<&'a QpObject> {
    object::find(Kind::Qp, qp.cast())
}

const ATTR_PD: u32 = 1;
const ATTR_SEND_OPS_FLAGS: u32 = 1 << 6;
const ATTR_CREATE_FLAGS: u32 = 1 << 2;

/// Inline data that every queue pair takes, in octets.
pub(crate) const INLINE_MIN: u32 = 32;

/// The steps that both ways of creating a queue pair share.
pub(crate) struct Wanted {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    qp_type: c_uint,
    pub(crate) sig_all: bool,
    pub(crate) ops: Option<u64>,
}

/// More than the device can do is an error for every type.
fn check_sizes(cap: &ibv_qp_cap) -> Res<()> {
    let wrs = cap.max_send_wr.max(cap.max_recv_wr);
    let sges = cap.max_send_sge.max(cap.max_recv_sge);
    if wrs > LIMITS.max_qp_wr || sges > LIMITS.max_sge || cap.max_inline_data > LIMITS.max_inline {
        return Err(EINVAL);
    }
    Ok(())
}

/// Operations of the `ibv_wr_*` interface that unreliable connections have: Write, Send, with immediate data, and those on local keys.
const UC_OPS: u64 = 0x38f;

/// Unreliable connections and datagrams are for GID and number only. An identifier of an iWARP NIC has none, as with the kernel's iWARP.
/// On a RoCE NIC a program may make them with the context of an identifier: UCX hands the number of one to `rdma_connect`.
fn check_type(qp_type: c_uint, ops: Option<u64>, is_managed: bool) -> Res<()> {
    match qp_type {
        QPT_RC => Ok(()),
        QPT_UC if !is_managed && ops.unwrap_or_default() & !UC_OPS == 0 => Ok(()),
        QPT_UD if !is_managed && ops.unwrap_or_default() & !ud::OPS == 0 => Ok(()),
        _ => Err(UNSUPPORTED),
    }
}

unsafe fn create(p: *mut ibv_pd, wanted: &Wanted, cap: &mut ibv_qp_cap) -> Res<*mut ibv_qp> {
    let pd = pd::find(p)?;
    let ctx = context((*p).context);
    check_sizes(cap)?;
    let is_managed = ctx.is_shared() && ctx.device.face == Face::Rnic;
    check_type(wanted.qp_type, wanted.ops, is_managed)
        .inspect_err(|_| face::type_refused(ctx.device.face, wanted.qp_type))?;
    if wanted.qp_type == QPT_UD {
        return ud::create(p, wanted, cap);
    }
    let send_cq = cq::find(wanted.send_cq)?;
    let recv_cq = cq::find(wanted.recv_cq)?;
    let srq = if wanted.srq.is_null() {
        None
    } else {
        Some(srq::find(wanted.srq)?)
    };
    // Hardware grants some inline data whether asked or not, and programs rely on it.
    cap.max_inline_data = cap.max_inline_data.max(INLINE_MIN);
    let builder = wanted.ops.map(Builder::new).transpose()?;
    let attributes = QpAttributes {
        pd: pd.number,
        send_cq: send_cq.raw.clone(),
        recv_cq: recv_cq.raw.clone(),
        srq: srq.map(|s| s.raw.clone()),
        unreliable: wanted.qp_type == QPT_UC,
        max_send_wr: cap.max_send_wr,
        max_recv_wr: if srq.is_some() { 0 } else { cap.max_recv_wr },
        max_send_sge: cap.max_send_sge.max(1),
        max_recv_sge: cap.max_recv_sge.max(1),
        max_inline: cap.max_inline_data,
        signal_all: wanted.sig_all,
        max_ird: query::RD_ATOMIC,
        max_ord: query::RD_ATOMIC,
    };
    // A queue pair on a context of the program's own may be connected by GID and number. The connection manager's contexts are for
    // identifiers.
    let raw = if ctx.is_shared() {
        ctx.raw.create_qp(&attributes)?
    } else {
        ctx.raw
            .create_addressable_qp(&attributes)
            .or_else(|_| ctx.raw.create_qp(&attributes))?
    };
    raw.set_snapshot(ctx.raw.config().snapshot);
    // A queue pair of an RNIC accepts receives as soon as it exists.
    raw.modify(State::Init)?;
    cap.max_send_sge = cap.max_send_sge.max(1);
    cap.max_recv_sge = if srq.is_some() {
        0
    } else {
        cap.max_recv_sge.max(1)
    };
    pd.users.add();
    send_cq.users.add();
    recv_cq.users.add();
    if let Some(srq) = srq {
        srq.users.add();
    }
    let mut c: ibv_qp_ex = std::mem::zeroed();
    c.qp_base.context = (*p).context;
    c.qp_base.qp_context = wanted.qp_context;
    c.qp_base.pd = p;
    c.qp_base.send_cq = wanted.send_cq;
    c.qp_base.recv_cq = wanted.recv_cq;
    c.qp_base.srq = wanted.srq;
    c.qp_base.handle = raw.num();
    c.qp_base.qp_num = raw.num();
    c.qp_base.state = QPS_RESET;
    c.qp_base.qp_type = wanted.qp_type;
    c.qp_base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    c.qp_base.cond = libc::PTHREAD_COND_INITIALIZER;
    if wanted.ops.is_some() {
        qp_ex::fill(&mut c);
    }
    let mut attributes: ibv_qp_attr = std::mem::zeroed();
    attributes.cap = *cap;
    attributes.path_mtu = 3;
    attributes.port_num = 1;
    let own = Qp {
        raw: raw.clone(),
        asynchronous: Unacknowledged::default(),
        attributes: Mutex::new(attributes),
        sig_all: wanted.sig_all,
        builder,
    };
    let qp = object::create(Kind::Qp, c, own);
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
        let a = &mut *attr;
        let wanted = Wanted {
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            qp_type: a.qp_type,
            sig_all: a.sq_sig_all != 0,
            ops: None,
        };
        create(p, &wanted, &mut a.cap)
    })
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    _: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    pointer(|| {
        if attr.is_null() {
            return Err(EINVAL);
        }
        let a = &mut *attr;
        check_sizes(&a.cap)?;
        let known = ATTR_PD | ATTR_SEND_OPS_FLAGS | ATTR_CREATE_FLAGS;
        if a.comp_mask & !known != 0 {
            return Err(UNSUPPORTED);
        }
        if a.comp_mask & ATTR_CREATE_FLAGS != 0 && a.create_flags != 0 {
            return Err(UNSUPPORTED);
        }
        if a.comp_mask & ATTR_PD == 0 {
            return Err(EINVAL);
        }
        let wanted = Wanted {
            qp_context: a.qp_context,
            send_cq: a.send_cq,
            recv_cq: a.recv_cq,
            srq: a.srq,
            qp_type: a.qp_type,
            sig_all: a.sq_sig_all != 0,
            ops: (a.comp_mask & ATTR_SEND_OPS_FLAGS != 0).then_some(a.send_ops_flags),
        };
        create(a.pd, &wanted, &mut a.cap)
    })
}

pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(q: *mut ibv_qp) -> *mut ibv_qp_ex {
    let extended = match ud::find(q) {
        Ok(qp) => qp.builder.is_some(),
        Err(_) => find(q).is_ok_and(|qp| qp.builder.is_some()),
    };
    match extended {
        true => q.cast(),
        false => null_mut(),
    }
}

pub(crate) unsafe extern "C" fn ibv_destroy_qp(q: *mut ibv_qp) -> c_int {
    code(|| {
        if let Ok(qp) = ud::find(q) {
            return ud::destroy(q, qp);
        }
        let qp = find(q)?;
        qp.raw.destroy();
        events::forget(&context((*q).context).raw, qp.raw.clone());
        // Acknowledging an event finds the object, so it is retired only afterwards.
        qp.asynchronous.wait();
        object::retire(Kind::Qp, q.cast::<ibv_qp_ex>())?;
        leave_users(&*q);
        object::free::<ibv_qp_ex, Qp>(q.cast());
        Ok(())
    })
}

/// A queue pair is gone: what it was made with may be destroyed.
pub(crate) unsafe fn leave_users(c: &ibv_qp) {
    if let Ok(pd) = pd::find(c.pd) {
        pd.users.remove();
    }
    for cq in [c.send_cq, c.recv_cq] {
        if let Ok(cq) = cq::find(cq) {
            cq.users.remove();
        }
    }
    if let Ok(srq) = srq::find(c.srq) {
        srq.users.remove();
    }
}

pub(crate) const fn state_of(state: State) -> c_uint {
    match state {
        State::Reset => QPS_RESET,
        State::Init => QPS_INIT,
        State::Rtr => QPS_RTR,
        State::Rts => QPS_RTS,
        State::Sqd => QPS_SQD,
        State::Sqe => QPS_SQE,
        State::Error => QPS_ERR,
    }
}

pub(crate) fn to_state(state: c_uint) -> Res<State> {
    Ok(match state {
        QPS_RESET => State::Reset,
        QPS_INIT => State::Init,
        QPS_RTR => State::Rtr,
        QPS_RTS => State::Rts,
        QPS_SQD => State::Sqd,
        QPS_SQE => State::Sqe,
        QPS_ERR => State::Error,
        _ => return Err(EINVAL),
    })
}

/// Every bit of `enum ibv_qp_attr_mask`.
const KNOWN_MASK: c_uint = ((1 << 21) - 1) | 1 << 25;

/// Returns the GIDs of both ends of a path, ours first: named by GID, or by LID if there is no global route header.
pub(crate) fn gids_of_path(c: &ContextObject, path: &ibv_ah_attr) -> Res<([u8; 16], [u8; 16])> {
    if path.is_global == 0 {
        return c.device.device.path_to_lid(path.dlid).ok_or(EINVAL);
    }
    // An entry of the table that is empty is no address to send from.
    let own = query::gid(c, 1, u32::from(path.grh.sgid_index))?.ok_or(EINVAL)?;
    Ok((own.gid, crate::kern::octets(path.grh.dgid)))
}

/// Copies the attributes about retries that the mask names.
fn retry_of(mut retry: Retry, from: &ibv_qp_attr, mask: c_uint) -> Retry {
    for (bit, to, value) in [
        (QP_TIMEOUT, &mut retry.timeout, from.timeout),
        (QP_RETRY_CNT, &mut retry.retry_cnt, from.retry_cnt),
        (QP_RNR_RETRY, &mut retry.rnr_retry, from.rnr_retry),
        (
            QP_MIN_RNR_TIMER,
            &mut retry.min_rnr_timer,
            from.min_rnr_timer,
        ),
    ] {
        if mask & bit != 0 {
            *to = value;
        }
    }
    retry
}

/// Copies the attributes that the mask names.
fn remember(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: c_uint) -> Res<()> {
    if mask & QP_PORT != 0 {
        if from.port_num != 1 {
            return Err(EINVAL);
        }
        to.port_num = from.port_num;
    }
    if mask & QP_PKEY_INDEX != 0 {
        if from.pkey_index != 0 {
            return Err(EINVAL);
        }
        to.pkey_index = 0;
    }
    if mask & QP_ACCESS_FLAGS != 0 {
        to.qp_access_flags = from.qp_access_flags;
    }
    if mask & QP_AV != 0 {
        to.ah_attr = from.ah_attr;
    }
    if mask & QP_PATH_MTU != 0 {
        if !(1..=5).contains(&from.path_mtu) {
            return Err(EINVAL);
        }
        to.path_mtu = from.path_mtu;
    }
    if mask & QP_MAX_QP_RD_ATOMIC != 0 {
        if u16::from(from.max_rd_atomic) > query::RD_ATOMIC {
            return Err(EINVAL);
        }
        to.max_rd_atomic = from.max_rd_atomic;
    }
    if mask & QP_MAX_DEST_RD_ATOMIC != 0 {
        if u16::from(from.max_dest_rd_atomic) > query::RD_ATOMIC {
            return Err(EINVAL);
        }
        to.max_dest_rd_atomic = from.max_dest_rd_atomic;
    }
    macro_rules! plain {
        ($($bit:ident $field:ident)*) => { $(
            if mask & $bit != 0 {
                to.$field = from.$field;
            }
        )* };
    }
    plain! {
        QP_TIMEOUT timeout
        QP_RETRY_CNT retry_cnt
        QP_RNR_RETRY rnr_retry
        QP_RQ_PSN rq_psn
        QP_SQ_PSN sq_psn
        QP_MIN_RNR_TIMER min_rnr_timer
        QP_DEST_QPN dest_qp_num
    }
    Ok(())
}

/// Returns the state as the program sees it. A new queue pair takes receives as if it were INIT, and is called RESET.
unsafe fn state_seen(q: *mut ibv_qp, qp: &QpObject) -> State {
    match qp.raw.state() {
        State::Init if (*q).state == QPS_RESET => State::Reset,
        state => state,
    }
}

pub(crate) unsafe extern "C" fn ibv_modify_qp(
    q: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    code(|| {
        let mask = mask as c_uint;
        if let Ok(qp) = ud::find(q) {
            return ud::modify(q, qp, attr, mask);
        }
        let qp = find(q)?;
        if attr.is_null() || mask & !KNOWN_MASK != 0 {
            return Err(EINVAL);
        }
        let attr = &*attr;
        if mask & QP_CUR_STATE != 0 && attr.cur_qp_state != state_of(qp.raw.state()) {
            return Err(EINVAL);
        }
        let mut remembered = qp.attributes.lock();
        let mut next = *remembered;
        remember(&mut next, attr, mask)?;
        let retry = retry_of(qp.raw.retry(), attr, mask);
        if !retry.is_valid() {
            return Err(EINVAL);
        }
        if mask & QP_STATE != 0 {
            let to = to_state(attr.qp_state)?;
            // A connected queue pair of an RNIC is ready to send already, whatever steps the program still makes.
            let has_peer = qp.raw.addresses().is_some();
            let connected = has_peer && matches!(to, State::Init | State::Rtr);
            let face = context((*q).context).device.face;
            let required = face::required(face, state_seen(q, qp), to);
            if !has_peer && mask & required != required {
                return Err(EINVAL);
            }
            let addressed = QP_AV | QP_DEST_QPN;
            let managed = face == Face::Roce && attr.dest_qp_num == face::MANAGED_QPN;
            if to == State::Rtr && mask & addressed == addressed && !connected && !managed {
                let (own, peer) = gids_of_path(context((*q).context), &attr.ah_attr)?;
                qp.raw.connect_peer_from(own, peer, attr.dest_qp_num)?;
            } else if !connected {
                qp.raw.modify(to)?;
            }
            (*q).state = attr.qp_state;
        }
        qp.raw.set_retry(retry)?;
        if mask & QP_ACCESS_FLAGS != 0 {
            qp.raw
                .set_remote_access(Access::from_bits_truncate(attr.qp_access_flags));
        }
        *remembered = next;
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_query_qp(
    q: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    code(|| {
        if let Ok(qp) = ud::find(q) {
            return ud::query(q, qp, attr, init);
        }
        let qp = find(q)?;
        let state = state_of(qp.raw.state());
        let mut a = *qp.attributes.lock();
        a.qp_state = state;
        a.cur_qp_state = state;
        (*q).state = state;
        *attr = a;
        *init = ibv_qp_init_attr {
            qp_context: (*q).qp_context,
            send_cq: (*q).send_cq,
            recv_cq: (*q).recv_cq,
            srq: (*q).srq,
            cap: a.cap,
            qp_type: (*q).qp_type,
            sq_sig_all: c_int::from(qp.sig_all),
        };
        Ok(())
    })
}

/// Only of the last octets of a Write is it known that they come last.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _: *mut ibv_qp,
    _op: c_uint,
    _flags: u32,
) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn ibv_query_ece(q: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(|| {
        ud::find(q).map(|_| ()).or_else(|_| find(q).map(|_| ()))?;
        *ece = ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_set_ece(q: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(|| {
        ud::find(q).map(|_| ()).or_else(|_| find(q).map(|_| ()))?;
        if (*ece).comp_mask != 0 {
            return Err(EINVAL);
        }
        if (*ece).vendor_id != 0 {
            Err(UNSUPPORTED)
        } else {
            Ok(())
        }
    })
}
