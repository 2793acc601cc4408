//! Datagram queue pairs (`IBV_QPT_UD`): `ibv_modify_qp(3)`, `ibv_query_qp(3)`, `ibv_attach_mcast(3)`, and posting.
//!
//! The functions of `qp` and `post` come here for queue pairs of this type.

use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::device::{check_same, context};
use crate::guard::{EINVAL, Res, code};
use crate::object::{self, Kind, Object, Unacknowledged, Users};
use crate::pd::Ah;
use crate::post::MaxSge;
use crate::qp::{state_of, to_state};
use crate::qp_ex::Builder;
use crate::{events, post, qp_create, transition};
use iwarp::runtime::{UdQueuePair, UdSendWr};
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::qp::State;
use iwarp_rnic::{SendFlags, Sge};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;

pub(crate) struct UdQp {
    pub(crate) raw: UdQueuePair,
    pub(crate) asynchronous: Unacknowledged,
    /// What `ibv_query_qp` reports besides state and Q_Key.
    pub(crate) attributes: Mutex<ibv_qp_attr>,
    pub(crate) sig_all: bool,
    pub(crate) max_inline: u32,
    pub(crate) max_sge: MaxSge,
    /// The `ibv_wr_*` interface, if it was asked for.
    pub(crate) builder: Option<Builder>,
}

// SAFETY: the attributes hold integers only; everything else is shared already.
unsafe impl Sync for UdQp {}

pub(crate) type UdObject = Object<ibv_qp_ex, UdQp>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(qp: *mut ibv_qp) -> Res<&'a UdObject> {
    object::find(Kind::UdQp, qp.cast())
}

/// # Safety
/// `q` is a living queue pair of this type.
#[inline]
pub(crate) unsafe fn trusted<'a>(q: *mut ibv_qp) -> &'a UdObject {
    object::trusted(q.cast())
}

/// `IBV_QP_EX_WITH_SEND` and `IBV_QP_EX_WITH_SEND_WITH_IMM`.
pub(crate) const OPS: u64 = 1 << 2 | 1 << 3;

pub(crate) unsafe fn destroy(q: *mut ibv_qp, qp: &UdObject) -> Res<()> {
    qp.raw.destroy();
    events::forget(&qp.raw.context(), qp.raw.clone());
    // Acknowledging an event finds the object, so it is retired only afterwards.
    qp.asynchronous.wait();
    object::retire(Kind::UdQp, q.cast::<ibv_qp_ex>())?;
    qp_create::each_used(&*q, None, Users::remove);
    object::free::<ibv_qp_ex, UdQp>(q.cast());
    Ok(())
}

/// Returns the state from which the program changes it. A new one of an RNIC accepts receives, and yet the program has to bring it to INIT.
unsafe fn seen(q: *mut ibv_qp, qp: &UdObject) -> State {
    match qp.raw.state() {
        State::Init if (*q).state == QPS_RESET => State::Reset,
        state => state,
    }
}

pub(crate) unsafe fn modify(
    q: *mut ibv_qp,
    qp: &UdObject,
    attr: *mut ibv_qp_attr,
    mask: c_uint,
) -> Res<()> {
    if attr.is_null() {
        return Err(EINVAL);
    }
    let attr = &*attr;
    let mut remembered = qp.attributes.lock();
    let mut from = seen(q, qp);
    if mask & QP_CUR_STATE != 0 {
        let told = to_state(attr.cur_qp_state)?;
        // A send that fails moves it from RTS to SQE without the program's doing.
        if told != from && (told, from) != (State::Rts, State::Sqe) {
            return Err(EINVAL);
        }
        from = told;
    }
    let to = match mask & QP_STATE {
        0 => None,
        _ => Some(to_state(attr.qp_state)?),
    };
    transition::check(context((*q).context).device.face, QPT_UD, from, to, mask)?;
    if mask & QP_PORT != 0 && attr.port_num != 1
        || mask & QP_PKEY_INDEX != 0 && attr.pkey_index != 0
    {
        return Err(EINVAL);
    }
    if let Some(to) = to {
        qp.raw.modify(to)?;
        (*q).state = attr.qp_state;
    }
    if mask & QP_QKEY != 0 {
        qp.raw.set_qkey(attr.qkey);
    }
    if mask & QP_SQ_PSN != 0 {
        remembered.sq_psn = attr.sq_psn;
    }
    Ok(())
}

pub(crate) unsafe fn query(
    q: *mut ibv_qp,
    qp: &UdObject,
    attr: *mut ibv_qp_attr,
    init: *mut ibv_qp_init_attr,
) -> Res<()> {
    let state = state_of(qp.raw.state());
    let mut a = *qp.attributes.lock();
    a.qp_state = state;
    a.cur_qp_state = state;
    a.qkey = qp.raw.qkey();
    if seen(q, qp) != State::Reset {
        (*q).state = state;
    }
    *attr = a;
    *init = ibv_qp_init_attr {
        qp_context: (*q).qp_context,
        send_cq: (*q).send_cq,
        recv_cq: (*q).recv_cq,
        srq: (*q).srq,
        cap: a.cap,
        qp_type: QPT_UD,
        sq_sig_all: c_int::from(qp.sig_all),
    };
    Ok(())
}

pub(crate) unsafe extern "C" fn ibv_attach_mcast(
    q: *mut ibv_qp,
    gid: *const [u8; 16],
    _lid: u16,
) -> c_int {
    code(|| Ok(find(q)?.raw.attach_group(*gid)?))
}

pub(crate) unsafe extern "C" fn ibv_detach_mcast(
    q: *mut ibv_qp,
    gid: *const [u8; 16],
    _lid: u16,
) -> c_int {
    code(|| Ok(find(q)?.raw.detach_group(*gid)?))
}

/// Where a datagram goes.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) to: iwarp::runtime::UdAddress,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
}

/// Returns the target of a request.
///
/// # Errors
/// EINVAL if there is no address handle, or if it is of another protection domain.
pub(crate) unsafe fn target(qp: &UdObject, ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Res<Target> {
    if ah.is_null() {
        return Err(EINVAL);
    }
    let c = (*ah).context;
    let ah: &Object<ibv_ah, Ah> = object::trusted(ah);
    if ah.pd != qp.raw.pd() {
        return Err(EINVAL);
    }
    check_same(c, (*qp.c()).qp_base.context)?;
    let to = ah.address;
    Ok(Target { to, qpn, qkey })
}

/// Requests that are posted at a time.
const AT_A_TIME: usize = 8;
/// Elements of these.
const SGES: usize = 2 * MAX_SGE as usize;

/// Posts the first requests of a list. Returns the rest of the list.
unsafe fn send_some(
    qp: &UdObject,
    first: *mut ibv_send_wr,
) -> Result<*mut ibv_send_wr, (*mut ibv_send_wr, crate::guard::Errno)> {
    let mut sge_room = [const { MaybeUninit::<Sge>::uninit() }; SGES];
    let mut inline_room = [const { MaybeUninit::<&[u8]>::uninit() }; SGES];
    let mut wrs = [const { MaybeUninit::<UdSendWr<'_>>::uninit() }; AT_A_TIME];
    let (mut sges, mut pieces) = (&mut sge_room[..], &mut inline_room[..]);
    let (mut at, mut n, mut stop) = (first, 0, None);
    while !at.is_null() && n < AT_A_TIME {
        let wr = &*at;
        let (target, immediate, num) = match parts(qp, wr) {
            Ok(parts) => parts,
            Err(e) => {
                stop = Some(e);
                break;
            }
        };
        if num > sges.len().min(pieces.len()) {
            break;
        }
        let list = match num {
            0 => &[],
            _ => std::slice::from_raw_parts(wr.sg_list, num),
        };
        let mut to = UdSendWr {
            wr_id: wr.wr_id,
            immediate,
            flags: SendFlags::from_bits_truncate(wr.send_flags & post::FLAGS),
            to: target.to,
            remote_qp: target.qpn,
            remote_qkey: target.qkey,
            sges: &[],
            inline: &[],
        };
        if wr.send_flags & SEND_INLINE == 0 {
            let (mine, rest) = sges.split_at_mut(num);
            for (to, from) in mine.iter_mut().zip(list) {
                to.write(Sge {
                    addr: from.addr,
                    len: from.length,
                    lkey: from.lkey,
                });
            }
            to.sges = post::written(mine);
            sges = rest;
        } else {
            let (mine, rest) = pieces.split_at_mut(num);
            for (to, from) in mine.iter_mut().zip(list) {
                to.write(post::octets(from));
            }
            to.inline = post::written(mine);
            pieces = rest;
        }
        wrs[n].write(to);
        n += 1;
        at = wr.next;
    }
    if let Err(failed) = qp.raw.post_send(post::written(&wrs[..n])) {
        let mut bad = first;
        for _ in 0..failed.accepted() {
            bad = (*bad).next;
        }
        return Err((bad, failed.into()));
    }
    match stop {
        Some(e) => Err((at, e)),
        None => Ok(at),
    }
}

/// Returns where a request goes, its immediate data, and the number of its elements.
unsafe fn parts(qp: &UdObject, wr: &ibv_send_wr) -> Res<(Target, Option<u32>, usize)> {
    let immediate = match wr.opcode {
        post::WR_SEND => None,
        post::WR_SEND_WITH_IMM => Some(u32::from_be(wr.imm_data)),
        _ => return Err(EINVAL),
    };
    let ud = wr.wr.ud;
    let target = target(qp, ud.ah, ud.remote_qpn, ud.remote_qkey)?;
    Ok((target, immediate, post::count(wr.num_sge, qp.max_sge.send)?))
}

/// `ibv_post_send(3)`.
pub(crate) unsafe fn post_send(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> Res<()> {
    let qp = trusted(q);
    let mut at = wr;
    while !at.is_null() {
        at = send_some(qp, at).map_err(|(wr, e)| {
            if !bad.is_null() {
                *bad = wr;
            }
            e
        })?;
    }
    Ok(())
}

/// Posts a batch of the `ibv_wr_*` interface: either all of it, or nothing with an error.
pub(crate) unsafe fn post_all(q: *mut ibv_qp, wrs: &[UdSendWr<'_>]) -> Res<()> {
    let posted = trusted(q).raw.post_send_all(wrs);
    Ok(posted?)
}
