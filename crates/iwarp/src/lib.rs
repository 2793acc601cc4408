//! RDMA over plain TCP, in user space: a software RNIC that speaks iWARP (RFC 5040, 5041, 5044,
//! 6581, 7306).
//!
//! Programs get RDMA verbs without RDMA hardware, root or a kernel module. The peer may be another
//! program that uses this crate, any C program on the project's `libibverbs`, or the Linux kernel's
//! `siw`.
//!
//! # A complete program
//!
//! The server shares a table; the client writes to it without the server's program taking part.
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
//! - Module [`connection`]: [`connect`] and [`listen`] create a [`Connection`], where each request
//!   is a call that returns a future for any runtime, with a blocking [`wait`](Operation::wait).
//!   Tasks and threads can share a connection. Memory is a [`Region`] of plain elements, and the
//!   peer's is a [`RemoteRegion`]. [`Channel`] and [`Stream`] add flow-controlled messages and byte
//!   streams.
//! - Module [`verbs`]: the objects of the C interface with owners, without `unsafe`. A program
//!   chooses completion queues, posts work requests and polls for completions.
//! - Module [`runtime`]: the same objects without owners, for programs that manage their own memory
//!   and objects, as the C libraries do.
//!
//! # Blocking, polling, async
//!
//! - Calls of a connection block ([`wait`](Operation::wait)) or are awaited in a task of any
//!   runtime. A blocked thread polls for up to [`Config::busy_poll`] before it sleeps.
//! - [`verbs::CompletionQueue::poll`] never blocks. The polling thread reads the sockets itself,
//!   which gives the lowest latency.
//! - The feature `tokio` adds a module that watches event queues in tokio's reactor.
//!
//! The crate starts a progress thread with the first socket of a process, and further ones with
//! more connections ([`Config::progress_threads`]). They process traffic when no thread of the
//! program does, so the peer's Writes and Reads are served while the program computes or sleeps.
//!
//! # What a peer may do to memory
//!
//! A peer can access only memory that was registered with remote rights ([`Access`]), within the
//! bounds of the region, and over queue pairs of the same protection domain. It can change such
//! memory at any time until the region is dropped. Therefore the crate gives out no reference to
//! memory that a peer can write: elements are copied in and out ([`Region::read_at`],
//! [`Region::write_at`]), and words are atomic ([`Region::load`](Region#method.load-1)). Treat
//! their contents as input from the network. A region is freed with its last handle; a peer that
//! accesses it later loses its connection.
//!
//! CRCs protect against accidents, not against attackers: nothing is encrypted or authenticated.
//!
//! # Errors
//!
//! - A call that fails returns an [`Error`]; [`Error::errno`] is what the C libraries report for
//!   it.
//! - A request of a [`Connection`] that cannot be posted fails with [`Error::Refused`]. One that
//!   was posted and failed gives an [`Error::Operation`], which names the request, the side at
//!   fault, and what to do.
//! - In the verbs, a failed work request has a [`verbs::WcStatus`] in its completion. The queue
//!   pair enters the error state, and all other requests complete as [`verbs::WcStatus::Flushed`].
//!   [`QueuePair::fault`](runtime::QueuePair::fault) returns the cause and the side at fault.
//! - If a completion queue overflows, its queue pairs fail; [`verbs::CompletionQueue::poll`] and
//!   the blocking waits report it.
//!
//! # Features
//!
//! - `tokio`: the module `tokio`, and tokio's I/O traits for [`Stream`]. Off by default.
//! - `serde`: serialization of [`RemoteRegion`]. Off by default.
//!
//! # Settings
//!
//! [`Config::from_env`] reads the same `IWARP_*` variables as the C libraries do.
#![deny(unsafe_op_in_unsafe_fn)]
// On docs.rs, items show which feature they need.
#![cfg_attr(docsrs, feature(doc_cfg), doc(auto_cfg(hide(loom))))]

// The threads simulator also compiles the engine, with its own replacement for `iwarp_os`.
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
#[cfg_attr(loom, allow(dead_code, reason = "the models use a part"))]
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
/// Plain data types, the elements of a [`Region`]: numbers, arrays of numbers, and structures that
/// implement this crate's traits.
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
pub use failure::{End, OperationError, Refusal, RequestKind};
pub use iwarp_rnic::Access;
pub use iwarp_rnic::qp::{Blame, Fault};

/// Compiles and runs the programs of the guide.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../guide.md")]
struct Guide;
