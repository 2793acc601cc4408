//! The border to C: what every function of the C interface needs, whatever it is about.
//!
//! `guard` catches panics and converts errors, `object` registers living objects and counts their
//! users and events, `wait` blocks as `read(2)` does. This room uses `abi` only. Every room above
//! uses it.

pub(crate) mod guard;
pub(crate) mod object;
pub(crate) mod wait;
