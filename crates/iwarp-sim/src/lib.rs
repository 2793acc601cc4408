//! A deterministic simulator: many RNICs over a simulated, faulty TCP, from one seed.
//!
//! A run makes hosts with the real [`iwarp_rnic`] objects and connects them by byte streams that
//! cut, delay, block, break and corrupt as TCP and networks do. Random verbs programs work on them.
//! The run compares everything that can be observed with what the programs must do: every
//! completion, every octet of memory, and that no endpoint waits forever. Nothing depends on real
//! time or on the machine, so a seed that fails once fails again.
//!
//! In this crate, the *fate* of a connection is what a run does to it: a reset, a flipped bit, a
//! side that stops reading.
//!
//! * [`generate`](mod@generate), [`script`], [`illegal`], [`forgery`], [`memory`] make hosts,
//!   options and programs from a seed, with the expected outcome of each request;
//! * [`net`] has the byte streams; [`driver`] does what a runtime does for a queue pair; [`app`]
//!   runs the programs; [`forge`] sends what no RNIC sends;
//! * [`setup`] sets connections up with a fault at every octet;
//! * [`reach`] notes what each seed has reached;
//! * [`check`] and [`verdict`] have the checkers; [`plant`] has bugs that are planted to show that
//!   the checkers find them.
#![deny(unsafe_code)]

pub mod app;
pub mod check;
pub mod driver;
pub mod forge;
pub mod forgery;
pub mod generate;
pub mod illegal;
pub mod memory;
pub mod net;
pub mod plant;
pub mod raw;
pub mod reach;
pub mod rng;
pub mod run;
pub mod script;
pub mod setup;
pub mod verdict;
pub mod world;

#[cfg(test)]
mod tests;
