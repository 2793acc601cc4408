//! What `iwarp perf` and the project's own benchmarks share: the spread of repeated measurements, curves over the message
//! size as SVG, and how much of the processors other programs used meanwhile.
#![forbid(unsafe_code)]

pub mod load;
pub mod plot;
mod spread;

pub use spread::Spread;
