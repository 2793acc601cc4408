//! librdmacm: event channels, identifiers, connections (`rdma_cm(7)`).
//!
//! `object` has the objects of identifiers, `identifier` creates them and keeps their public fields
//! up to date, `channel` has event channels and `event` their events. `id` has the calls that belong
//! to an identifier's life and address, `connect` those that make and end connections, `multicast`
//! those for groups, `endpoint` queue pairs and the synchronous interface, `lookup` look-ups that an
//! event ends. `address` looks up names and devices, `sockaddr` converts addresses. What differs is
//! in `roce` for devices that look like a RoCE NIC, and in `datagram` for datagrams.
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
