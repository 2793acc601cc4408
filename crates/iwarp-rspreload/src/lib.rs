//! `LD_PRELOAD=librspreload.so`: the TCP sockets of a program become rsockets (`rsocket(7)`).
//!
//! The functions of the C library stand here a second time. For a descriptor of ours they call the rsocket functions
//! of `librdmacm.so.1`, whichever the loader finds, for all others those of the C library. There is no RDMA in here.
//! A program's descriptor is `/dev/null` as far as the kernel is concerned, and only this library knows better.
//!
//! - A `connect` that fails because the peer is no rsocket is repeated as ordinary TCP.
//! - What a program does not do through these functions goes to `/dev/null`: stdio streams on sockets, `splice`,
//!   `io_uring`. `epoll_ctl` fails with EPERM; programs that can use `poll` or `select` instead do so.
//! - After a fork the child can only close the sockets that it inherits. `RDMAV_FORK_SAFE` has no effect.
//! - `ppoll` and `pselect` change the signal mask in a step of its own.
//! - `RS_SQ_SIZE`, `RS_RQ_SIZE`, `RS_INLINE` set the options of the same names on all sockets.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contracts are those of the C library's functions"
)]
#![allow(missing_docs, reason = "the manual pages of the C library")]

mod api;
pub mod descriptors;
pub mod setup;
mod table;
pub mod transfer;
pub mod waiting;

use libc::c_int;

/// Fails with an `errno`.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library gives each thread a valid place.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}
