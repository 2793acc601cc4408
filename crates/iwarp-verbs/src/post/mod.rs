//! Posting of work requests. `send`, `datagram` and `receive` convert the requests of their queues;
//! `list` contains the rules for lists of requests; `batch` builds requests one by one. This room
//! uses `qp`, `srq`, `memory` and the rooms below them.

pub(crate) mod batch;
mod datagram;
mod list;
pub(crate) mod receive;
pub(crate) mod send;
