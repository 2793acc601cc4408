//! Runs the fuzz targets on the stable toolchain. `cargo xtask fuzz` builds it with the instrumentation that guides the search.

use std::process::ExitCode;

fn main() -> ExitCode {
    iwarp_fuzz_engine::main(&iwarp_fuzz::SUITE)
}
