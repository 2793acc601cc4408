//! The lifecycle of queue pairs. `create`, `modify`, `query` and `destroy` contain the functions
//! for all types, `datagram` and `xrc` the differences for datagrams and XRC targets. `used` counts
//! the users of the objects that a queue pair depends on.
//!
//! This room uses `qp`, `post`, `counter` and the rooms below them. `open`, `cm` and `exports` use
//! it.

pub(crate) mod create;
pub(crate) mod datagram;
pub(crate) mod destroy;
pub(crate) mod modify;
pub(crate) mod query;
mod used;
pub(crate) mod xrc;
