//! Changes of queue pairs: `ibv_modify_qp(3)`.

use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code};
use crate::device::gid::gids_of_path;
use crate::device::{context, face, query};
use crate::qp::connected::{self, QpObject, state_for_program};
use crate::qp::state::{state_of, to_state};
use crate::qp::{datagram, transition};
use iwarp::Face;
use iwarp::runtime::Retry;
use iwarp_rnic::Access;
use iwarp_rnic::qp::State;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;

/// Returns the retry attributes, with those in the mask replaced.
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

/// Copies the attributes in the mask, for later queries. Fails with EINVAL if a value is not
/// supported.
fn store_attributes(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: c_uint) -> Res<()> {
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
    macro_rules! copy {
        ($($bit:ident $field:ident)*) => { $(
            if mask & $bit != 0 {
                to.$field = from.$field;
            }
        )* };
    }
    copy! {
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

pub(crate) unsafe extern "C" fn ibv_modify_qp(
    q: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    code(|| {
        let mask = mask as c_uint;
        if let Ok(qp) = datagram::find(q) {
            return super::datagram::modify(q, qp, attr, mask);
        }
        let qp = connected::find(q)?;
        let mask = transition::relevant((*q).qp_type, mask);
        let attr = mask_reserved_bits(attr.as_ref().ok_or(EINVAL)?);
        let change = Change::find(q, qp, &attr, mask)?;
        let mut stored = qp.attributes.lock();
        let mut next = *stored;
        store_attributes(&mut next, &attr, mask)?;
        let retry = retry_of(qp.raw.retry(), &attr, mask);
        if !retry.is_valid() {
            return Err(EINVAL);
        }
        change.apply(q, qp, &attr)?;
        qp.raw.set_retry(retry)?;
        if mask & QP_ACCESS_FLAGS != 0 {
            qp.raw
                .set_remote_access(Access::from_bits_truncate(attr.qp_access_flags));
        }
        *stored = next;
        Ok(())
    })
}

/// Returns the attributes as hardware reads them: `min_rnr_timer` has five bits, but some programs
/// pass larger values.
const fn mask_reserved_bits(attr: &ibv_qp_attr) -> ibv_qp_attr {
    ibv_qp_attr {
        min_rnr_timer: attr.min_rnr_timer & 31,
        ..*attr
    }
}

enum Change {
    Nothing,
    /// The connection manager already moved the queue pair to RTS, so the program's own change to
    /// INIT, RTR or RTS has no effect.
    AlreadyRts,
    To(State),
    /// To RTR, with a peer known by GID and number.
    Connect,
}

impl Change {
    unsafe fn find(q: *mut ibv_qp, qp: &QpObject, attr: &ibv_qp_attr, mask: c_uint) -> Res<Self> {
        let to = match mask & QP_STATE {
            0 => None,
            _ => Some(to_state(attr.qp_state)?),
        };
        let from = state_for_program(qp);
        if mask & QP_CUR_STATE != 0 && attr.cur_qp_state != state_of(from) {
            return Err(EINVAL);
        }
        let face = context((*q).context).device.face;
        let managed = qp.raw.addresses().is_some() && !qp.raw.is_by_number();
        // The changes to INIT, RTR and RTS. An iWARP NIC ignores them always, as siw does; a RoCE
        // NIC, until the program itself has moved the queue pair to RTS.
        let ignored = (*q).state != QPS_RTS || face == Face::Rnic;
        let step = matches!(to, Some(State::Init | State::Rtr | State::Rts));
        if managed && from == State::Rts && step && ignored {
            return Ok(Self::AlreadyRts);
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
            // A peer has both an address and a number.
            Some(State::Rtr) if addressed != 0 => return Err(EINVAL),
            Some(to) => Self::To(to),
        })
    }

    unsafe fn apply(self, q: *mut ibv_qp, qp: &QpObject, attr: &ibv_qp_attr) -> Res<()> {
        match self {
            Self::Nothing => return Ok(()),
            Self::AlreadyRts => {}
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
