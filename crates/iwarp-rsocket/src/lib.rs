//! Sockets over RDMA: the calls of TCP sockets, carried by RDMA Writes, and the calls of UDP
//! sockets.
//!
//! Both ends of a stream must be rsockets, of this crate or of rdma-core's librdmacm on an iWARP
//! device. The number of an rsocket is different from all descriptors of the process, so one call
//! of [`poll()`] accepts both.
//!
//! ```no_run
//! # fn main() -> Result<(), iwarp_rsocket::Errno> {
//! let fd = iwarp_rsocket::socket(libc::AF_INET, libc::SOCK_STREAM, 0)?;
//! iwarp_rsocket::connect(fd, "192.0.2.1:7471".parse().unwrap())?;
//! iwarp_rsocket::send(fd, b"hello", 0)?;
//! iwarp_rsocket::close(fd)?;
//! # Ok(())
//! # }
//! ```
//!
//! Differences from TCP:
//! - A connection's memory has a fixed size: set `SO_RCVBUF` and `SO_SNDBUF` before connecting or
//!   listening.
//! - [`close`] blocks until the data is sent. With `SO_LINGER` of zero seconds, it resets the
//!   connection.
//! - Stream sockets do not survive a fork: the child can only close them, without effect on the
//!   connection.
//! - There is no out-of-band data, and `SIGPIPE` is never raised.
//!
//! A datagram socket (`SOCK_DGRAM`) is a UDP socket of the kernel, because iWARP has no datagrams:
//! its peer may be any UDP socket, it needs no RDMA device, it survives a fork, and `SO_RCVBUF` has
//! the kernel's limits. `SOL_RDMA` options have no effect on it, and `iomap` and related calls
//! return `EOPNOTSUPP`.

mod address;
pub mod c_api;
mod calls;
#[doc(hidden)]
pub mod cancel;
mod datagram;
mod errno;
mod fork;
mod notify;
mod options;
mod poll;
mod repoll;
mod service;
mod settings;
mod socket;
mod spin;
mod stream;
mod table;
mod wire;

pub use calls::{
    accept, bind, close, connect, control, get_option, iomap, iounmap, iowrite, is_rsocket, listen,
    local_address, peer_address, recv, recv_from, recv_vectored, send, send_to, send_vectored,
    set_option, shutdown, socket,
};
pub use errno::{Errno, Result};
pub use options::{RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_ROUTE, RDMA_RQSIZE, RDMA_SQSIZE, SOL_RDMA};
pub use poll::{Sets, poll, select};
