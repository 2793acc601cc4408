//! `LD_PRELOAD=librspreload.so`: the TCP sockets of a program become rsockets (`rsocket(7)`).
//!
//! This library redefines functions of the C library. If the descriptor is a placeholder for an
//! rsocket, they call the rsocket functions of the `librdmacm.so.1` that the loader finds. For all
//! other descriptors, they call the C library. A placeholder is an open `/dev/null`; a table in
//! this library maps it to its rsocket.
//!
//! - Datagram sockets are not replaced, because datagram rsockets are UDP sockets anyway.
//! - If `connect` fails because the peer is not an rsocket, it is repeated with TCP, also if it is
//!   nonblocking (`connecting`).
//! - `/etc/rdma/rsocket/preload_config` selects the sockets that become rsockets (`config`).
//! - Operations that bypass these functions use `/dev/null` instead of the rsocket: stdio streams
//!   on sockets, `splice`, `io_uring`.
//! - An `epoll` set may contain rsockets, which are level-triggered (`epoll`). A set that is itself
//!   polled, or is in another set, reports its ordinary descriptors only.
//! - A forked child can only close inherited sockets. With `RDMAV_FORK_SAFE` it can use listeners,
//!   and connections that have not been used (`fork`).
//! - `ppoll` and `pselect` do not change the signal mask atomically.
//! - `RS_SQ_SIZE`, `RS_RQ_SIZE`, `RS_INLINE` set the corresponding options on all sockets.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contracts are those of the C library's functions"
)]
#![allow(
    missing_docs,
    reason = "the manual pages of the C library describe these functions"
)]

mod api;
mod config;
mod connecting;
pub mod descriptors;
pub mod epoll;
mod fork;
mod placeholder;
mod sets;
pub mod setup;
mod table;
pub mod transfer;
pub mod waiting;

use libc::c_int;

fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn errno() -> c_int {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() }
}
