//! Many RNICs over a simulated TCP, from one seed.
//!
//! A run makes hosts with the real [`iwarp_rnic`] objects and connects them by byte streams that cut, delay, block, break
//! and corrupt as TCP and networks do. Random verbs programs work on them. The run compares everything that can be observed
//! with what the programs must do: every completion, every octet of memory, and that no endpoint waits forever. Nothing
//! depends on real time or on the machine, so a seed that fails once fails again.
//!
//! Two words of this crate: a *fate* is what a run does to a connection (a reset, a flipped bit, a side that stops reading);
//! a *sin* is a request that must not succeed.
//!
//! * [`generate`](mod@generate), [`script`], [`sins`], [`memory`] — from a seed to hosts, options and programs with their outcomes;
//! * [`net`] — the byte streams; [`driver`] — what a runtime does for a queue pair; [`app`] — the programs at work;
//! * [`check`], [`verdict`] — the checkers; [`plant`] — bugs that are planted to show that the checkers find them.
#![deny(unsafe_code)]

pub mod app;
pub mod check;
pub mod driver;
pub mod generate;
pub mod memory;
pub mod net;
pub mod plant;
pub mod raw;
pub mod rng;
pub mod run;
pub mod script;
pub mod sins;
pub mod verdict;
pub mod world;

#[cfg(test)]
mod tests;
