//! The operating system as the iWARP runtime uses it: sockets, `epoll`, clocks, forks, memory, and
//! CRC32C.
//!
//! This crate contains every system call of the runtime, and the `unsafe` code for it. Each file
//! states the invariant that makes its `unsafe` sound. The crates above see safe types, and a few
//! functions named `_raw`, whose callers are responsible for the memory (registered memory that
//! peers may write).
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
