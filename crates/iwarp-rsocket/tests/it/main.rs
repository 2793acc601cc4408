//! The integration tests of this crate: a single program, because each program takes seconds to
//! link. A test that depends on the descriptors or environment of its process runs in its own
//! process: see `common::alone`.

mod c_api;
mod common;
mod connect;
mod datagram;
mod iomap;
mod leaks;
mod options;
mod processes;
mod repoll;
mod stream;
mod transient;
