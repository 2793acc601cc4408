//! Connections: connect, accept, reject, disconnect, and their relatives.

use super::id::{self, IdObject, complete, drop_event, find};
use super::{datagram, roce};
use crate::abi::cma::*;
use crate::abi::verbs::value as v;
use crate::abi::verbs::*;
use crate::device;
use crate::guard::{EINVAL, Res, minus_one};
use crate::query::RD_ATOMIC;
use iwarp::raw::cm::ConnectionParameters;
use std::ffi::{c_int, c_uint, c_void};

/// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`: as many as the device can.
const MAX_DEPTH: u8 = 0xff;

fn depth(value: u8) -> Res<Option<u16>> {
    match value {
        MAX_DEPTH => Ok(None),
        n if u16::from(n) > RD_ATOMIC => Err(EINVAL),
        n => Ok(Some(u16::from(n))),
    }
}

/// Returns the program's connection parameters; NULL stands for as much as possible.
unsafe fn parameters(object: &IdObject, p: *const rdma_conn_param) -> Res<ConnectionParameters> {
    let mut to = ConnectionParameters {
        private_data: object.endpoint.lock().connect_data.clone(),
        ..Default::default()
    };
    if let Some(p) = p.as_ref() {
        to.responder_resources = depth(p.responder_resources)?;
        to.initiator_depth = depth(p.initiator_depth)?;
        if !p.private_data.is_null() && p.private_data_len > 0 {
            to.private_data = std::slice::from_raw_parts(
                p.private_data.cast::<u8>(),
                usize::from(p.private_data_len),
            )
            .to_vec();
        }
    }
    Ok(to)
}

/// Gives the connection its queue pair: the identifier's, or the one whose number is in the parameters. On a device that looks like a
/// RoCE NIC the number may be any, because InfiniBand's connection manager only passes it on. UCX hands over the number of a datagram queue pair.
unsafe fn choose_qp(id: *mut rdma_cm_id, object: &IdObject, p: *const rdma_conn_param) -> Res<()> {
    if !(*id).qp.is_null() {
        id::show_timeout(id, object);
        object
            .raw
            .set_queue_pair(Some(&crate::qp::find((*id).qp)?.raw));
        return Ok(());
    }
    if object.raw.queue_pair().is_some() {
        return Ok(());
    }
    let num = p.as_ref().map(|p| p.qp_num).ok_or(EINVAL)?;
    let ctx = object.raw.context().ok_or(EINVAL)?;
    match ctx.queue_pair(num) {
        Some(qp) => object.raw.set_queue_pair(Some(&qp)),
        None if roce::is_face_of(&ctx) => object.raw.use_stand_in(RD_ATOMIC)?,
        None => return Err(EINVAL),
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    p: *mut rdma_conn_param,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let parameters = parameters(object, p)?;
        // A question about datagrams names no queue pair.
        if !object.raw.is_for_datagrams() {
            choose_qp(id, object, p)?;
            object.endpoint.lock().external_qp = (*id).qp.is_null();
        }
        drop_event(id)?;
        object.raw.connect(&parameters)?;
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, p: *mut rdma_conn_param) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if object.raw.is_for_datagrams() {
            datagram::accept(id, p)?;
            // No event follows.
            return Ok(0);
        }
        let parameters = parameters(object, p)?;
        choose_qp(id, object, p)?;
        drop_event(id)?;
        object.raw.accept(&parameters)?;
        id::refresh(id);
        complete(id)
    })
}

unsafe fn reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> Res<c_int> {
    let data = if data.is_null() || len == 0 {
        &[][..]
    } else {
        std::slice::from_raw_parts(data.cast::<u8>(), usize::from(len))
    };
    find(id)?.raw.reject(data)?;
    Ok(0)
}

pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    minus_one(|| reject(id, data, len))
}

/// Enhanced connection establishment belongs to InfiniBand; here this is an ordinary refusal.
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    minus_one(|| reject(id, data, len))
}

pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    minus_one(|| {
        find(id)?.raw.disconnect()?;
        complete(id)
    })
}

/// Needed only if the program moves the queue pair itself, or has none. Where the program has one, it is done by the time the event comes.
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if !(*id).qp.is_null() {
            return Err(EINVAL);
        }
        object.raw.establish()?;
        Ok(0)
    })
}

const EVENT_COMM_EST: c_uint = 4;

/// Tells the connection manager that data came before its event. It knows that, because the data came through it.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: c_uint) -> c_int {
    minus_one(|| {
        find(id)?;
        if event == EVENT_COMM_EST {
            Ok(0)
        } else {
            Err(EINVAL)
        }
    })
}

/// Returns the attributes for the next `ibv_modify_qp` of a program that moves its queue pair itself.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let ctx = object.raw.context().ok_or(EINVAL)?;
        if object.raw.is_for_datagrams() {
            *mask = (v::QP_STATE | datagram::attributes(&mut *attr)?) as c_int;
            return Ok(0);
        }
        let bits = match (*attr).qp_state {
            _ if roce::is_face_of(&ctx) => {
                roce::attributes(&ctx, &object.raw, (*id).qp_type, &mut *attr)?
            }
            v::QPS_INIT => v::QP_STATE | v::QP_ACCESS_FLAGS | v::QP_PKEY_INDEX | v::QP_PORT,
            v::QPS_RTR | v::QPS_RTS => v::QP_STATE | v::QP_ACCESS_FLAGS,
            _ => return Err(EINVAL),
        };
        // Rights are checked by memory region; the queue pair allows all.
        (*attr).qp_access_flags = 0xf;
        (*attr).port_num = 1;
        (*attr).pkey_index = 0;
        *mask = bits as c_int;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_get_remote_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    minus_one(|| {
        find(id)?;
        *ece = ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        };
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_set_local_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    minus_one(|| {
        find(id)?;
        if ece.is_null() || (*ece).comp_mask != 0 {
            return Err(EINVAL);
        }
        // There is no vendor, so there is nothing to agree on.
        Ok(0)
    })
}

/// Returns `true` if the context belongs to the connection manager.
pub(crate) unsafe fn same_device(verbs: *mut ibv_context, other: *mut ibv_context) -> bool {
    verbs == other
        || device::context(verbs)
            .raw
            .is_same(&device::context(other).raw)
}
