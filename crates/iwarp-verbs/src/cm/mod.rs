//! librdmacm: event channels, identifiers, connections (`rdma_cm(7)`).
//!
//! - `object`: the objects behind identifiers; `identifier` creates them and updates their public
//!   fields
//! - `channel`, `event`: event channels and their events
//! - `id`: functions that create, bind and destroy identifiers; `connect`: connections;
//!   `multicast`: groups
//! - `endpoint`: queue pairs, and the synchronous interface
//! - `address`: looks up names and devices; `lookup`: the same, with an event at the end;
//!   `sockaddr`: converts addresses
//! - `roce`, `datagram`: differences for devices that look like a RoCE NIC, and for datagrams
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
