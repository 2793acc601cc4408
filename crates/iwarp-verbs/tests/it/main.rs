//! The integration tests of this crate. They are one program, because each program takes seconds to
//! link.

mod c_programs;
mod common;
mod programs;
mod runtimes;
mod symbols;
mod unused;
