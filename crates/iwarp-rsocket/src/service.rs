//! The service thread does the work that must not depend on calls of the program: it answers
//! connection requests, sends keep-alive messages, and ends connections of closed sockets. It
//! starts when it is first needed, and sleeps when it has nothing to do.
//!
//! TCP's FIN must not directly follow the farewell message: the kernel's siw drops unprocessed
//! data, including the farewell, when the FIN arrives. So the side that sends the farewell first
//! waits for the other side to close, for a bounded time.
//!
//! The thread accesses sockets through the trait [`Client`], because sockets use this room.

use crate::errno::Result;
use crate::fork;
use crate::stream::Stream;
use iwarp::runtime::ProcessLock;
use iwarp::runtime::cm::CmId;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

pub(crate) trait Client: Send + Sync {
    /// Answers connection requests.
    fn serve(&self);

    /// Sends a message that only checks whether the peer is alive.
    fn keep_alive(&self);

    /// Sends gathered data that was there at the last call already. Returns `false` if there was
    /// none for a while, so that no further call is needed.
    fn send_old_tail(&self) -> bool;
}

/// Interval at which gathered data is checked.
const TAIL_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Default)]
struct Service {
    is_running: bool,
    kicked: bool,
    listeners: Vec<Weak<dyn Client>>,
    keep_alives: Vec<KeepAlive>,
    /// Sockets that have gathered data, or had some lately.
    tails: Vec<Weak<dyn Client>>,
    tails_due: Option<Instant>,
    ending: Vec<Ending>,
}

/// A connection whose socket is closed at this end, but not at the peer.
struct Ending {
    stream: Box<Stream>,
    id: CmId,
    deadline: Instant,
}

impl Ending {
    /// Frees the connection. The identifier and a pending event in its channel refer to each other,
    /// so dropping only the identifier would leak both and the channel's descriptor.
    fn finish(&mut self) {
        self.stream.destroy(false);
        self.id.destroy();
    }
}

struct KeepAlive {
    socket: Weak<dyn Client>,
    interval: Duration,
    due: Instant,
}

/// A child starts without its parent's entries.
static SERVICE: ProcessLock<Service> = ProcessLock::own(
    "rsocket::service::SERVICE",
    Service {
        is_running: false,
        kicked: false,
        listeners: Vec::new(),
        keep_alives: Vec::new(),
        tails: Vec::new(),
        tails_due: None,
        ending: Vec::new(),
    },
);
/// The number of connections that are being ended, and the fork generation they belong to.
static ENDING_COUNT: AtomicUsize = AtomicUsize::new(0);
static ENDING_GENERATION: AtomicU32 = AtomicU32::new(0);
static CHANGED: Condvar = Condvar::new();

fn weak<C: Client + 'static>(socket: &Arc<C>) -> Weak<dyn Client> {
    let this: Weak<C> = Arc::downgrade(socket);
    this
}

/// Wakes the service thread, because a listener has requests.
pub(crate) fn kick() {
    SERVICE.lock().kicked = true;
    CHANGED.notify_all();
}

/// Answers a listener's requests from now on. Fails if the thread cannot be started.
pub(crate) fn watch_listener<C: Client + 'static>(socket: &Arc<C>) -> Result<()> {
    let mut service = lock_running()?;
    service.listeners.retain(|l| l.strong_count() > 0);
    service.listeners.push(weak(socket));
    // A request may have arrived before the listener was added.
    service.kicked = true;
    drop(service);
    CHANGED.notify_all();
    Ok(())
}

/// Sends keep-alive messages on an idle connection at this interval; `None` stops them. Fails if
/// the thread cannot be started.
pub(crate) fn keep_alive<C: Client + 'static>(
    socket: &Arc<C>,
    interval: Option<Duration>,
) -> Result<()> {
    let mut service = lock_running()?;
    let this = weak(socket);
    service.keep_alives.retain(|k| !k.socket.ptr_eq(&this));
    if let Some(interval) = interval {
        service.keep_alives.push(KeepAlive {
            socket: this,
            interval,
            due: Instant::now() + interval,
        });
    }
    drop(service);
    CHANGED.notify_all();
    Ok(())
}

/// Calls [`Client::send_old_tail`] regularly, until it returns `false`. The caller may hold the
/// socket's lock. Fails if the thread cannot be started.
pub(crate) fn watch_tail<C: Client + 'static>(socket: Weak<C>) -> Result<()> {
    let mut service = lock_running()?;
    service.tails.push(socket);
    let is_first = service.tails_due.is_none();
    service
        .tails_due
        .get_or_insert_with(|| Instant::now() + TAIL_INTERVAL);
    drop(service);
    if is_first {
        CHANGED.notify_all();
    }
    Ok(())
}

/// Ends a connection when the peer closes, or after `timeout`.
pub(crate) fn end(stream: Box<Stream>, id: CmId, timeout: Duration) {
    let mut ending = Ending {
        stream,
        id,
        deadline: Instant::now() + timeout,
    };
    let Ok(mut service) = lock_running() else {
        return ending.finish();
    };
    ENDING_COUNT.fetch_add(1, Ordering::AcqRel);
    service.ending.push(ending);
    service.kicked = true;
    drop(service);
    CHANGED.notify_all();
}

/// Returns the number of connections that are being ended. Process exit waits for them.
pub(crate) fn ending_count() -> usize {
    if ENDING_GENERATION.load(Ordering::Acquire) != fork::generation() {
        return 0;
    }
    ENDING_COUNT.load(Ordering::Acquire)
}

struct Kick;

impl Wake for Kick {
    fn wake(self: Arc<Self>) {
        kick();
    }
}

fn finish_if_over(ending: &mut Ending, waker: &Waker) -> bool {
    ending.stream.cq.wake_at_next(waker);
    ending.stream.process(false);
    let over = ending.stream.is_over() || Instant::now() >= ending.deadline;
    if over {
        ending.finish();
        ENDING_COUNT.fetch_sub(1, Ordering::AcqRel);
    }
    over
}

/// Returns the locked service, and starts the thread if it is not running. Fails if the thread
/// cannot be started.
fn lock_running() -> Result<MutexGuard<'static, Service>> {
    let mut service = SERVICE.lock();
    if !service.is_running {
        ENDING_COUNT.store(0, Ordering::Release);
        ENDING_GENERATION.store(fork::generation(), Ordering::Release);
        spawn_without_signals()?;
        service.is_running = true;
    }
    Ok(service)
}

/// Blocks signals in the thread, so that handlers run on the program's threads only.
fn spawn_without_signals() -> Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are writable, and the first is filled before it is read.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = std::thread::Builder::new()
        .name("iwarp-rsocket".into())
        .spawn(run);
    if masked == 0 {
        // SAFETY: the call above filled the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    spawned?;
    Ok(())
}

fn run() {
    let waker = Waker::from(Arc::new(Kick));
    loop {
        let Work {
            listeners,
            keep_alives,
            mut tails,
            mut ending,
        } = wait_for_work(SERVICE.lock());
        for listener in listeners {
            listener.serve();
        }
        for socket in keep_alives {
            socket.keep_alive();
        }
        tails.retain(|socket| socket.send_old_tail());
        ending.retain_mut(|e| !finish_if_over(e, &waker));
        SERVICE.lock().put_back(&tails, ending);
    }
}

fn wait_for_work(mut service: MutexGuard<'static, Service>) -> Work {
    loop {
        if std::mem::take(&mut service.kicked) {
            return service.take_work();
        }
        let due = service.next_due();
        let remaining = due.map(|due| due.saturating_duration_since(Instant::now()));
        service = match remaining {
            Some(Duration::ZERO) => return service.take_work(),
            Some(remaining) => CHANGED
                .wait_timeout(service, remaining)
                .map(|(service, _)| service)
                .unwrap_or_else(|poisoned| poisoned.into_inner().0),
            None => CHANGED
                .wait(service)
                .unwrap_or_else(PoisonError::into_inner),
        };
    }
}

struct Work {
    listeners: Vec<Arc<dyn Client>>,
    keep_alives: Vec<Arc<dyn Client>>,
    tails: Vec<Arc<dyn Client>>,
    ending: Vec<Ending>,
}

impl Service {
    fn next_due(&self) -> Option<Instant> {
        let keep_alives = self.keep_alives.iter().map(|k| k.due);
        keep_alives
            .chain(self.tails_due)
            .chain(self.ending.iter().map(|e| e.deadline))
            .min()
    }

    fn take_work(&mut self) -> Work {
        let now = Instant::now();
        self.keep_alives.retain(|k| k.socket.strong_count() > 0);
        let due = self.keep_alives.iter_mut().filter(|k| k.due <= now);
        let keep_alives = due
            .filter_map(|k| {
                k.due = now + k.interval;
                k.socket.upgrade()
            })
            .collect();
        let tails = match self.tails_due.take_if(|due| *due <= now) {
            Some(_) => std::mem::take(&mut self.tails),
            None => Vec::new(),
        };
        Work {
            tails: tails.iter().filter_map(Weak::upgrade).collect(),
            listeners: self.listeners.iter().filter_map(Weak::upgrade).collect(),
            keep_alives,
            ending: std::mem::take(&mut self.ending),
        }
    }

    /// Returns work that is not finished.
    fn put_back(&mut self, tails: &[Arc<dyn Client>], mut ending: Vec<Ending>) {
        self.ending.append(&mut ending);
        self.tails.extend(tails.iter().map(Arc::downgrade));
        if !self.tails.is_empty() {
            self.tails_due
                .get_or_insert_with(|| Instant::now() + TAIL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::socket::Socket;

    /// A socket has at most one keep-alive timer.
    #[test]
    fn new_interval_replaces_timer() {
        let hour = Duration::from_secs(3600);
        let new = || Socket::create(libc::AF_INET, Options::new(false, false)).unwrap();
        let timers = |socket: &Arc<Socket>| {
            let (this, service) = (weak(socket), SERVICE.lock());
            let own = service
                .keep_alives
                .iter()
                .filter(|k| k.socket.ptr_eq(&this));
            own.map(|k| k.interval).collect::<Vec<_>>()
        };
        let (socket, other) = (new(), new());
        keep_alive(&other, Some(hour * 5)).unwrap();
        for interval in [hour, hour * 2, hour] {
            keep_alive(&socket, Some(interval)).unwrap();
            assert_eq!(timers(&socket), [interval]);
        }
        keep_alive(&socket, None).unwrap();
        assert_eq!(timers(&socket), []);
        assert_eq!(timers(&other), [hour * 5]);
    }
}
