//! The modules of `iwarp perf` that parse the peer's messages.

#[path = "../../../../crates/iwarp-cli/src/perf/control.rs"]
pub(crate) mod control;
#[path = "../../../../crates/iwarp-cli/src/perf/host.rs"]
pub(crate) mod host;
#[path = "../../../../crates/iwarp-cli/src/perf/point.rs"]
pub(crate) mod point;
