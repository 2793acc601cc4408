//! Events: delivery to programs, acknowledgement, and contents.

use super::channel::{self, DELIVERY, MULTICAST_ERROR, MULTICAST_JOIN, USER};
use super::object::{IdObject, find};
use super::{datagram, identifier, roce};
use crate::abi::cma::*;
use crate::abi::verbs::ibv_qp_attr;
use crate::abi::verbs::value::{QP_STATE, QPS_ERR};
use crate::border::guard::{EINVAL, Errno, Res, minus_one, value};
use crate::border::object::{self, Kind, Object, Unacknowledged};
use crate::border::wait;
use crate::device::query;
use crate::lifecycle::modify;
use iwarp::runtime::cm::{CmEvent, CmEventKind};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

pub(crate) struct Event {
    /// The identifier that counts the event. For a connection request, this is the listener.
    counted: *mut rdma_cm_id,
    /// The event counter of a multicast group, if the event is about a group.
    group: Option<Arc<Unacknowledged>>,
    _private_data: Vec<u8>,
}

/// Reported to the active side instead of ESTABLISHED if the program moves the queue pair itself;
/// it then calls `rdma_establish(3)`.
const CONNECT_RESPONSE: c_uint = 5;

const fn event_code(kind: CmEventKind) -> c_uint {
    match kind {
        CmEventKind::AddrResolved => 0,
        CmEventKind::AddrError => 1,
        CmEventKind::RouteResolved => 2,
        CmEventKind::ConnectRequest => 4,
        CmEventKind::ConnectError => 6,
        CmEventKind::Unreachable => 7,
        CmEventKind::Rejected => 8,
        CmEventKind::Established => 9,
        CmEventKind::Disconnected => 10,
        CmEventKind::MulticastJoin(_) => MULTICAST_JOIN,
        CmEventKind::MulticastError(_) => MULTICAST_ERROR,
        CmEventKind::TimewaitExit => 15,
        CmEventKind::AddrinfoResolved => 16,
        CmEventKind::AddrinfoError => 17,
        CmEventKind::User(_) => USER,
        // RDMA_CM_EVENT_ROUTE_ERROR, also for kinds without an equivalent in C.
        _ => 3,
    }
}

/// Returns the depth to report: at most the device's maximum, because many programs pass the
/// event's values to `rdma_accept`. If the peer sent no depth, it is the maximum.
fn depth(value: Option<u16>) -> u8 {
    let max = query::RD_ATOMIC;
    u8::try_from(value.unwrap_or(max).min(max)).unwrap_or(u8::MAX)
}

/// Creates the program's event and updates its identifier. Returns `None` if the identifier was
/// destroyed, or if a connection request cannot be delivered.
unsafe fn deliver(event: CmEvent) -> Option<*mut rdma_cm_event> {
    let (id, listener) = match &event.listener {
        None => {
            let id = event.id.user_data() as *mut rdma_cm_id;
            if id.is_null() {
                return None;
            }
            identifier::refresh(id);
            (id, null_mut())
        }
        Some(listener) => {
            let listener = listener.user_data() as *mut rdma_cm_id;
            if listener.is_null() {
                event.id.destroy();
                return None;
            }
            if !identifier::accepts_type(listener, event.xrc) {
                tracing::debug!("rejected a connection request for another type of queue pair");
                let _ = event.id.reject(&[]);
                event.id.destroy();
                return None;
            }
            match identifier::create_for_request(listener, &event.id) {
                Ok(id) => (id, listener),
                Err(Errno(errno)) => {
                    tracing::warn!(errno, "a connection request could not be delivered");
                    event.id.destroy();
                    return None;
                }
            }
        }
    };
    let counted = if listener.is_null() { id } else { listener };
    let object: &IdObject = object::trusted(counted);
    let subject: &IdObject = object::trusted(id);
    if event.infiniband.is_some() {
        subject.endpoint.lock().peer = event.infiniband;
    }
    let (param, group) = parameters(subject, &event);
    object.events.delivered();
    if event.kind == CmEventKind::Rejected {
        move_qp_to_error(id);
    }
    let response = event.kind == CmEventKind::Established && object.endpoint.lock().external_qp;
    if event.kind == CmEventKind::Established {
        identifier::publish_connection(id, subject);
    }
    let c = rdma_cm_event {
        id,
        listen_id: listener,
        event: if response {
            CONNECT_RESPONSE
        } else {
            event_code(event.kind)
        },
        status: status_of(subject, &event),
        param,
    };
    let own = Event {
        counted,
        group,
        _private_data: event.private_data,
    };
    Some(object::create(Kind::CmEvent, c, own))
}

/// Reject reasons of InfiniBand's connection manager: the initiator gave up, no listener, and
/// rejected by the program.
const GIVEN_UP: c_int = 4;
const INVALID_SERVICE_ID: c_int = 8;
const CONSUMER_DEFINED: c_int = 28;

fn status_of(id: &IdObject, event: &CmEvent) -> c_int {
    let is_roce = || id.raw.context().is_some_and(|ctx| roce::is_roce_face(&ctx));
    match (event.kind, event.replied) {
        (CmEventKind::Rejected, true) if is_roce() => CONSUMER_DEFINED,
        (CmEventKind::Rejected, false) if event.status == libc::ECONNABORTED => GIVEN_UP,
        (CmEventKind::Rejected, false) if is_roce() => INVALID_SERVICE_ID,
        _ => datagram::status_of(event),
    }
}

/// Moves a rejected identifier's queue pair to ERR, as librdmacm does, so that receives posted
/// before the connection attempt complete.
unsafe fn move_qp_to_error(id: *mut rdma_cm_id) {
    if (*id).qp.is_null() {
        return;
    }
    // SAFETY: integers, for which zero is valid.
    let mut attr: ibv_qp_attr = std::mem::zeroed();
    attr.qp_state = QPS_ERR;
    // Fails if the program destroyed the queue pair meanwhile; then nothing is left to flush.
    let _ = modify::ibv_modify_qp((*id).qp, &raw mut attr, QP_STATE as c_int);
}

/// Returns an event's parameters, which point into its private data. Counts the event for its
/// multicast group.
fn parameters(id: &IdObject, event: &CmEvent) -> (event_param, Option<Arc<Unacknowledged>>) {
    // SAFETY: integers and pointers, for which zero is valid.
    let mut param: event_param = unsafe { std::mem::zeroed() };
    let mut group = None;
    match event.kind {
        CmEventKind::User(arg) => param.arg = arg,
        _ if id.raw.is_for_datagrams() => {
            let mut ud = datagram::parameters(id, event);
            group = datagram::count_group_event(id, event.kind, &mut ud);
            param.ud = ud;
        }
        _ => param.conn = connection(event),
    }
    (param, group)
}

fn connection(event: &CmEvent) -> rdma_conn_param {
    let private_data = &event.private_data;
    let peer = event.infiniband.unwrap_or_default();
    rdma_conn_param {
        private_data: if private_data.is_empty() {
            null_mut()
        } else {
            private_data.as_ptr().cast::<c_void>()
        },
        private_data_len: u8::try_from(private_data.len()).unwrap_or(u8::MAX),
        responder_resources: depth(event.responder_resources),
        initiator_depth: depth(event.initiator_depth),
        flow_control: u8::from(peer.flow_control),
        // Only a request carries this value.
        retry_count: match event.kind {
            CmEventKind::ConnectRequest => peer.retry_count,
            _ => 0,
        },
        rnr_retry_count: peer.rnr_retry_count,
        srq: u8::from(peer.srq),
        qp_num: peer.qp_num,
    }
}

/// Takes one event and counts it as delivered.
unsafe fn take_event(
    channel: *mut rdma_event_channel,
    was_read: bool,
) -> Res<Option<*mut rdma_cm_event>> {
    let queue = Arc::clone(&channel::find(channel)?.queue);
    loop {
        let _delivery = DELIVERY.lock();
        let event = if was_read {
            queue.try_next_after_read()
        } else {
            queue.try_next()
        };
        let Some(event) = event else { return Ok(None) };
        if let Some(event) = deliver(event) {
            return Ok(Some(event));
        }
    }
}

pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    if to.is_null() {
        return minus_one(|| Err(EINVAL));
    }
    let fd = match value(Err(EINVAL), || channel::begin_read(channel)) {
        Ok(fd) => fd,
        Err(e) => return minus_one(|| Err(e)),
    };
    let mut was_read = false;
    let result = loop {
        match value(Err(EINVAL), || take_event(channel, was_read)) {
            Ok(Some(event)) => {
                *to = event;
                break 0;
            }
            Ok(None) => {}
            Err(e) => break minus_one(|| Err(e)),
        }
        if wait::consume(fd) != 0 {
            break -1;
        }
        was_read = true;
    };
    value((), || channel::end_read(channel));
    result
}

/// Acknowledges an event and frees it.
///
/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn acknowledge(event: *mut rdma_cm_event) -> Res<()> {
    let object: &Object<rdma_cm_event, Event> = object::find(Kind::CmEvent, event)?;
    object::retire(Kind::CmEvent, event)?;
    let counted = object.counted;
    let group = object.group.clone();
    object::free::<rdma_cm_event, Event>(event);
    if let Some(group) = group {
        group.acknowledged(1);
    }
    // Last, because destroying the identifier may be waiting for this.
    if let Ok(id) = find(counted) {
        id.events.acknowledged(1);
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    minus_one(|| {
        acknowledge(event)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    let name = match event {
        0 => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        1 => c"RDMA_CM_EVENT_ADDR_ERROR",
        2 => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        3 => c"RDMA_CM_EVENT_ROUTE_ERROR",
        4 => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        5 => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        6 => c"RDMA_CM_EVENT_CONNECT_ERROR",
        7 => c"RDMA_CM_EVENT_UNREACHABLE",
        8 => c"RDMA_CM_EVENT_REJECTED",
        9 => c"RDMA_CM_EVENT_ESTABLISHED",
        10 => c"RDMA_CM_EVENT_DISCONNECTED",
        11 => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        14 => c"RDMA_CM_EVENT_ADDR_CHANGE",
        15 => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        16 => c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        17 => c"RDMA_CM_EVENT_ADDRINFO_ERROR",
        USER => c"RDMA_CM_EVENT_USER",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use iwarp::runtime::cm::CmId;
    use iwarp::runtime::create_event_channel;
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    #[test]
    fn reported_depths_are_acceptable() {
        for offered in [
            None,
            Some(0),
            Some(1),
            Some(64),
            Some(65),
            Some(255),
            Some(u16::MAX),
        ] {
            assert!(u16::from(depth(offered)) <= query::RD_ATOMIC, "{offered:?}");
        }
        assert_eq!((depth(Some(0)), depth(Some(64))), (0, 64));
    }

    /// A thread may take the event of a request just before the listener is destroyed. Then the
    /// listener has no address any more, and the requester is rejected.
    #[test]
    fn request_to_destroyed_listener_is_rejected() {
        let queue = create_event_channel().unwrap();
        let listener = CmId::create(&queue, None);
        listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        listener.listen(1).unwrap();
        assert_eq!(listener.user_data(), 0);
        let mut requester = TcpStream::connect(listener.addresses().0.unwrap()).unwrap();
        let request = b"MPA ID Req Frame\x40\x01\x00\x00";
        requester.write_all(request).unwrap();
        let event = std::iter::repeat_with(|| {
            std::thread::yield_now();
            queue.try_next()
        });
        let event = event.flatten().next().unwrap();
        assert_eq!(event.kind, CmEventKind::ConnectRequest);
        // SAFETY: the event refers to no object of C.
        assert!(unsafe { deliver(event) }.is_none());
        // The answer, if there is one, is a rejection. A reset ends the stream, too.
        let mut answer = Vec::new();
        let _ = requester.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer[16] & 0x20 != 0, "{answer:?}");
        listener.destroy();
    }
}
