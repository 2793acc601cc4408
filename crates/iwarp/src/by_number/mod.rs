//! Queue pairs that are connected by GID and queue pair number, as programs for InfiniBand and RoCE do it.
//!
//! May use `conn`, `objects` and everything below.

pub(crate) mod numbered;
pub(crate) mod peer;
