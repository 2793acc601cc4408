//! Connection management as in rdma_cm (`rdma_cm(7)`): identifiers, events, and MPA start-up.
//!
//! An identifier is bound, resolved, connected, or listens. The results arrive as events on its
//! channel.
//!
//! - `id`: identifiers; `resolve`: resolution of addresses; `portmap`: the port mapper's client.
//! - `active` and `passive`: the initiator's and the responder's MPA start-up (RFC 5044 section
//!   7.1, RFC 6581); `startup`: what they share. `accept`: the responder's last step, and
//!   `awaiting_first_fpdu` the same for queue pairs that are connected by number. `refused`:
//!   rejected connections; `withdrawn`: requests that are given up; `reminders`: when a silent
//!   responder is reminded.
//! - `sink`: events of queue pairs; `overtaken` and `timewait`: the events of a connection's end.
//! - `xrc`: extended reliable connections; `stand_in`: connections without a queue pair of the
//!   program; `sidr`: identifiers for datagrams.
//!
//! May use `admission`, `ud`, `conn`, `objects` and everything below.

mod accept;
mod active;
mod awaiting_first_fpdu;
mod id;
mod overtaken;
mod passive;
pub(crate) mod portmap;
mod refused;
mod reminders;
mod resolve;
mod sidr;
mod sink;
mod stand_in;
mod startup;
mod timewait;
mod withdrawn;
mod xrc;

pub use crate::conn::infiniband::InfinibandParameters;
#[cfg(test)]
pub(crate) use awaiting_first_fpdu::tests::{accepted, requested};
pub use id::{CmId, CmProgress, ConnectionParameters};
pub use iwarp_proto::sidr::DEFAULT_QKEY;
pub use sidr::DatagramEnd;

use crate::device::Device;
use crate::error::Result;
use crate::objects::context::Context;
use crate::objects::events::EventQueue;
use iwarp_rnic::qp::XrcEnd;
use std::sync::Arc;

/// The kind of an event. Names as in `rdma_get_cm_event(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CmEventKind {
    /// The address was resolved; the identifier has a device.
    AddrResolved,
    /// The address was not resolved; `status` says why.
    AddrError,
    /// The route was resolved.
    RouteResolved,
    /// A peer asks to connect. `id` is the new identifier, `listener` the listener.
    ConnectRequest,
    /// The attempt failed; `status` says why.
    ConnectError,
    /// The peer did not answer. For datagrams: it named no queue pair.
    Unreachable,
    /// The peer refused.
    Rejected,
    /// The connection is up.
    Established,
    /// The connection is over.
    Disconnected,
    /// A multicast group was joined. The value is the program's ([`CmId::join_multicast`]).
    MulticastJoin(u64),
    /// A multicast group was not joined; `status` says why.
    MulticastError(u64),
    /// A second has passed since [`Disconnected`](Self::Disconnected), and no more events come. A
    /// destroyed identifier does not get it.
    TimewaitExit,
    /// An event of the program itself, with a value of its own ([`CmId::write_event`]).
    User(u64),
    /// Names were resolved (`rdma_resolve_addrinfo(3)`).
    AddrinfoResolved,
    /// Names were not resolved; `status` says why.
    AddrinfoError,
}

/// An event of an identifier.
#[derive(Debug, Clone)]
pub struct CmEvent {
    /// The kind of the event.
    pub kind: CmEventKind,
    /// Zero, or the errno that describes a failure.
    pub status: i32,
    /// The identifier of the event. For a connection request it is the new one.
    pub id: CmId,
    /// For a connection request, the listening identifier.
    pub listener: Option<CmId>,
    /// The peer's private data, without the RFC 6581 prefix.
    pub private_data: Vec<u8>,
    /// For [`CmEventKind::Rejected`]: `true` if the peer rejected by an MPA reply, `false` if TCP
    /// refused, which usually means that nothing listens there.
    pub replied: bool,
    /// RDMA Reads and atomics that the peer may have outstanding towards us: for a request what it
    /// asks for, `None` if it did not say; for [`CmEventKind::Established`] what was negotiated.
    pub responder_resources: Option<u16>,
    /// RDMA Reads and atomics that we may have outstanding towards the peer: for a request what it
    /// can serve, `None` if it did not say; for [`CmEventKind::Established`] what was negotiated.
    pub initiator_depth: Option<u16>,
    /// For a connection request, and for [`CmEventKind::Established`] at the initiator: the peer's
    /// parameters, if its connection behaves as on InfiniBand
    /// ([`ConnectionParameters::infiniband`]).
    pub infiniband: Option<InfinibandParameters>,
    /// Counts the event of a request until the program takes it.
    pub(crate) _untaken: Option<Arc<passive::Count>>,
    /// For a connection request: the peer's end of an extended reliable connection. A queue pair of
    /// the other end has to accept it.
    pub xrc: Option<XrcEnd>,
    /// For an identifier for datagrams, with [`Established`](CmEventKind::Established) and the
    /// events of multicast: the destination of datagrams.
    pub datagrams: Option<DatagramEnd>,
    /// For an identifier for datagrams, with [`Unreachable`](CmEventKind::Unreachable): the status
    /// of InfiniBand's SIDR reply, such as 1 if nothing serves the port and 2 if the program there
    /// has rejected the request. Zero if there was no answer.
    pub service_status: u8,
}

/// A queue of connection events (`rdma_create_event_channel(3)`) with a pollable descriptor.
pub type CmEventChannel = Arc<EventQueue<CmEvent>>;

/// Returns the context that all identifiers without a context of their own share for a device.
///
/// # Errors
/// As [`Context::open`].
pub fn device_context(device: &Device) -> Result<Context> {
    id::shared_context(device)
}

/// Creates an event channel.
///
/// # Errors
/// The operating system's error: no descriptors left.
pub(crate) fn create_event_channel() -> Result<CmEventChannel> {
    Ok(Arc::new(EventQueue::new()?))
}
