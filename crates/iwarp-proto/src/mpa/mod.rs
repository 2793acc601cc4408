//! Marker PDU Aligned framing: how DDP segments travel on TCP. RFC 5044, and RFC 6581 for enhanced
//! connection set-up.
//!
//! Each side of a connection first sends one [`startup`] frame; [`negotiate`] decides what the
//! frames contain and mean. After that both directions are streams of FPDUs: [`framing`].

pub mod framing;
pub mod negotiate;
pub mod pretty;
pub mod startup;
