//! Which thread drives a socket, and when.
//!
//! Threads that are running already do most of the work: posting threads write, polling threads
//! read. The progress thread does the work for which no other thread is running, and sleeps while
//! there is none.
//!
//! May use `sys` (the operating system) and nothing else. `objects` and the rooms above use this
//! one. It serves objects that implement the trait [`Source`], and names no queue pair, completion
//! queue or connection.
//!
//! | question | modules |
//! | --- | --- |
//! | Which threads exist, and what do they serve? | `core` (the [`Engine`]), `progress_thread`, `sources`, `timers`, `watch` |
//! | Which thread drives, and until when? | `pollers`, `lease`, `baton` |
//! | Which thread sleeps, and which thread wakes it? | `parker`, `wakers`, `slots` |
//! | Does a thread poll, sleep or yield? | `busy_poll`, `answers`, `yield_pacing` |
//! | Where are the thresholds? | `policy`: all constants and decisions of these heuristics, without state |
//!
//! The protocols that must not lose a wake-up (`baton`, `lease`, `parker`, `slots`) have models,
//! which `loom` checks over all interleavings of two or three threads. Each model also has a
//! variant with a planted bug, which it must find. This compiles only the modules that the models
//! need:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p iwarp --lib --release loom_
//! ```
//!
//! `crates/iwarp-sim/threads` compiles all modules for the scheduler `shuttle`, with a simulated
//! operating system. `loom` and `shuttle` replace the atomics and locks in [`sync`]; `shuttle` also
//! replaces `crate::sys`.

pub(crate) mod answers;
pub(crate) mod baton;
pub(crate) mod busy_poll;
#[cfg(not(loom))]
mod core;
pub(crate) mod lease;
pub(crate) mod parker;
pub(crate) mod policy;
#[cfg(not(loom))]
mod pollers;
#[cfg(not(loom))]
mod progress_thread;
pub(crate) mod slots;
#[cfg(not(loom))]
mod sources;
pub(crate) mod sync;
#[cfg(not(loom))]
mod timers;
pub(crate) mod wakers;
#[cfg(not(loom))]
mod watch;
pub(crate) mod yield_pacing;

#[cfg(not(loom))]
pub(crate) use self::core::Engine;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use self::core::at_start;
#[cfg(all(not(loom), any(test, shuttle)))]
pub(crate) use self::core::whole_process_lease;
#[cfg(not(loom))]
pub(crate) use pollers::Pollers;
#[cfg(not(loom))]
pub(crate) use sources::Source;
