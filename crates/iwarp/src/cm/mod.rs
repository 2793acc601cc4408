//! Connection management as in rdma_cm (`rdma_cm(7)`): identifiers, events, and MPA start-up.
//!
//! Programs bind, resolve, connect and listen with an identifier. The results arrive as events in
//! its channel.
//!
//! - `id`: identifiers; `calls`: what programs do with them; `phase`: how far they have come;
//!   `notify`: their events; `resolve`: resolution of addresses; `portmap`: the port mapper's
//!   client.
//! - `active` and `passive`: the initiator's and the responder's MPA start-up (RFC 5044 section
//!   7.1, RFC 6581); `startup`: their common parts. `accept`: the responder's last step;
//!   `awaiting_first_fpdu`: the same step for queue pairs that are connected by number. `refused`:
//!   rejected connections; `withdrawn`: requests that their initiator gives up; `reminders`: when
//!   an initiator reminds a silent responder.
//! - `sink`: events of queue pairs; `overtaken` and `timewait`: the events at the end of a
//!   connection.
//! - `xrc`: extended reliable connections; `placeholder_qp`: connections for which the program has
//!   no queue pair; `sidr`: identifiers for datagrams.
//!
//! May use `admission`, `ud`, `conn`, `objects` and everything below.

mod accept;
mod active;
mod awaiting_first_fpdu;
mod calls;
mod id;
mod notify;
mod overtaken;
mod passive;
mod phase;
mod placeholder_qp;
pub(crate) mod portmap;
mod refused;
mod reminders;
mod resolve;
mod sidr;
mod sink;
mod startup;
mod timewait;
mod withdrawn;
mod xrc;

pub use crate::conn::infiniband::InfinibandParameters;
#[cfg(test)]
pub(crate) use awaiting_first_fpdu::tests::{accepted, requested};
pub use id::{CmId, ConnectionParameters};
pub use iwarp_proto::sidr::DEFAULT_QKEY;
pub use phase::CmProgress;
pub use sidr::DatagramEnd;

use crate::device::Device;
use crate::error::Result;
use crate::objects::context::Context;
use crate::objects::events::EventQueue;
use iwarp_rnic::qp::XrcEnd;
use std::sync::Arc;

/// The kind of an event, with the names of `rdma_get_cm_event(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CmEventKind {
    /// The address was resolved; the identifier has a device.
    AddrResolved,
    /// The address was not resolved; `status` is the error.
    AddrError,
    /// The route was resolved.
    RouteResolved,
    /// A connection request has arrived. `id` is the new identifier, `listener` the listener.
    ConnectRequest,
    /// The attempt failed; `status` is the error.
    ConnectError,
    /// The peer did not answer. For datagrams: the peer did not return a queue pair.
    Unreachable,
    /// The peer rejected the request, or TCP refused the connection.
    Rejected,
    /// The connection is up.
    Established,
    /// The connection is over.
    Disconnected,
    /// A multicast group was joined. The value is the argument of [`CmId::join_multicast`].
    MulticastJoin(u64),
    /// A multicast group was not joined; `status` is the error.
    MulticastError(u64),
    /// The last event of a connection, a second after [`Disconnected`](Self::Disconnected). A
    /// destroyed identifier does not get this event.
    TimewaitExit,
    /// An event that the program has written, with the program's value ([`CmId::write_event`]).
    User(u64),
    /// Names were resolved (`rdma_resolve_addrinfo(3)`).
    AddrinfoResolved,
    /// Names were not resolved; `status` is the error.
    AddrinfoError,
}

/// An event of an identifier.
#[derive(Debug, Clone)]
pub struct CmEvent {
    /// The kind of the event.
    pub kind: CmEventKind,
    /// Zero, or the errno that describes a failure.
    pub status: i32,
    /// The identifier of the event; for a connection request, the new identifier.
    pub id: CmId,
    /// For a connection request, the listening identifier.
    pub listener: Option<CmId>,
    /// The peer's private data, without the RFC 6581 prefix.
    pub private_data: Vec<u8>,
    /// For [`CmEventKind::Rejected`]: `true` if the peer sent a rejecting MPA reply, `false` if TCP
    /// refused the connection, usually because there is no listener.
    pub replied: bool,
    /// Maximum number of RDMA Reads and atomics that the peer may have in flight towards us. For a
    /// request: the peer's wish, `None` if it sent none. For [`CmEventKind::Established`]: the
    /// negotiated value.
    pub responder_resources: Option<u16>,
    /// Maximum number of RDMA Reads and atomics that we may have in flight towards the peer. For a
    /// request: the peer's limit, `None` if it sent none. For [`CmEventKind::Established`]: the
    /// negotiated value.
    pub initiator_depth: Option<u16>,
    /// For a connection request, and for [`CmEventKind::Established`] at the initiator: the peer's
    /// parameters, if its connection behaves as on InfiniBand
    /// ([`ConnectionParameters::infiniband`]).
    pub infiniband: Option<InfinibandParameters>,
    /// Counts the event against the listener's backlog until the program takes it.
    pub(crate) _untaken: Option<Arc<passive::Count>>,
    /// For a connection request: which end of an extended reliable connection the peer is. Only a
    /// queue pair of the opposite end can accept the request.
    pub xrc: Option<XrcEnd>,
    /// For an identifier for datagrams, with [`Established`](CmEventKind::Established) and the
    /// events of multicast: the destination of datagrams.
    pub datagrams: Option<DatagramEnd>,
    /// For an identifier for datagrams, with [`Unreachable`](CmEventKind::Unreachable): the status
    /// in InfiniBand's SIDR reply. For example, 1 if there is no listener at the port, and 2 if the
    /// listener's program has rejected the request. Zero if there was no reply.
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
/// [`Error::Io`](crate::Error::Io): no file descriptor is left.
pub(crate) fn create_event_channel() -> Result<CmEventChannel> {
    Ok(Arc::new(EventQueue::new()?))
}
