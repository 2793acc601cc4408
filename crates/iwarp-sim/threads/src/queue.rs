//! A completion queue and its sockets, as in `objects/cq.rs`, `conn/engine_events.rs` and
//! `conn/qp.rs` of the runtime, without data transfer. The runtime's own modules decide which
//! thread drives which socket.

use crate::engine::baton::Baton;
use crate::engine::busy_poll::BusyPoll;
use crate::engine::wakers::Wakers;
use crate::engine::yield_pacing::after_empty_poll;
use crate::engine::{Engine, Pollers, Source, everything};
use crate::sync::parking::{Mutex, RwLock};
use crate::sync::{AtomicBool, AtomicUsize, Ordering, yield_now};
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{AsFd, Interest, wait_fd};
use crate::world::{self, Plant};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::Duration;

/// Sockets that an empty poll reads one by one. Fewer than in the runtime, so that small models
/// have queues of both kinds.
const POLL_DIRECTLY: usize = 2;
/// Time for reading something.
const READ: u64 = 400;
/// How long waits poll before they sleep.
const WINDOW: Duration = Duration::from_micros(100);

pub(crate) struct Queue {
    /// Completions that have not been polled.
    ring: Mutex<usize>,
    ready: AtomicBool,
    sockets: RwLock<Vec<Weak<Socket>>>,
    pollers: Pollers,
    wakers: Wakers,
    busy: BusyPoll,
    taken: AtomicUsize,
    wanted: usize,
    /// Number of sleeping programs, for the checks only.
    asleep: std::sync::atomic::AtomicUsize,
    number: usize,
}

impl Queue {
    pub(crate) fn new(wanted: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: Mutex::new(0),
            ready: AtomicBool::new(false),
            sockets: RwLock::default(),
            pollers: Pollers::default(),
            wakers: Wakers::default(),
            busy: BusyPoll::default(),
            taken: AtomicUsize::new(0),
            wanted,
            asleep: std::sync::atomic::AtomicUsize::new(0),
            number: world::descriptor(),
        })
    }

    /// Returns `true` if all completions have been polled.
    pub(crate) fn is_over(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        assert!(taken <= self.wanted, "a completion was taken twice");
        taken == self.wanted
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
        if n > 0 && self.taken.fetch_add(n, Ordering::Relaxed) + n == self.wanted {
            // Another program may be waiting for more.
            self.wakers.wake_all();
        }
        n
    }

    /// No thread can run. Checks that no program sleeps despite a completion.
    pub(crate) fn check(&self) {
        let asleep = self.asleep.load(Ordering::Relaxed);
        assert!(
            asleep == 0 || *self.ring.lock() == 0,
            "a program sleeps despite a completion"
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
                self.pollers.took(n);
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
        let many = sockets.len() > POLL_DIRECTLY;
        for socket in sockets.iter().filter(|_| !many) {
            socket.drive();
            if socket.rx.is_held() {
                yield_now();
            }
        }
        (serve_all || many) && self.pollers.serve_all()
    }

    /// Like `ibv_post_send` on one of its queue pairs.
    pub(crate) fn post(&self) {
        let socket = {
            let sockets = self.sockets.read();
            let at = world::random(sockets.len() as u64) as usize;
            sockets.get(at).and_then(Weak::upgrade)
        };
        if let Some(socket) = socket {
            socket.post();
        }
    }

    /// Polls for a moment if that is worthwhile, and then sleeps until there is a completion, or
    /// all have been polled.
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
        let is_there = || *self.ring.lock() > 0 || self.is_over();
        let looks_first = world::has(Plant::LooksFirst);
        if looks_first && is_there() {
            return;
        }
        let event = Arc::new(EventFd::new().expect("the world has no limits"));
        let waker = Waker::from(Arc::new(Alarm(Arc::clone(&event))));
        self.wakers.register(&waker);
        self.ready.store(true, Ordering::Release);
        if !world::has(Plant::KeepsLease) {
            self.pollers.hand_over();
        }
        world::note_hand_over(self.number);
        if looks_first || !is_there() {
            self.asleep.fetch_add(1, Ordering::Relaxed);
            let _ = wait_fd(&*event, Interest::READ, None);
            self.asleep.fetch_sub(1, Ordering::Relaxed);
            let waited = Duration::from_nanos(world::now() - begin);
            self.busy.slept(waited, WINDOW);
        }
    }

    /// Updates the number of queue pairs.
    fn count_members(&self) {
        let many = self.sockets.read().len() > POLL_DIRECTLY;
        self.pollers.set_many(many);
    }
}

/// Wakes the thread that sleeps on the descriptor.
struct Alarm(Arc<EventFd>);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.raise();
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
    resting: Mutex<bool>,
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
            resting: Mutex::default(),
        });
        queue.sockets.write().push(Arc::downgrade(&socket));
        queue.count_members();
        let source = Arc::clone(&socket);
        engine
            .add(&*socket, socket.token, Interest::READ, source)
            .expect("it is not watched");
        socket
    }

    /// Receives a message from the peer.
    pub(crate) fn receive(&self) {
        world::call();
        world::arrive(self.fd);
    }

    /// Posts a request, which this thread sends, or one that is sending already.
    fn post(&self) {
        *self.posted.lock() += 1;
        if world::has(Plant::LeavesNoNote) && self.tx.is_held() {
            return;
        }
        self.tx.drive(|| {
            let requests = std::mem::take(&mut *self.posted.lock());
            if requests > 0 {
                world::call();
                world::spend(requests as u64 * READ);
                // Process the result of the system call before releasing the baton.
                world::call();
            }
        });
    }

    /// No thread can run. Checks that all requests were sent.
    pub(crate) fn check(&self) {
        assert_eq!(*self.posted.lock(), 0, "a request is not sent");
    }

    /// Returns `true` if there is something to read.
    pub(crate) fn has_more(&self) -> bool {
        world::waiting(self.fd) > 0
    }

    /// Returns until when programs may drive the socket by a lease, or `None` if no program has a
    /// lease at `now`.
    pub(crate) fn lease(&self, now: u64) -> Option<u64> {
        let own = self.queue.pollers.driven_until(now);
        let own = own.filter(|_| !world::is_handed_over(Some(self.queue.number)));
        let of_all = everything()
            .end(now)
            .filter(|_| !world::is_handed_over(None));
        own.max(of_all)
    }

    fn drive(&self) -> bool {
        self.rx.drive(|| {
            world::call();
            let messages = world::take_all(self.fd);
            for _ in 0..messages {
                world::spend(READ);
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
        let mut resting = self.resting.lock();
        if !*resting {
            self.engine.pause(self);
            *resting = true;
        }
        true
    }

    fn resume_watch(&self) {
        let mut resting = self.resting.lock();
        if *resting && !world::has(Plant::NeverResumes) {
            self.engine
                .resume(self, self.token, Interest::READ)
                .expect("it is not watched");
            *resting = false;
        }
    }

    fn timer(self: Arc<Self>, _: u32) {}
}
