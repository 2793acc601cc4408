//! Streams that their queue pair has given up, because it was destroyed or is in error. They are
//! closed in the background, so that the last data arrives and the peer notices the end.
//!
//! The end is a FIN, which TCP retransmits until it is acknowledged. If the last FPDU is cut, the
//! end is a reset. A reset is a single packet: if it is lost, the peer notices the end when it next
//! sends, or by its keep-alive.
//!
//! Closing a socket with unread data sends a reset, and on a reset the peer's TCP may discard data
//! that it has not delivered. So the rest of the stream is read and discarded until the peer
//! closes, too. The descriptor stays open while the peer's TCP acknowledges data, and for a limited
//! time after that. The limit is longer if the peer does not answer at all: when it is reachable
//! again, its own data arrives, and must not find a closed socket. Otherwise, closing loses
//! nothing, because the kernel finishes the connection.
//!
//! If a Terminate waits for room in the socket, the octets up to its end are kept and sent first
//! ([`UnsentTail`]). Because they need memory, there are two limits: the stream is reset if the
//! peer's TCP takes no data for a while, and in any case after some time.
//!
//! Nothing else limits the number of these descriptors, and a peer that drops all packets looks
//! like an unreachable one. So if there are many lingering streams, peers that do not answer get no
//! extra time. When the process needs a descriptor, the oldest stream is given up.

use super::link::Socket;
use super::liveness::Reach;
use super::qp::QpInner;
use super::unsent_tail::UnsentTail;
use crate::engine::{Engine, Source};
use crate::sys::clock::now_ns;
use crate::sys::exit::AtExit;
use crate::sys::limits;
use crate::sys::poller::Interest;
use crate::sys::process_lock::ProcessLock;
use iwarp_rnic::Time;
use iwarp_rnic::qp::QueuePair as Machine;
use iwarp_rnic::startup::MATURITY;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Number of checks of the exit handler whether delayed FINs were sent, and the time between two.
const EXIT_STEPS: u32 = 25;
const EXIT_STEP: Duration = Duration::from_millis(2);

const _: () = assert!(EXIT_STEP.as_millis() * EXIT_STEPS as u128 == MATURITY.as_millis());

/// A stream that its queue pair has given up, and how to end it.
pub(crate) struct Closing {
    pub(crate) socket: Arc<Socket>,
    pub(crate) end: StreamEnd,
}

#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The descriptor is closed at once, because the peer has closed, too, or the stream is broken.
    Close,
    Fin {
        /// The earliest time for the FIN.
        not_before: Option<Time>,
        /// Octets to send before the FIN.
        tail: UnsentTail,
    },
    /// A reset, because the last FPDU was cut. It is sent when the peer's TCP has acknowledged all
    /// data.
    Reset,
}

impl StreamEnd {
    /// Returns the end of a stream whose last FPDU is `cut`, or complete and followed by `tail`.
    pub(crate) fn new(cut: bool, not_before: Option<Time>, tail: UnsentTail) -> Self {
        match cut {
            true => Self::Reset,
            false => Self::Fin { not_before, tail },
        }
    }
}

struct Linger {
    socket: Arc<Socket>,
    token: u64,
    engine: Arc<Engine>,
    /// The last FPDU is cut, so the stream ends with a reset.
    cut: bool,
    /// How long a peer that answers may acknowledge nothing.
    patience: Duration,
    /// How long a peer that does not answer may acknowledge nothing; at least `patience`.
    outage: Duration,
    progress: Mutex<Progress>,
    tail: Mutex<UnsentTail>,
    /// Deadline for sending the tail.
    tail_until: Option<Instant>,
    /// It is too early for the FIN.
    fin_delayed: AtomicBool,
    /// The FIN is not sent yet.
    fin_pending: AtomicBool,
}

struct Progress {
    /// Number of octets that the peer's TCP has not acknowledged, including the tail.
    unacknowledged: u64,
    /// Time when that number last decreased.
    since: Instant,
    /// Time until the next check.
    pause: Duration,
}

impl Linger {
    /// Closes the descriptor. The kernel goes on sending unacknowledged data and the FIN for a
    /// limited time (`tcp_orphan_retries`).
    fn remove(&self) {
        self.engine.remove(&self.socket.stream, self.token);
    }

    fn is_cut(&self) -> bool {
        self.cut || !self.tail.lock().is_empty()
    }

    fn give_up(&self) {
        if self.is_cut() {
            self.socket.stream.abort();
        }
        self.remove();
    }

    /// Sends the tail and the FIN. Returns `false` if the connection is broken.
    fn send_tail(&self) -> bool {
        let sent = {
            let mut tail = self.tail.lock();
            // The tail may be empty: the engine may report the socket once more after another
            // thread has sent the tail.
            let was_empty = tail.is_empty();
            let sent = tail.send(&self.socket);
            if sent.is_ok() && !tail.is_empty() {
                return true;
            }
            if was_empty {
                self.stop_watching_writability();
                return true;
            }
            sent
        };
        if sent.is_err() {
            self.remove();
            return false;
        }
        self.stop_watching_writability();
        if !self.fin_delayed.load(Ordering::SeqCst) {
            self.shut_down();
        }
        true
    }

    /// Watches the socket only for reading. Called with the tail locked or after it was sent, so
    /// that no other thread watches for writability again.
    fn stop_watching_writability(&self) {
        let _ = self
            .engine
            .modify(&self.socket.stream, self.token, Interest::READ);
    }

    fn shut_down(&self) {
        let _ = self.socket.stream.shutdown_write();
        self.fin_pending.store(false, Ordering::Relaxed);
    }

    /// Closes the stream if the peer's TCP has acknowledged all data, or makes no progress. If not,
    /// sets the timer for the next check.
    fn check_progress(&self) {
        let tail = self.tail.lock().len();
        if tail != 0 && self.tail_until.is_some_and(|until| until <= Instant::now()) {
            tracing::debug!(
                tail,
                "the peer reads too slowly; the Terminate for it is dropped"
            );
            return self.give_up();
        }
        let in_socket = self.socket.stream.unacknowledged_bytes().unwrap_or(0);
        let unacknowledged = in_socket + tail as u64;
        if self.cut && unacknowledged == 0 {
            self.socket.stream.abort();
            return self.remove();
        }
        let mut progress = self.progress.lock();
        if unacknowledged < progress.unacknowledged {
            (progress.unacknowledged, progress.since) = (unacknowledged, Instant::now());
        }
        let quiet = progress.since.elapsed();
        let reach = self.socket.reach(quiet);
        let limit = match reach {
            Reach::Answers => self.patience,
            _ if are_too_many() => self.patience,
            Reach::Silent => self.outage,
            Reach::Unknown(detection_time) => self.patience.max(detection_time),
        };
        let remaining = limit.saturating_sub(quiet);
        if !remaining.is_zero() {
            progress.pause = next_pause(progress.pause, self.cut, self.patience);
            let pause = progress.pause.min(remaining);
            drop(progress);
            self.engine.after(pause, self.token, TIMER_CHECK);
            return;
        }
        drop(progress);
        if self.is_cut() && reach == Reach::Answers {
            // The peer answers but does not read, so reset it. An unreachable peer is not reset:
            // when it is reachable again, the kernel sends the data and a FIN, and the peer's MPA
            // notices the end inside an FPDU.
            self.socket.stream.abort();
        }
        self.remove();
    }
}

fn first_pause(cut: bool, patience: Duration) -> Duration {
    if cut {
        CUT_PAUSE_MIN
    } else {
        patience.max(CUT_PAUSE_MIN)
    }
}

/// Returns the time to the next check. It grows even if `patience` is zero, because a peer that
/// does not answer is checked for much longer.
fn next_pause(pause: Duration, cut: bool, patience: Duration) -> Duration {
    let longest = if cut {
        CUT_PAUSE_MAX
    } else {
        patience.max(CUT_PAUSE_MAX)
    };
    (pause * 2).min(longest)
}

impl Drop for Linger {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

const TIMER_CHECK: u32 = 0;
const TIMER_SHUTDOWN: u32 = 1;

/// Factor: the deadline of the tail is this many times the `patience`.
const TAIL_FACTOR: u32 = 12;
/// How long the peer may take to close its direction after a stream has ended with a FIN.
const PATIENCE_MAX: Duration = Duration::from_secs(2);
/// Shortest and longest time between two checks of a cut stream. The checks are needed because the
/// kernel does not report when the peer has acknowledged all data, and the reset is due.
const CUT_PAUSE_MIN: Duration = Duration::from_millis(1);
const CUT_PAUSE_MAX: Duration = Duration::from_millis(64);

static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Lingering streams, oldest first. Some entries may be dead. A forked child has an empty list,
/// because it must not end the streams of its parent.
static LINGERING: ProcessLock<VecDeque<Weak<Linger>>> =
    ProcessLock::own("conn::linger::LINGERING", VecDeque::new());

fn register(linger: &Arc<Linger>) {
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut all = LINGERING.lock();
    // Remove dead entries only when about half of the entries are dead, so that the cost per stream
    // is low.
    if all.len() > 2 * count + 16 {
        all.retain(|entry| entry.strong_count() > 0);
    }
    all.push_back(Arc::downgrade(linger));
}

fn are_too_many() -> bool {
    COUNT.load(Ordering::Relaxed) > limits::descriptors() / 4
}

/// Removes the oldest live stream from the list, and the dead entries before it.
fn take_oldest(all: &mut VecDeque<Weak<Linger>>) -> Option<Arc<Linger>> {
    std::iter::from_fn(|| all.pop_front()).find_map(|entry| entry.upgrade())
}

/// Gives up the oldest stream, because its descriptor is needed. Returns `false` if there is none.
pub(crate) fn give_up_oldest() -> bool {
    // The lock is released at the end of this statement. Dropping the stream takes other locks.
    let oldest = take_oldest(&mut LINGERING.lock());
    if let Some(oldest) = &oldest {
        tracing::debug!("descriptors are scarce; the oldest lingering connection is closed");
        oldest.give_up();
    }
    oldest.is_some()
}

/// Returns the number of bytes that the peer's TCP has acknowledged since the queue pair was
/// created. A FIN is one byte.
pub(crate) fn acknowledged(machine: &Machine, socket: &Socket) -> u64 {
    let unacknowledged = socket.stream.unacknowledged_bytes().unwrap_or(0);
    machine.counters().tx_bytes.wrapping_sub(unacknowledged)
}

impl Closing {
    /// Sets the tail of a stream that ends with a FIN.
    pub(crate) fn send_first(&mut self, unsent: UnsentTail) {
        if let StreamEnd::Fin { tail, .. } = &mut self.end {
            *tail = unsent;
        }
    }

    /// Ends the stream, in the background if that takes time. The caller holds no lock.
    pub(crate) fn run(self, qp: &QpInner) {
        let Self { socket, end } = self;
        socket.engine.remove(&socket.stream, socket.token);
        if socket.engine.is_foreign() {
            // In a forked child, only drop the descriptor. Anything else would affect the parent.
            return;
        }
        match end {
            StreamEnd::Close => {}
            StreamEnd::Reset => {
                if socket.stream.unacknowledged_bytes().unwrap_or(0) == 0 {
                    return socket.stream.abort();
                }
                end_in_background(qp, &socket, true, None, UnsentTail::default());
            }
            StreamEnd::Fin {
                not_before,
                mut tail,
            } => {
                if tail.send(&socket).is_err() {
                    return;
                }
                let delay = not_before
                    .map(|at| at.since(Time::from_nanos(now_ns())))
                    .filter(|delay| !delay.is_zero());
                if delay.is_none() && tail.is_empty() {
                    let _ = socket.stream.shutdown_write();
                    if drain(&socket) {
                        return;
                    }
                }
                end_in_background(qp, &socket, false, delay, tail);
            }
        }
    }
}

/// Ends a stream in the background. The FIN is sent after `delay` at the earliest.
fn end_in_background(
    qp: &QpInner,
    socket: &Arc<Socket>,
    cut: bool,
    delay: Option<Duration>,
    tail: UnsentTail,
) {
    let engine = Arc::clone(&socket.engine);
    let token = engine.token();
    let linger = qp.ctx.config.linger;
    let patience = if cut || !tail.is_empty() {
        linger
    } else {
        linger.min(PATIENCE_MAX)
    };
    let fin_delay = delay.unwrap_or_default();
    let start = Instant::now() + fin_delay;
    let pause = first_pause(cut, patience);
    let interest = match tail.is_empty() {
        true => Interest::READ,
        false => Interest::BOTH,
    };
    let in_socket = socket.stream.unacknowledged_bytes().unwrap_or(0);
    let fin_pending = delay.is_some() || !tail.is_empty();
    let lingering = Arc::new(Linger {
        socket: Arc::clone(socket),
        token,
        engine: Arc::clone(&engine),
        cut,
        patience,
        outage: qp.ctx.config.peer_timeout.unwrap_or_default().max(patience),
        progress: Mutex::new(Progress {
            unacknowledged: in_socket + tail.len() as u64,
            since: start,
            pause,
        }),
        tail: Mutex::new(tail),
        tail_until: start.checked_add(patience.saturating_mul(TAIL_FACTOR)),
        fin_delayed: AtomicBool::new(delay.is_some()),
        fin_pending: AtomicBool::new(fin_pending),
    });
    if fin_pending {
        static WAIT: AtExit = AtExit::new(wait_for_fins);
        WAIT.plan();
    }
    register(&lingering);
    let source = Arc::clone(&lingering) as Arc<dyn Source>;
    if engine.add(&socket.stream, token, interest, source).is_err() {
        // No thread would serve the stream. The kernel finishes it, but a cut stream must not end
        // with a FIN.
        if lingering.is_cut() {
            socket.stream.abort();
        }
        return;
    }
    if let Some(delay) = delay {
        engine.after(delay, token, TIMER_SHUTDOWN);
    }
    engine.after(fin_delay + pause, token, TIMER_CHECK);
}

/// Exit handler: waits until the progress thread has sent delayed FINs, for at most [`MATURITY`].
fn wait_for_fins() {
    for _ in 0..EXIT_STEPS {
        if !any_fin_pending() {
            break;
        }
        std::thread::sleep(EXIT_STEP);
    }
}

fn any_fin_pending() -> bool {
    lingering().is_none_or(|all| {
        all.iter()
            .any(|linger| linger.fin_pending.load(Ordering::Relaxed))
    })
}

/// Returns how many bytes the peers of all lingering streams have not acknowledged; `None` if that
/// is not known at the moment. For an exit handler.
pub(crate) fn unacknowledged_bytes() -> Option<u64> {
    let bytes = |linger: &Arc<Linger>| linger.socket.stream.unacknowledged_bytes().unwrap_or(0);
    lingering().map(|all| all.iter().map(bytes).sum())
}

/// Returns all lingering streams; `None` if another thread has locked the list. A program may exit
/// in a signal handler, on the thread that holds the lock, so this does not wait.
fn lingering() -> Option<Vec<Arc<Linger>>> {
    // The list is unlocked when this returns: dropping the last reference to a stream takes other
    // locks.
    let all = LINGERING.try_lock()?;
    Some(all.iter().filter_map(Weak::upgrade).collect())
}

/// Reads and discards data. Returns `true` if the stream has ended or is broken.
fn drain(socket: &Socket) -> bool {
    let mut sink = [0u8; 16 * 1024];
    for _ in 0..64 {
        match socket.stream.recv(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() != ErrorKind::WouldBlock,
        }
    }
    false
}

impl Source for Linger {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, broken: bool) -> bool {
        if writable && !self.send_tail() {
            return true;
        }
        if readable && drain(&self.socket) {
            let tail = self.tail.lock();
            if !broken && !tail.is_empty() {
                // The peer has closed only its direction, and may still read the tail. Stop
                // watching for reading, because the engine would report the peer's end again and
                // again.
                let _ = self
                    .engine
                    .modify(&self.socket.stream, self.token, Interest::WRITE);
                return true;
            }
            drop(tail);
            self.give_up();
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind != TIMER_SHUTDOWN {
            return self.check_progress();
        }
        // Store this before the check of the tail: a thread that sends the end of the tail loads it
        // after that.
        self.fin_delayed.store(false, Ordering::SeqCst);
        let is_sent = self.tail.lock().is_empty();
        if is_sent {
            self.shut_down();
        }
    }
}

#[cfg(test)]
#[path = "linger_tests.rs"]
mod tests;
