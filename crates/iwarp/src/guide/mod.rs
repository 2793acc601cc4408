//! Guides: how to write a program with this crate. They contain no items, and their programs run as
//! tests.
//!
//! ```
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let connect = iwarp::connect(listener.local_addr());
//! let client = std::thread::spawn(move || connect.wait()?.send("hello").wait());
//! let connection = listener.accept().wait()?;
//! assert_eq!(*connection.recv().wait()?, *b"hello");
//! client.join().unwrap()?;
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! 1. [`one_sided`]: from TCP to one-sided operations.
//! 2. [`messages`]: messages, channels and streams, and which one to use.
//! 3. [`memory`]: what is copied, who owns it, and what a peer may do to it.
//! 4. [`errors`]: what failed, and how connections end.
//! 5. [`faults`]: tests in which connections fail.
//!
//! The programs block with `wait`. In a task of any runtime, write `.await` in its place: each
//! call returns a value that is both. The verbs have a guide of their own, in
//! [`verbs`](crate::verbs).

pub mod errors;
pub mod faults;
pub mod memory;
pub mod messages;
pub mod one_sided;
