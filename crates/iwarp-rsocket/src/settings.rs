//! Settings: defaults, the administrator's files in `/etc/rdma/rsocket`, and limits.

use iwarp::LIMITS;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

const QUEUE_MIN: u16 = 16;
/// Maximum work requests of a queue: half the range of the 16-bit sequence numbers, so that they
/// can be compared.
const QUEUE_MAX: u16 = 0x7fff;
/// The defaults are larger than rdma-core's 128 KiB, and similar to the limits of TCP's buffers. A
/// sender waits when one is full, until a thread at each end has run: the progress thread that
/// empties the send buffer, and the program that has read half of the receive buffer.
const RECEIVE_BUFFER: u32 = 4 << 20;
const SEND_BUFFER: u32 = 4 << 20;
const BUFFER_MIN: u32 = 4096;
const BUFFER_MAX: u32 = 1 << 28;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) send_queue: u16,
    /// Messages that the peer may have in flight.
    pub(crate) receive_queue: u16,
    /// Transfers of at most this many bytes bypass the send buffer.
    pub(crate) inline: u16,
    pub(crate) receive_buffer: u32,
    pub(crate) send_buffer: u32,
    /// Buffers that the peer may map for this end.
    pub(crate) mappings: u16,
}

impl Sizes {
    pub(crate) fn clamped(mut self) -> Self {
        let max = u16::try_from(LIMITS.max_qp_wr)
            .unwrap_or(QUEUE_MAX)
            .min(QUEUE_MAX);
        self.send_queue = self.send_queue.clamp(QUEUE_MIN, max);
        self.receive_queue = self.receive_queue.clamp(QUEUE_MIN, max);
        self.inline = self.inline.min(MAX_INLINE);
        self.receive_buffer = clamp_buffer(self.receive_buffer);
        self.send_buffer = clamp_buffer(self.send_buffer);
        self
    }
}

/// Maximum inline data. Above this size, copying the data twice costs more than it saves.
pub(crate) const MAX_INLINE: u16 = 512;

/// Returns a buffer size clamped to the limits and rounded down to a multiple of 8, because the
/// receive buffer has two halves.
pub(crate) fn clamp_buffer(size: u32) -> u32 {
    size.clamp(BUFFER_MIN, BUFFER_MAX) & !7
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) sizes: Sizes,
    /// Time that a call polls before it sleeps.
    pub(crate) polling_time: Duration,
    /// Maximum sleep of `rpoll` before it checks the sockets itself.
    pub(crate) wake_up_interval: Duration,
}

impl Settings {
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(null_mut());
        // SAFETY: null, or settings that are never freed.
        if let Some(known) = unsafe { SETTINGS.load(Ordering::Acquire).as_ref() } {
            return known;
        }
        // Several threads may read the files at the same time. A lock would avoid that, but it
        // could stay locked in a forked child.
        let read = Box::leak(Box::new(Self::read(Path::new("/etc/rdma/rsocket"))));
        SETTINGS.store(read, Ordering::Release);
        read
    }

    fn read(dir: &Path) -> Self {
        let number = |name: &str, default: u32| {
            std::fs::read_to_string(dir.join(name))
                .ok()
                .and_then(|text| text.split_whitespace().next()?.parse().ok())
                .unwrap_or(default)
        };
        let number_u16 =
            |name: &str, default| u16::try_from(number(name, default)).unwrap_or(u16::MAX);
        let sizes = Sizes {
            send_queue: number_u16("sqsize_default", 384),
            receive_queue: number_u16("rqsize_default", 384),
            inline: number_u16("inline_default", 64),
            receive_buffer: number("mem_default", RECEIVE_BUFFER),
            send_buffer: number("wmem_default", SEND_BUFFER),
            mappings: crate::wire::round_mappings(number_u16("iomap_size", 0)),
        };
        Self {
            sizes: sizes.clamped(),
            polling_time: Duration::from_micros(u64::from(
                number("polling_time", 10).min(1_000_000),
            )),
            wake_up_interval: Duration::from_millis(u64::from(
                number("wake_up_interval", 500).max(1),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_and_clamped() {
        let dir =
            std::env::temp_dir().join(format!("iwarp-rsocket-settings-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let defaults = Settings::read(&dir.join("nothing"));
        assert_eq!(
            (defaults.sizes.send_queue, defaults.sizes.receive_buffer),
            (384, RECEIVE_BUFFER)
        );
        std::fs::write(dir.join("sqsize_default"), "5\n").unwrap();
        std::fs::write(dir.join("rqsize_default"), "4000000\n").unwrap();
        std::fs::write(dir.join("mem_default"), " 100001 ").unwrap();
        std::fs::write(dir.join("wmem_default"), "many").unwrap();
        std::fs::write(dir.join("inline_default"), "513").unwrap();
        std::fs::write(dir.join("polling_time"), "0").unwrap();
        std::fs::write(dir.join("wake_up_interval"), "0").unwrap();
        let configured = Settings::read(&dir);
        std::fs::write(dir.join("polling_time"), "1000001").unwrap();
        let polling_time = Settings::read(&dir).polling_time;
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(
            (configured.sizes.send_queue, configured.sizes.receive_queue),
            (QUEUE_MIN, QUEUE_MAX)
        );
        assert_eq!(
            (
                configured.sizes.receive_buffer,
                configured.sizes.send_buffer
            ),
            (100_000, SEND_BUFFER)
        );
        assert_eq!(configured.sizes.inline, MAX_INLINE);
        let polling = [configured.polling_time, polling_time];
        assert_eq!(polling, [Duration::ZERO, Duration::from_secs(1)]);
        assert_eq!(configured.wake_up_interval, Duration::from_millis(1));
    }
}
