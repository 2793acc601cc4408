//! iWARP RDMA in user space over plain TCP.
#![deny(unsafe_op_in_unsafe_fn)]

mod capture;
mod config;
mod crc;
mod device;
#[cfg(not(loom))]
mod engine;
mod error;
#[allow(dead_code, reason = "pruned when the crate is complete")]
mod progress;
#[cfg(not(loom))]
pub mod raw;
#[allow(dead_code, reason = "pruned when the crate is complete")]
mod sys;

pub use capture::{Recorder, RecorderLimits};
pub use config::{Config, ReceiverNotReady};
pub use device::{Device, LIMITS, Limits};
pub use error::{Error, Result};
