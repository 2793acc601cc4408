//! The iWARP wire: MPA, DDP and RDMAP codecs, framing and connection negotiation.
//!
//! The modules are the layers of the RFCs, so a reader of an RFC finds its sections by name:
//!
//! | module | layer | read |
//! | --- | --- | --- |
//! | [`mpa`] | start-up frames, negotiation, FPDU framing, markers | RFC 5044, RFC 6581 |
//! | [`ddp`] | tagged and untagged headers, STags, queues | RFC 5041 |
//! | [`rdmap`] | opcodes, Read Request, atomics, Immediate Data, Terminate | RFC 5040, RFC 7306 |
//! | [`crc32c`] | the checksum of FPDUs | RFC 5044 §4.4 |
//! | [`datagram`] | unreliable datagrams over UDP, a framing of our own | docs/wire.md |
//! | [`tag_matching`] | the headers of messages that are matched by tag | docs/wire.md |
//! | [`sidr`] | which datagram queue pair serves a port, messages of our own | docs/wire.md |
//!
//! Nothing here does I/O, allocates, reads a clock, or panics because of a peer's input. Each frame
//! has two types: a *view* reads and writes fields in place in any container of octets, and a
//! *value* is a plain struct that is parsed and emitted through the view. Values are for protocol
//! code, views for tools and for invalid frames.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]

pub mod crc32c;
pub mod datagram;
pub mod ddp;
pub mod mpa;
pub mod rdmap;
pub mod sidr;
pub mod tag_matching;

mod wire;
