//! A completion queue and its sockets, as in `objects/cq.rs`, `conn/engine_events.rs` and
//! `conn/qp.rs` of the runtime, without data transfer. The runtime's own modules decide which
//! thread drives which socket.

use crate::engine::baton::Baton;
use crate::engine::busy_poll::BusyPoll;
use crate::engine::wakers::Wakers;
use crate::engine::yield_pacing::after_empty_poll;
use crate::engine::{Engine, Pollers, Source, whole_process_lease};
use crate::sync::parking::{Mutex, RwLock};
use crate::sync::{AtomicBool, AtomicUsize, Ordering, yield_now};
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{AsFd, Interest, wait_fd};
use crate::world::{self, Plant};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::Duration;

/// Largest number of sockets that an empty poll reads one by one. Smaller than in the runtime, so
/// that small models also use the epoll set.
const POLL_DIRECTLY_MAX: usize = 2;
/// Time that it takes to process a message or a request.
const PROCESSING_TIME: u64 = 400;
/// How long [`Queue::wait`] polls before it sleeps.
const WINDOW: Duration = Duration::from_micros(100);

pub(crate) struct Queue {
    /// Completions that have not been polled.
    ring: Mutex<usize>,
    ready: AtomicBool,
    sockets: RwLock<Vec<Weak<Socket>>>,
    pollers: Pollers,
    wakers: Wakers,
    busy: BusyPoll,
    /// Number of completions that were polled.
    taken: AtomicUsize,
    /// Number of completions that the queue gets in this execution.
    expected: usize,
    /// Number of sleeping programs, for the checks only.
    asleep: std::sync::atomic::AtomicUsize,
    number: usize,
}

impl Queue {
    pub(crate) fn new(expected: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: Mutex::new(0),
            ready: AtomicBool::new(false),
            sockets: RwLock::default(),
            pollers: Pollers::default(),
            wakers: Wakers::default(),
            busy: BusyPoll::default(),
            taken: AtomicUsize::new(0),
            expected,
            asleep: std::sync::atomic::AtomicUsize::new(0),
            number: world::descriptor(),
        })
    }

    pub(crate) fn is_over(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        assert!(taken <= self.expected, "a completion was taken twice");
        taken == self.expected
    }

    fn push(&self) {
        let wakes = {
            let mut ring = self.ring.lock();
            self.ready.store(true, Ordering::Release);
            *ring += 1;
            self.wakers.any()
        };
        if wakes {
            self.wakers.wake_all();
        }
    }

    /// Takes the pending completions. Returns their number.
    fn take(&self) -> usize {
        let n = {
            let mut ring = self.ring.lock();
            self.ready.store(false, Ordering::Relaxed);
            std::mem::take(&mut *ring)
        };
        if n > 0 && self.taken.fetch_add(n, Ordering::Relaxed) + n == self.expected {
            // Another program may wait for a completion that will never be written.
            self.wakers.wake_all();
        }
        n
    }

    /// Called when no thread can run. Checks that no program sleeps although there is a completion.
    pub(crate) fn check(&self) {
        let asleep = self.asleep.load(Ordering::Relaxed);
        assert!(
            asleep == 0 || *self.ring.lock() == 0,
            "a program sleeps, although there is a completion"
        );
    }

    /// Like `ibv_poll_cq`.
    pub(crate) fn poll(&self) -> usize {
        let taken = self.poll_once();
        world::note_poll(self.number);
        taken
    }

    fn poll_once(&self) -> usize {
        if self.ready.load(Ordering::Acquire) {
            let n = self.take();
            if n > 0 {
                self.pollers.record_taken(n);
                return n;
            }
        }
        self.pollers.drive_for_poll(|all| self.drive(all));
        if self.ready.load(Ordering::Acquire) {
            return self.take();
        }
        after_empty_poll();
        0
    }

    fn drive(&self, serve_all: bool) -> bool {
        let sockets: Vec<_> = {
            let sockets = self.sockets.read();
            sockets.iter().filter_map(Weak::upgrade).collect()
        };
        let many = sockets.len() > POLL_DIRECTLY_MAX;
        let direct = if many { &[][..] } else { &sockets };
        for socket in direct {
            socket.drive();
            if socket.rx.is_held() {
                yield_now();
            }
        }
        (serve_all || many) && self.pollers.serve_all()
    }

    /// Like `ibv_post_send` on a random queue pair of the queue.
    pub(crate) fn post(&self) {
        let socket = {
            let sockets = self.sockets.read();
            let i = world::random(sockets.len() as u64) as usize;
            sockets.get(i).and_then(Weak::upgrade)
        };
        if let Some(socket) = socket {
            socket.post();
        }
    }

    /// Waits until there is a completion, or all have been polled. Busy-polls for a short time
    /// first if that is worthwhile.
    pub(crate) fn wait(&self) {
        let begin = world::now();
        let found = self.busy.poll(WINDOW, |now| {
            self.pollers.renew(now);
            self.drive(false);
            *self.ring.lock() > 0 || self.is_over()
        });
        world::note_poll(self.number);
        if found {
            return;
        }
        let must_not_sleep = || *self.ring.lock() > 0 || self.is_over();
        let checks_first = world::has_plant(Plant::ChecksFirst);
        if checks_first && must_not_sleep() {
            return;
        }
        let event = Arc::new(EventFd::new().expect("the world has no limits"));
        let waker = Waker::from(Arc::new(EventWaker(Arc::clone(&event))));
        self.wakers.register(&waker);
        self.ready.store(true, Ordering::Release);
        if !world::has_plant(Plant::KeepsLease) {
            self.pollers.hand_over();
        }
        world::note_hand_over(self.number);
        if checks_first || !must_not_sleep() {
            self.asleep.fetch_add(1, Ordering::Relaxed);
            let _ = wait_fd(&*event, Interest::READ, None);
            self.asleep.fetch_sub(1, Ordering::Relaxed);
            let waited = Duration::from_nanos(world::now() - begin);
            self.busy.record_sleep(waited, WINDOW);
        }
    }

    /// Updates the pollers after a queue pair was added.
    fn update_pollers(&self) {
        let many = self.sockets.read().len() > POLL_DIRECTLY_MAX;
        self.pollers.set_many_qps(many);
    }
}

/// Wakes the thread that sleeps on the descriptor.
struct EventWaker(Arc<EventFd>);

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.0.signal_reliably();
    }
}

/// A queue pair's socket.
pub(crate) struct Socket {
    fd: usize,
    token: u64,
    engine: Arc<Engine>,
    queue: Arc<Queue>,
    rx: Baton,
    tx: Baton,
    /// Number of posted requests that were not sent yet.
    posted: Mutex<usize>,
    /// The engine does not watch the socket, because programs drive it.
    paused: Mutex<bool>,
}

impl AsFd for Socket {
    fn number(&self) -> usize {
        self.fd
    }
}

impl Socket {
    /// Connects a socket whose completions go to `queue`, with at most this many `engines`.
    pub(crate) fn connect(queue: &Arc<Queue>, engines: usize) -> Arc<Self> {
        let engine = Engine::for_connection(engines).expect("the world has no limits");
        engine.connection_added();
        let socket = Arc::new(Self {
            fd: world::descriptor(),
            token: engine.token(),
            engine: Arc::clone(&engine),
            queue: Arc::clone(queue),
            rx: Baton::new(),
            tx: Baton::new(),
            posted: Mutex::new(0),
            paused: Mutex::default(),
        });
        queue.sockets.write().push(Arc::downgrade(&socket));
        queue.update_pollers();
        let source = Arc::clone(&socket);
        engine
            .add(&*socket, socket.token, Interest::READ, source)
            .expect("the socket is not in the set");
        socket
    }

    /// Adds a message that the peer has sent.
    pub(crate) fn receive(&self) {
        world::call();
        world::arrive(self.fd);
    }

    /// Posts a request. This thread sends it, unless another thread holds the baton.
    fn post(&self) {
        *self.posted.lock() += 1;
        if world::has_plant(Plant::LeavesNoNote) && self.tx.is_held() {
            return;
        }
        self.tx.drive(|| {
            let requests = std::mem::take(&mut *self.posted.lock());
            if requests > 0 {
                world::call();
                world::spend(requests as u64 * PROCESSING_TIME);
                // Process the result of the system call before releasing the baton.
                world::call();
            }
        });
    }

    /// Called when no thread can run. Checks that all requests were sent.
    pub(crate) fn check(&self) {
        assert_eq!(*self.posted.lock(), 0, "a request was not sent");
    }

    pub(crate) fn is_readable(&self) -> bool {
        world::pending(self.fd) > 0
    }

    /// Returns the end of the latest lease that covers the socket at `now`, if there is one.
    pub(crate) fn lease(&self, now: u64) -> Option<u64> {
        let of_queue = self.queue.pollers.driven_until(now);
        let of_queue = of_queue.filter(|_| !world::is_handed_over(Some(self.queue.number)));
        let of_all_queues = whole_process_lease()
            .end(now)
            .filter(|_| !world::is_handed_over(None));
        of_queue.max(of_all_queues)
    }

    fn drive(&self) -> bool {
        self.rx.drive(|| {
            world::call();
            let messages = world::take_all(self.fd);
            for _ in 0..messages {
                world::spend(PROCESSING_TIME);
                self.queue.push();
            }
        })
    }
}

impl Source for Socket {
    fn ready(self: Arc<Self>, readable: bool, _: bool, _: bool) -> bool {
        readable && self.drive()
    }

    fn driven_until(&self, now: u64) -> Option<u64> {
        self.queue.pollers.driven_until(now)
    }

    fn was_driven(&self, now: u64) -> bool {
        self.queue.pollers.was_driven(now)
    }

    fn pause_watch(&self) -> bool {
        let mut paused = self.paused.lock();
        if !*paused {
            self.engine.pause(self);
            *paused = true;
        }
        true
    }

    fn resume_watch(&self) {
        let mut paused = self.paused.lock();
        if *paused && !world::has_plant(Plant::NeverResumes) {
            self.engine
                .resume(self, self.token, Interest::READ)
                .expect("the socket is not in the set");
            *paused = false;
        }
    }

    fn timer(self: Arc<Self>, _: u32) {}
}
