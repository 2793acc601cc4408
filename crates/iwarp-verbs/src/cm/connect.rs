//! Connections: connect, accept, reject, disconnect and related calls.

use super::id::{complete, drop_event};
use super::object::{ACCESS_ALL, IdObject, find};
use super::{datagram, identifier, roce};
use crate::abi::cma::*;
use crate::abi::verbs::value as v;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, minus_one};
use crate::device::query::RD_ATOMIC;
use crate::qp::connected;
use iwarp::runtime::cm::{CmProgress, ConnectionParameters, DEFAULT_QKEY, InfinibandParameters};
use std::ffi::{c_int, c_uint, c_void};

/// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`, which request the device's maximum.
const MAX_DEPTH: u8 = 0xff;

fn depth(value: u8) -> Res<Option<u16>> {
    match value {
        MAX_DEPTH => Ok(None),
        n if u16::from(n) > RD_ATOMIC => Err(EINVAL),
        n => Ok(Some(u16::from(n))),
    }
}

/// The largest retry count, and the default if the program passes no parameters.
const MAX_RETRY_COUNT: u8 = 7;

/// Returns the program's connection parameters. If the program passes NULL, they are the maxima.
unsafe fn parameters(
    id: *mut rdma_cm_id,
    object: &IdObject,
    p: *const rdma_conn_param,
) -> Res<ConnectionParameters> {
    let infiniband = infiniband(id, object, p.as_ref());
    let mut to = ConnectionParameters {
        private_data: object.endpoint.lock().connect_data.clone(),
        infiniband,
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

/// Returns the parameters that InfiniBand's connection manager exchanges, if the device looks like
/// a RoCE NIC.
unsafe fn infiniband(
    id: *mut rdma_cm_id,
    object: &IdObject,
    p: Option<&rdma_conn_param>,
) -> Option<InfinibandParameters> {
    let ctx = object.raw.context()?;
    if !roce::is_roce_face(&ctx) {
        return None;
    }
    let endpoint = object.endpoint.lock();
    let counts = p.map_or((MAX_RETRY_COUNT, MAX_RETRY_COUNT), |p| {
        (p.retry_count, p.rnr_retry_count)
    });
    // The initiator's retry count applies to both ends.
    let retry_count = endpoint.peer.map_or(counts.0, |peer| peer.retry_count);
    let q = (*id).qp;
    let (qp_num, srq) = match q.is_null() {
        false => ((*q).qp_num, !(*q).srq.is_null()),
        true => p.map_or((0, false), |p| (p.qp_num, p.srq != 0)),
    };
    Some(InfinibandParameters {
        qp_num,
        retry_count: retry_count.min(MAX_RETRY_COUNT),
        rnr_retry_count: counts.1.min(MAX_RETRY_COUNT),
        flow_control: p.is_some_and(|p| p.flow_control != 0),
        srq,
        ack_timeout: endpoint.ack_timeout,
    })
}

/// Selects the connection's queue pair: the identifier's, or the one whose number is in the
/// parameters. A device that looks like a RoCE NIC accepts any number, because InfiniBand's
/// connection manager only forwards it. For example, UCX passes a datagram queue pair's number.
unsafe fn choose_qp(id: *mut rdma_cm_id, object: &IdObject, p: *const rdma_conn_param) -> Res<()> {
    if !(*id).qp.is_null() {
        identifier::publish_timeout(id, object);
        object
            .raw
            .set_queue_pair(Some(&connected::find((*id).qp)?.raw));
        return Ok(());
    }
    if object.raw.queue_pair().is_some() {
        return Ok(());
    }
    let num = p.as_ref().map(|p| p.qp_num).ok_or(EINVAL)?;
    let ctx = object.raw.context().ok_or(EINVAL)?;
    match ctx.queue_pair(num) {
        Some(qp) => object.raw.set_queue_pair(Some(&qp)),
        None if roce::is_roce_face(&ctx) => object.raw.use_placeholder_qp(RD_ATOMIC)?,
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
        let parameters = parameters(id, object, p)?;
        // A datagram service request names no queue pair.
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
            accept_datagrams(id, p)?;
            return Ok(0);
        }
        let parameters = parameters(id, object, p)?;
        choose_qp(id, object, p)?;
        drop_event(id)?;
        object.raw.accept(&parameters)?;
        identifier::refresh(id);
        identifier::publish_connection(id, object);
        complete(id)
    })
}

/// `rdma_accept(3)` for datagrams: replies with the number of the identifier's queue pair, or with
/// the number in the parameters.
unsafe fn accept_datagrams(id: *mut rdma_cm_id, p: *const rdma_conn_param) -> Res<()> {
    let raw = &find(id)?.raw;
    let data = private_data(p);
    if (*id).qp.is_null() {
        let num = p.as_ref().map(|p| p.qp_num).ok_or(EINVAL)?;
        raw.accept_datagrams(num, DEFAULT_QKEY, data)?;
    } else {
        let qp = &crate::qp::datagram::find((*id).qp)?.raw;
        raw.accept_datagrams(qp.num(), qp.qkey(), data)?;
    }
    drop_event(id)
}

unsafe fn private_data<'a>(p: *const rdma_conn_param) -> &'a [u8] {
    match p.as_ref() {
        Some(p) if !p.private_data.is_null() && p.private_data_len > 0 => {
            std::slice::from_raw_parts(p.private_data.cast(), usize::from(p.private_data_len))
        }
        _ => &[],
    }
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

/// Rejects as usual: enhanced connection establishment exists in InfiniBand only.
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    minus_one(|| reject(id, data, len))
}

pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        object.raw.disconnect()?;
        if let Ok(qp) = connected::find((*id).qp) {
            qp.set_disconnected();
            (*(*id).qp).state = v::QPS_ERR;
        }
        complete(id)
    })
}

/// Programs call this only if they move the queue pair themselves, or have none. In all other cases
/// the connection is established when the event is delivered.
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

/// Accepts the report that data arrived before the connection event, and does nothing, because the
/// library has seen that data. The errors are the kernel's: InfiniBand's connection manager allows
/// the report only between the reply and its confirmation.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: c_uint) -> c_int {
    minus_one(|| {
        let raw = &find(id)?.raw;
        let is_roce = raw.context().is_some_and(|ctx| roce::is_roce_face(&ctx));
        match (raw.progress(), is_roce) {
            _ if event != EVENT_COMM_EST || raw.is_for_datagrams() => Err(EINVAL),
            (CmProgress::Idle, _) => Err(EINVAL),
            (CmProgress::Accepted, _) | (_, false) => Ok(0),
            (CmProgress::Up, true) => Err(Errno(libc::EISCONN)),
            (CmProgress::Begun | CmProgress::Over, true) => Err(EINVAL),
        }
    })
}

/// Returns the attributes for the next `ibv_modify_qp` of a program that moves its queue pair.
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
            _ if roce::is_roce_face(&ctx) => {
                roce::attributes(&ctx, object, (*id).qp_type, &mut *attr)?
            }
            v::QPS_INIT => v::QP_STATE | v::QP_ACCESS_FLAGS | v::QP_PKEY_INDEX | v::QP_PORT,
            v::QPS_RTR | v::QPS_RTS => v::QP_STATE | v::QP_ACCESS_FLAGS,
            _ => return Err(EINVAL),
        };
        // Memory regions check access rights; the queue pair allows everything.
        (*attr).qp_access_flags = ACCESS_ALL;
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
        // There are no vendor options to negotiate.
        Ok(0)
    })
}
