//! Event channels and the threads that read from them.

use crate::abi::cma::*;
use crate::border::guard::{Errno, Res, pointer, value};
use crate::border::object::{self, Kind, Object};
use crate::border::wait;
use iwarp::runtime::cm::CmEventChannel;
use iwarp::runtime::{ProcessLock, create_event_channel, fork_generation};
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

pub(crate) struct Channel {
    pub(crate) queue: CmEventChannel,
    /// Threads in `rdma_get_cm_event`. A thread that was cancelled there stays counted.
    inside: AtomicU32,
    /// The thread that last took an event; 0 if there is none.
    reader: AtomicI32,
    generation: u32,
}

/// Before a channel is destroyed: how often it checks for a reader, and the time between checks.
const READER_CHECKS: u32 = 20;
const READER_PAUSE: Duration = Duration::from_micros(500);

impl Channel {
    /// Returns `true` if a thread reads from the channel or is about to.
    ///
    /// Some programs acknowledge the last event on one thread and exit on another, while the first
    /// is about to wait for the next event. That thread would find the channel destroyed and report
    /// an error, whereas in the kernel it would wait until the program exits. So it gets time to
    /// arrive.
    fn is_read(&self) -> bool {
        let inside = || self.inside.load(Ordering::Acquire) > 0;
        let reader = self.reader.load(Ordering::Acquire);
        let comes_back = || reader != 0 && reader != this_thread() && is_alive(reader);
        for _ in 0..READER_CHECKS {
            if inside() || !comes_back() {
                break;
            }
            std::thread::sleep(READER_PAUSE);
        }
        inside()
    }
}

fn this_thread() -> i32 {
    // SAFETY: returns a number and has no effect.
    unsafe { libc::gettid() }
}

fn is_alive(thread: i32) -> bool {
    // SAFETY: signal 0 is not delivered; the call only checks that the thread exists.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) == 0 }
}

/// Queues of channels that were destroyed while a thread was waiting in them. There is no signal
/// for when such a thread returns.
static LEFT_OPEN: ProcessLock<Vec<CmEventChannel>> =
    ProcessLock::new("verbs::cm::LEFT_OPEN", Vec::new());

pub(crate) type ChannelObject = Object<rdma_event_channel, Channel>;

/// Held while an event is taken and counted, so that destroying an identifier sees both or neither.
pub(crate) static DELIVERY: ProcessLock<()> = ProcessLock::new("verbs::cm::DELIVERY", ());

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(channel: *mut rdma_event_channel) -> Res<&'a ChannelObject> {
    object::find(Kind::CmChannel, channel)
}

pub(crate) fn create() -> Res<*mut rdma_event_channel> {
    let queue = create_event_channel()?;
    let fd = queue.as_fd().as_raw_fd();
    wait::make_blocking(fd);
    Ok(object::create(
        Kind::CmChannel,
        rdma_event_channel { fd },
        Channel {
            queue,
            inside: AtomicU32::new(0),
            reader: AtomicI32::new(0),
            generation: fork_generation(),
        },
    ))
}

/// # Safety
/// `channel` is no longer used.
pub(crate) unsafe fn destroy(channel: *mut rdma_event_channel) {
    let Ok(object) = find(channel) else { return };
    if object.is_read() {
        // In the kernel the thread would never return. Here it would get an error from the closed
        // descriptor, or read from an unrelated file that reuses the number.
        LEFT_OPEN.lock().push(Arc::clone(&object.queue));
    }
    if object::retire(Kind::CmChannel, channel).is_ok() {
        object::free::<rdma_event_channel, Channel>(channel);
    }
}

/// Counts a thread in `rdma_get_cm_event`. The returned descriptor stays open until [`leave`].
pub(super) unsafe fn enter(channel: *mut rdma_event_channel) -> Res<c_int> {
    let object = find(channel)?;
    if object.generation != fork_generation() {
        // A forked child receives no events, and the queue's lock may have been held at the fork.
        return Err(Errno(libc::EOPNOTSUPP));
    }
    object.inside.fetch_add(1, Ordering::AcqRel);
    Ok((*channel).fd)
}

pub(super) unsafe fn leave(channel: *mut rdma_event_channel) {
    if let Ok(object) = find(channel) {
        object.reader.store(this_thread(), Ordering::Release);
        object.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(create)
}

pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    value((), || destroy(channel));
}

pub(super) const MULTICAST_JOIN: c_uint = 12;
pub(super) const MULTICAST_ERROR: c_uint = 13;
/// An event that the program wrote itself (`rdma_write_cm_event(3)`).
pub(super) const USER: c_uint = 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_waits_for_its_reader() {
        let channel = Channel {
            queue: create_event_channel().unwrap(),
            inside: AtomicU32::new(0),
            reader: AtomicI32::new(0),
            generation: fork_generation(),
        };
        assert!(!channel.is_read(), "it has no reader");
        let read = || channel.reader.store(this_thread(), Ordering::Release);
        read();
        assert!(!channel.is_read(), "the reader itself destroys it");
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                read();
                barrier.wait();
                barrier.wait();
                channel.inside.store(1, Ordering::Release);
                barrier.wait();
            });
            barrier.wait();
            assert!(!channel.is_read(), "it does not come back");
            barrier.wait();
            barrier.wait();
            assert!(channel.is_read(), "it is there");
            reader.join().unwrap();
        });
        channel.inside.store(0, Ordering::Release);
        assert!(!channel.is_read(), "it has ended");
    }
}
