//! The integration tests of this crate. They are one program, because each program takes seconds to
//! link. A test that depends on the descriptors or the environment of its process runs in a process
//! of its own: see `common::alone`.

mod c_api;
mod common;
mod connect;
mod datagram;
mod iomap;
mod options;
mod processes;
mod repoll;
mod stream;
mod transient;
