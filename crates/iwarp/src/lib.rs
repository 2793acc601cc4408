//! iWARP RDMA in user space over plain TCP.
#![deny(unsafe_op_in_unsafe_fn)]

mod capture;
#[cfg(not(loom))]
pub mod cm;
mod complain;
mod config;
mod crc;
mod device;
#[cfg(not(loom))]
mod engine;
mod error;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod portmap;
#[cfg_attr(loom, allow(dead_code, reason = "the models use a part"))]
mod progress;
#[cfg(not(loom))]
pub mod raw;
#[cfg_attr(loom, allow(dead_code, reason = "the models use a part"))]
mod sys;
#[cfg(all(feature = "tokio", not(loom)))]
pub mod tokio;
#[cfg(not(loom))]
mod verbs;

pub use capture::{Recorder, RecorderLimits};
pub use config::{Alignment, Config, ReceiverNotReady};
pub use device::{Device, LIMITS, Limits};
pub use error::{Error, Result};
pub use iwarp_rnic::counters::Counters;
pub use iwarp_rnic::memory::WindowType;
pub use iwarp_rnic::qp::{Blame, Fault, State};
pub use iwarp_rnic::{
    Access, Bind, Cqe, FastRegister, RecvWr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
};
#[cfg(not(loom))]
pub use memory::{MemoryRegion, ProtectionDomain, RemoteMemory};
#[cfg(not(loom))]
pub use raw::{CompletionChannel, CompletionQueue, Context, SharedReceiveQueue};
#[cfg(not(loom))]
pub use verbs::{Completions, QueuePair, QueuePairBuilder};
