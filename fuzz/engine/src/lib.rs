//! A coverage-guided fuzzer in the process itself, for the stable toolchain.
//!
//! A program with fuzz targets calls `main` with the list of them. Built by `cargo xtask fuzz`, its code under test is instrumented, and
//! inputs that reach something new are kept and changed further. Built without, it replays the seeds and the corpus, and changes them
//! blindly.
//!
//! * `coverage` has the counters; `mutate` changes inputs; `search` does both in turn;
//! * `state` has the corpus and the failures on disk; `trace` shows the running input to another process;
//! * `command` has the command line, `worker` the process that runs one target, `minimise` makes failing inputs small.

mod command;
mod coverage;
mod failure;
mod minimise;
mod mutate;
mod search;
mod state;
mod trace;
mod worker;

pub use command::main;
pub use mutate::Random;
pub use state::seeds;

/// A fuzz target and its name.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name on the command line, and of the directory in `seeds/`.
    pub name: &'static str,
    /// The function. It panics when it finds a bug.
    pub run: fn(&[u8]),
    /// The longest useful input, in octets.
    pub len_max: usize,
}

/// Targets that are in one program, and where they have their seeds.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    /// The targets.
    pub targets: &'static [Target],
    /// The folder with a folder of seeds for each target.
    pub seeds: &'static str,
}
