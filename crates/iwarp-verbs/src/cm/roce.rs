//! Values that identifiers report on a device that looks like a RoCE NIC ([`Face::Roce`]): a path
//! record, and attributes for programs that move their queue pair themselves. Both faces connect in
//! the same way: of these values, only the addresses have an effect.

use super::object::IdObject;
use super::sockaddr::gid_of;
use crate::abi::verbs::value as v;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res};
use crate::device::face;
use crate::device::query::{self, PKEY, RD_ATOMIC};
use crate::qp::transition;
use iwarp::Face;
use iwarp::runtime::cm::CmId;
use iwarp::runtime::{Context, QueuePair, Retry};
use iwarp_rnic::qp::State;
use std::ffi::c_uint;
use std::net::SocketAddr;

/// Selector of a path record's field: the value is exact, not a limit.
const EXACTLY: u8 = 2;
/// `IBV_RATE_10_GBPS`, which matches the port's width and speed.
const RATE: u8 = 3;
const HOP_LIMIT: u8 = 64;

pub(super) fn is_roce_face(ctx: &Context) -> bool {
    ctx.config().face == Face::Roce
}

/// Returns the record of the path to the peer, or `None` while there is no peer.
pub(super) fn path(ctx: &Context, id: &CmId) -> Option<ibv_sa_path_rec> {
    let (local, peer) = id.addresses();
    peer?;
    // SAFETY: integers only.
    let mut path: ibv_sa_path_rec = unsafe { std::mem::zeroed() };
    path.dgid = gid_of(peer);
    path.sgid = gid_of(local);
    path.hop_limit = HOP_LIMIT;
    path.reversible = 1;
    path.numb_path = 1;
    path.pkey = PKEY.to_be();
    path.mtu_selector = EXACTLY;
    path.mtu = query::mtu_code(ctx.device().mtu) as u8;
    path.rate_selector = EXACTLY;
    path.rate = RATE;
    path.packet_life_time_selector = EXACTLY;
    Some(path)
}

/// Fills in the connection's negotiated values as `ibv_query_qp` reports them. Fields that only
/// InfiniBand has are set for the RoCE face only.
pub(super) fn connection(ctx: &Context, id: &IdObject, qp: &QueuePair, attr: &mut ibv_qp_attr) {
    attr.path_mtu = query::mtu_code(ctx.device().mtu);
    let (outbound, inbound) = id.raw.depths().unwrap_or_default();
    let saturated = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
    attr.max_rd_atomic = saturated(outbound);
    attr.max_dest_rd_atomic = saturated(inbound);
    let endpoint = id.endpoint.lock();
    let retry = qp.retry();
    attr.timeout = endpoint.ack_timeout.unwrap_or(retry.timeout);
    attr.retry_cnt = retry.retry_cnt;
    attr.rnr_retry = retry.rnr_retry;
    if let Some(peer) = endpoint.peer {
        attr.dest_qp_num = peer.qp_num;
        attr.rnr_retry = peer.rnr_retry_count;
    }
    if let Ok(ah_attr) = ah_attr_to_peer(ctx, &id.raw) {
        attr.ah_attr = ah_attr;
    }
}

/// Fills in the attributes that move a queue pair to `attr.qp_state`; returns their mask.
pub(super) fn attributes(
    ctx: &Context,
    id: &IdObject,
    qp_type: c_uint,
    attr: &mut ibv_qp_attr,
) -> Res<c_uint> {
    let (outbound, inbound) = id.raw.depths().unwrap_or((RD_ATOMIC, RD_ATOMIC));
    let (from, to) = match attr.qp_state {
        v::QPS_INIT => (State::Reset, State::Init),
        v::QPS_RTR => {
            attr.ah_attr = ah_attr_to_peer(ctx, &id.raw)?;
            attr.path_mtu = query::mtu_code(ctx.device().mtu);
            attr.dest_qp_num = face::MANAGED_QPN;
            attr.rq_psn = 0;
            attr.max_dest_rd_atomic = inbound as u8;
            attr.min_rnr_timer = 0;
            (State::Init, State::Rtr)
        }
        v::QPS_RTS => {
            let retry = Retry::default();
            let endpoint = id.endpoint.lock();
            attr.timeout = endpoint.ack_timeout.unwrap_or(retry.timeout);
            attr.retry_cnt = endpoint.peer.map_or(retry.retry_cnt, |p| p.retry_count);
            attr.rnr_retry = endpoint.peer.map_or(retry.rnr_retry, |p| p.rnr_retry_count);
            attr.sq_psn = 0;
            attr.max_rd_atomic = outbound as u8;
            (State::Rtr, State::Rts)
        }
        _ => return Err(EINVAL),
    };
    Ok(v::QP_STATE | transition::required(qp_type, from, to))
}

fn ah_attr_to_peer(ctx: &Context, id: &CmId) -> Res<ibv_ah_attr> {
    let (local, peer) = id.addresses();
    let gid = gid_of(Some(peer.ok_or(EINVAL)?));
    // Loopback addresses other than 127.0.0.1 are in no GID table. The connection manager does not
    // need the index.
    Ok(ah_attr(gid, gid_index(ctx, local)))
}

/// Returns the index of an address in its device's GID table, or `None` if the address is missing.
/// With the RoCE face, returns the index of the RoCE v2 entry.
pub(super) fn gid_index(ctx: &Context, local: Option<SocketAddr>) -> Option<u32> {
    let own = crate::abi::kern::gid_octets(gid_of(local));
    // The addresses may have changed since the context was opened.
    let device = ctx.device().current().ok()??;
    let table = device.gids(ctx.config().face);
    // The RoCE v2 entry is the last entry of each address.
    table.iter().rfind(|e| e.gid == own).map(|e| e.index)
}

/// Returns address handle attributes with this entry of the GID table as the source.
pub(super) fn ah_attr(gid: [u64; 2], index: Option<u32>) -> ibv_ah_attr {
    // SAFETY: integers only.
    let mut to: ibv_ah_attr = unsafe { std::mem::zeroed() };
    to.is_global = 1;
    to.port_num = 1;
    to.grh.dgid = gid;
    to.grh.hop_limit = HOP_LIMIT;
    to.grh.sgid_index = index.and_then(|i| u8::try_from(i).ok()).unwrap_or(0);
    to
}
