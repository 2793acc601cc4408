//! Connections that their queue pair has left, because it is destroyed or in error: they are closed
//! in the background, so that what was sent last arrives, and the peer hears of the end.
//!
//! The end is a FIN, which TCP sends again until it is acknowledged. A reset is a single packet: it
//! is sent where the last FPDU is cut, and if it is lost, the peer learns of the end from what it
//! sends next or from its keep-alive.
//!
//! Closing a socket with unread data resets the connection, and a reset overtakes data on their
//! way. So the rest of the stream is read and thrown away until the peer closes too. The descriptor
//! is kept while the peer's TCP acknowledges what was sent, and then for a bounded time, which is
//! longer if the peer does not answer at all: what it has sent meanwhile comes when it can be
//! reached again, and would meet a closed socket. Closing takes nothing else back: the kernel goes
//! on alone.
//!
//! Where a Terminate waits for room in the socket, the octets up to its end are kept and sent first
//! ([`UnsentTail`]). They are given up, and the stream is reset, if the peer's TCP takes nothing
//! for a while, and in any case after some time, because they are memory.
//!
//! No listener counts these descriptors, and a peer that drops what is sent to it looks like one
//! that is out of reach. So if they are many, those that do not answer get no more time than
//! others, and the oldest makes room where a descriptor is needed.

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

/// How often, and after how long each time, the end of the process looks whether what was put off
/// is done.
const EXIT_STEPS: u32 = 25;
const EXIT_STEP: Duration = Duration::from_millis(2);

const _: () = assert!(EXIT_STEP.as_millis() * EXIT_STEPS as u128 == MATURITY.as_millis());

/// A stream that its queue pair has given up, and how it ends. It belongs to no queue pair any
/// more.
pub(crate) struct Closing {
    pub(crate) socket: Arc<Socket>,
    pub(crate) end: StreamEnd,
}

/// How a stream ends that its queue pair has given up.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The descriptor is closed at once: the peer has closed, too, or the stream was reset or is
    /// broken.
    Close,
    /// A FIN.
    Fin {
        /// It must not be sent earlier.
        not_before: Option<Time>,
        /// What is sent before it.
        tail: UnsentTail,
    },
    /// A reset as soon as the peer's TCP has acknowledged everything, because the last FPDU was
    /// written in part.
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
    /// How long the peer's TCP may acknowledge nothing if it answers.
    patience: Duration,
    /// How long it may if it does not answer, not shorter than that.
    outage: Duration,
    progress: Mutex<Progress>,
    tail: Mutex<UnsentTail>,
    /// When it ends whatever the peer's TCP has acknowledged, if there is a rest by then.
    tail_until: Option<Instant>,
    /// The end must not be sent yet.
    early: AtomicBool,
    /// Its end waits.
    waits: AtomicBool,
}

/// How far the peer's TCP has come.
struct Progress {
    unacknowledged: u64,
    /// When that number was last seen to change.
    since: Instant,
    /// Until the next look.
    pause: Duration,
}

impl Linger {
    /// Closes the descriptor. What TCP has and the peer's TCP has not acknowledged, the kernel goes
    /// on sending, with the end behind it, for a time of its own (`tcp_orphan_retries`).
    fn remove(&self) {
        self.engine.remove(&self.socket.stream, self.token);
    }

    /// Returns `true` if the last FPDU that the socket has taken is cut.
    fn is_cut(&self) -> bool {
        self.cut || !self.tail.lock().is_empty()
    }

    /// Ends it at once. A stream that is cut needs a reset.
    fn give_up(&self) {
        if self.is_cut() {
            self.socket.stream.abort();
        }
        self.remove();
    }

    /// Sends the rest, and the end behind it. Returns `false` if the connection is broken.
    fn send_tail(&self) -> bool {
        let sent = {
            let mut tail = self.tail.lock();
            // Reported once more after the end, which another thread may have sent.
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
        if !self.early.load(Ordering::SeqCst) {
            self.shut_down();
        }
        true
    }

    /// There is nothing to send any more. Called with the rest locked or gone, so that no other
    /// thread asks for room after this.
    fn watch_for_end(&self) {
        let _ = self
            .engine
            .modify(&self.socket.stream, self.token, Interest::READ);
    }

    /// Sends the end.
    fn shut_down(&self) {
        let _ = self.socket.stream.shutdown_write();
        self.waits.store(false, Ordering::Relaxed);
    }

    /// Looks how far the peer's TCP has come, and ends it if it is done or makes no progress.
    fn look(&self) {
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
            _ if are_a_crowd() => self.patience,
            Reach::Silent => self.outage,
            Reach::Unknown(time_to_tell) => self.patience.max(time_to_tell),
        };
        let left = limit.saturating_sub(quiet);
        if !left.is_zero() {
            progress.pause = next_pause(progress.pause, self.cut, self.patience);
            let pause = progress.pause.min(left);
            drop(progress);
            self.engine.after(pause, self.token, TIMER_LOOK);
            return;
        }
        drop(progress);
        if self.is_cut() && reach == Reach::Answers {
            // It does not read. One that cannot be reached may be later: the kernel sends what it
            // has then, and the end behind it, which MPA finds in the middle of an FPDU.
            self.socket.stream.abort();
        }
        self.remove();
    }
}

/// Returns the time from the end to the first look.
fn first_pause(cut: bool, patience: Duration) -> Duration {
    if cut {
        CUT_PAUSE_MIN
    } else {
        patience.max(CUT_PAUSE_MIN)
    }
}

/// Returns the time from a look to the next one. Never short for long, though a program may want no
/// patience at all: a peer that does not answer is looked at for much longer.
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

const TIMER_LOOK: u32 = 0;
const TIMER_SHUTDOWN: u32 = 1;

/// How long the rest is kept at most: so many times as long as the peer's TCP may take nothing.
const TAIL_PATIENCES: u32 = 12;
/// How long the peer may take to close its direction after a queue pair was destroyed.
const PATIENCE_MAX: Duration = Duration::from_secs(2);
/// Between looks whether the peer's TCP has everything. Nothing tells that, and a reset is due
/// then.
const CUT_PAUSE_MIN: Duration = Duration::from_millis(1);
const CUT_PAUSE_MAX: Duration = Duration::from_millis(64);

/// Streams that linger.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The oldest first. Some may be over. A child must not end those of its parent.
static LINGERING: ProcessLock<VecDeque<Weak<Linger>>> =
    ProcessLock::own("raw::linger::LEFT", VecDeque::new());

fn remember(linger: &Arc<Linger>) {
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut all = LINGERING.lock();
    // They end in any order. Looking only when half of them are over costs each little.
    if all.len() > 2 * count + 16 {
        all.retain(|one| one.strong_count() > 0);
    }
    all.push_back(Arc::downgrade(linger));
}

/// Returns `true` if they have more than a quarter of the process's descriptors.
fn are_a_crowd() -> bool {
    COUNT.load(Ordering::Relaxed) > limits::descriptors() / 4
}

/// Takes the connection that was left first off the list, and all before it, which are over.
fn take_oldest(all: &mut VecDeque<Weak<Linger>>) -> Option<Arc<Linger>> {
    std::iter::from_fn(|| all.pop_front()).find_map(|one| one.upgrade())
}

/// Gives up the connection that was left first, because its descriptor is needed. Returns `false`
/// if there is none.
pub(crate) fn give_up_oldest() -> bool {
    // The lock is dropped before the connection, which takes others.
    let oldest = take_oldest(&mut LINGERING.lock());
    if let Some(oldest) = &oldest {
        tracing::debug!("a connection that was left is given up: its descriptor is needed");
        oldest.give_up();
    }
    oldest.is_some()
}

/// Octets that the peer's TCP has acknowledged since the queue pair was created; the end of the
/// stream counts as one.
pub(crate) fn acknowledged(machine: &Machine, socket: &Socket) -> u64 {
    let waiting = socket.stream.unacknowledged_bytes().unwrap_or(0);
    machine.counters().tx_bytes.wrapping_sub(waiting)
}

impl Closing {
    /// Has a tail sent before the FIN. A stream that ends otherwise sends nothing more.
    pub(crate) fn send_first(&mut self, unsent: UnsentTail) {
        if let StreamEnd::Fin { tail, .. } = &mut self.end {
            *tail = unsent;
        }
    }

    /// Ends the stream, in the background if that takes time. The caller holds no lock.
    pub(crate) fn run(self, qp: &QpInner) {
        let Self { socket, end } = self;
        // Removing it drops the engine's handle to the queue pair.
        socket.engine.remove(&socket.stream, socket.token);
        if socket.engine.is_foreign() {
            // In a child of the process whose connection this is, closing the descriptor is the
            // only thing that does not affect the parent.
            return;
        }
        match end {
            StreamEnd::Close => {}
            StreamEnd::Reset => {
                if socket.stream.unacknowledged_bytes().unwrap_or(0) == 0 {
                    return socket.stream.abort();
                }
                stay(qp, &socket, true, None, UnsentTail::default());
            }
            StreamEnd::Fin {
                not_before,
                mut tail,
            } => {
                if tail.send(&socket).is_err() {
                    return;
                }
                let early = not_before
                    .map(|at| at.since(Time::from_nanos(now_ns())))
                    .filter(|early| !early.is_zero());
                if early.is_none() && tail.is_empty() {
                    let _ = socket.stream.shutdown_write();
                    if drained(&socket) {
                        return;
                    }
                }
                stay(qp, &socket, false, early, tail);
            }
        }
    }
}

/// Keeps the descriptor of a stream whose end must not be sent for a time of `early`.
fn stay(qp: &QpInner, socket: &Arc<Socket>, cut: bool, early: Option<Duration>, tail: UnsentTail) {
    let engine = Arc::clone(&socket.engine);
    let token = engine.token();
    let linger = qp.ctx.config.linger;
    let patience = if cut || !tail.is_empty() {
        linger
    } else {
        linger.min(PATIENCE_MAX)
    };
    let begin = early.unwrap_or_default();
    let start = Instant::now() + begin;
    let pause = first_pause(cut, patience);
    let interest = match tail.is_empty() {
        true => Interest::READ,
        false => Interest::BOTH,
    };
    let in_socket = socket.stream.unacknowledged_bytes().unwrap_or(0);
    let waits = early.is_some() || !tail.is_empty();
    let left = Arc::new(Linger {
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
        tail_until: start.checked_add(patience.saturating_mul(TAIL_PATIENCES)),
        early: AtomicBool::new(early.is_some()),
        waits: AtomicBool::new(waits),
    });
    if waits {
        static WAIT: AtExit = AtExit::new(end_of_process);
        WAIT.plan();
    }
    remember(&left);
    let source = Arc::clone(&left) as Arc<dyn Source>;
    if engine.add(&socket.stream, token, interest, source).is_err() {
        // No thread would look after it. The kernel does what is left to do, but must not end the
        // stream in the middle of an FPDU.
        if left.is_cut() {
            socket.stream.abort();
        }
        return;
    }
    if let Some(early) = early {
        engine.after(early, token, TIMER_SHUTDOWN);
    }
    engine.after(begin + pause, token, TIMER_LOOK);
}

/// The engine's thread still runs while the exit handlers do. Nothing is put off for longer than
/// [`MATURITY`].
fn end_of_process() {
    for _ in 0..EXIT_STEPS {
        if !any_waits() {
            break;
        }
        std::thread::sleep(EXIT_STEP);
    }
}

/// Returns `true` if the end of a stream waits.
fn any_waits() -> bool {
    // A program may end in a signal handler, on a thread that holds the lock.
    let all: Vec<_> = match LINGERING.try_lock() {
        Some(all) => all.iter().filter_map(Weak::upgrade).collect(),
        None => return true,
    };
    // The last handle may be one of these, and takes other locks when it is dropped.
    all.iter().any(|one| one.waits.load(Ordering::Relaxed))
}

/// Reads and discards. Returns `true` at the end of the stream.
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
                // The peer has closed its direction only, and may read on. That it has would be
                // reported all the time.
                let _ = self
                    .engine
                    .modify(&self.socket.stream, self.token, Interest::WRITE);
                return true;
            }
            drop(tail);
            // If the stream is cut, the peer reads no more.
            self.give_up();
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind != TIMER_SHUTDOWN {
            return self.look();
        }
        // Before the look at the rest: the thread that sends the last of it looks at this
        // afterwards.
        self.early.store(false, Ordering::SeqCst);
        let is_sent = self.tail.lock().is_empty();
        if is_sent {
            self.shut_down();
        }
    }
}

#[cfg(test)]
#[path = "linger_tests.rs"]
mod tests;
