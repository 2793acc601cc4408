//! Shared by `iwarp perf` and the project's own benchmarks. This crate collects the times of many
//! operations, computes the spread of repeated measurements, draws curves over the message size as
//! SVG, and measures how much processor time other programs used meanwhile.
#![forbid(unsafe_code)]

mod latencies;
pub mod load;
pub mod plot;
mod spread;

pub use latencies::Latencies;
pub use spread::Spread;
