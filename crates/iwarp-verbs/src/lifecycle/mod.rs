//! The life of queue pairs: `create`, `modify`, `query` and `destroy` have the functions for all
//! types, `datagram` and `xrc` what differs for datagrams and for targets of extended reliable
//! connections, and `used` counts the objects that a queue pair is made with.
//!
//! This room uses `qp`, `post`, `counter` and the rooms below them. It is used by `open`, `cm` and
//! `exports`.

pub(crate) mod create;
pub(crate) mod datagram;
pub(crate) mod destroy;
pub(crate) mod modify;
pub(crate) mod query;
mod used;
pub(crate) mod xrc;
