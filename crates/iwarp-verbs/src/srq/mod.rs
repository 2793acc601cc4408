//! Shared receive queues: `queue` contains the objects, `tags` the operations on their tag lists.
//! This room uses `cq`, `domain` and the rooms below them.

pub(crate) mod queue;
pub(crate) mod tags;
