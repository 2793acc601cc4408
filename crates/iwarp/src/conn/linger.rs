//! Streams that their queue pair has given up, because it is destroyed or in error. They are closed
//! in the background, so that the last data arrives and the peer learns of the end.
//!
//! The end is a FIN, which TCP retransmits until it is acknowledged. If the last FPDU is cut, the
//! end is a reset. A reset is a single packet: if it is lost, the peer learns of the end when it
//! next sends, or from its keep-alive.
//!
//! Closing a socket with unread data resets the connection, and a reset overtakes data in flight.
//! So the rest of the stream is read and discarded until the peer closes, too. The descriptor is
//! kept while the peer's TCP acknowledges what was sent, and then for a limited time. The limit is
//! longer if the peer does not answer at all: what it has sent arrives when it can be reached
//! again, and must not meet a closed socket. Otherwise closing loses nothing, because the kernel
//! finishes alone.
//!
//! If a Terminate waits for room in the socket, the bytes up to its end are kept and sent first
//! ([`UnsentTail`]). Because they take memory, there are two limits: the stream is reset if the
//! peer's TCP takes nothing for a while, and in any case after some time.
//!
//! Nothing else limits the number of these descriptors, and a peer that drops all packets looks
//! like one that is out of reach. So if there are many, peers that do not answer get no extra time,
//! and the oldest stream is given up when a descriptor is needed.

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

/// How often, and after what time, the exit handler checks whether delayed FINs were sent.
const EXIT_STEPS: u32 = 25;
const EXIT_STEP: Duration = Duration::from_millis(2);

const _: () = assert!(EXIT_STEP.as_millis() * EXIT_STEPS as u128 == MATURITY.as_millis());

/// A stream that its queue pair has given up, and how it ends. It no longer belongs to a queue
/// pair.
pub(crate) struct Closing {
    pub(crate) socket: Arc<Socket>,
    pub(crate) end: StreamEnd,
}

#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The descriptor is closed at once: the peer has closed, too, or the stream is broken.
    Close,
    Fin {
        /// The FIN must not be sent earlier.
        not_before: Option<Time>,
        tail: UnsentTail,
    },
    /// A reset, once the peer's TCP has acknowledged everything, because the last FPDU was cut.
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
    cut: bool,
    /// How long a peer that answers may acknowledge nothing.
    patience: Duration,
    /// How long a peer that does not answer may acknowledge nothing; at least `patience`.
    outage: Duration,
    progress: Mutex<Progress>,
    tail: Mutex<UnsentTail>,
    /// Deadline of the unsent tail, whatever the peer's TCP acknowledges.
    tail_until: Option<Instant>,
    /// The FIN must not be sent yet.
    fin_delayed: AtomicBool,
    /// The FIN is still to be sent.
    fin_pending: AtomicBool,
}

struct Progress {
    unacknowledged: u64,
    /// When that number last decreased.
    since: Instant,
    /// Time until the next check.
    pause: Duration,
}

impl Linger {
    /// Closes the descriptor. The kernel goes on sending what is not acknowledged, and the FIN, for
    /// a time of its own (`tcp_orphan_retries`).
    fn remove(&self) {
        self.engine.remove(&self.socket.stream, self.token);
    }

    /// Returns `true` if the last FPDU that the socket took is cut.
    fn is_cut(&self) -> bool {
        self.cut || !self.tail.lock().is_empty()
    }

    /// Ends the stream now. A cut stream needs a reset.
    fn give_up(&self) {
        if self.is_cut() {
            self.socket.stream.abort();
        }
        self.remove();
    }

    /// Sends the tail and then the FIN. Returns `false` if the connection is broken.
    fn send_tail(&self) -> bool {
        let sent = {
            let mut tail = self.tail.lock();
            // The engine reports once more after another thread has sent everything.
            let was_empty = tail.is_empty();
            let sent = tail.send(&self.socket);
            if sent.is_ok() && !tail.is_empty() {
                return true;
            }
            if was_empty {
                self.watch_for_end();
                return true;
            }
            sent
        };
        if sent.is_err() {
            self.remove();
            return false;
        }
        self.watch_for_end();
        if !self.fin_delayed.load(Ordering::SeqCst) {
            self.shut_down();
        }
        true
    }

    /// Stops watching for writability. Called with the tail locked, or after it was sent, so that
    /// no other thread watches for writability afterwards.
    fn watch_for_end(&self) {
        let _ = self
            .engine
            .modify(&self.socket.stream, self.token, Interest::READ);
    }

    fn shut_down(&self) {
        let _ = self.socket.stream.shutdown_write();
        self.fin_pending.store(false, Ordering::Relaxed);
    }

    /// Checks the progress of the peer's TCP, and closes the stream if it is done or makes no
    /// progress.
    fn check_progress(&self) {
        let tail = self.tail.lock().len();
        if tail != 0 && self.tail_until.is_some_and(|until| until <= Instant::now()) {
            tracing::debug!(tail, "the peer takes too long: its Terminate is dropped");
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
            Reach::Unknown(time_to_tell) => self.patience.max(time_to_tell),
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
            // The peer answers but does not read. A peer that cannot be reached is not reset: when
            // it can be reached again, the kernel sends the data and a FIN, and its MPA finds the
            // end inside an FPDU.
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

/// Returns the time from one check to the next. It soon becomes long even with a `patience` of
/// zero, because a peer that does not answer is checked for much longer.
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

/// Factor: the tail is kept for this many times the time that the peer's TCP may take nothing.
const TAIL_FACTOR: u32 = 12;
/// How long the peer may take to close its direction after a queue pair was destroyed.
const PATIENCE_MAX: Duration = Duration::from_secs(2);
/// Time between two checks of a cut stream. The kernel does not report when the peer has everything
/// and the reset is due.
const CUT_PAUSE_MIN: Duration = Duration::from_millis(1);
const CUT_PAUSE_MAX: Duration = Duration::from_millis(64);

static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The oldest first. Some may be over. A child must not end the streams of its parent.
static LINGERING: ProcessLock<VecDeque<Weak<Linger>>> =
    ProcessLock::own("conn::linger::LINGERING", VecDeque::new());

fn register(linger: &Arc<Linger>) {
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut all = LINGERING.lock();
    // Streams end in any order. Removing entries only when half of them are dead keeps the cost of
    // each low.
    if all.len() > 2 * count + 16 {
        all.retain(|one| one.strong_count() > 0);
    }
    all.push_back(Arc::downgrade(linger));
}

/// Returns `true` if lingering streams have more than a quarter of the process's descriptors.
fn are_too_many() -> bool {
    COUNT.load(Ordering::Relaxed) > limits::descriptors() / 4
}

/// Removes the oldest live stream from the list, and the dead entries before it.
fn take_oldest(all: &mut VecDeque<Weak<Linger>>) -> Option<Arc<Linger>> {
    std::iter::from_fn(|| all.pop_front()).find_map(|one| one.upgrade())
}

/// Gives up the oldest stream, because its descriptor is needed. Returns `false` if there is none.
pub(crate) fn give_up_oldest() -> bool {
    // Unlock before the stream is dropped, which takes other locks.
    let oldest = take_oldest(&mut LINGERING.lock());
    if let Some(oldest) = &oldest {
        tracing::debug!("the oldest lingering connection is given up: its descriptor is needed");
        oldest.give_up();
    }
    oldest.is_some()
}

/// Returns how many bytes the peer's TCP has acknowledged since the queue pair was created. A FIN
/// counts as one.
pub(crate) fn acknowledged(machine: &Machine, socket: &Socket) -> u64 {
    let waiting = socket.stream.unacknowledged_bytes().unwrap_or(0);
    machine.counters().tx_bytes.wrapping_sub(waiting)
}

impl Closing {
    /// Sets a tail to send before the FIN. A stream that ends otherwise sends nothing more.
    pub(crate) fn send_first(&mut self, unsent: UnsentTail) {
        if let StreamEnd::Fin { tail, .. } = &mut self.end {
            *tail = unsent;
        }
    }

    /// Ends the stream, in the background if that takes time. The caller holds no lock.
    pub(crate) fn run(self, qp: &QpInner) {
        let Self { socket, end } = self;
        // This drops the engine's handle to the queue pair.
        socket.engine.remove(&socket.stream, socket.token);
        if socket.engine.is_foreign() {
            // In a forked child only closing the descriptor does not affect the parent.
            return;
        }
        match end {
            StreamEnd::Close => {}
            StreamEnd::Reset => {
                if socket.stream.unacknowledged_bytes().unwrap_or(0) == 0 {
                    return socket.stream.abort();
                }
                linger_on(qp, &socket, true, None, UnsentTail::default());
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
                    if drained(&socket) {
                        return;
                    }
                }
                linger_on(qp, &socket, false, delay, tail);
            }
        }
    }
}

/// Keeps the descriptor of a stream in the background. The FIN is sent after `delay` at the
/// earliest.
fn linger_on(
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
    let begin = delay.unwrap_or_default();
    let start = Instant::now() + begin;
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
        static WAIT: AtExit = AtExit::new(end_of_process);
        WAIT.plan();
    }
    register(&lingering);
    let source = Arc::clone(&lingering) as Arc<dyn Source>;
    if engine.add(&socket.stream, token, interest, source).is_err() {
        // No thread would serve the stream. The kernel finishes alone, but must not end the stream
        // inside an FPDU.
        if lingering.is_cut() {
            socket.stream.abort();
        }
        return;
    }
    if let Some(delay) = delay {
        engine.after(delay, token, TIMER_SHUTDOWN);
    }
    engine.after(begin + pause, token, TIMER_CHECK);
}

/// Waits in an exit handler for delayed FINs, at most for [`MATURITY`]. The progress thread still
/// runs.
fn end_of_process() {
    for _ in 0..EXIT_STEPS {
        if !any_fin_pending() {
            break;
        }
        std::thread::sleep(EXIT_STEP);
    }
}

fn any_fin_pending() -> bool {
    // A program may exit in a signal handler on a thread that holds the lock.
    let all: Vec<_> = match LINGERING.try_lock() {
        Some(all) => all.iter().filter_map(Weak::upgrade).collect(),
        None => return true,
    };
    // Dropping the last handle takes other locks, so the list is unlocked by now.
    all.iter()
        .any(|one| one.fin_pending.load(Ordering::Relaxed))
}

/// Reads and discards. Returns `true` if the stream has ended or is broken.
fn drained(socket: &Socket) -> bool {
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
        if readable && drained(&self.socket) {
            let tail = self.tail.lock();
            if !broken && !tail.is_empty() {
                // The peer has closed only its direction, and may still read. While the socket were
                // watched for reading, the engine would report that end all the time.
                let _ = self
                    .engine
                    .modify(&self.socket.stream, self.token, Interest::WRITE);
                return true;
            }
            drop(tail);
            // A cut stream is reset: the peer reads no more.
            self.give_up();
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind != TIMER_SHUTDOWN {
            return self.check_progress();
        }
        // Before the tail is checked: the thread that sends the last of it checks this flag
        // afterwards.
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
