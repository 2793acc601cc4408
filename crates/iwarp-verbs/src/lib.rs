//! `libibverbs.so.1` and `librdmacm.so.1` on the software RNIC.
//!
//! One library has both names (the second is a link), so both share one runtime. The functions
//! convert C structures to `iwarp` objects; they contain no protocol and no sockets. rdma-core's
//! manual pages describe them (`ibv_post_send(3)`, `rdma_cm(7)`, `rsocket(7)`).
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "C calls every function; its contract is that the program follows the manual page"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "C entry points have the manual page's contract"
)]
#![cfg_attr(
    any(test, fuzzing),
    allow(dead_code, unused_imports, reason = "only `exports` uses some items")
)]

mod abi;
mod border;
mod cm;
mod counter;
mod cq;
mod device;
mod domain;
mod events;
// Only the shared library has symbol versions.
#[cfg(not(any(test, fuzzing)))]
mod exports;
#[cfg(test)]
mod fork_tests;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lifecycle;
mod memory;
mod open;
mod post;
mod process;
mod qp;
mod rsocket;
mod srq;
mod stateless;

/// Has a reserve for small allocations: if one failed, Rust would abort the program.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: process::reserve::Allocator = process::reserve::Allocator;
