//! Opened devices.

use super::{AsyncEvent, CompletionChannel, CompletionQueue, ProtectionDomain};
use crate::config::Config;
use crate::device::{Device, LIMITS, Limits};
use crate::error::Result;
use crate::owned::memory::ProtectionDomain as Domain;
use crate::runtime;
use iwarp_rnic::counters::Counters;
use std::time::{Duration, Instant};

/// An opened device (`ibv_open_device(3)`). A clone is another handle to it.
///
/// ```
/// use iwarp::verbs::{Config, Context, Device};
/// # fn main() -> iwarp::Result<()> {
/// for device in Device::list()? {
///     let ctx = Context::open(&device, Config::from_env())?;
///     println!("{}: {} completions at most", ctx.device().name, ctx.query_device().max_cqe);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Context(pub(crate) runtime::Context);

impl Context {
    /// Opens a device with these settings.
    ///
    /// # Errors
    /// The operating system's: no descriptors left, or the file of a capture cannot be made.
    pub fn open(device: &Device, config: Config) -> Result<Self> {
        runtime::Context::open(device, config).map(Self)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        self.0.device()
    }

    /// Returns the settings.
    pub fn config(&self) -> &Config {
        self.0.config()
    }

    /// Returns what the device can at most (`ibv_query_device(3)`).
    pub const fn query_device(&self) -> &'static Limits {
        &LIMITS
    }

    /// Allocates a protection domain (`ibv_alloc_pd(3)`).
    pub fn alloc_pd(&self) -> ProtectionDomain {
        ProtectionDomain(Domain::new(&self.0))
    }

    /// Creates a completion queue for `cqe` completions (`ibv_create_cq(3)`), whose events go to `channel`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): 0, or above the limit; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn create_cq(
        &self,
        cqe: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue> {
        let channel = channel.map(|channel| &channel.0);
        self.0.create_cq(cqe, channel).map(CompletionQueue)
    }

    /// Creates a completion channel (`ibv_create_comp_channel(3)`).
    ///
    /// # Errors
    /// The operating system's: no descriptors left.
    pub fn create_comp_channel(&self) -> Result<CompletionChannel> {
        self.0.create_channel().map(CompletionChannel)
    }

    /// Waits for an asynchronous event (`ibv_get_async_event(3)`), and blocks the thread; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); the operating system's.
    pub fn get_async_event(&self, timeout: Option<Duration>) -> Result<AsyncEvent> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if let Some(event) = AsyncEvent::of(self.0.async_event(left)?.kind) {
                return Ok(event);
            }
        }
    }

    /// Takes the oldest asynchronous event, without waiting.
    pub fn try_get_async_event(&self) -> Option<AsyncEvent> {
        std::iter::from_fn(|| self.0.try_async_event()).find_map(|event| AsyncEvent::of(event.kind))
    }

    /// Waits for an asynchronous event in a task of any runtime. Dropping the future loses none.
    pub async fn async_event(&self) -> AsyncEvent {
        loop {
            if let Some(event) = AsyncEvent::of(self.0.async_events().recv().await.kind) {
                return event;
            }
        }
    }

    /// Returns the sums of all its queue pairs.
    pub fn counters(&self) -> Counters {
        self.0.counters()
    }

    /// Returns `true` if both handles mean the same opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }
}
