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
    /// Number of threads in `rdma_get_cm_event`. A thread that is cancelled inside stays counted.
    threads_inside: AtomicU32,
    /// The thread that last took an event; 0 if there is none.
    reader: AtomicI32,
    generation: u32,
}

/// How often the destruction of a channel checks for a reader, and the pause between two checks.
const READER_CHECKS: u32 = 20;
const READER_PAUSE: Duration = Duration::from_micros(500);

impl Channel {
    /// Returns `true` if a thread waits for events of the channel. If the last reader still exists,
    /// gives it a moment to call `rdma_get_cm_event` again.
    ///
    /// In some programs, one thread acknowledges the last event and calls `rdma_get_cm_event`
    /// again, while another thread destroys the channel and exits. If the channel were destroyed
    /// first, the reader would report an error. With the kernel's channel, the reader would wait
    /// until the program exits.
    fn has_reader(&self) -> bool {
        let threads_inside = || self.threads_inside.load(Ordering::Acquire) > 0;
        let reader = self.reader.load(Ordering::Acquire);
        let may_return = || reader != 0 && reader != this_thread() && is_alive(reader);
        for _ in 0..READER_CHECKS {
            if threads_inside() || !may_return() {
                break;
            }
            std::thread::sleep(READER_PAUSE);
        }
        threads_inside()
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

/// Queues of channels that were destroyed while a thread was waiting in them. They are never freed,
/// because nothing reports when such a thread returns.
static LEFT_OPEN: ProcessLock<Vec<CmEventChannel>> =
    ProcessLock::new("verbs::cm::LEFT_OPEN", Vec::new());

pub(crate) type ChannelObject = Object<rdma_event_channel, Channel>;

/// Held while an event is taken and counted, so that destroying an identifier sees both changes or
/// neither.
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
            threads_inside: AtomicU32::new(0),
            reader: AtomicI32::new(0),
            generation: fork_generation(),
        },
    ))
}

/// # Safety
/// `channel` is no longer used.
pub(crate) unsafe fn destroy(channel: *mut rdma_event_channel) {
    let Ok(object) = find(channel) else { return };
    if object.has_reader() {
        // With the kernel's channel, the thread would never return. If the descriptor were closed
        // here, the thread would get an error, or read from a file that reuses the number.
        LEFT_OPEN.lock().push(Arc::clone(&object.queue));
    }
    if object::retire(Kind::CmChannel, channel).is_ok() {
        object::free::<rdma_event_channel, Channel>(channel);
    }
}

/// Counts this thread as inside `rdma_get_cm_event`. The returned descriptor stays open until
/// [`end_read`].
pub(super) unsafe fn begin_read(channel: *mut rdma_event_channel) -> Res<c_int> {
    let object = find(channel)?;
    if object.generation != fork_generation() {
        // A forked child receives no events, and the queue's lock may have been held at the fork.
        return Err(Errno(libc::EOPNOTSUPP));
    }
    object.threads_inside.fetch_add(1, Ordering::AcqRel);
    Ok((*channel).fd)
}

pub(super) unsafe fn end_read(channel: *mut rdma_event_channel) {
    if let Ok(object) = find(channel) {
        object.reader.store(this_thread(), Ordering::Release);
        object.threads_inside.fetch_sub(1, Ordering::AcqRel);
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
            threads_inside: AtomicU32::new(0),
            reader: AtomicI32::new(0),
            generation: fork_generation(),
        };
        assert!(!channel.has_reader(), "no thread has read");
        let read = || channel.reader.store(this_thread(), Ordering::Release);
        read();
        assert!(!channel.has_reader(), "this thread is the reader");
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                read();
                barrier.wait();
                barrier.wait();
                channel.threads_inside.store(1, Ordering::Release);
                barrier.wait();
            });
            barrier.wait();
            assert!(!channel.has_reader(), "the reader did not return in time");
            barrier.wait();
            barrier.wait();
            assert!(channel.has_reader(), "the reader is inside");
            reader.join().unwrap();
        });
        channel.threads_inside.store(0, Ordering::Release);
        assert!(!channel.has_reader(), "the reader's thread has ended");
    }
}
