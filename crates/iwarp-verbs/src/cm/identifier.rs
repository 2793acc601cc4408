//! Public identifiers: their creation, and the fields that follow the connection's state.

use super::channel;
use super::datagram;
use super::object::{Endpoint, Id, IdObject, is_synchronous};
use super::sockaddr::gid_of;
use super::{roce, sockaddr};
use crate::abi::cma::*;
use crate::abi::verbs::value::{QPS_RTS, QPT_RC, QPT_UD, QPT_XRC_RECV};
use crate::abi::verbs::*;
use crate::border::guard::{Errno, Res};
use crate::border::object::{self, Kind, Unacknowledged};
use crate::device::query::PKEY;
use crate::domain::pd;
use crate::open;
use crate::process::unused;
use crate::qp::connected;
use iwarp::runtime::cm::CmId;
use iwarp::runtime::{ProcessLock, XrcEnd};
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Returns the default protection domain of a device context of the connection manager.
unsafe fn default_pd(verbs: *mut ibv_context) -> Res<*mut ibv_pd> {
    static PDS: ProcessLock<Option<HashMap<usize, usize>>> =
        ProcessLock::new("verbs::cm::PDS", None);
    let mut pds = PDS.lock();
    let pds = pds.get_or_insert_with(HashMap::new);
    if let Some(pd) = pds.get(&(verbs as usize)) {
        return Ok(*pd as *mut ibv_pd);
    }
    let pd = pd::ibv_alloc_pd(verbs);
    if pd.is_null() {
        return Err(Errno(libc::ENOMEM));
    }
    pds.insert(verbs as usize, pd as usize);
    Ok(pd)
}

fn new_object(
    raw: &CmId,
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: c_uint,
    synchronous: bool,
) -> *mut rdma_cm_id {
    // SAFETY: integers, pointers and addresses, for which zero is valid.
    let mut c: rdma_cm_id = unsafe { std::mem::zeroed() };
    c.channel = channel;
    c.context = context;
    c.ps = ps;
    c.qp_type = match raw.is_for_datagrams() {
        true => QPT_UD,
        false => QPT_RC,
    };
    let own = Id {
        raw: raw.clone(),
        events: Unacknowledged::default(),
        endpoint: Mutex::new(Endpoint {
            channel: if synchronous { channel as usize } else { 0 },
            ..Endpoint::default()
        }),
        lookup: Arc::default(),
        groups: Mutex::default(),
    };
    let id = object::create(Kind::CmId, c, own);
    raw.set_user_data(id as u64);
    id
}

pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: c_uint,
) -> Res<*mut rdma_cm_id> {
    unused::record_use();
    let synchronous = channel.is_null();
    let channel = if synchronous {
        channel::create()?
    } else {
        channel
    };
    let raw = match datagram::create_raw(&channel::find(channel)?.queue, ps) {
        Ok(raw) => raw,
        Err(e) => {
            if synchronous {
                channel::destroy(channel);
            }
            return Err(e);
        }
    };
    Ok(new_object(&raw, channel, context, ps, synchronous))
}

/// Returns `true` if the request is for the listener's type of queue pair. As in the kernel, the
/// caller rejects requests for other types.
pub(crate) unsafe fn accepts_type(listener: *mut rdma_cm_id, peer: Option<XrcEnd>) -> bool {
    let wanted = match (*listener).qp_type {
        QPT_XRC_RECV => Some(XrcEnd::Initiator),
        _ => None,
    };
    peer == wanted
}

/// Creates an identifier for a connection request. It uses the listener's channel; if the listener
/// is synchronous, it gets its own channel.
pub(crate) unsafe fn create_for_request(
    listener: *mut rdma_cm_id,
    raw: &CmId,
) -> Res<*mut rdma_cm_id> {
    let synchronous = is_synchronous(object::trusted(listener));
    let channel = if synchronous {
        let channel = channel::create()?;
        raw.migrate(&channel::find(channel)?.queue);
        channel
    } else {
        (*listener).channel
    };
    let id = new_object(
        raw,
        channel,
        (*listener).context,
        (*listener).ps,
        synchronous,
    );
    (*id).qp_type = (*listener).qp_type;
    refresh(id);
    Ok(id)
}

/// Updates the public fields: addresses, device, protection domain and path.
pub(crate) unsafe fn refresh(id: *mut rdma_cm_id) {
    let object: &IdObject = object::trusted(id);
    let (local, peer) = object.raw.addresses();
    if let Some(local) = local {
        (*id).route.addr.src_storage = sockaddr::write(local).0;
    }
    if let Some(peer) = peer {
        (*id).route.addr.dst_storage = sockaddr::write(peer).0;
    }
    // As in the kernel, an identifier bound to a loopback address has that address's device;
    // SPDK's target checks this before it listens. A synchronous identifier gets the device only
    // when it listens or has a peer, because libfabric would limit itself to that device.
    let bound_only = peer.is_none() && !object.raw.is_listening();
    let hidden_loopback = |a: std::net::SocketAddr| a.ip().is_loopback() && is_synchronous(object);
    let without_device = bound_only && local.is_none_or(hidden_loopback);
    if (*id).verbs.is_null()
        && !without_device
        && let Some(ctx) = object.raw.context()
        && let Ok(verbs) = open::shared_context(&ctx)
    {
        (*id).verbs = verbs;
        (*id).port_num = 1;
        if (*id).pd.is_null() {
            (*id).pd = default_pd(verbs).unwrap_or(null_mut());
        }
        (*id).route.addr.ibaddr.sgid = gid_of(local);
        (*id).route.addr.ibaddr.dgid = gid_of(peer);
        (*id).route.addr.ibaddr.pkey = PKEY;
    }
    publish_path(id, object);
}

/// Publishes the path record as soon as there is a peer.
unsafe fn publish_path(id: *mut rdma_cm_id, object: &IdObject) {
    let mut endpoint = object.endpoint.lock();
    if endpoint.path.is_none()
        && let Some(ctx) = object.raw.context()
        && roce::is_roce_face(&ctx)
        && let Some(path) = roce::path(&ctx, &object.raw)
    {
        (*id).route.path_rec = &raw mut **endpoint.path.insert(Box::new(path));
        (*id).route.num_paths = 1;
    }
}

/// Copies the ACK timeout to the queue pair's attributes.
pub(crate) unsafe fn publish_timeout(id: *mut rdma_cm_id, object: &IdObject) {
    if let (Some(timeout), Ok(qp)) = (
        object.endpoint.lock().ack_timeout,
        connected::find((*id).qp),
    ) {
        qp.set_timeout(timeout);
    }
}

/// Updates the queue pair's public attributes and state when the connection is established, as
/// librdmacm does when it moves the queue pair to RTR and RTS.
pub(crate) unsafe fn publish_connection(id: *mut rdma_cm_id, object: &IdObject) {
    let (Ok(qp), Some(ctx)) = (connected::find((*id).qp), object.raw.context()) else {
        return;
    };
    let mut attr: ibv_qp_attr = std::mem::zeroed();
    roce::connection(&ctx, object, &qp.raw, &mut attr);
    qp.set_negotiated(&attr, roce::is_roce_face(&ctx));
    // A queue pair that failed meanwhile, or that the program moves itself, keeps its state.
    if qp.raw.state() == State::Rts {
        (*(*id).qp).state = QPS_RTS;
    }
}
