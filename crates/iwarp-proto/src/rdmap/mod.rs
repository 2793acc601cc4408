//! The RDMA Protocol: opcodes and the headers that follow the DDP header. RFC 5040 §4, RFC 7306 §5
//! and §6.

mod atomic;
mod immediate;
mod read_request;
pub mod terminate;

pub use crate::ddp::opcode::Opcode;
pub use atomic::{AtomicOp, AtomicRequest, AtomicRequestView, AtomicResponse, AtomicResponseView};
pub use immediate::Immediate;
pub use read_request::{ReadRequest, ReadRequestView};
pub use terminate::{Terminate, TerminateCode};
