//! Process-wide state: `reserve` is the library's allocator; `unused` reports at exit that the
//! program used no device. This room uses no other room.

pub(crate) mod reserve;
pub(crate) mod unused;
