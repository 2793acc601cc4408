//! Delivery of asynchronous events: `ibv_get_async_event(3)`, `ibv_ack_async_event(3)`.
//!
//! An event refers to an object of any kind, so this room uses `cq`, `srq` and `qp`. The room
//! `device` discards the events of destroyed objects.

use crate::abi::verbs::*;
use crate::border::guard::value;
use crate::border::object::Unacknowledged;
use crate::border::wait;
use crate::device::context;
use crate::device::pending_events::DELIVERY;
use crate::qp::{connected, datagram};
use crate::{cq, srq};
use iwarp::runtime::{AsyncEventKind, PortEvent, UdEvent};
use std::ffi::{c_int, c_uint};

const CQ_ERR: c_uint = 0;
const QP_FATAL: c_uint = 1;
const QP_REQ_ERR: c_uint = 2;
const QP_ACCESS_ERR: c_uint = 3;
const COMM_EST: c_uint = 4;
const SQ_DRAINED: c_uint = 5;
const DEVICE_FATAL: c_uint = 8;
const PORT_ACTIVE: c_uint = 9;
const PORT_ERR: c_uint = 10;
const LID_CHANGE: c_uint = 11;
const PKEY_CHANGE: c_uint = 12;
const SM_CHANGE: c_uint = 13;
const SRQ_ERR: c_uint = 14;
const SRQ_LIMIT_REACHED: c_uint = 15;
const QP_LAST_WQE_REACHED: c_uint = 16;
const CLIENT_REREGISTER: c_uint = 17;
const GID_CHANGE: c_uint = 18;

const PORT: c_int = 1;

/// Takes one event and counts it as delivered.
unsafe fn take_event(c: *mut ibv_context, was_read: bool) -> Option<ibv_async_event> {
    use AsyncEventKind as K;
    let queue = context(c).raw.async_events();
    let _delivery = DELIVERY.lock();
    loop {
        let event = if was_read {
            queue.try_next_after_read()
        } else {
            queue.try_next()
        }?;
        if let K::Port(port) = event.kind {
            return Some(port_event(port));
        }
        let (object, event_type) = match &event.kind {
            K::CqError(cq) => (cq.user_data(), CQ_ERR),
            K::QpFatal(qp) => (qp.user_data(), QP_FATAL),
            K::QpRequestError(qp) => (qp.user_data(), QP_REQ_ERR),
            K::QpAccessError(qp) => (qp.user_data(), QP_ACCESS_ERR),
            K::CommunicationEstablished(qp) => (qp.user_data(), COMM_EST),
            K::SqDrained(qp) => (qp.user_data(), SQ_DRAINED),
            K::LastWqeReached(qp) => (qp.user_data(), QP_LAST_WQE_REACHED),
            K::Datagram(qp, UdEvent::Fatal) => (qp.user_data(), QP_FATAL),
            K::Datagram(qp, UdEvent::SqDrained) => (qp.user_data(), SQ_DRAINED),
            K::Datagram(qp, UdEvent::LastWqeReached) => (qp.user_data(), QP_LAST_WQE_REACHED),
            K::SrqLimitReached(srq) => (srq.user_data(), SRQ_LIMIT_REACHED),
            _ => continue,
        };
        if object == 0 {
            continue;
        }
        let element = async_element {
            cq: object as *mut ibv_cq,
        };
        let event = ibv_async_event {
            element,
            event_type,
        };
        if let Some(counter) = counter(&event) {
            counter.delivered();
            return Some(event);
        }
    }
}

/// Returns an event of the port or the device, which refers to no object.
const fn port_event(event: PortEvent) -> ibv_async_event {
    let event_type = match event {
        PortEvent::Active => PORT_ACTIVE,
        PortEvent::Error => PORT_ERR,
        PortEvent::LidChange => LID_CHANGE,
        PortEvent::PkeyChange => PKEY_CHANGE,
        PortEvent::SmChange => SM_CHANGE,
        PortEvent::ClientReregister => CLIENT_REREGISTER,
        PortEvent::GidChange => GID_CHANGE,
        _ => DEVICE_FATAL,
    };
    ibv_async_event {
        element: async_element { port_num: PORT },
        event_type,
    }
}

/// Returns the object's counter of unacknowledged events.
unsafe fn counter<'a>(event: &ibv_async_event) -> Option<&'a Unacknowledged> {
    match event.event_type {
        CQ_ERR => cq::find(event.element.cq).ok().map(|cq| &cq.asynchronous),
        QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR | COMM_EST | SQ_DRAINED | QP_LAST_WQE_REACHED => {
            let qp = event.element.qp;
            match datagram::find(qp) {
                Ok(qp) => Some(&qp.asynchronous),
                Err(_) => connected::find(qp).ok().map(|qp| &qp.asynchronous),
            }
        }
        SRQ_ERR | SRQ_LIMIT_REACHED => srq::queue::find(event.element.srq)
            .ok()
            .map(|srq| &srq.asynchronous),
        _ => None,
    }
}

pub(crate) unsafe extern "C-unwind" fn ibv_get_async_event(
    c: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    let mut was_read = false;
    loop {
        if let Some(event) = value(None, || take_event(c, was_read)) {
            *to = event;
            return 0;
        }
        if wait::consume((*c).async_fd) != 0 {
            return -1;
        }
        was_read = true;
    }
}

pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    value((), || {
        if let Some(counter) = counter(&*event) {
            counter.acknowledged(1);
        }
    });
}
