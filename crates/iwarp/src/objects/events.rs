//! Queues of events with a pollable descriptor, and the asynchronous events of a device.

use super::any_qp::EventQp;
use crate::engine::wakers::Wakers;
use crate::error::{Error, Result};
use crate::objects::cq::CompletionQueue;
use crate::objects::srq::SharedReceiveQueue;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{Interest, wait_fd};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// Events in the order in which they happened. The descriptor is readable while events are pending,
/// and each event signals it again. It may be duplicated and watched by `poll`, `epoll` (also
/// edge-triggered) or an async runtime.
#[derive(Debug)]
pub struct EventQueue<T> {
    queue: Mutex<Waiting<T>>,
    fd: EventFd,
    wakers: Wakers,
}

#[derive(Debug)]
struct Waiting<T> {
    events: VecDeque<T>,
    /// The descriptor was signalled and not drained by [`drain`](Self::drain). While this is
    /// `false`, a check of an empty queue costs no system call.
    signalled: bool,
}

impl<T> Waiting<T> {
    fn signal(&mut self, fd: &EventFd) {
        fd.signal();
        self.signalled = true;
    }

    fn drain(&mut self, fd: &EventFd) {
        if self.events.is_empty() && std::mem::take(&mut self.signalled) {
            fd.drain();
        }
    }
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            queue: Mutex::new(Waiting {
                events: VecDeque::new(),
                signalled: false,
            }),
            fd: EventFd::new()?,
            wakers: Wakers::default(),
        })
    }

    /// Adds an event and wakes waiting threads and tasks. Call it with no lock held. With a lock
    /// held, call [`put`](Self::put), and [`wake`](Self::wake) after the lock is released.
    pub(crate) fn push(&self, event: T) {
        self.put(event);
        self.wake();
    }

    /// Adds an event and signals the descriptor. Wakes no tasks; [`wake`](Self::wake) does that.
    pub(crate) fn put(&self, event: T) {
        let mut queue = self.queue.lock();
        queue.events.push_back(event);
        // Signal with the lock held. Otherwise another thread could take the event first, and the
        // descriptor would stay readable without an event. Signal each event, as the kernel's
        // channels do: some programs watch the edges of the descriptor and never take events.
        queue.signal(&self.fd);
    }

    /// Wakes waiting tasks. Call it with no lock held, because wakers run code of the program.
    pub(crate) fn wake(&self) {
        if self.wakers.any() {
            self.wakers.wake_all();
        }
    }

    /// Wakes a task at the next event. Check the queue once more after this call, and then wait.
    /// The waker is called once, with no lock held.
    pub fn wake_at_next(&self, waker: &Waker) {
        self.wakers.register(waker);
    }

    /// Waits for an event in a task of any async runtime. Dropping the future loses no event.
    pub async fn recv(&self) -> T {
        let mut wait = self.wakers.registration();
        std::future::poll_fn(|cx| {
            if let Some(event) = self.try_next() {
                return Poll::Ready(event);
            }
            wait.renew(cx.waker());
            // An event may have come before the waker was registered.
            self.try_next().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Takes the oldest event; `None` if there is none. Never blocks.
    pub fn try_next(&self) -> Option<T> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front();
        queue.drain(&self.fd);
        event
    }

    /// Takes the oldest event for a program that has read the descriptor itself. The read made it
    /// unreadable for all threads, so this signals it again if events remain.
    pub fn try_next_after_read(&self) -> Option<T> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front();
        if !queue.events.is_empty() {
            queue.signal(&self.fd);
        }
        event
    }

    /// Waits for an event. A timeout of `None` waits without limit.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if no event comes in time, or the operating system's error if it
    /// cannot wait.
    pub fn next(&self, timeout: Option<Duration>) -> Result<T> {
        // A deadline beyond the range of the clock means no limit.
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            if let Some(event) = self.try_next() {
                return Ok(event);
            }
            let remaining = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if remaining == Some(Duration::ZERO) {
                return Err(Error::TimedOut("no event came"));
            }
            wait_fd(&self.fd, Interest::READ, remaining)?;
        }
    }

    /// Keeps only the events for which `keep` returns `true`.
    pub fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut queue = self.queue.lock();
        queue.events.retain(keep);
        queue.drain(&self.fd);
    }

    /// Returns how many events are pending.
    pub fn len(&self) -> usize {
        self.queue.lock().events.len()
    }

    /// Returns `true` if no event is pending.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().events.is_empty()
    }
}

impl AsyncEventKind {
    /// Returns the queue pair that the event is about, or `None` if it is about another object.
    pub fn queue_pair(&self) -> Option<&EventQp> {
        match self {
            Self::QpFatal(qp)
            | Self::QpRequestError(qp)
            | Self::QpAccessError(qp)
            | Self::CommunicationEstablished(qp)
            | Self::SqDrained(qp)
            | Self::LastWqeReached(qp)
            | Self::Datagram(qp, _) => Some(qp),
            Self::CqError(_) | Self::SrqLimitReached(_) | Self::Port(_) => None,
        }
    }
}

impl<T> AsFd for EventQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The kind of an asynchronous event (`ibv_get_async_event(3)`).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AsyncEventKind {
    /// A completion queue overflowed.
    CqError(CompletionQueue),
    /// A queue pair failed.
    QpFatal(EventQp),
    /// A peer broke the protocol.
    QpRequestError(EventQp),
    /// A peer's access to memory was refused.
    QpAccessError(EventQp),
    /// A responder has received the initiator's first message before the program moved the queue
    /// pair to state RTS.
    CommunicationEstablished(EventQp),
    /// The send queue is drained in state SQD.
    SqDrained(EventQp),
    /// A queue pair in error takes no more receives from the shared receive queue.
    LastWqeReached(EventQp),
    /// A shared receive queue has fewer receives than its limit.
    SrqLimitReached(SharedReceiveQueue),
    /// An event of a datagram queue pair.
    Datagram(EventQp, UdEvent),
    /// An event of the port or the device. Only an injected fault causes it
    /// ([`fault`](crate::fault)).
    Port(PortEvent),
}

/// An event of a datagram queue pair ([`AsyncEventKind::Datagram`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UdEvent {
    /// The queue pair failed, because a completion queue overflowed.
    Fatal,
    /// The send queue is drained in state SQD.
    SqDrained,
    /// The queue pair is in error, and takes no more receives from the shared receive queue.
    LastWqeReached,
}

/// An event of a port or its device ([`AsyncEventKind::Port`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortEvent {
    /// The port is up again.
    Active,
    /// The port is down.
    Error,
    /// The port's LID has changed.
    LidChange,
    /// The port's table of partition keys has changed.
    PkeyChange,
    /// The port has another subnet manager.
    SmChange,
    /// The subnet manager asks clients to register again.
    ClientReregister,
    /// The port's GID table has changed.
    GidChange,
    /// The device has failed.
    DeviceFatal,
}

/// An asynchronous event of a device.
#[derive(Debug, Clone)]
pub struct AsyncEvent {
    /// The kind of event, and the object that it is about.
    pub kind: AsyncEventKind,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    fn is_readable(queue: &EventQueue<u32>) -> bool {
        wait_fd(&queue.fd, Interest::READ, Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn descriptor_is_readable_while_events_wait() {
        let queue = EventQueue::new().unwrap();
        assert!(!is_readable(&queue));
        (1..=3).for_each(|event| queue.push(event));
        assert_eq!(queue.try_next(), Some(1));
        assert!(is_readable(&queue));
        queue.retain(|event| *event != 2);
        assert!(is_readable(&queue), "one event is pending");
        queue.retain(|_| false);
        assert!(!is_readable(&queue), "no event is pending");
        queue.push(4);
        assert_eq!((is_readable(&queue), queue.try_next()), (true, Some(4)));
        assert!(!is_readable(&queue));
    }

    /// async-rdma never takes an event: it watches the descriptor edge-triggered and polls its
    /// completion queue at each edge.
    #[test]
    fn each_event_is_an_edge() {
        use rustix::event::{Timespec, epoll};
        let queue = EventQueue::new().unwrap();
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&watch, &queue, epoll::EventData::new_u64(0), edges).unwrap();
        let woken = || {
            let mut events = Vec::with_capacity(4);
            let spare = rustix::buffer::spare_capacity(&mut events);
            epoll::wait(&watch, spare, Some(&Timespec::default())).unwrap()
        };
        assert_eq!(woken(), 0);
        for event in 1..=3 {
            queue.push(event);
            assert_eq!((woken(), woken()), (1, 0), "event {event}");
        }
        assert_eq!(queue.try_next(), Some(1));
        assert_eq!(woken(), 0, "no new event");
    }

    /// Some programs read the descriptor before they take the event.
    #[test]
    fn descriptor_is_signalled_again_after_read() {
        let queue = EventQueue::new().unwrap();
        for round in 0..3 {
            (1..=3).for_each(|event| queue.push(event));
            for event in 1..=3 {
                assert!(is_readable(&queue), "event {event}, round {round}");
                assert!(queue.fd.drain());
                assert_eq!(queue.try_next_after_read(), Some(event));
            }
            assert!(!is_readable(&queue));
            assert_eq!(queue.try_next_after_read(), None);
            assert!(!is_readable(&queue));
        }
    }

    struct WakeCounter(AtomicU32);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn waker_is_called_once() {
        let queue = EventQueue::new().unwrap();
        let counts = Arc::new(WakeCounter(AtomicU32::new(0)));
        let woken = || counts.0.load(Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(&counts));
        queue.wake_at_next(&waker);
        queue.put(1);
        assert_eq!((woken(), queue.len(), queue.is_empty()), (0, 1, false));
        queue.wake();
        assert_eq!(woken(), 1);
        queue.push(2);
        assert_eq!((woken(), queue.len()), (1, 2));
        queue.wake_at_next(&waker);
        queue.push(3);
        assert_eq!(woken(), 2);
        queue.retain(|_| false);
        assert_eq!((queue.len(), queue.is_empty()), (0, true));
        let limit = Some(Duration::from_millis(1));
        assert!(matches!(queue.next(limit), Err(Error::TimedOut(_))));
    }
}
