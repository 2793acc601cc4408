//! Datagram queue pairs (`IBV_QPT_UD`): their changes, queries and destruction, called by this
//! room's functions for all types; and `ibv_attach_mcast(3)`.

use super::used::for_each_dependency;
use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code};
use crate::border::object::{self, Kind, Users};
use crate::device::context;
use crate::device::pending_events::discard;
use crate::qp::datagram::{UdObject, UdQp, find};
use crate::qp::state::{state_of, to_state};
use crate::qp::transition;
use iwarp_rnic::qp::State;
use std::ffi::{c_int, c_uint};

pub(super) unsafe fn destroy(q: *mut ibv_qp, qp: &UdObject) -> Res<()> {
    qp.raw.destroy();
    discard(&qp.raw.context(), qp.raw.clone());
    // Acknowledging an event must still find the object.
    qp.asynchronous.wait();
    object::retire(Kind::UdQp, q.cast::<ibv_qp_ex>())?;
    for_each_dependency(&*q, None, Users::remove);
    object::free::<ibv_qp_ex, UdQp>(q.cast());
    Ok(())
}

/// Returns the state from the program's view. A new queue pair of an RNIC is in INIT, to accept
/// receives, but the program still has to move it from RESET to INIT.
unsafe fn state_for_program(q: *mut ibv_qp, qp: &UdObject) -> State {
    match qp.raw.state() {
        State::Init if (*q).state == QPS_RESET => State::Reset,
        state => state,
    }
}

pub(super) unsafe fn modify(
    q: *mut ibv_qp,
    qp: &UdObject,
    attr: *mut ibv_qp_attr,
    mask: c_uint,
) -> Res<()> {
    if attr.is_null() {
        return Err(EINVAL);
    }
    let attr = &*attr;
    let mut stored = qp.attributes.lock();
    let mut from = state_for_program(q, qp);
    if mask & QP_CUR_STATE != 0 {
        let current = to_state(attr.cur_qp_state)?;
        // A failed send moves the queue pair from RTS to SQE without a call.
        if current != from && (current, from) != (State::Rts, State::Sqe) {
            return Err(EINVAL);
        }
        from = current;
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
        stored.sq_psn = attr.sq_psn;
    }
    Ok(())
}

pub(super) unsafe fn query(
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
    if state_for_program(q, qp) != State::Reset {
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
