//! Posting of work requests. `send` and `receive` post lists; `batch` builds requests one by one;
//! `datagram` contains the differences for datagrams, and `elements` the common parts. This room
//! uses `qp`, `srq`, `memory` and the rooms below them.

pub(crate) mod batch;
mod datagram;
mod elements;
pub(crate) mod receive;
pub(crate) mod send;
