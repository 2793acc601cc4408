//! What programs create on a device: contexts, memory tables, completion queues, shared receive queues, completion
//! channels and asynchronous events.
//!
//! May use `engine`, `device`, settings and errors, and the operating system. Connections and services use it.

pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod events;
pub(crate) mod hooks;
pub(crate) mod member;
pub(crate) mod members;
pub(crate) mod memory_waiters;
pub(crate) mod numbers;
pub(crate) mod registry;
pub(crate) mod slots;
pub(crate) mod srq;
pub(crate) mod stats;
pub(crate) mod table_lock;
pub(crate) mod wait;
