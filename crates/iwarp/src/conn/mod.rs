//! One connected stream queue pair: its state, its socket, which thread reads and writes the
//! socket, and how the connection ends.
//!
//! May use `objects` and the rooms below it. The services (`cm`, `by_number`, `xrc`, `tags`) and
//! the rooms above them use this one.
//!
//! | stage of a connection | files |
//! | --- | --- |
//! | the queue pair: creation, changes of state | `qp`, `attributes`, `any_qp` (its interface for `objects`) |
//! | start: attaching a stream that has finished MPA start-up | `attach` |
//! | state of the stream, with its transition table | `link` |
//! | data: writing and reading the socket | `drive/tx`, `drive/rx`; `pool` (plans and buffers) |
//! | posting, and when posted requests are sent | `post`, `cork` |
//! | order of completions during a `sendmsg` | `held_receives` |
//! | effects of a call of the state machine | `closing` (collects them), `effects` (applies them without locks) |
//! | readiness and timers | `engine_events`, `machine_timer`, `liveness` (detects peers that have vanished) |
//! | end: disconnecting, destroying, errors | `closing` |
//! | end: the peer is gone but the queue pair stays in RTS | `peer_gone`, with the limits of `retry` |
//! | end: finishing in the background | `linger`, `unsent_tail` |
//! | variants | `infiniband` (devices shown as RoCE), `xrc_target`, `faults` (injected), `tally` (counts of operations) |

pub(crate) mod any_qp;
pub(crate) mod attach;
pub(crate) mod attributes;
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
#[cfg(test)]
mod memory_wait_tests;
pub(crate) mod peer_gone;
pub(crate) mod pool;
pub(crate) mod post;
pub(crate) mod qp;
pub(crate) mod retry;
#[cfg(test)]
mod start_tests;
mod tally;
pub(crate) mod unsent_tail;
pub(crate) mod xrc_target;
