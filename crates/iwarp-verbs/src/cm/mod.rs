//! librdmacm: event channels, identifiers, connections (`rdma_cm(7)`).
//!
//! `channel` has event channels and events, `id` identifiers and addresses, `connect` the calls that make and end
//! connections, `endpoint` queue pairs and the synchronous interface, `address` look-ups of names and devices, `lookup` those that an
//! event ends, `roce` what is different if the device looks like a RoCE NIC, `datagram` identifiers for datagrams.

pub(crate) mod address;
pub(crate) mod channel;
pub(crate) mod connect;
pub(crate) mod datagram;
pub(crate) mod endpoint;
pub(crate) mod id;
pub(crate) mod lookup;
mod roce;
pub(crate) mod sockaddr;
