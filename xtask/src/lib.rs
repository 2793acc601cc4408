//! Functions that the project's own programs share: the tasks of this package, `conformance/` and `bench/driver/`.
//!
//! `context` finds the tree, `process` runs commands with a log and a time limit, `packages` lists the distribution's packages
//! that steps need, and `outcome` is the result of a check.

pub mod context;
pub mod files;
pub mod install;
pub mod layout;
pub mod outcome;
pub mod packages;
pub mod process;
