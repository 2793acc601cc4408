//! The integration tests of this crate: one program, because each takes seconds to link.

mod c_programs;
mod common;
mod programs;
mod runtimes;
mod symbols;
mod unused;
