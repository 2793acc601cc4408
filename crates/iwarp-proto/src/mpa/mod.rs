//! Marker PDU Aligned framing: how DDP segments travel on TCP. RFC 5044, and RFC 6581 for enhanced connection set-up.
//!
//! A connection first exchanges one [`startup`] frame in each direction; [`negotiate`] decides what the frames say and what
//! follows from them. After that both directions are streams of FPDUs: [`framing`].

pub mod framing;
pub mod negotiate;
pub mod pretty;
pub mod startup;
