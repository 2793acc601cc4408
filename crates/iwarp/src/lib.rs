//! iWARP RDMA in user space over plain TCP.
#![deny(unsafe_op_in_unsafe_fn)]

#[allow(dead_code, reason = "the engine above uses it piece by piece")]
mod capture;
#[allow(dead_code, reason = "the engine above uses it piece by piece")]
mod crc;
#[allow(dead_code, reason = "the engine above uses it piece by piece")]
mod progress;
#[allow(dead_code, reason = "the engine above uses it piece by piece")]
mod sys;

pub use capture::{Recorder, RecorderLimits};
