//! Memory and ownership: what is copied, who owns it, and what a peer may do to it.
//!
//! ```
//! use iwarp::{Access, Endpoint};
//!
//! let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
//! let mut scratch = endpoint.allocate::<u64>(8)?; // for this program's requests only
//! scratch.get_mut().expect("the only handle")[0] = 1;
//! let table = endpoint.share::<u64>(8, Access::REMOTE_WRITE)?; // for peers, too
//! table.set(0, 1)?; // copied in
//! assert_eq!(table.get(0)?, 1); // copied out
//! let counter = endpoint.adopt(vec![0_u64], Access::REMOTE_ATOMIC)?; // the vector's own memory
//! assert_eq!(counter.fetch_add(0, 1)?, 0); // atomic
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # What an operation does with its data
//!
//! | Passed as | Copies when it is posted | Limit | Lifetime |
//! | --- | --- | --- | --- |
//! | `&[T]`, `&str`, `&[T; N]` | one | [`Options::message_size`](crate::Options::message_size) | borrowed by the operation, and free once that is posted |
//! | `Vec<T>`, `Box<[T]>`, `String`; `Bytes` with the feature `bytes` | none if long, one if short | 2 GiB | owned by the operation, and freed after its completion |
//! | `&Region<T>`, `Region<T>` | none | 2 GiB | held by the operation until its completion |
//!
//! Use slices for small data, vectors for data that is built for one operation, and regions for
//! buffers that are reused, because a region is registered once. [`read`](crate::Connection::read)
//! and [`get`](crate::Connection::get) copy their answers out of registered memory;
//! [`read_into`](crate::Connection::read_into) places the answer in a region.
//!
//! A received [`Message`](crate::Message) is a slice of its receive buffer. A clone or a
//! [`slice`](crate::Message::slice) of it is cheap. The buffer is posted again when the last of
//! them is dropped.
//!
//! # Where the memory comes from
//!
//! | Memory | Call | Notes |
//! | --- | --- | --- |
//! | zeroed, local or shared | [`allocate`](crate::Endpoint::allocate), [`share`](crate::Endpoint::share) | pages are used when they are accessed |
//! | a vector, a boxed slice, a string | [`adopt`](crate::Endpoint::adopt) | not copied |
//! | a file | [`map_file`](crate::Endpoint::map_file), [`map_file_mut`](crate::Endpoint::map_file_mut) | shared with other processes; any range of the file |
//! | huge pages | [`share_huge`](crate::Endpoint::share_huge) | [transparent](crate::HugePages::Transparent), or reserved pages of 2 MiB or 1 GiB |
//! | equal buffers, reused | [`pool`](crate::Endpoint::pool) | one registration for each block of buffers |
//!
//! All are a [`Region`](crate::Region), which all requests take, whole or in slices. Elements are
//! *plain data* (`iwarp::bytemuck::Pod`): every bit pattern is valid, because a peer can write any.
//! Numbers and arrays are plain, and structures for which the macros of `iwarp::bytemuck` are
//! derived (feature `derive`).
//!
//! ```
//! use iwarp::bytemuck::{Pod, Zeroable};
//! use iwarp::{Access, Connection, Endpoint, Region, RemoteRegion};
//!
//! #[derive(Debug, Clone, Copy, Pod, Zeroable)]
//! #[bytemuck(crate = "iwarp::bytemuck")]
//! #[repr(C)]
//! struct Sample {
//!     time: u64,
//!     values: [f32; 6],
//! }
//!
//! /// Shares a file of samples. Peers read it without this program.
//! fn publish(endpoint: &Endpoint, file: &std::fs::File) -> iwarp::Result<Region<Sample>> {
//!     endpoint.map_file(file, .., Access::REMOTE_READ)
//! }
//!
//! /// Reads a peer's samples into a buffer of a pool, and adds them up there.
//! fn total(connection: &Connection, samples: &RemoteRegion<Sample>) -> iwarp::Result<f32> {
//!     let pool = connection.endpoint().pool::<Sample>(samples.len(), 64, Access::empty())?;
//!     let buffer = pool.take().wait()?; // waits if all 64 are in use
//!     connection.read_into(&buffer, samples).wait()?;
//!     let view = buffer.view()?; // no copy: nothing can write the buffer meanwhile
//!     Ok(view.iter().map(|sample| sample.values[0]).sum())
//! }
//! ```
//!
//! # When elements are read in place
//!
//! A peer may write to shared memory at any moment, and so may a request of this program. A Rust
//! reference to such memory would be undefined behaviour. So the elements of a region are copied in
//! and out, and words are atomic ([`load`](crate::Region#method.load-1),
//! [`store`](crate::Region#method.store)). References are given out where nobody else can write:
//!
//! | In place | Condition | Meanwhile |
//! | --- | --- | --- |
//! | a [`Message`](crate::Message), and its [`elements`](crate::Message::elements) | always | its receive buffer is not posted |
//! | [`Region::view`](crate::Region::view): a slice, cheap to clone | no peer has rights to write, no window grants them, no operation reads into it | such requests and calls are refused; Sends and Writes from it are not |
//! | [`Region::get_mut`](crate::Region::get_mut): a mutable slice | not shared, and no other handle, request or view | the region is borrowed |
//!
//! A window that the peer has invalidated ends by
//! [`into_region`](crate::Window::into_region); then the region can be viewed. A file is never
//! viewed, because other processes can change it. If it is truncated, calls return
//! [`MapError::NoPage`](crate::MapError::NoPage), and requests that access the missing part end
//! their connection. The process continues, if faults are caught
//! ([`Config::memory_guard`](crate::Config::memory_guard)). A buffer returns to its pool when its
//! last handle and its last request are gone.
//!
//! # Handles, and when memory is freed
//!
//! [`Region`](crate::Region), [`Connection`](crate::Connection) and [`Endpoint`](crate::Endpoint)
//! are handles: a clone refers to the same object. A region belongs to the endpoint that created
//! it, and all connections of this endpoint can use it. Its memory is freed when the last handle,
//! slice and request that uses it are gone. A request keeps its memory even if its operation was
//! dropped, so cancellation is safe at every point.
//!
//! ```
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let address = listener.local_addr();
//! # let server = std::thread::spawn(move || -> iwarp::Result<_> {
//! #     let connection = listener.accept().wait()?;
//! #     Ok(connection.recv().wait()?.len())
//! # });
//! let connection = iwarp::connect(address).wait()?;
//! let mut buffer = connection.allocate::<u8>(100)?;
//! let send = connection.send(&buffer).started();
//! assert!(buffer.get_mut().is_none()); // the request holds a handle
//! send.wait()?;
//! assert!(buffer.get_mut().is_some());
//! # assert_eq!(server.join().unwrap()?, 100);
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # What a peer may do
//!
//! A peer can access a region only if the region was shared or bound to a window, within its bounds
//! and rights, and over a connection of the same endpoint. Everything else ends its connection.
//! Treat the contents of shared memory as input from the network: copy an element out, check the
//! copy, and use the copy.
//!
//! Rights of [`share`](crate::Endpoint::share) last as long as the region. To grant less, bind a
//! window for one peer, and drop it when the peer has finished:
//!
//! ```
//! use iwarp::{Access, RemoteRegion};
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let address = listener.local_addr();
//! # let client = std::thread::spawn(move || -> iwarp::Result<()> {
//! #     let connection = iwarp::connect(address).wait()?;
//! #     let half = RemoteRegion::<u64>::from_bytes(&connection.recv().wait()?)?;
//! #     connection.write(&[7; 4], &half).wait()?;
//! #     connection.send_with_invalidate(&[], &half).wait()?;
//! #     connection.closed().wait()?.into_result()
//! # });
//! let connection = listener.accept().wait()?;
//! let table = connection.allocate::<u64>(8)?;
//! let window = connection.bind(table.slice(4..)?, Access::REMOTE_WRITE).wait()?;
//! connection.send(&window.remote().to_bytes()).wait()?;
//! let message = connection.recv().wait()?; // the client has written, and gives up its rights
//! assert!(window.is_invalidated_by(&message));
//! assert_eq!(table.to_vec()?, [0, 0, 0, 0, 7, 7, 7, 7]);
//! # drop((connection, window, message));
//! # client.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Forks
//!
//! A forked child must not use connections of its parent: its calls fail with
//! [`Refusal::Forked`](crate::Refusal::Forked). It can open its own.
