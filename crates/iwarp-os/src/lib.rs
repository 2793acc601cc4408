//! System calls of the iWARP runtime: sockets, `epoll`, clocks, forks, memory, and CRC32C.
//!
//! This crate contains every system call of the runtime, and the `unsafe` code for it. Each file
//! states the invariant that makes its `unsafe` sound. Most of the interface is safe. The callers
//! of functions named `…_raw` guarantee that the memory is valid: registered memory, which peers
//! may write at any time.
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
#[cfg(miri)]
mod miri;
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
pub mod sharded_lock;
pub mod sockopt;
pub mod stream;
pub mod thread;

pub use fork::process_lock;
