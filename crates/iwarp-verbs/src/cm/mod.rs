//! librdmacm: event channels, identifiers, connections (`rdma_cm(7)`).
//!
//! `object` has the objects of identifiers, `identifier` creates them and keeps their public fields
//! up to date, `channel` has event channels and `event` their events. `id` has the calls that
//! create, bind and destroy identifiers, `connect` those for connections, `multicast` those for
//! groups, `endpoint` queue pairs and the synchronous interface, `lookup` look-ups that end with an
//! event. `address` looks up names and devices, `sockaddr` converts addresses. `roce` has what
//! differs on devices that look like a RoCE NIC, and `datagram` what differs for datagrams.
//!
//! This room uses `open`, `lifecycle` and the rooms below them. Only `exports` uses it.

pub(crate) mod address;
pub(crate) mod channel;
pub(crate) mod connect;
mod datagram;
pub(crate) mod endpoint;
pub(crate) mod event;
pub(crate) mod id;
mod identifier;
pub(crate) mod lookup;
pub(crate) mod multicast;
pub(crate) mod object;
mod roce;
mod sockaddr;
