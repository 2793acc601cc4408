//! RDMA over plain TCP, in user space: a software RNIC that speaks iWARP (RFC 5040, 5041, 5044, 6581, 7306).
//!
//! Programs get RDMA verbs without RDMA hardware, without root and without a kernel module. The peer may be another
//! program with this crate, any C program on the project's `libibverbs`, or the Linux kernel's `siw`.
//!
//! # A complete program
//!
//! The server shares a table. The client writes to it, and the server's program takes no part in that.
//!
//! ```
//! use iwarp::{Access, Endpoint, RemoteRegion};
//!
//! # fn main() -> iwarp::Result<()> {
//! let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! let table = endpoint.share::<u64>(512, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
//! let listener = endpoint.listen("127.0.0.1:0").private_data(table.remote().to_bytes()).bind()?;
//! let address = listener.local_addr();
//! let server = std::thread::spawn(move || listener.accept().wait()?.closed().wait());
//!
//! let connection = iwarp::connect(address).wait()?;
//! let there = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
//! connection.write(&[1, 2, 3], &there).wait()?;
//! assert_eq!(connection.get(&there.at(2)?).wait()?, 3);
//! drop(connection); // disconnects gracefully
//! server.join().unwrap()?;
//! assert_eq!(table.get(1)?, 2);
//! # Ok(())
//! # }
//! ```
//!
//! # Three layers
//!
//! - Module [`connection`]: [`connect`] and [`listen`] make a [`Connection`], whose requests are calls. Each is a future for
//!   any runtime and has a blocking [`wait`](Operation::wait); tasks and threads share a connection. Memory is a [`Region`]
//!   of plain elements, and the peer's is a [`RemoteRegion`]. [`Channel`] and [`Stream`] are messages and octets with flow
//!   control.
//! - Module [`verbs`]: the objects of the C interface with owners, without `unsafe`. A program chooses completion queues,
//!   posts work requests and polls for completions.
//! - Module [`runtime`]: the same objects without owners, for programs that manage their own memory and objects, as the C
//!   libraries do.
//!
//! # Blocking, polling, async
//!
//! - Calls of a connection block ([`wait`](Operation::wait)), or are awaited in a task of any runtime. A thread that waits polls for up to
//!   [`Config::busy_poll`] before it sleeps.
//! - [`verbs::CompletionQueue::poll`] never blocks. The polling thread reads the sockets itself, which gives the lowest latency.
//! - The feature `tokio` adds a module that watches events in tokio's reactor.
//!
//! The crate starts one thread in each process, with the first socket. It moves octets when no thread of the program
//! does, so a peer's Writes and Reads are served while the program computes or sleeps.
//!
//! # What a peer may do to memory
//!
//! A peer reaches only memory that was registered with remote rights ([`Access`]), only within the bounds of the region,
//! and only over queue pairs of the same protection domain. It may change such memory at any time until the region is
//! dropped. Therefore the crate gives out no reference to memory that a peer may write: elements are copied in and out
//! ([`Region::read_at`], [`Region::write_at`]), and words are atomic ([`Region::load`](Region#method.load-1)). Treat what
//! is there as input from the network. A region is freed when its last handle is dropped; a peer that accesses it later
//! loses its connection.
//!
//! CRCs protect against accidents, not against attackers: nothing is encrypted or authenticated.
//!
//! # Errors
//!
//! - A call that cannot be carried out returns an [`Error`]; [`Error::errno`] is what the C library reports for it.
//! - A request of a [`Connection`] that does not fit is an [`Error::Refused`]; one that was posted and has failed is an
//!   [`Error::Operation`], which says which request it was, whose fault it is, and what to do.
//! - By the verbs, a work request that fails has a [`verbs::WcStatus`] in its completion. The queue pair is then in the error
//!   state, and all other requests complete as [`verbs::WcStatus::Flushed`]; [`QueuePair::fault`](runtime::QueuePair::fault) says which end
//!   is to blame and why.
//! - A completion queue that overflows fails its queue pairs; [`verbs::CompletionQueue::poll`] and the waits report it.
//!
//! # Features
//!
//! - `tokio`: the module `tokio`; tokio's traits for [`Stream`]. Off by default.
//! - `serde`: [`RemoteRegion`] as a value of serde. Off by default.
//!
//! # Settings
//!
//! [`Config::from_env`] reads the same `IWARP_*` variables as the C libraries do.
#![deny(unsafe_op_in_unsafe_fn)]

// The engine is compiled by the simulator of threads, too, with an operating system of its own.
use iwarp_os as sys;
#[cfg(not(loom))]
use iwarp_os::crc;

mod admission;
#[cfg(not(loom))]
mod by_number;
#[cfg(not(loom))]
mod capture;
#[cfg(not(loom))]
mod cm;
mod complain;
mod config;
#[cfg(not(loom))]
mod conn;
#[cfg(not(loom))]
pub mod connection;
mod device;
#[cfg(not(loom))]
mod engine;
mod error;
#[cfg_attr(loom, allow(dead_code, reason = "the models use a part"))]
mod failure;
#[cfg_attr(
    loom,
    allow(dead_code, unused_imports, reason = "the models inject no faults")
)]
pub mod fault;
#[cfg(not(loom))]
mod inject;
mod lid;
#[cfg(not(loom))]
mod objects;
#[cfg(not(loom))]
mod open;
#[cfg_attr(loom, allow(dead_code, reason = "the models use a part"))]
mod progress;
#[cfg(not(loom))]
pub mod runtime;
#[cfg(not(loom))]
pub mod stat;
#[cfg(not(loom))]
mod tags;
#[cfg(all(test, not(loom)))]
mod testing;
#[cfg(all(feature = "tokio", not(loom)))]
pub mod tokio;
#[cfg(not(loom))]
mod ud;
#[cfg(not(loom))]
pub mod verbs;
#[cfg(not(loom))]
mod xrc;

pub use admission::{Admission, Networks, NetworksError};
/// Plain data: what a [`Region`] has as elements. Numbers and arrays of them are; a structure can be, by the crate's traits.
pub use bytemuck;
#[cfg(not(loom))]
pub use capture::{Recorder, RecorderLimits};
pub use config::{Alignment, Config, Face, ReceiverNotReady};
#[cfg(not(loom))]
pub use connection::{
    Batch, Channel, Connection, Endpoint, Incoming, Listener, Message, Operation, Options, Region,
    RemoteRegion, Stream, Window, connect, listen,
};
pub use device::{Device, DeviceAddress, GidEntry, GidKind, LIMITS, Limits, MAX_GID_ADDRESSES};
pub use error::{Error, Result};
pub use failure::{OperationError, Refusal, RequestKind};
pub use iwarp_rnic::Access;
pub use iwarp_rnic::qp::{Blame, Fault};

/// The programs of the guide compile and run.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../guide.md")]
struct Guide;
