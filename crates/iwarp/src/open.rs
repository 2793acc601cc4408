//! Opens devices, with the hooks (captures, faults) that the settings select.

use crate::capture;
use crate::cm::{self, CmEventChannel};
use crate::config::Config;
use crate::device::Device;
use crate::engine;
use crate::error::Result;
use crate::inject::Plan;
use crate::objects::context::Context;
use crate::objects::hooks::{DeviceFaults, Hooks, Recording};
use crate::stat;
use std::sync::Arc;

/// Creates an event channel (`rdma_create_event_channel(3)`).
///
/// # Errors
/// [`Error::Io`](crate::Error::Io): no file descriptor is left.
pub fn create_event_channel() -> Result<CmEventChannel> {
    engine::at_start(stat::start);
    cm::create_event_channel()
}

impl Context {
    /// Opens a device (`ibv_open_device(3)`).
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io): no file descriptor is left, or the capture file cannot be
    /// created.
    pub fn open(device: &Device, config: Config) -> Result<Self> {
        engine::at_start(stat::start);
        let recorder = match &config.capture {
            Some(path) => Some(capture::shared_recorder(path, config.capture_bytes)?),
            None => None,
        };
        let plan = config.fault.as_ref().map(Plan::of).transpose()?;
        let hooks = Hooks {
            recorder: recorder.map(|recorder| Arc::new(recorder) as Arc<dyn Recording>),
            faults: plan.clone().map(|plan| plan as Arc<dyn DeviceFaults>),
        };
        let ctx = Self::open_with(device, config, hooks)?;
        if let Some(plan) = plan {
            plan.enter(&ctx.inner)?;
        }
        Ok(ctx)
    }
}
