//! Identifiers: creation, addresses, options.

use super::channel::{self, DELIVERY};
use super::datagram::{self, Joined};
use super::lookup::Lookup;
use super::{roce, sockaddr};
use crate::abi::cma::*;
use crate::abi::verbs::value::{QPS_RTS, QPT_RC, QPT_UD, QPT_XRC_RECV};
use crate::abi::verbs::*;
use crate::device;
use crate::guard::{EINVAL, Errno, Res, UNSUPPORTED, minus_one, value};
use crate::object::{self, Kind, Object, Unacknowledged};
use crate::query::PKEY;
use crate::unused;
use iwarp::runtime::cm::{CmId, InfinibandParameters};
use iwarp::runtime::{ProcessLock, XrcEnd};
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// Our part of an identifier.
pub(crate) struct Id {
    pub(crate) raw: CmId,
    pub(crate) events: Unacknowledged,
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) lookup: Arc<Lookup>,
    /// Multicast groups that it has joined.
    pub(crate) groups: Mutex<Vec<Joined>>,
}

/// Objects that were made for the program.
#[derive(Default)]
pub(crate) struct Endpoint {
    /// The channel of a synchronous identifier.
    pub(crate) channel: usize,
    /// Queue pair attributes for connections to a passive end point.
    pub(crate) qp_init: Option<QpInit>,
    /// `RDMA_OPTION_ID_TOS`: the traffic class of datagrams.
    pub(crate) tos: u8,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(crate) ack_timeout: Option<u8>,
    /// It connects, and the program moves the queue pair itself.
    pub(crate) external_qp: bool,
    /// Private data from `rdma_getaddrinfo`'s hints.
    pub(crate) connect_data: Vec<u8>,
    /// Completion queues and channels that `rdma_create_qp` made.
    pub(crate) made_cqs: bool,
    /// The queue pair as `rdma_create_qp` made it; a program may have changed `id->qp` since.
    pub(crate) qp: usize,
    /// The shared receive queue that `rdma_create_srq` made.
    pub(crate) srq: usize,
    /// What the other end says of its queue pair, if both devices look like RoCE NICs.
    pub(crate) peer: Option<InfinibandParameters>,
    /// The path record, on a device that looks like a RoCE NIC.
    path: Option<Box<ibv_sa_path_rec>>,
}

/// A copy of `struct ibv_qp_init_attr`.
#[derive(Clone, Copy)]
pub(crate) struct QpInit(pub(crate) ibv_qp_init_attr);

// SAFETY: the pointers are the program's, and are only handed back to functions of this library.
unsafe impl Send for QpInit {}

pub(crate) type IdObject = Object<rdma_cm_id, Id>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(id: *mut rdma_cm_id) -> Res<&'a IdObject> {
    object::find(Kind::CmId, id)
}

/// A protection domain for each device context of the connection manager.
unsafe fn default_pd(verbs: *mut ibv_context) -> Res<*mut ibv_pd> {
    static PDS: ProcessLock<Option<HashMap<usize, usize>>> =
        ProcessLock::new("verbs::cm::PDS", None);
    let mut pds = PDS.lock();
    let pds = pds.get_or_insert_with(HashMap::new);
    if let Some(pd) = pds.get(&(verbs as usize)) {
        return Ok(*pd as *mut ibv_pd);
    }
    let pd = crate::pd::ibv_alloc_pd(verbs);
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
    // SAFETY: integers, pointers and addresses, for which zero is a value.
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
    unused::used();
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

pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    minus_one(|| {
        *to = create(channel, context, ps)?;
        Ok(0)
    })
}

/// Returns `true` if a request of this peer is for the type of queue pair that the listener is for. Others are rejected, as by the kernel.
pub(crate) unsafe fn takes(listener: *mut rdma_cm_id, peer: Option<XrcEnd>) -> bool {
    let wanted = match (*listener).qp_type {
        QPT_XRC_RECV => Some(XrcEnd::Initiator),
        _ => None,
    };
    peer == wanted
}

/// Makes the identifier of a request: on the listener's channel, or on one of its own if the listener is synchronous.
pub(crate) unsafe fn of_request(listener: *mut rdma_cm_id, raw: &CmId) -> Res<*mut rdma_cm_id> {
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

/// Updates the public fields: addresses, device, protection domain.
pub(crate) unsafe fn refresh(id: *mut rdma_cm_id) {
    let object: &IdObject = object::trusted(id);
    let (local, peer) = object.raw.addresses();
    if let Some(local) = local {
        (*id).route.addr.src_storage = sockaddr::write(local).0;
    }
    if let Some(peer) = peer {
        (*id).route.addr.dst_storage = sockaddr::write(peer).0;
    }
    // An identifier that is bound to a loopback address is on no device, as if bound to the
    // wildcard. libfabric would take a device that it sees here for the only one to be used. A
    // listener has its device, as in the kernel.
    let bound_only = peer.is_none() && !object.raw.is_listening();
    let anywhere = bound_only && local.is_none_or(|a| a.ip().is_loopback());
    if (*id).verbs.is_null()
        && !anywhere
        && let Some(ctx) = object.raw.context()
        && let Ok(verbs) = device::shared_context(&ctx)
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
    show_path(id, object);
}

/// Shows the path record as soon as there is a peer.
unsafe fn show_path(id: *mut rdma_cm_id, object: &IdObject) {
    let mut endpoint = object.endpoint.lock();
    if endpoint.path.is_none()
        && let Some(ctx) = object.raw.context()
        && roce::is_face_of(&ctx)
        && let Some(path) = roce::path(&ctx, &object.raw)
    {
        (*id).route.path_rec = &raw mut **endpoint.path.insert(Box::new(path));
        (*id).route.num_paths = 1;
    }
}

pub(crate) fn gid_of(address: Option<SocketAddr>) -> [u64; 2] {
    let octets = match address.map(|a| a.ip()) {
        Some(std::net::IpAddr::V4(ip)) => ip.to_ipv6_mapped().octets(),
        Some(std::net::IpAddr::V6(ip)) => ip.octets(),
        None => [0; 16],
    };
    // SAFETY: any 16 octets are two integers.
    unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(octets) }
}

pub(crate) unsafe fn destroy(id: *mut rdma_cm_id) -> Res<()> {
    let object = find(id)?;
    if !(*id).event.is_null() {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        channel::acknowledge(event)?;
    }
    {
        let _delivery = DELIVERY.lock();
        object.raw.set_user_data(0);
        object.raw.destroy();
    }
    object.events.wait();
    object::retire(Kind::CmId, id)?;
    let channel = object.endpoint.lock().channel;
    object::free::<rdma_cm_id, Id>(id);
    if channel != 0 {
        channel::destroy(channel as *mut rdma_event_channel);
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    minus_one(|| {
        destroy(id)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if is_synchronous(object) {
            // It is the library's own, and nobody else acknowledges it.
            drop_event(id)?;
        }
        let own = channel.is_null();
        let to = if own { channel::create()? } else { channel };
        // Whether it is synchronous changes together with its queue: the next event may be a request, whose identifier is as its listener is.
        let old = {
            let _delivery = DELIVERY.lock();
            object.raw.migrate(&channel::find(to)?.queue);
            (*id).channel = to;
            std::mem::replace(
                &mut object.endpoint.lock().channel,
                if own { to as usize } else { 0 },
            )
        };
        // Events that were delivered belong to the old channel, and are acknowledged first.
        object.events.wait();
        if old != 0 {
            channel::destroy(old as *mut rdma_event_channel);
        }
        Ok(0)
    })
}

/// For a synchronous identifier: waits for the event of a call, and keeps it in `id->event`.
pub(crate) unsafe fn complete(id: *mut rdma_cm_id) -> Res<c_int> {
    let object = find(id)?;
    if !is_synchronous(object) {
        return Ok(0);
    }
    drop_event(id)?;
    let mut event = null_mut();
    if channel::rdma_get_cm_event((*id).channel, &raw mut event) != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    (*id).event = event;
    match (*event).status {
        0 => Ok(0),
        // A refusal's status may be a reason instead of an errno.
        _ if (*event).event == 8 => Err(Errno(libc::ECONNREFUSED)),
        // The listener of a port for datagrams names no queue pair.
        reason if reason > 0 => Err(Errno(libc::ECONNREFUSED)),
        errno => Err(Errno(errno.abs())),
    }
}

/// Acknowledges the event that the last call of a synchronous identifier has kept.
pub(crate) unsafe fn drop_event(id: *mut rdma_cm_id) -> Res<()> {
    if !(*id).event.is_null() {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        channel::acknowledge(event)?;
    }
    Ok(())
}

/// Returns `true` if the channel is the identifier's own: calls wait for their event, which stays in `id->event`, because nobody else takes it.
pub(super) fn is_synchronous(object: &IdObject) -> bool {
    object.endpoint.lock().channel != 0
}

pub(crate) unsafe extern "C" fn rdma_bind_addr(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
) -> c_int {
    minus_one(|| {
        let address = sockaddr::read(address)?;
        find(id)?
            .raw
            .bind(address)
            .map_err(|error| in_use(address, error.into()))?;
        refresh(id);
        Ok(0)
    })
}

/// Returns the error of a failed bind as Linux's connection manager has it: for a wildcard address a port that is in use is `EADDRNOTAVAIL`.
fn in_use(address: SocketAddr, error: Errno) -> Errno {
    if address.ip().is_unspecified() && error == Errno(libc::EADDRINUSE) {
        return Errno(libc::EADDRNOTAVAIL);
    }
    error
}

pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut libc::sockaddr,
    peer: *mut libc::sockaddr,
    timeout_ms: c_int,
) -> c_int {
    minus_one(|| {
        let (source, peer) = (sockaddr::read_optional(source)?, sockaddr::read(peer)?);
        // A negative time is a very long one, as in the kernel.
        let limit = Duration::from_millis(u64::from(timeout_ms as u32));
        find(id)?.raw.resolve_addr_within(source, peer, limit)?;
        refresh(id);
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    minus_one(|| {
        find(id)?.raw.resolve_route()?;
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    minus_one(|| {
        find(id)?.raw.listen_strictly(backlog.max(0) as u32)?;
        refresh(id);
        Ok(0)
    })
}

const OPTION_ID: c_int = 0;
const OPTION_IB: c_int = 1;
const ID_TOS: c_int = 0;
const ID_REUSEADDR: c_int = 1;
const ID_AFONLY: c_int = 2;
const ID_ACK_TIMEOUT: c_int = 3;

/// The largest code of a time-out, which has five bits.
const ACK_TIMEOUT_MAX: u8 = 31;

/// Lets the queue pair's attributes report the time-out.
pub(crate) unsafe fn show_timeout(id: *mut rdma_cm_id, object: &IdObject) {
    if let (Some(timeout), Ok(qp)) = (
        object.endpoint.lock().ack_timeout,
        crate::qp::find((*id).qp),
    ) {
        qp.set_timeout(timeout);
    }
}

/// Lets the queue pair say what the connection has agreed on: librdmacm moves it to RTR and RTS
/// when it accepts, and when it reports that the other end has accepted.
pub(crate) unsafe fn show_connection(id: *mut rdma_cm_id, object: &IdObject) {
    let (Ok(qp), Some(ctx)) = (crate::qp::find((*id).qp), object.raw.context()) else {
        return;
    };
    let mut attr: ibv_qp_attr = std::mem::zeroed();
    roce::connection(&ctx, object, &qp.raw, &mut attr);
    qp.show_connection(&attr, roce::is_face_of(&ctx));
    // A queue pair that has failed meanwhile, or that the program moves itself, is what it is.
    if qp.raw.state() == State::Rts {
        (*(*id).qp).state = QPS_RTS;
    }
}

/// Sets an option of an identifier that the kernel takes in some of its states only.
fn set_port_option(raw: &CmId, name: c_int, on: bool) -> Res<()> {
    let may = match name {
        ID_REUSEADDR => raw.may_reuse_address(on),
        _ => raw.may_choose_family(),
    };
    if !may {
        return Err(EINVAL);
    }
    match name {
        ID_REUSEADDR => raw.set_reuse_address(on),
        _ => raw.set_only_v6(on),
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    data: *mut c_void,
    len: usize,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let int = || {
            if len == size_of::<c_int>() && !data.is_null() {
                Ok(*data.cast::<c_int>())
            } else {
                Err(EINVAL)
            }
        };
        match (level, name) {
            (OPTION_ID, ID_AFONLY | ID_REUSEADDR) => {
                set_port_option(&object.raw, name, int()? != 0)?;
            }
            (OPTION_ID, ID_TOS) if len == 1 && !data.is_null() => {
                object.endpoint.lock().tos = *data.cast::<u8>();
            }
            (OPTION_ID, ID_ACK_TIMEOUT) if len == 1 && !data.is_null() => {
                let timeout = *data.cast::<u8>();
                if timeout > ACK_TIMEOUT_MAX || object.raw.is_for_datagrams() {
                    return Err(EINVAL);
                }
                object.endpoint.lock().ack_timeout = Some(timeout);
                show_timeout(id, object);
            }
            (OPTION_ID, ID_TOS | ID_ACK_TIMEOUT) => return Err(EINVAL),
            // Paths of InfiniBand.
            (OPTION_IB, _) => return Err(UNSUPPORTED),
            _ => return Err(Errno(libc::ENOSYS)),
        }
        Ok(0)
    })
}

/// Returns the port numbers in network order, ours and the peer's; zero if not known.
unsafe fn ports(id: *mut rdma_cm_id) -> (u16, u16) {
    value((0, 0), || {
        let Ok(object) = find(id) else { return (0, 0) };
        let (local, peer) = object.raw.addresses();
        let port = |a: Option<SocketAddr>| a.map_or(0, |a| a.port().to_be());
        (port(local), port(peer))
    })
}

pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    ports(id).0
}

pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    ports(id).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_address_has_a_device_in_use_only() {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let (mut address, _) = sockaddr::write(address);
        let address = (&raw mut address).cast::<libc::sockaddr>();
        // SAFETY: identifiers of this test, used as a program would.
        unsafe {
            let mut id = null_mut();
            assert_eq!(
                rdma_create_id(null_mut(), &raw mut id, null_mut(), PS_TCP),
                0
            );
            assert_eq!(rdma_bind_addr(id, address), 0);
            assert!((*id).verbs.is_null() && (*id).pd.is_null());
            assert_ne!(rdma_get_src_port(id), 0);
            assert_eq!(rdma_listen(id, 1), 0);
            assert!(!(*id).verbs.is_null() && !(*id).pd.is_null());
            let mut peer = (*id).route.addr.src_storage;
            assert_eq!(rdma_destroy_id(id), 0);

            assert_eq!(
                rdma_create_id(null_mut(), &raw mut id, null_mut(), PS_TCP),
                0
            );
            assert_eq!(rdma_bind_addr(id, address), 0);
            assert_eq!(
                rdma_resolve_addr(id, null_mut(), (&raw mut peer).cast(), 1000),
                0
            );
            assert!(!(*id).verbs.is_null() && !(*id).pd.is_null());
            assert_eq!(rdma_destroy_id(id), 0);
        }
    }
}
