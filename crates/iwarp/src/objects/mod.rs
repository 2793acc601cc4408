//! Objects that programs create on a device, and what they share: contexts with their memory table,
//! completion queues and channels, shared receive queues, asynchronous events.
//!
//! May use `engine`, `device`, settings, errors, and the operating system. The rooms above use this
//! one: connections, services, capture, faults and the faces. It names none of them, but defines
//! traits that they implement: queue pairs are [`AnyQp`](member::AnyQp)s, tables of services are
//! [`Registry`](registry::Registry)s, and capture and faults are [`Hooks`](hooks::Hooks).

pub(crate) mod any_qp;
pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod events;
pub(crate) mod hooks;
pub(crate) mod members;
pub(crate) mod memory_waiters;
pub(crate) mod registry;
pub(crate) mod slots;
pub(crate) mod srq;
pub(crate) mod stats;
pub(crate) mod ud_table;
pub(crate) mod wait;
