//! The RDMA Protocol: opcodes and the headers that follow the DDP header. RFC 5040 §4, RFC 7306 §5 and §6.

mod atomic;
mod immediate;
mod opcode;
mod read_request;
pub mod terminate;

pub use atomic::{AtomicOp, AtomicRequest, AtomicRequestView, AtomicResponse, AtomicResponseView};
pub use immediate::Immediate;
pub use opcode::Opcode;
pub use read_request::{ReadRequest, ReadRequestView};
pub use terminate::{Terminate, TerminateCode};
