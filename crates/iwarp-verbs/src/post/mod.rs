//! Posting of work requests: `send` and `receive` take lists, `batch` has the functions that build
//! requests one by one, `datagram` has what differs for datagrams, and `elements` what lists have in
//! common. Polling is in `cq`. This room uses `qp`, `srq`, `memory` and the rooms below them.

pub(crate) mod batch;
mod datagram;
mod elements;
pub(crate) mod receive;
pub(crate) mod send;
