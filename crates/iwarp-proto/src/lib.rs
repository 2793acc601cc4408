//! The iWARP wire protocol: MPA, DDP and RDMAP codecs, framing and connection negotiation.
//!
//! The modules follow the layers of the RFCs:
//!
//! | module | contents | defined in |
//! | --- | --- | --- |
//! | [`mpa`] | start-up frames, negotiation, FPDU framing, markers | RFC 5044, RFC 6581 |
//! | [`ddp`] | tagged and untagged headers, STags, queues | RFC 5041 |
//! | [`rdmap`] | opcodes, Read Request, atomics, Immediate Data, Terminate | RFC 5040, RFC 7306 |
//! | [`crc32c`] | the checksum of FPDUs | RFC 5044 §4.4 |
//! | [`datagram`] | unreliable datagrams over UDP (this project's own framing) | docs/wire.md |
//! | [`tag_matching`] | the headers of messages that are matched by tag | docs/wire.md |
//! | [`sidr`] | messages to find the datagram queue pair of a port (this project's own) | docs/wire.md |
//!
//! The crate does no I/O, does not allocate or read a clock, and never panics because of a peer's
//! input. Each frame has two types. A *view* reads and writes fields in place, in any container of
//! octets. A *value* is a plain struct that is parsed and emitted through the view. Protocol code
//! uses values; tools use views, also for invalid frames.
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
