//! Connections without visible queues: each request is one call, whose result a task awaits or a
//! thread waits for.
//!
//! [`connect`] and [`listen`] create a [`Connection`], which any number of tasks and threads can
//! share. Its calls (`send`, `write`, `read_into`, `get`, `fetch_add`, …) return an [`Operation`],
//! and `recv` returns a [`Recv`]: await it, or [`wait`](Operation::wait) for it. Memory is a
//! [`Region`] of plain elements; a peer's memory is a [`RemoteRegion`], a token sent by the peer. A
//! [`Channel`] adds flow-controlled messages, and a [`Stream`] a byte stream.
//!
//! ```
//! # fn main() -> iwarp::Result<()> {
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let address = listener.local_addr();
//! let server = std::thread::spawn(move || -> iwarp::Result<()> {
//!     let connection = listener.accept().wait()?;
//!     let question = connection.recv().wait()?;
//!     connection.send(&question.to_ascii_uppercase()).wait()?;
//!     connection.closed().wait()?.into_result()
//! });
//! let connection = iwarp::connect(address).wait()?;
//! connection.send("hello").wait()?;
//! assert_eq!(&*connection.recv().wait()?, b"HELLO");
//! drop(connection);
//! server.join().unwrap()
//! # }
//! ```
//!
//! # Safety
//!
//! A program needs no `unsafe`. Requests own what they use: a [`Region`] is reference-counted, and
//! a request holds it until it completes, even if its operation was dropped. References to memory
//! are given out only where no one can write it: in a received [`Message`], by [`Region::view`]
//! while nothing may write the region, and by [`Region::get_mut`] if nothing else uses it. All
//! other accesses to a region copy the data, or read and write single words atomically.

mod batch;
mod channel;
mod channel_state;
mod channel_wait;
mod endpoint;
mod exclusive;
mod farewell;
mod frames;
mod handle;
mod large;
mod listener;
mod mapped;
mod operation;
mod output;
mod owned;
mod payload;
mod pool;
mod receive;
mod region;
mod remote;
mod request;
mod router;
mod shutdown;
mod state;
mod stats;
mod stream;
mod tail;
mod turns;
mod wait;
mod waiters;
mod window;

pub use batch::{Batch, Submit};
pub use channel::Channel;
pub use channel_wait::{ChannelMessage, Open, Receiving, Sending};
pub use endpoint::{Connect, Endpoint, Options};
pub use exclusive::View;
pub use handle::{Closed, Connection};
pub use listener::{Accept, Incoming, Listen, Listener};
pub use mapped::HugePages;
pub use operation::Operation;
pub use output::{Bound, Done, Element, Elements};
pub use payload::Payload;
pub use pool::{Pool, Take};
pub use receive::{Message, Recv};
pub use region::Region;
pub use remote::RemoteRegion;
pub use shutdown::Shutdown;
pub use stats::{Stats, Traffic, Transport};
pub use stream::{ReadHalf, Stream, WriteHalf};
pub use window::Window;

pub use crate::failure::{End, MapError, OperationError, Refusal, RequestKind};

use std::net::ToSocketAddrs;

/// Connects to a listener: await the result, or [`wait`](Connect::wait) for it. Opens the device
/// that routes to the address with the settings of [`Config::from_env`](crate::Config::from_env).
/// Resolves a name in this call, which may block.
///
/// ```no_run
/// # async fn run() -> iwarp::Result<()> {
/// let connection = iwarp::connect("192.0.2.7:7171").await?;
/// # Ok(())
/// # }
/// ```
pub fn connect(to: impl ToSocketAddrs) -> Connect {
    Connect::new(None, to)
}

/// Listens on an address of this host; port 0 selects a free port. [`bind`](Listen::bind) starts
/// listening. Opens the device that has this address, with the settings
/// of [`Config::from_env`](crate::Config::from_env).
///
/// ```
/// # fn main() -> iwarp::Result<()> {
/// let listener = iwarp::listen("127.0.0.1:0").bind()?;
/// println!("listening on {}", listener.local_addr());
/// # Ok(())
/// # }
/// ```
pub fn listen(at: impl ToSocketAddrs) -> Listen {
    Listen::new(None, at)
}

// These tests open sockets, which Miri does not support.
#[cfg(all(test, not(miri)))]
mod channel_tests;
#[cfg(all(test, not(miri)))]
mod testing;
