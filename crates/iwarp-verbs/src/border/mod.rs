//! The border to C, used by every room above; it uses `abi` only.
//!
//! `guard` catches panics and converts errors, `object` registers living objects and counts their
//! users and events, `wait` blocks as `read(2)` does.

pub(crate) mod guard;
pub(crate) mod object;
pub(crate) mod wait;
