//! Queue pairs: `ibv_modify_qp(3)`, `ibv_query_qp(3)`, and their end. `qp_create` makes them.

use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::device::{ContextObject, context};
use crate::guard::{EINVAL, Res, UNSUPPORTED, code};
use crate::object::{self, Kind, Object, Unacknowledged, Users};
use crate::post::MaxSge;
use crate::qp_ex::Builder;
use crate::{comp_cntr, events, face, qp_create, query, transition, ud, xrc};
use iwarp::Face;
use iwarp::runtime::{QueuePair, Retry};
use iwarp_rnic::Access;
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Qp {
    pub(crate) raw: QueuePair,
    /// The program has called `rdma_disconnect`, which moves the queue pair to ERR. Here it still
    /// sends what is queued.
    pub(crate) disconnected: AtomicBool,
    /// Nobody has changed the state yet.
    pub(crate) is_new: AtomicBool,
    pub(crate) asynchronous: Unacknowledged,
    /// What `ibv_query_qp` reports besides the state.
    pub(crate) attributes: Mutex<ibv_qp_attr>,
    pub(crate) sig_all: bool,
    pub(crate) max_sge: MaxSge,
    /// The `ibv_wr_*` interface, if it was asked for.
    pub(crate) builder: Option<Builder>,
    /// What the target of an extended reliable connection has besides.
    pub(crate) target: Option<xrc::Target>,
}

// SAFETY: the attributes hold integers only; everything else is shared already.
unsafe impl Sync for Qp {}

pub(crate) type QpObject = Object<ibv_qp_ex, Qp>;

impl Qp {
    /// The value that `ibv_query_qp` reports as time-out.
    pub(crate) fn set_timeout(&self, timeout: u8) {
        self.attributes.lock().timeout = timeout;
    }

    /// The attributes that a connection of the connection manager has. Those about retries and the
    /// peer are InfiniBand's.
    pub(crate) fn show_connection(&self, from: &ibv_qp_attr, is_infiniband: bool) {
        let mut to = self.attributes.lock();
        to.path_mtu = from.path_mtu;
        to.max_rd_atomic = from.max_rd_atomic;
        to.max_dest_rd_atomic = from.max_dest_rd_atomic;
        if is_infiniband {
            to.timeout = from.timeout;
            to.retry_cnt = from.retry_cnt;
            to.rnr_retry = from.rnr_retry;
            to.dest_qp_num = from.dest_qp_num;
            to.ah_attr = from.ah_attr;
        }
    }

    /// The program has disconnected, and the queue pair counts as in ERR.
    pub(crate) fn show_disconnected(&self) {
        self.disconnected.store(true, Ordering::Release);
    }

    /// Returns the state that programs see.
    fn state(&self) -> State {
        match self.raw.state() {
            State::Reset => State::Reset,
            _ if self.disconnected.load(Ordering::Acquire) => State::Error,
            state => state,
        }
    }
}

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(qp: *mut ibv_qp) -> Res<&'a QpObject> {
    object::find(Kind::Qp, qp.cast())
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
        comp_cntr::detach(q);
        if !xrc::has_other_handles(q, qp) {
            qp.raw.destroy();
            events::forget(&context((*q).context).raw, qp.raw.clone());
        }
        // Acknowledging an event finds the object, so it is retired only afterwards.
        qp.asynchronous.wait();
        object::retire(Kind::Qp, q.cast::<ibv_qp_ex>())?;
        qp_create::each_used(&*q, qp.target.as_ref(), Users::remove);
        object::free::<ibv_qp_ex, Qp>(q.cast());
        Ok(())
    })
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
        if from.ah_attr.port_num != 1 {
            return Err(EINVAL);
        }
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

/// Returns the state from which the program changes it. A new queue pair of an RNIC takes receives
/// as if it were INIT, and is INIT in answers, as with siw; the program still has to bring it there.
pub(crate) fn state_seen(qp: &QpObject) -> State {
    match qp.state() {
        State::Init if qp.is_new.load(Ordering::Acquire) => State::Reset,
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
        let mask = transition::relevant((*q).qp_type, mask);
        let attr = as_read(attr.as_ref().ok_or(EINVAL)?);
        let change = Change::of(q, qp, &attr, mask)?;
        let mut remembered = qp.attributes.lock();
        let mut next = *remembered;
        remember(&mut next, &attr, mask)?;
        let retry = retry_of(qp.raw.retry(), &attr, mask);
        if !retry.is_valid() {
            return Err(EINVAL);
        }
        change.make(q, qp, &attr)?;
        qp.raw.set_retry(retry)?;
        if mask & QP_ACCESS_FLAGS != 0 {
            qp.raw
                .set_remote_access(Access::from_bits_truncate(attr.qp_access_flags));
        }
        *remembered = next;
        Ok(())
    })
}

/// Returns the attributes as hardware reads them: `min_rnr_timer` has five bits, and programs exist that pass more.
const fn as_read(attr: &ibv_qp_attr) -> ibv_qp_attr {
    ibv_qp_attr {
        min_rnr_timer: attr.min_rnr_timer & 31,
        ..*attr
    }
}

/// What a call does to the state.
enum Change {
    /// It stays as it is.
    Nothing,
    /// The connection manager has moved the queue pair to RTS, and the program still makes the steps that lead there.
    Overtaken,
    To(State),
    /// To RTR, with a peer known by number.
    Connect,
}

impl Change {
    /// Checks state and attributes.
    unsafe fn of(q: *mut ibv_qp, qp: &QpObject, attr: &ibv_qp_attr, mask: c_uint) -> Res<Self> {
        let to = match mask & QP_STATE {
            0 => None,
            _ => Some(to_state(attr.qp_state)?),
        };
        let from = state_seen(qp);
        if mask & QP_CUR_STATE != 0 && attr.cur_qp_state != state_of(from) {
            return Err(EINVAL);
        }
        let face = context((*q).context).device.face;
        let managed = qp.raw.addresses().is_some() && !qp.raw.is_by_number();
        // siw ignores these steps at any time.
        let on_its_way = (*q).state != QPS_RTS || face == Face::Rnic;
        let step = matches!(to, Some(State::Init | State::Rtr | State::Rts));
        if managed && from == State::Rts && step && on_its_way {
            return Ok(Self::Overtaken);
        }
        transition::check(face, (*q).qp_type, from, to, mask)?;
        let addressed = mask & (QP_AV | QP_DEST_QPN);
        Ok(match to {
            None => Self::Nothing,
            Some(State::Rtr) if addressed == QP_AV | QP_DEST_QPN => {
                match face == Face::Roce && attr.dest_qp_num == face::MANAGED_QPN {
                    true => Self::To(State::Rtr),
                    false => Self::Connect,
                }
            }
            // A peer has an address and a number.
            Some(State::Rtr) if addressed != 0 => return Err(EINVAL),
            Some(to) => Self::To(to),
        })
    }

    unsafe fn make(self, q: *mut ibv_qp, qp: &QpObject, attr: &ibv_qp_attr) -> Res<()> {
        match self {
            Self::Nothing => return Ok(()),
            Self::Overtaken => {}
            Self::To(state) => {
                qp.raw.modify(state)?;
                if state == State::Reset {
                    qp.disconnected.store(false, Ordering::Release);
                }
            }
            Self::Connect => {
                let (own, peer) = gids_of_path(context((*q).context), &attr.ah_attr)?;
                qp.raw.connect_peer_from(own, peer, attr.dest_qp_num)?;
            }
        }
        (*q).state = attr.qp_state;
        qp.is_new.store(false, Ordering::Release);
        Ok(())
    }
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
        let state = state_of(qp.state());
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
