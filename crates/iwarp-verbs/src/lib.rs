//! `libibverbs.so.1` and `librdmacm.so.1` on the software RNIC.
//!
//! One library has both names (the second is a link), so that both share one runtime. The functions convert C structures to
//! `iwarp` objects, and contain no protocol and no sockets. rdma-core's manual pages describe them (`ibv_post_send(3)`,
//! `rdma_cm(7)`, `rsocket(7)`).
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function is called by C and unsafe as a whole: its contract is that the program obeys the manual page"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "C entry points have the manual page's contract"
)]
#![cfg_attr(
    any(test, fuzzing),
    allow(dead_code, unused_imports, reason = "what only the exports use")
)]

mod abi;
mod cm;
#[path = "counter.rs"]
mod comp_cntr;
#[path = "cq/queue.rs"]
mod cq;
#[path = "device/context.rs"]
mod device;
#[path = "memory/dmabuf.rs"]
mod dmabuf;
mod events;
#[path = "device/face.rs"]
mod face;
// The versions have a meaning in the C library only.
#[cfg(not(any(test, fuzzing)))]
mod exports;
#[cfg(test)]
mod fork_tests;
#[cfg(fuzzing)]
pub mod fuzzing;
#[path = "border/guard.rs"]
mod guard;
#[path = "memory/huge.rs"]
mod huge;
#[path = "abi/kern.rs"]
mod kern;
#[path = "stateless/misc.rs"]
mod misc;
#[path = "memory/mr.rs"]
mod mr;
#[path = "memory/mr_ex.rs"]
mod mr_ex;
#[path = "memory/mw.rs"]
mod mw;
#[path = "border/object.rs"]
mod object;
#[path = "domain/pd.rs"]
mod pd;
#[path = "post/requests.rs"]
mod post;
#[path = "stateless/providers.rs"]
mod private;
#[path = "lifecycle/modify.rs"]
mod qp;
#[path = "lifecycle/create.rs"]
mod qp_create;
#[path = "post/batch.rs"]
mod qp_ex;
#[path = "device/query.rs"]
mod query;
#[path = "process/reserve.rs"]
mod reserve;
mod rsocket;
#[path = "srq/queue.rs"]
mod srq;
#[path = "srq/tags.rs"]
mod srq_ops;
#[path = "qp/transition.rs"]
mod transition;
#[path = "lifecycle/datagram.rs"]
mod ud;
#[path = "process/unused.rs"]
mod unused;
#[path = "border/wait.rs"]
mod wait;
#[path = "lifecycle/xrc.rs"]
mod xrc;

/// Small allocations do not fail, because Rust would end the program.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: reserve::Allocator = reserve::Allocator;
