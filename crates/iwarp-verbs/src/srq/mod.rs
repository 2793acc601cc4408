//! Shared receive queues: `queue` has the objects, `tags` the operations on their tag lists. This
//! room uses `cq`, `domain` and the rooms below them. `post` posts receives.

pub(crate) mod queue;
pub(crate) mod tags;
