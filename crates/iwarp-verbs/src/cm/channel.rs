//! Event channels: the objects, and who reads from them.

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
    /// The thread that took an event last; 0 if none has.
    reader: AtomicI32,
    /// The process that created it.
    generation: u32,
}

/// How often a channel looks for its reader before it is destroyed, and the time between two looks.
const READER_LOOKS: u32 = 20;
const READER_PAUSE: Duration = Duration::from_micros(500);

impl Channel {
    /// Returns `true` if a thread reads from the channel, or is about to. Some programs acknowledge the last event on one thread
    /// and end on another, while the first is on its way back for the next event. It would find the channel destroyed, and report
    /// that. On the kernel's queue it would wait until the program is over. So it is given time to arrive here.
    fn is_read(&self) -> bool {
        let inside = || self.inside.load(Ordering::Acquire) > 0;
        let reader = self.reader.load(Ordering::Acquire);
        let comes_back = || reader != 0 && reader != this_thread() && is_alive(reader);
        for _ in 0..READER_LOOKS {
            if inside() || !comes_back() {
                break;
            }
            std::thread::sleep(READER_PAUSE);
        }
        inside()
    }
}

fn this_thread() -> i32 {
    // SAFETY: only returns a number.
    unsafe { libc::gettid() }
}

/// Returns `true` if this process has such a thread.
fn is_alive(thread: i32) -> bool {
    // SAFETY: signal 0 is not sent; the numbers are only looked up.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) == 0 }
}

/// The queues of channels that were destroyed while a thread was in them. Nothing tells when that thread has left.
static LEFT_OPEN: ProcessLock<Vec<CmEventChannel>> =
    ProcessLock::new("verbs::cm::LEFT_OPEN", Vec::new());

pub(crate) type ChannelObject = Object<rdma_event_channel, Channel>;

/// Taking an event and counting it is one step, as seen by the thread that destroys the identifier.
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
        // On the kernel's queue the thread would never return. Here a closed descriptor would be an error to it, or be another file
        // by then.
        LEFT_OPEN.lock().push(Arc::clone(&object.queue));
    }
    if object::retire(Kind::CmChannel, channel).is_ok() {
        object::free::<rdma_event_channel, Channel>(channel);
    }
}

/// Counts a thread that asks for events. Returns the descriptor, which stays open until the thread leaves.
pub(super) unsafe fn enter(channel: *mut rdma_event_channel) -> Res<c_int> {
    let object = find(channel)?;
    if object.generation != fork_generation() {
        // Nobody in a forked child puts events there, and threads of the parent may have the queue's lock.
        return Err(Errno(libc::EOPNOTSUPP));
    }
    object.inside.fetch_add(1, Ordering::AcqRel);
    Ok((*channel).fd)
}

/// Counts a thread that has its event, or an error.
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
/// An event that the program has written itself (`rdma_write_cm_event(3)`).
pub(super) const USER: c_uint = 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_waits_for_the_thread_that_reads_it() {
        let channel = Channel {
            queue: create_event_channel().unwrap(),
            inside: AtomicU32::new(0),
            reader: AtomicI32::new(0),
            generation: fork_generation(),
        };
        assert!(!channel.is_read(), "nobody has read it");
        let read = || channel.reader.store(this_thread(), Ordering::Release);
        read();
        assert!(!channel.is_read(), "who read it destroys it");
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
