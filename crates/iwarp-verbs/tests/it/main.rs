//! The integration tests of this crate: a single program, because each program takes seconds to
//! link.

mod c_programs;
mod common;
mod programs;
mod runtimes;
mod symbols;
mod unused;
