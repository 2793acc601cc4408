//! Which thread drives a socket, and when.
//!
//! Threads that are running already do most of the work: posting threads write, polling threads
//! read. The progress thread does what no other thread does, and sleeps meanwhile.
//!
//! May use `sys` (the operating system) and nothing else. Used by `objects` and all rooms above. It
//! knows what it serves only by the trait [`Source`]: it names no queue pair, completion queue or
//! connection.
//!
//! | question | modules |
//! | --- | --- |
//! | Which threads exist, and what do they serve? | `core` (the [`Engine`]), `progress_thread`, `sources`, `timers`, `watch` |
//! | Which thread drives, and until when? | `pollers`, `lease`, `baton` |
//! | Who sleeps, and who wakes whom? | `parker`, `wakers`, `slots` |
//! | Does a thread poll, sleep or yield? | `busy_poll`, `answers`, `yield_pacing` |
//! | Where are the thresholds? | `policy`: all constants and decisions of these heuristics, without state |
//!
//! The protocols on which no wake-up may be lost (`baton`, `lease`, `parker`, `slots`) are checked
//! by `loom` over all interleavings of two or three threads, next to a deliberately broken variant
//! that the model must catch. Only the modules that the models need are compiled then:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p iwarp --lib --release loom_
//! ```
//!
//! `crates/iwarp-sim/threads` compiles all modules under the scheduler `shuttle`, with an operating
//! system of its own. Both replace the atomics and locks in [`sync`]; `shuttle` also replaces
//! `crate::sys`.

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
pub(crate) use self::core::everything;
#[cfg(not(loom))]
pub(crate) use pollers::Pollers;
#[cfg(not(loom))]
pub(crate) use sources::Source;
