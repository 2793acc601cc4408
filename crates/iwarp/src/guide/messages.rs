//! Message patterns: messages, channels and streams.
//!
//! ```
//! use iwarp::Channel;
//!
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let address = listener.local_addr();
//! let server = std::thread::spawn(move || -> iwarp::Result<()> {
//!     let channel = Channel::open(listener.accept().wait()?).wait()?;
//!     while let Some(request) = channel.recv().wait()? {
//!         channel.send(&request.to_ascii_uppercase()).wait()?;
//!     }
//!     Ok(()) // the client has finished
//! });
//! let channel = Channel::open(iwarp::connect(address).wait()?).wait()?;
//! channel.send("hello").wait()?;
//! assert_eq!(channel.recv().wait()?.as_deref(), Some(&b"HELLO"[..]));
//! drop(channel);
//! server.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Which one?
//!
//! | | [`Connection`](crate::Connection) | [`Channel`](crate::Channel) | [`Stream`](crate::Stream) |
//! | --- | --- | --- | --- |
//! | Unit | messages | messages | bytes |
//! | A slow receiver | ends the connection after a while | makes the sender wait | makes the sender wait |
//! | The end | [`closed`](crate::Connection::closed) | `recv` returns `None` | `read` returns 0 |
//! | Copies at the receiver | none | none | one |
//! | The peer | any iWARP program | this crate | this crate |
//! | Use it for | fixed protocols, such as one request at a time | remote procedure calls, events | programs written for TCP |
//!
//! RDMA has no flow control for messages: a Send needs a posted receive. A connection posts
//! [`Options::receives`](crate::Options::receives) of them, and posts each again when its
//! [`Message`](crate::Message) is dropped. So drop messages early, and use a channel if the sender
//! can be faster than the receiver. One-sided operations need no receive, and are possible beside a
//! channel: [`Channel::connection`](crate::Channel::connection).
//!
//! # Requests and answers
//!
//! One request at a time needs nothing else than the first program. For many at a time, begin each
//! request with a number, and let the answer repeat it. One task reads all answers, and gives each
//! to the call that waits for it: see the example
//! [`rpc`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp/examples/rpc.rs). A channel can
//! be cloned, so each request can be served, and answered, in its own task.
//!
//! # Long data
//!
//! A channel takes messages up to [`Channel::max_len`](crate::Channel::max_len), usually 1 MiB. It
//! writes long ones into memory that the receiver lends, and they arrive as other messages do.
//!
//! A message of a connection is limited by [`Options::message_size`](crate::Options::message_size),
//! because it is copied into a receive buffer of that size. Do not increase this size for a few
//! long messages: each connection has [`receives`](crate::Options::receives) such buffers. Send the
//! token of the data instead, and let the receiver read it into its own memory:
//!
//! ```
//! # use iwarp::{Access, RemoteRegion, Result};
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let address = listener.local_addr();
//! let server = std::thread::spawn(move || -> Result<Vec<u8>> {
//!     let connection = listener.accept().wait()?;
//!     let long = RemoteRegion::<u8>::from_bytes(&connection.recv().wait()?)?;
//!     let memory = connection.allocate(long.len())?;
//!     connection.read_into(&memory, &long).wait()?;
//!     connection.send("I have it").wait()?;
//!     memory.to_vec()
//! });
//! let connection = iwarp::connect(address).wait()?;
//! let long = connection.endpoint().adopt(vec![7_u8; 1 << 20], Access::REMOTE_READ)?;
//! connection.send(&long.remote().to_bytes()).wait()?;
//! connection.recv().wait()?; // until then the region must exist
//! assert_eq!(server.join().unwrap()?.len(), 1 << 20);
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Byte streams, and libraries that use them
//!
//! A [`Stream`](crate::Stream) implements [`std::io::Read`] and [`std::io::Write`], and with the
//! feature `tokio` also tokio's `AsyncRead` and `AsyncWrite`. It can be split into two halves. A
//! cut connection is an error, and never looks like the end of the stream.
//!
//! ```
//! use iwarp::{Channel, Connection, Stream};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main]
//! # async fn main() -> std::io::Result<()> {
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let address = listener.local_addr();
//! let server = tokio::spawn(async move {
//!     let mut stream = Stream::from(Channel::open(listener.accept().await?).await?);
//!     let mut text = String::new();
//!     stream.read_to_string(&mut text).await?;
//!     std::io::Result::Ok(text)
//! });
//! let mut stream = Stream::from(Channel::open(iwarp::connect(address).await?).await?);
//! stream.write_all(b"a fast pipe").await?;
//! stream.shutdown().await?;
//! assert_eq!(server.await??, "a fast pipe");
//! # Ok(())
//! # }
//! ```
//!
//! So libraries that accept tokio's traits run over it. These are
//! [tested](https://github.com/iwarp-rs/iwarp/tree/main/crates/iwarp-http/tests/it):
//!
//! | Library | How |
//! | --- | --- |
//! | hyper 1, HTTP/1 and HTTP/2 | `hyper_util::rt::TokioIo::new(stream)` is its I/O object, at both ends: example [`http2`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp-http/examples/http2.rs) |
//! | tonic 0.14, client | `Endpoint::connect_with_connector`, with a `tower::service_fn` that connects and returns a `TokioIo` |
//! | tonic 0.14, server | `serve_with_incoming`, with a type that contains a stream and implements tonic's `Connected`: [`grpc.rs`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp-http/tests/it/grpc.rs) |
//! | tower 0.5 | a `Service` whose calls are messages of a channel: [`layers.rs`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp-http/tests/it/layers.rs) |
