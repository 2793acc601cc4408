//! Identifiers for datagrams (`RDMA_PS_UDP`, `rdma_cm(7)`): attributes of their queue pairs, and
//! events with the destination of datagrams.

use super::object::IdObject;
use super::roce;
use super::sockaddr::gid_of;
use crate::abi::cma::*;
use crate::abi::verbs::value as v;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res};
use crate::border::object::Unacknowledged;
use iwarp::runtime::cm::{CmEvent, CmEventKind, CmId, DEFAULT_QKEY, DatagramEnd};
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

/// Fills in the attributes that move a datagram queue pair to `attr.qp_state`; returns their mask.
pub(super) fn attributes(attr: &mut ibv_qp_attr) -> Res<c_uint> {
    match attr.qp_state {
        v::QPS_INIT => {
            attr.port_num = 1;
            attr.pkey_index = 0;
            attr.qkey = DEFAULT_QKEY;
            Ok(v::QP_PKEY_INDEX | v::QP_PORT | v::QP_QKEY)
        }
        v::QPS_RTR => Ok(0),
        v::QPS_RTS => {
            attr.sq_psn = 0;
            Ok(v::QP_SQ_PSN)
        }
        _ => Err(EINVAL),
    }
}

/// Returns an event's status for C programs: InfiniBand's positive code, or a negative errno.
pub(super) fn status_of(event: &CmEvent) -> c_int {
    match event.service_status {
        0 => event.status.wrapping_neg(),
        status => c_int::from(status),
    }
}

pub(super) fn parameters(id: &IdObject, event: &CmEvent) -> rdma_ud_param {
    // SAFETY: integers and a pointer, for which zero is a value.
    let mut to: rdma_ud_param = unsafe { std::mem::zeroed() };
    if !event.private_data.is_empty() {
        to.private_data = event.private_data.as_ptr().cast::<c_void>();
        to.private_data_len = u8::try_from(event.private_data.len()).unwrap_or(u8::MAX);
    }
    if let Some(end) = event.datagrams {
        to.ah_attr = ah_attr_to(id, end);
        to.qp_num = end.num;
        to.qkey = end.qkey;
    }
    to
}

/// Returns address handle attributes whose source is the identifier's address.
fn ah_attr_to(id: &IdObject, end: DatagramEnd) -> ibv_ah_attr {
    let port = 0;
    let gid = gid_of(Some(SocketAddr::new(end.ip, port)));
    let (local, _) = id.raw.addresses();
    let context = id.raw.context();
    let index = context.and_then(|ctx| roce::gid_index(&ctx, local));
    let mut to = roce::ah_attr(gid, index);
    to.grh.traffic_class = id.endpoint.lock().tos;
    to
}

/// Completes the parameters of a multicast event and counts it. Returns the counter, or `None` if
/// the program has left the group.
pub(super) fn count_group_event(
    object: &IdObject,
    kind: CmEventKind,
    to: &mut rdma_ud_param,
) -> Option<Arc<Unacknowledged>> {
    let (CmEventKind::MulticastJoin(key) | CmEventKind::MulticastError(key)) = kind else {
        return None;
    };
    let groups = object.groups.lock();
    let group = groups.iter().find(|g| g.key == key)?;
    to.private_data = group.context as *const c_void;
    group.events.delivered();
    Some(Arc::clone(&group.events))
}

pub(super) fn create_raw(queue: &iwarp::runtime::cm::CmEventChannel, ps: c_uint) -> Res<CmId> {
    match ps {
        PS_TCP | PS_IB => Ok(CmId::create(queue, None)),
        PS_UDP => Ok(CmId::create_for_datagrams(queue, None)),
        PS_IPOIB => {
            iwarp::runtime::complain_once(
                "the program uses the port space of IP over InfiniBand (RDMA_PS_IPOIB), which \
                 needs an InfiniBand network; use the UDP port space (RDMA_PS_UDP) instead, for \
                 example `udaddy -P udp` or `mckey -p 0x111`"
                    .to_owned(),
            );
            Err(Errno(libc::EPROTONOSUPPORT))
        }
        _ => Err(EINVAL),
    }
}
