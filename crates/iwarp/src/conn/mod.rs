//! One connected stream queue pair: its state, its socket, who may read and write it when, and how its connection ends.
//!
//! May use `objects` and everything below. The services (`cm`, `by_number`, `xrc`, `tags`) use it.

pub(crate) mod absent_peer;
pub(crate) mod after;
pub(crate) mod closing;
pub(crate) mod cork;
pub(crate) mod drive;
mod faults;
pub(crate) mod infiniband;
pub(crate) mod late;
pub(crate) mod linger;
pub(crate) mod link_state;
pub(crate) mod member;
#[cfg(test)]
mod memory_wait_tests;
pub(crate) mod pool;
pub(crate) mod qp;
pub(crate) mod rest;
pub(crate) mod retry;
pub(crate) mod silence;
pub(crate) mod source;
#[cfg(test)]
mod start_tests;
mod tally;
pub(crate) mod timer;
pub(crate) mod xrc_target;
