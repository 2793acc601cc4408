//! Runs the examples of this crate, by the code that runs those of `iwarp`.

#[path = "../../../iwarp/tests/it/examples.rs"]
mod runner;
