//! What `iwarp perf` and the project's own benchmarks share: the times of many operations, the spread of repeated
//! measurements, curves over the message size as SVG, and how much of the processors other programs used meanwhile.
#![forbid(unsafe_code)]

mod latencies;
pub mod load;
pub mod plot;
mod spread;

pub use latencies::Latencies;
pub use spread::Spread;
