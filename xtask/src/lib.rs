//! Functions that the project's own programs share: the tasks of this package, `conformance/` and
//! `bench/driver/`.
//!
//! `context` finds the tree, `process` runs commands with a log and a time limit, `packages` lists
//! the distribution's packages that steps need, `debian` unpacks packages without installing them,
//! `documents` knows the links of the documents, `manual` writes the manual page iwarp(7),
//! `release` builds in release mode, `kernel` builds and checks the engine for a Linux kernel,
//! `watch` kills test programs that hang, and `outcome` is the result of a check.

pub mod context;
pub mod debian;
pub mod documents;
pub mod files;
pub mod install;
pub mod kernel;
pub mod layout;
pub mod manual;
pub mod outcome;
pub mod packages;
pub mod process;
pub mod release_builds;
pub mod watch;
