//! The operating system: every system call of this crate, and the `unsafe` for it, is in here.
//!
//! Each file states the invariant that makes its `unsafe` sound. The rest of the crate sees safe types, with a few
//! clearly named `_raw` functions whose callers own the memory argument (registered memory that peers may write).

pub(crate) mod clock;
pub(crate) mod connect;
pub(crate) mod datagram;
pub(crate) mod eventfd;
pub(crate) mod exit;
pub(crate) mod fork;
pub(crate) mod guarded;
pub(crate) mod interfaces;
pub(crate) mod limits;
pub(crate) mod mapping;
pub(crate) mod neighbour;
pub(crate) mod null;
pub(crate) mod on_demand;
mod option;
pub(crate) mod poller;
pub(crate) mod prefetch;
pub(crate) mod probe;
pub mod process_lock;
pub(crate) mod raw_slice;
pub(crate) mod secure;
pub(crate) mod service;
pub(crate) mod sockopt;
pub(crate) mod stream;
pub(crate) mod thread;
