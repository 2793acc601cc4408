//! The operating system as the runtime of iWARP uses it: sockets, `epoll`, clocks, forks, memory, and CRC32c.
//!
//! Every system call of the runtime is in this crate, and the `unsafe` for it. Each file states the invariant that makes its
//! `unsafe` sound. The crates above see safe types, with a few clearly named `_raw` functions whose callers own the memory argument
//! (registered memory that peers may write).
#![deny(unsafe_op_in_unsafe_fn)]

pub mod address;
pub mod clock;
pub mod connect;
pub mod crc;
pub mod datagram;
pub mod eventfd;
pub mod exit;
pub mod fork;
pub mod guarded;
pub mod interfaces;
pub mod limits;
pub mod mapping;
pub mod neighbour;
pub mod null;
pub mod on_demand;
mod option;
pub mod poller;
pub mod prefetch;
pub mod probe;
pub mod raw_slice;
pub mod secure;
pub mod service;
pub mod sockopt;
pub mod stream;
pub mod thread;

pub use fork::process_lock;
