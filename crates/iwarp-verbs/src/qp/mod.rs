//! Queue pairs: the objects that programs see (`connected`, `datagram`), their states (`state`) and
//! the changes that are allowed (`transition`), the sizes of their requests (`limits`), and batches
//! that are being built (`batch`).
//!
//! This room uses `border` and `abi`. `post` posts to these objects, `lifecycle` creates, changes
//! and destroys them.

pub(crate) mod batch;
pub(crate) mod connected;
pub(crate) mod datagram;
pub(crate) mod limits;
pub(crate) mod state;
pub(crate) mod transition;
