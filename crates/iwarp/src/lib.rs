//! RDMA over plain TCP, in user space: messages, and access to a peer's memory, without special
//! hardware.
//!
//! The crate is a *software RNIC*: threads of your program do the work of an RDMA network card. It
//! needs only Linux and TCP sockets: no root, no kernel module, no `unsafe`.
//!
//! **Use it** for caches, logs and queues in the memory of several machines, for many small
//! messages, and to write or test RDMA programs without RDMA hardware. **Do not use it** if you
//! need encryption, or the latency of RDMA hardware.
//!
//! # Connect and serve
//!
//! ```
//! use iwarp::{Access, Endpoint, RemoteRegion};
//! fn main() -> iwarp::Result<()> {
//!     let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//!     let table = endpoint.share::<u64>(4, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
//!     let token = table.remote().to_bytes();
//!     let listener = endpoint.listen("127.0.0.1:0").private_data(token).bind()?;
//!     let address = listener.local_addr();
//!     let server = std::thread::spawn(move || {
//!         let connection = listener.accept().wait()?; // in a task: `.await`, not `.wait()`
//!         connection.recv().wait()?; // a message
//!         table.to_vec()
//!     });
//!     let connection = iwarp::connect(address).wait()?;
//!     let there = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
//!     connection.write(&[1, 2, 3], &there).wait()?; // the server's program takes no part
//!     assert_eq!(connection.get(&there.at(2)?).wait()?, 3);
//!     connection.send("done").wait()?;
//!     assert_eq!(server.join().unwrap()?, [1, 2, 3, 0]);
//!     Ok(())
//! }
//! ```
//!
//! The protocol is iWARP (RFC 5040, 5041, 5044, 6581, 7306). So the peer may also be a C program on
//! the project's `libibverbs`, or the Linux kernel's `siw`.
//!
//! # Guides
//!
//! | Guide | Question |
//! | --- | --- |
//! | [From TCP to one-sided operations](guide::one_sided) | How does a TCP program become one that reads and writes a peer's memory? |
//! | [Message patterns](guide::messages) | Messages, a [`Channel`] or a [`Stream`]? How do hyper and tonic use it? |
//! | [Memory and ownership](guide::memory) | What is copied, who owns it, and what may a peer do to it? |
//! | [Errors and how connections end](guide::errors) | What failed, what should the program do, and is the connection still usable? |
//! | [Testing with faults](guide::faults) | How does the program behave when a connection fails? |
//!
//! The [examples](https://github.com/iwarp-rs/iwarp/tree/main/crates/iwarp/examples) are larger
//! programs that run in two terminals: remote procedure calls, a key-value cache, a replicated log,
//! a work queue, a file transfer, and
//! [HTTP/2](https://github.com/iwarp-rs/iwarp/tree/main/crates/iwarp-http/examples).
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
//! # Threads
//!
//! The crate starts a progress thread with the first socket of a process, and further ones with
//! more connections ([`Config::progress_threads`]). They process traffic when no thread of the
//! program does, so the peer's Writes and Reads are served while the program computes or sleeps. A
//! thread that waits polls for up to [`Config::busy_poll`] before it sleeps, and reads the sockets
//! itself meanwhile. [`verbs::CompletionQueue::poll`] never sleeps, which gives the lowest latency.
//!
//! # Security
//!
//! Nothing is encrypted or authenticated, and CRCs protect against accidents only. A peer can
//! access only memory that was shared with it, within the bounds and rights of the region. Read the
//! [security notes](https://github.com/iwarp-rs/iwarp/blob/main/SECURITY.md) before you listen on a
//! network that you do not trust.
//!
//! # Features
//!
//! All are off by default.
//!
//! - `tokio`: tokio's I/O traits for [`Stream`], and the module `tokio`. Operations need no
//!   feature: they are futures of any runtime.
//! - `bytes`: `Bytes` as data of Sends and Writes, and received messages as `Bytes`.
//! - `serde`: serialization of [`RemoteRegion`].
//! - `derive`: the derive macros of `iwarp::bytemuck`, for structures as elements of regions.
//!
//! # Settings
//!
//! [`Config::from_env`] reads the same `IWARP_*` variables as the C libraries do. [`Options`] has
//! the sizes of a connection.
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
#[cfg(all(doc, not(loom)))]
pub mod guide;
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
/// Plain data types, the elements of a [`Region`]: numbers, arrays of any length, and structures
/// that implement this crate's traits. The feature `derive` enables its derive macros.
pub use bytemuck;
#[cfg(not(loom))]
pub use capture::{Recorder, RecorderLimits};
pub use config::{Alignment, Config, Face, ReceiverNotReady};
#[cfg(not(loom))]
pub use connection::{
    Batch, Channel, Connection, Endpoint, HugePages, Incoming, Listener, Message, Operation,
    Options, Pool, Region, RemoteRegion, Stream, View, Window, connect, listen,
};
pub use device::{Device, DeviceAddress, GidEntry, GidKind, LIMITS, Limits, MAX_GID_ADDRESSES};
pub use error::{Error, Result};
pub use failure::{End, MapError, OperationError, Refusal, RequestKind};
pub use iwarp_rnic::Access;
pub use iwarp_rnic::qp::{Blame, Fault};

/// Compiles and runs the programs of docs/rust.md and of the README.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../guide.md")]
#[doc = include_str!("../README.md")]
struct Pages;
