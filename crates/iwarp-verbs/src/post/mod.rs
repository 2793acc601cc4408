//! Posting of work requests: `send` and `receive` take lists, `batch` builds requests one by one,
//! `datagram` has the differences for datagrams, and `elements` the common parts. `cq` polls. This
//! room uses `qp`, `srq`, `memory` and the rooms below them.

pub(crate) mod batch;
mod datagram;
mod elements;
pub(crate) mod receive;
pub(crate) mod send;
