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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::events::{AsyncEventKind, PortEvent};
    use crate::testing;
    use std::io::IoSlice;
    use std::time::Duration;

    #[test]
    fn capture_has_its_limit() {
        let name = format!("iwarp-open-{}.pcapng", std::process::id());
        let path = std::env::temp_dir().join(name);
        let ctx = testing::context_with(Config {
            capture: Some(path.clone()),
            capture_bytes: Some(900),
            ..Config::default()
        });
        let recorder = ctx.inner.hooks.recorder.as_ref().expect("a recorder");
        let [local, peer] = ["192.0.2.1:1", "192.0.2.2:2"].map(|ip| ip.parse().unwrap());
        let flow = recorder.connection(local, peer, true);
        for _ in 0..10 {
            flow.sent(&[IoSlice::new(&[7; 100])]);
        }
        recorder.flush().unwrap();
        let len = std::fs::metadata(&path).unwrap().len();
        std::fs::remove_file(&path).unwrap();
        assert!((1..=900).contains(&len), "{len}");
    }

    /// A fault that concerns the port is raised on each device that was opened with its rule.
    #[test]
    fn opened_device_gets_faults() {
        let ctx = testing::context_with(Config {
            fault: Some(
                "seed=253;log=/dev/null;event=PORT_ERR,time=1ms"
                    .parse()
                    .unwrap(),
            ),
            ..Config::default()
        });
        let event = ctx.async_events().next(Some(Duration::from_secs(20)));
        let kind = event.expect("no event is raised").kind;
        assert!(
            matches!(kind, AsyncEventKind::Port(PortEvent::Error)),
            "{kind:?}"
        );
    }
}
