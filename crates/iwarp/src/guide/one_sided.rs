//! From TCP to one-sided operations.
//!
//! ```
//! // The client reads the server's memory. The server's program sleeps meanwhile.
//! use iwarp::{Access, Endpoint, RemoteRegion};
//!
//! let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! let prices = endpoint.adopt(vec![5_u64, 7, 11], Access::REMOTE_READ)?;
//! let token = prices.remote().to_bytes();
//! let listener = endpoint.listen("127.0.0.1:0").private_data(token).bind()?;
//! let address = listener.local_addr();
//! let server = std::thread::spawn(move || listener.accept().wait()?.closed().wait());
//!
//! let connection = iwarp::connect(address).wait()?;
//! let prices = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
//! assert_eq!(connection.read(&prices.slice(1..)?).wait()?, [7, 11]);
//! # drop(connection);
//! # server.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # What is different
//!
//! A TCP server reads a request, looks something up, and writes an answer. Each request wakes the
//! server's program. With one-sided operations the client accesses the server's memory, and the
//! server's RNIC, here a thread of this crate, does the rest.
//!
//! | With TCP | Here |
//! | --- | --- |
//! | `TcpListener::bind`, `accept` | [`listen`](crate::listen), [`accept`](crate::Listener::accept) |
//! | `TcpStream::connect` | [`connect`](crate::connect) |
//! | a request for data, and its answer | [`read`](crate::Connection::read), [`get`](crate::Connection::get), [`read_into`](crate::Connection::read_into) |
//! | a request that stores data | [`write`](crate::Connection::write) |
//! | a request that counts, or takes a lock | [`fetch_add`](crate::Connection::fetch_add), [`compare_swap`](crate::Connection::compare_swap) |
//! | a frame with a length | [`send`](crate::Connection::send), [`recv`](crate::Connection::recv) |
//! | a byte stream | [`Stream`](crate::Stream) |
//! | `shutdown`, then a read of the end | [`shutdown`](crate::Connection::shutdown) |
//! | several connections, one per thread | one connection that tasks and threads share |
//!
//! To change a TCP program, begin with its messages: replace frames by Sends, or the whole stream
//! by a [`Stream`](crate::Stream). Then find the requests that only read or store data, and replace
//! these by Reads and Writes. Keep messages for everything that the server's program has to decide.
//!
//! # Share memory, and send its token
//!
//! Memory is a [`Region`](crate::Region) of plain elements. A peer can access it with the rights
//! with which it was shared, if it has the region's token, a
//! [`RemoteRegion`](crate::RemoteRegion). The first program sends the token in the private data of
//! the connection, which has room for 18 tokens. A message can carry it, too.
//!
//! Lengths, ranges and rights are checked before anything is posted, so a mistake leaves the
//! connection intact. The peer checks all of them again.
//!
//! ```
//! # use iwarp::{Access, Endpoint, Error, Refusal, RemoteRegion};
//! # let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! # let prices = endpoint.adopt(vec![5_u64, 7, 11], Access::REMOTE_READ)?;
//! # let token = prices.remote().to_bytes();
//! # let listener = endpoint.listen("127.0.0.1:0").private_data(token).bind()?;
//! # let address = listener.local_addr();
//! # let server = std::thread::spawn(move || listener.accept().wait()?.closed().wait());
//! # let connection = iwarp::connect(address).wait()?;
//! # let prices = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
//! let refused = connection.write(&[6], &prices).wait();
//! assert!(matches!(refused, Err(Error::Refused(Refusal::NotGranted { .. }))));
//! assert_eq!(connection.get(&prices).wait()?, 5); // still usable
//! # drop(connection);
//! # server.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # What a completion proves
//!
//! | Operation | When it completes | Then the peer |
//! | --- | --- | --- |
//! | [`send`](crate::Connection::send), [`write`](crate::Connection::write) | TCP has taken the data, which may be reused | may not have it yet |
//! | the same, with [`Config::placed`](crate::Config::placed) | the peer confirms it | has it in its memory |
//! | [`read`](crate::Connection::read), [`get`](crate::Connection::get), atomics | the answer is here | has placed all Writes that started before |
//! | [`recv`](crate::Connection::recv) | a message is here | has sent it; its Writes that started before are placed |
//!
//! So a Write followed by a Read of the same connection is a confirmed Write, and a Write followed
//! by a Send tells the peer's program that its memory is complete.
//! [`write_with_immediate`](crate::Connection::write_with_immediate) does both in one operation.
//!
//! ```
//! # use iwarp::{Access, RemoteRegion, Result};
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let address = listener.local_addr();
//! let server = std::thread::spawn(move || -> Result<Vec<u8>> {
//!     let connection = listener.accept().wait()?;
//!     let inbox = connection.share::<u8>(1 << 20, Access::REMOTE_WRITE)?;
//!     connection.send(&inbox.remote().to_bytes()).wait()?;
//!     let length = connection.recv().wait()?.immediate().unwrap_or(0);
//!     inbox.slice(..length as usize)?.to_vec()
//! });
//! let connection = iwarp::connect(address).wait()?;
//! let there = RemoteRegion::<u8>::from_bytes(&connection.recv().wait()?)?;
//! let picture = vec![7; 100_000];
//! connection.write_with_immediate(picture, &there, 100_000).wait()?;
//! assert_eq!(server.join().unwrap()?.len(), 100_000);
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Many operations at a time
//!
//! An operation starts when it is first polled or waited for, or by
//! [`started`](crate::Operation::started). Operations of a connection are posted in the order in
//! which they start, and placed in this order. If the send queue is full, they wait in a backlog,
//! so any number can be started, and awaited in any order.
//!
//! ```
//! use iwarp::{Connection, RemoteRegion, Result};
//!
//! /// Two Reads are in flight at the same time.
//! async fn both(connection: &Connection, from: [RemoteRegion<u64>; 2]) -> Result<u64> {
//!     let [one, other] = [connection.get(&from[0]).started(), connection.get(&from[1]).started()];
//!     Ok(one.await? + other.await?)
//! }
//!
//! /// All Writes have one completion: the last per cent of speed.
//! fn count(connection: &Connection, to: &RemoteRegion<u64>) -> Result<()> {
//!     let mut batch = connection.batch();
//!     for i in 0..to.len() {
//!         batch.write(&[i as u64], &to.at(i)?)?;
//!     }
//!     batch.submit().wait()
//! }
//! ```
//!
//! An operation owns a handle of its connection, and data that is passed by value. So it can be
//! moved to another task:
//!
//! ```
//! use iwarp::{Connection, RemoteRegion, Result};
//!
//! /// Writes to several peers at the same time.
//! async fn replicate(peers: &[(Connection, RemoteRegion<u8>)], entry: &[u8]) -> Result<()> {
//!     let write = |(peer, log): &(Connection, RemoteRegion<u8>)| peer.write(entry.to_vec(), log);
//!     let tasks: Vec<_> = peers.iter().map(write).map(tokio::spawn).collect();
//!     for task in tasks {
//!         task.await.expect("the task does not panic")?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Read what the peer changes
//!
//! A Read is not atomic: while the owner writes, it may return a mix of old and new bytes. Only
//! single words, and the peer's atomics, are indivisible. A usual pattern is a version before and
//! after the data, as in the example
//! [`kv`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp/examples/kv.rs). The example
//! [`replicated_log`](https://github.com/iwarp-rs/iwarp/blob/main/crates/iwarp/examples/replicated_log.rs)
//! relies on the order of Writes instead.
