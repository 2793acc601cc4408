//! Queue pairs: the public objects (`connected`, `datagram`), their states (`state`) and allowed
//! transitions (`transition`), the sizes of their requests (`limits`), and batches under
//! construction (`batch`).
//!
//! This room uses `border` and `abi`. `post` posts to these objects; `lifecycle` creates, changes
//! and destroys them.

pub(crate) mod batch;
pub(crate) mod connected;
pub(crate) mod datagram;
pub(crate) mod limits;
pub(crate) mod state;
pub(crate) mod transition;
