//! The integration tests of this crate. They are one program, because each program takes seconds to
//! link.

mod action;
mod tree;
