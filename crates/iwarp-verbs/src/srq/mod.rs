//! Shared receive queues: `queue` has the objects, `tags` the requests to their lists of tagged
//! buffers. This room uses `cq`, `domain` and the rooms below them. Receives are posted by `post`.

pub(crate) mod queue;
pub(crate) mod tags;
