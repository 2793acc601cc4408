//! Marker PDU Aligned framing: DDP segments in a TCP stream. RFC 5044, and RFC 6581 for enhanced
//! connection set-up.
//!
//! Each side of a connection first sends one [`startup`] frame. [`negotiate`] determines the
//! contents and the meaning of the frames. After that, both directions are streams of FPDUs:
//! [`framing`].

pub mod framing;
pub mod negotiate;
pub mod pretty;
pub mod startup;
