//! State of the whole process: `reserve` is the library's allocator, `unused` the line at the end
//! of a program that used no device. This room uses no other.

pub(crate) mod reserve;
pub(crate) mod unused;
