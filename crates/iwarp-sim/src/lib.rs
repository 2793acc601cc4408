//! A deterministic simulator: many RNICs over a simulated, faulty TCP, from one seed.
//!
//! A run creates hosts with the real [`iwarp_rnic`] objects. Byte streams connect them, which
//! split, delay, block, break and corrupt data as TCP and networks do. Random verbs programs run on
//! the hosts. The run compares every completion and every octet of memory with the expected result,
//! and checks that no endpoint waits forever. Nothing depends on real time or on the machine, so a
//! failing seed always fails.
//!
//! In this crate, the *fate* of a connection is what a run does to it: a reset, a flipped bit, a
//! side that stops reading.
//!
//! * [`generate`](mod@generate), [`script`], [`illegal`], [`forgery`], [`memory`] create hosts,
//!   options and programs from a seed, with the expected outcome of each request;
//! * [`net`] simulates the byte streams; [`driver`] drives queue pairs as a runtime does; [`app`]
//!   runs the programs; [`forge`] sends FPDUs that no correct RNIC sends;
//! * [`setup`] tests connection set-up with a fault after every octet;
//! * [`reach`] records the coverage of each seed: states, operations, completions and errors;
//! * [`check`] and [`verdict`] contain the checks; [`plant`] plants bugs that the checks must find.
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
