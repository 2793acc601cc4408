//! What the project's own programs share: the tasks of this package, `conformance/` and `bench/driver/`.
//!
//! `context` finds the tree, `process` runs commands with a log and a limit on their time, `packages` knows what the
//! distribution has to provide, and `outcome` says how a check ended.

pub mod context;
pub mod files;
pub mod install;
pub mod layout;
pub mod outcome;
pub mod packages;
pub mod process;
