//! The integration tests of this crate. They are a single program, because linking each program
//! takes seconds.

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
