//! Used by `iwarp perf` and the project's own benchmarks: durations of many operations, the spread
//! of repeated measurements, curves over the message size as SVG, and the load by other programs.
#![forbid(unsafe_code)]

mod latencies;
pub mod load;
pub mod plot;
mod spread;

pub use latencies::Latencies;
pub use spread::Spread;
