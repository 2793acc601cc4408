//! One connected stream queue pair: its state, its socket, who may read and write it when, and how its connection ends.
//!
//! May use `objects` and everything below. The services (`cm`, `by_number`, `xrc`, `tags`) use it.

pub(crate) mod closing;
pub(crate) mod cork;
pub(crate) mod drive;
pub(crate) mod effects;
pub(crate) mod engine_events;
mod faults;
pub(crate) mod held_receives;
pub(crate) mod infiniband;
pub(crate) mod linger;
pub(crate) mod link;
pub(crate) mod liveness;
pub(crate) mod machine_timer;
pub(crate) mod member;
#[cfg(test)]
mod memory_wait_tests;
pub(crate) mod peer_gone;
pub(crate) mod pool;
pub(crate) mod qp;
pub(crate) mod retry;
#[cfg(test)]
mod start_tests;
mod tally;
pub(crate) mod unsent_tail;
pub(crate) mod xrc_target;
