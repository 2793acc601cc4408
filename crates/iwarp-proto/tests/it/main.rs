//! The integration tests of this crate. They are one program, because each program takes seconds to
//! link.

mod common;
mod framing;
mod negotiate;
mod negotiate_refuse;
mod negotiate_rtr;
mod peers;
mod roundtrip;
mod siw;
mod startup;
mod terminate;
mod wire;
