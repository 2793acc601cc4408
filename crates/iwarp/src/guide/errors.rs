//! Errors, and how connections end.
//!
//! ```
//! use iwarp::{End, Error};
//!
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let address = listener.local_addr();
//! let client = std::thread::spawn(move || iwarp::connect(address).wait()?.shutdown().wait());
//! let connection = listener.accept().wait()?;
//! assert!(matches!(connection.recv().wait(), Err(Error::Closed)));
//! assert_eq!(connection.closed().wait()?, End::ClosedByPeer);
//! assert_eq!(client.join().unwrap()?, End::Closed);
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Which errors there are
//!
//! All errors have the type [`Error`](crate::Error), so `?` works. For a request of a connection,
//! four kinds matter:
//!
//! | Error | Meaning | The connection | What to do |
//! | --- | --- | --- | --- |
//! | [`Refused`](crate::Error::Refused) | the request is invalid: too long, a right that was not granted, a region of another endpoint | remains usable | correct the program: the text of the error names the mistake |
//! | [`TimedOut`](crate::Error::TimedOut) | the limit of `wait_for` expired; the operation was dropped | remains usable | start a new operation, or close |
//! | [`Closed`](crate::Error::Closed) | either side closed it | has ended | nothing, or connect again |
//! | [`Operation`](crate::Error::Operation) | a posted request failed | has ended | see below |
//!
//! An [`OperationError`](crate::OperationError) has the [request](crate::OperationError::request),
//! its [status](crate::OperationError::status), the side at
//! [fault](crate::OperationError::blame), and one sentence of
//! [advice](crate::OperationError::advice). RDMA has no error that affects one request only: after
//! the first failed request all others fail with the status `Flushed`, and the connection has
//! ended. So look at the first one, or at the end of the connection.
//!
//! # How a connection ends
//!
//! [`closed`](crate::Connection::closed) waits for the end, and returns an [`End`](crate::End):
//!
//! | End | Cause |
//! | --- | --- |
//! | [`Closed`](crate::End::Closed), [`ClosedByPeer`](crate::End::ClosedByPeer) | a handle was closed or the last one dropped, at this end or at the peer |
//! | [`TerminatedByPeer`](crate::End::TerminatedByPeer) | the peer found an error in what this end sent; the value has the layer, type and code |
//! | [`Terminated`](crate::End::Terminated) | this end found an error: in what the peer sent, or in a request of its own |
//! | [`Reset`](crate::End::Reset) | TCP was reset, or cut within a message |
//! | [`Vanished`](crate::End::Vanished) | the peer's machine has not answered for [`Config::peer_timeout`](crate::Config::peer_timeout) |
//! | [`Failed`](crate::End::Failed) | an error of the operating system |
//!
//! If a peer's process is killed between two messages, its kernel closes the connection, and the
//! end is `ClosedByPeer`. So let the last message of a protocol say that it is the last. Channels
//! and streams send such a message: if the connection ends without it, reading returns an error.
//!
//! A Write completes when TCP has taken it, so it usually succeeds even if the peer later finds an
//! error in it. It fails only if the peer's Terminate arrives before the program gets the
//! completion. Either way, the connection ends with `TerminatedByPeer`.
//!
//! ```
//! # use iwarp::{Access, End, Endpoint, RemoteRegion};
//! # let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! # let table = endpoint.share::<u64>(4, Access::REMOTE_WRITE)?;
//! # let listener = endpoint.listen("127.0.0.1:0").private_data(table.remote().to_bytes()).bind()?;
//! # let address = listener.local_addr();
//! # let server = std::thread::spawn(move || {
//! #     drop(table);
//! #     listener.accept().wait()?.closed().wait()
//! # });
//! # let connection = iwarp::connect(address).wait()?;
//! # let there = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
//! // The server has dropped its region.
//! if let Err(error) = connection.write(&[1], &there).wait() {
//!     println!("{error}");
//! }
//! let end = connection.closed().wait()?;
//! assert!(matches!(end, End::TerminatedByPeer(_)), "{end}");
//! println!("{end}");
//! # server.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # How to end a connection
//!
//! | Call | Effect |
//! | --- | --- |
//! | dropping the last handle | closes it: started requests that fit into TCP's send buffer are sent |
//! | [`close`](crate::Connection::close) | the same, for all handles |
//! | [`shutdown`](crate::Connection::shutdown) | sends everything that was started, waits until the peer has received it, and closes |
//! | [`Channel::finish`](crate::Channel::finish), [`Stream::finish`](crate::Stream::finish) | ends one direction: the peer reads everything, then the end |
//!
//! Even `shutdown` proves only that the data is in the peer's memory. Only an answer from
//! the peer's program can prove that it has processed the data.
//!
//! # Time limits and cancellation
//!
//! Blocking calls have `wait_for`. In a task, use the timeout of the runtime: dropping a future
//! cancels it.
//!
//! - An operation that has not started is not executed. Nor is one that was polled, but not started
//!   by `started`, while it waits for room in the send queue.
//! - One that was posted, or started by [`started`](crate::Operation::started), is executed, and
//!   its result is discarded. Its memory is kept until then.
//! - Dropping a receive loses no message.
//! - Forgetting an operation ([`std::mem::forget`]) leaks its slot and its memory.
//!
//! ```
//! # use iwarp::Error;
//! # use std::time::Duration;
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let address = listener.local_addr();
//! # let server = std::thread::spawn(move || -> iwarp::Result<()> {
//! #     let connection = listener.accept().wait()?;
//! #     connection.recv().wait()?;
//! #     connection.send("late").wait()?;
//! #     connection.closed().wait()?.into_result()
//! # });
//! # let connection = iwarp::connect(address).wait()?;
//! let early = connection.recv().wait_for(Duration::from_millis(1));
//! assert!(matches!(early, Err(Error::TimedOut(_))));
//! connection.send("now I am ready").wait()?;
//! assert_eq!(*connection.recv().wait()?, *b"late"); // nothing was lost
//! # drop(connection);
//! # server.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Connect again
//!
//! A connection that has ended stays ended. Regions of an [`Endpoint`](crate::Endpoint) survive
//! it, and the next connection of the same endpoint can use them. The peer's tokens may have
//! changed: take them from the new connection.
//!
//! ```
//! use iwarp::{Connection, Endpoint, Error};
//! use std::time::Duration;
//!
//! /// Connects, and tries again while the server starts.
//! fn persistent(endpoint: &Endpoint, to: &str) -> iwarp::Result<Connection> {
//!     let mut pause = Duration::from_millis(10);
//!     loop {
//!         match endpoint.connect(to).wait_for(Duration::from_secs(5)) {
//!             Err(Error::Io(_) | Error::TimedOut(_)) if pause < Duration::from_secs(1) => {
//!                 std::thread::sleep(pause);
//!                 pause *= 2;
//!             }
//!             done => return done,
//!         }
//!     }
//! }
//! # let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let at = listener.local_addr().to_string();
//! # let client = std::thread::spawn(move || persistent(&endpoint, &at)?.shutdown().wait());
//! # listener.accept().wait()?.closed().wait()?;
//! # client.join().unwrap()?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Find out more
//!
//! [`stats`](crate::Connection::stats) returns the traffic of a connection, and TCP's round-trip
//! time, retransmissions and bytes in flight. With a `tracing` subscriber at level DEBUG, each
//! connection and each operation has a span; without a subscriber, a span costs one comparison.
//! `iwarp stat` shows all queue pairs of running processes, and
//! [`Config::capture`](crate::Config::capture) records the traffic for Wireshark.
