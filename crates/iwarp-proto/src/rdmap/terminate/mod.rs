//! The Terminate message: why a stream ends, and which segment caused it. RFC 5040 §4.8. The error
//! codes are defined in RFC 5040 §4.8, RFC 5041 §7.2, RFC 5044 §8, RFC 6581 §8, and RFC 7306 §8
//! (for atomics and immediate data).

mod code;
mod message;

pub use code::{Code, Etype, Layer, TerminateCode};
pub use message::{Layout, Terminate, TerminateError};
