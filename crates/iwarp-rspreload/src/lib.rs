//! `LD_PRELOAD=librspreload.so`: the TCP sockets of a program become rsockets (`rsocket(7)`).
//!
//! This library has functions of the same names as the C library. For a descriptor that stands for an rsocket they call the
//! rsocket functions of the `librdmacm.so.1` that the loader finds, for all others those of the C library. There is no RDMA in
//! here. The program's descriptor is an open `/dev/null` for the kernel. Only this library knows that it stands for an rsocket.
//!
//! - Datagram sockets stay the kernel's, because those of rsockets are UDP sockets, too.
//! - A `connect` that fails because the peer is no rsocket is repeated as ordinary TCP.
//! - `/etc/rdma/rsocket/preload_config` restricts which sockets become rsockets (`config`).
//! - Operations that bypass these functions reach `/dev/null`: stdio streams on sockets, `splice`, `io_uring`.
//! - A set of `epoll` may have rsockets, which are level-triggered there (`epoll`). A set that is polled itself, or is in another set,
//!   shows its ordinary descriptors only.
//! - After a fork the child can only close the sockets that it inherits, in sets of `epoll` too. With `RDMAV_FORK_SAFE` it can use
//!   listeners, and connections that have not been used (`fork`).
//! - `ppoll` and `pselect` change the signal mask in a separate step.
//! - `RS_SQ_SIZE`, `RS_RQ_SIZE`, `RS_INLINE` set the options of the same names on all sockets.
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
pub mod descriptors;
pub mod epoll;
mod fork;
pub mod setup;
mod stand_in;
mod table;
pub mod transfer;
pub mod waiting;

use libc::c_int;

/// Sets `errno` and returns -1.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}
