//! Identifiers for datagrams (`RDMA_PS_UDP`) as `rdma_cm(7)` has them: their queue pairs, events that say where to send to, and multicast.

use super::channel::DELIVERY;
use super::id::{self, IdObject, find, gid_of};
use super::roce;
use super::sockaddr;
use crate::abi::cma::*;
use crate::abi::verbs::value as v;
use crate::abi::verbs::*;
use crate::guard::{EINVAL, Errno, Res, UNSUPPORTED, minus_one};
use crate::object::Unacknowledged;
use crate::qp;
use iwarp::runtime::cm::{CmEvent, CmEventKind, CmId, DEFAULT_QKEY, DatagramEnd};
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A group that the program has joined.
pub(crate) struct Joined {
    /// Our number for it, which comes back in its events.
    key: u64,
    /// The program's own pointer, which is given back in its events.
    context: usize,
    /// Leaving waits for these.
    pub(super) events: Arc<Unacknowledged>,
}

/// Brings the queue pair of an identifier to RTS, as `rdma_create_qp(3)` does for datagrams, and lets the identifier name it.
pub(super) unsafe fn make_ready(object: &IdObject, q: *mut ibv_qp) -> Res<()> {
    let mut attr: ibv_qp_attr = std::mem::zeroed();
    attr.qp_state = v::QPS_INIT;
    let init = v::QP_STATE | attributes(&mut attr)?;
    for (state, mask) in [
        (v::QPS_INIT, init),
        (v::QPS_RTR, v::QP_STATE),
        (v::QPS_RTS, v::QP_STATE | v::QP_SQ_PSN),
    ] {
        attr.qp_state = state;
        match qp::ibv_modify_qp(q, &raw mut attr, mask as c_int) {
            0 => {}
            errno => return Err(Errno(errno)),
        }
    }
    let raw = &crate::ud::find(q)?.raw;
    Ok(object.raw.set_datagram_queue_pair(Some(raw))?)
}

/// Fills in the attributes with which a queue pair for datagrams gets to `attr.qp_state`. Returns which they are.
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

/// `rdma_accept(3)`: the peer is told the identifier's queue pair, or the one whose number is in the parameters.
pub(super) unsafe fn accept(id: *mut rdma_cm_id, p: *const rdma_conn_param) -> Res<()> {
    let raw = &find(id)?.raw;
    let data = private_data(p);
    if (*id).qp.is_null() {
        let num = p.as_ref().map(|p| p.qp_num).ok_or(EINVAL)?;
        raw.accept_datagrams(num, DEFAULT_QKEY, data)?;
    } else {
        let qp = &crate::ud::find((*id).qp)?.raw;
        raw.accept_datagrams(qp.num(), qp.qkey(), data)?;
    }
    id::drop_event(id)
}

unsafe fn private_data<'a>(p: *const rdma_conn_param) -> &'a [u8] {
    match p.as_ref() {
        Some(p) if !p.private_data.is_null() && p.private_data_len > 0 => {
            std::slice::from_raw_parts(p.private_data.cast(), usize::from(p.private_data_len))
        }
        _ => &[],
    }
}

/// Returns the status of an event as C programs see it: a positive number that InfiniBand's messages have, or a negative errno.
pub(super) fn status_of(event: &CmEvent) -> c_int {
    match event.service_status {
        0 => event.status.wrapping_neg(),
        status => c_int::from(status),
    }
}

/// Makes the parameters of an event of an identifier for datagrams.
pub(super) fn parameters(id: &IdObject, event: &CmEvent) -> rdma_ud_param {
    // SAFETY: integers and a pointer, for which zero is a value.
    let mut to: rdma_ud_param = unsafe { std::mem::zeroed() };
    if !event.private_data.is_empty() {
        to.private_data = event.private_data.as_ptr().cast::<c_void>();
        to.private_data_len = u8::try_from(event.private_data.len()).unwrap_or(u8::MAX);
    }
    if let Some(end) = event.datagrams {
        to.ah_attr = route(id, end);
        to.qp_num = end.num;
        to.qkey = end.qkey;
    }
    to
}

/// Returns the attributes of an address handle, with which datagrams leave from the identifier's address.
fn route(id: &IdObject, end: DatagramEnd) -> ibv_ah_attr {
    let port = 0;
    let gid = gid_of(Some(SocketAddr::new(end.ip, port)));
    let (local, _) = id.raw.addresses();
    let context = id.raw.context();
    let index = context.and_then(|ctx| roce::index_of(&ctx, local));
    let mut to = roce::handle_to(gid, index);
    to.grh.traffic_class = id.endpoint.lock().tos;
    to
}

/// Completes the parameters of a multicast event, and counts it. Returns its counter; `None` if the program has left the group.
pub(super) fn joined(
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

unsafe fn join(
    id: *mut rdma_cm_id,
    address: SocketAddr,
    send_only: bool,
    context: *mut c_void,
) -> Res<c_int> {
    static KEYS: AtomicU64 = AtomicU64::new(1);
    let object = find(id)?;
    let key = KEYS.fetch_add(1, Ordering::Relaxed);
    id::drop_event(id)?;
    // Before the event, which may be taken at once.
    object.groups.lock().push(Joined {
        key,
        context: context as usize,
        events: Arc::default(),
    });
    if let Err(e) = object.raw.join_multicast(address, send_only, key) {
        object.groups.lock().retain(|g| g.key != key);
        return Err(e.into());
    }
    id::complete(id)
}

pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    minus_one(|| join(id, sockaddr::read(address)?, false, context))
}

/// `struct rdma_cm_join_mc_attr_ex`.
#[repr(C)]
pub(crate) struct JoinAttributes {
    comp_mask: u32,
    join_flags: u32,
    addr: *mut libc::sockaddr,
}

const MASK_ADDRESS: u32 = 1;
const MASK_FLAGS: u32 = 1 << 1;
/// Members of a group, those that receive and those that only send.
const FULL_MEMBER: u32 = 0;
const SEND_ONLY: u32 = 1;

pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attributes: *mut c_void,
    context: *mut c_void,
) -> c_int {
    minus_one(|| {
        let Some(a) = attributes.cast::<JoinAttributes>().as_ref() else {
            return Err(EINVAL);
        };
        if a.comp_mask & !(MASK_ADDRESS | MASK_FLAGS) != 0 {
            return Err(UNSUPPORTED);
        }
        if a.comp_mask != MASK_ADDRESS | MASK_FLAGS || a.join_flags > SEND_ONLY {
            return Err(EINVAL);
        }
        let send_only = a.join_flags != FULL_MEMBER;
        join(id, sockaddr::read(a.addr)?, send_only, context)
    })
}

pub(crate) unsafe extern "C" fn rdma_leave_multicast(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let address = sockaddr::read(address)?;
        let left = {
            // An event that is being taken is counted before, or dropped here.
            let _delivery = DELIVERY.lock();
            let key = object.raw.leave_multicast(address)?;
            let mut groups = object.groups.lock();
            let at = groups.iter().position(|g| g.key == key);
            at.map(|at| groups.swap_remove(at))
        };
        if !(*id).event.is_null() && is_about_a_group(&*(*id).event) {
            // It is the library's own, and nobody else acknowledges it.
            id::drop_event(id)?;
        }
        if let Some(left) = left {
            left.events.wait();
        }
        Ok(0)
    })
}

fn is_about_a_group(event: &rdma_cm_event) -> bool {
    use super::channel::{MULTICAST_ERROR, MULTICAST_JOIN};
    [MULTICAST_JOIN, MULTICAST_ERROR].contains(&event.event)
}

/// Makes an identifier for the port space of a program.
pub(super) fn create_raw(queue: &iwarp::runtime::cm::CmEventChannel, ps: c_uint) -> Res<CmId> {
    match ps {
        PS_TCP | PS_IB => Ok(CmId::create(queue, None)),
        PS_UDP => Ok(CmId::create_for_datagrams(queue, None)),
        PS_IPOIB => {
            iwarp::runtime::complain_once(
                "the program asks for datagrams of IP over InfiniBand (RDMA_PS_IPOIB), which need an InfiniBand network; \
                 choose the port space of UDP (RDMA_PS_UDP), for example `udaddy -P udp`, `mckey -p 0x111`"
                    .to_owned(),
            );
            Err(Errno(libc::EPROTONOSUPPORT))
        }
        _ => Err(EINVAL),
    }
}
