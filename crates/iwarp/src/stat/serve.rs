//! Answers other processes that ask: the listening socket, and the few connections that are answered at a time.
//!
//! The progress thread does all of it. It writes one piece and then pauses, so that it soon returns to the sockets of queue
//! pairs. An application thread that polls the whole set may see a new connection first. It only takes the socket out of the set
//! and sets a timer, which the progress thread serves.

use super::document::Document;
use crate::engine::{Engine, Source};
use crate::sys::poller::Interest;
use crate::sys::sockopt::peer_credentials;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags, accept_with, send, shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most connections answered at the same time. Further ones wait until one of these has its answer.
const ASKERS_MAX: usize = 4;
/// Most connections accepted or refused in one turn.
const TURN_MAX: usize = 16;
/// The pause between two pieces of an answer.
const PAUSE: Duration = Duration::from_micros(500);
/// A connection that has taken no octet of its answer for this long is ended.
const DEADLINE: Duration = Duration::from_secs(2);
/// A connection that takes its answer slowly is ended after this long.
const LONGEST: Duration = Duration::from_secs(30);

const TIMER_TURN: u32 = 0;
const TIMER_DEADLINE: u32 = 1;

/// The socket at which this process is asked.
pub(super) struct Desk {
    engine: Arc<Engine>,
    token: u64,
    socket: OwnedFd,
    askers: AtomicUsize,
}

impl Desk {
    /// Serves the listening socket `socket` until the process ends.
    ///
    /// # Errors
    /// The kernel's error if the socket cannot be watched.
    pub(super) fn open(engine: &Arc<Engine>, socket: OwnedFd) -> std::io::Result<Arc<Self>> {
        let token = engine.token();
        let desk = Arc::new(Self {
            engine: Arc::clone(engine),
            token,
            socket,
            askers: AtomicUsize::new(0),
        });
        engine.add(
            &desk.socket,
            token,
            Interest::READ,
            Arc::clone(&desk) as Arc<dyn Source>,
        )?;
        Ok(desk)
    }

    /// Accepts waiting connections. Returns `false` if it must accept no more for the moment.
    fn accept(self: &Arc<Self>) -> bool {
        for _ in 0..TURN_MAX {
            if self.askers.load(Ordering::Relaxed) >= ASKERS_MAX {
                return false;
            }
            match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) if may_ask(socket.as_fd()) => Asker::begin(self, socket),
                Ok(_) | Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                // No descriptors are left. Try again later, when some may be free.
                Err(_) => {
                    self.engine.after(DEADLINE, self.token, TIMER_TURN);
                    return false;
                }
            }
        }
        true
    }

    /// Frees the place of a connection that has ended.
    fn leave(&self) {
        self.askers.fetch_sub(1, Ordering::Relaxed);
        self.engine.after(Duration::ZERO, self.token, TIMER_TURN);
    }
}

/// Returns `true` if the process at the other end belongs to the same user or to root. The socket's mode ensures the same,
/// unless it has been changed.
fn may_ask(socket: BorrowedFd<'_>) -> bool {
    let own = rustix::process::geteuid().as_raw();
    peer_credentials(socket).is_ok_and(|who| who.uid == 0 || who.uid == own)
}

impl Source for Desk {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.engine.pause(&self.socket);
        self.engine.after(Duration::ZERO, self.token, TIMER_TURN);
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        if self.accept() {
            // The socket may be in the set already, if two timers were set.
            let _ = self.engine.resume(&self.socket, self.token, Interest::READ);
        }
    }
}

/// A connection whose answer is being written.
struct Asker {
    desk: Arc<Desk>,
    token: u64,
    socket: OwnedFd,
    begin: Instant,
    /// The answer, or `None` after its end.
    answer: Mutex<Option<Pieces>>,
}

/// An answer that is being written.
struct Pieces {
    document: Document,
    /// The octets of the current piece, those written included.
    piece: Vec<u8>,
    written: usize,
    /// The time at which the socket last took an octet.
    moved: Instant,
}

/// The result of a turn.
enum Turn {
    /// The next piece comes after a pause.
    Again,
    /// The socket is full.
    Full,
    /// The answer is complete, or the other end is gone.
    Over,
}

impl Asker {
    fn begin(desk: &Arc<Desk>, socket: OwnedFd) {
        let engine = &desk.engine;
        let token = engine.token();
        desk.askers.fetch_add(1, Ordering::Relaxed);
        let asker = Arc::new(Self {
            desk: Arc::clone(desk),
            token,
            socket,
            begin: Instant::now(),
            answer: Mutex::new(Some(Pieces {
                document: Document::new(),
                piece: Vec::new(),
                written: 0,
                moved: Instant::now(),
            })),
        });
        engine.add_timed(token, asker);
        engine.after(Duration::ZERO, token, TIMER_TURN);
        engine.after(DEADLINE, token, TIMER_DEADLINE);
    }

    fn turn(&self) -> Turn {
        let mut answer = self.answer.lock();
        let Some(pieces) = &mut *answer else {
            return Turn::Over;
        };
        if pieces.written == pieces.piece.len() {
            match pieces.document.next() {
                Some(text) => (pieces.piece, pieces.written) = (text.into_bytes(), 0),
                None => return Turn::Over,
            }
        }
        let rest = pieces.piece.get(pieces.written..).unwrap_or_default();
        match send(
            &self.socket,
            rest,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(n) => {
                pieces.written += n;
                pieces.moved = Instant::now();
                Turn::Again
            }
            Err(Errno::INTR) => Turn::Again,
            Err(Errno::AGAIN) => Turn::Full,
            Err(_) => Turn::Over,
        }
    }

    /// Ends the connection if the other end has not read for too long.
    fn deadline(&self) {
        let silent = match &*self.answer.lock() {
            Some(pieces) => pieces.moved.elapsed(),
            None => return,
        };
        let left = DEADLINE.saturating_sub(silent);
        if left.is_zero() || self.begin.elapsed() >= LONGEST {
            self.end();
        } else {
            self.desk.engine.after(left, self.token, TIMER_DEADLINE);
        }
    }

    fn end(&self) {
        if self.answer.lock().take().is_none() {
            return;
        }
        // A child that was forked meanwhile has this descriptor, too, so closing it here would not end the answer.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.desk.engine.remove(&self.socket, self.token);
        self.desk.leave();
    }
}

impl Source for Asker {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.desk.engine.pause(&self.socket);
        self.desk
            .engine
            .after(Duration::ZERO, self.token, TIMER_TURN);
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        let engine = &self.desk.engine;
        if kind == TIMER_DEADLINE {
            self.deadline();
            return;
        }
        match self.turn() {
            Turn::Again => engine.after(PAUSE, self.token, TIMER_TURN),
            Turn::Full => {
                if engine
                    .resume(&self.socket, self.token, Interest::WRITE)
                    .is_err_and(|e| e.kind() != std::io::ErrorKind::AlreadyExists)
                {
                    self.end();
                }
            }
            Turn::Over => self.end(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket_with};
    use std::io::Read;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};

    /// A process that cannot accept, as when it has no descriptors left, is asked again later.
    #[test]
    fn who_cannot_accept_tries_again() {
        let name = format!("iwarp-serve-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &address).unwrap();
        let engine = Engine::current().unwrap();
        // Not watched, so that nobody else tries.
        let token = engine.token();
        let desk = Arc::new(Desk {
            engine: Arc::clone(&engine),
            token,
            socket,
            askers: AtomicUsize::new(0),
        });
        engine.add_timed(token, Arc::clone(&desk) as Arc<dyn Source>);
        assert!(!desk.accept(), "it does not listen");
        listen(&desk.socket, 8).unwrap();
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let mut asks = UnixStream::connect_addr(&address).unwrap();
        asks.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut answer = String::new();
        asks.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with('{'), "{answer}");
        engine.remove(&desk.socket, token);
    }

    /// A desk with a socket that listens and that no engine watches.
    fn desk(name: &str) -> (Arc<Desk>, SocketAddr) {
        let name = format!("iwarp-serve-{name}-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &address).unwrap();
        listen(&socket, 8).unwrap();
        let engine = Engine::current().unwrap();
        let token = engine.token();
        let desk = Arc::new(Desk {
            engine: Arc::clone(&engine),
            token,
            socket,
            askers: AtomicUsize::new(0),
        });
        engine.add_timed(token, Arc::clone(&desk) as Arc<dyn Source>);
        (desk, SocketAddr::from_abstract_name(name).unwrap())
    }

    #[test]
    fn free_place_admits_waiting_connection() {
        let (desk, address) = desk("place");
        desk.askers.store(ASKERS_MAX, Ordering::Relaxed);
        let mut asks = UnixStream::connect_addr(&address).unwrap();
        asks.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert!(!desk.accept(), "all places are taken");
        desk.leave();
        let mut answer = String::new();
        asks.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with('{'), "{answer}");
        desk.engine.remove(&desk.socket, desk.token);
    }

    /// A connection that always takes a little is ended nevertheless.
    #[test]
    fn slow_answer_has_a_limit() {
        let (desk, address) = desk("limit");
        let _asks = UnixStream::connect_addr(&address).unwrap();
        let socket = accept_with(&desk.socket, SocketFlags::NONBLOCK).unwrap();
        desk.askers.fetch_add(1, Ordering::Relaxed);
        let begin = |age| {
            Instant::now()
                .checked_sub(age)
                .expect("the clock began earlier")
        };
        let mut asker = Asker {
            token: desk.engine.token(),
            desk: Arc::clone(&desk),
            socket,
            begin: begin(Duration::ZERO),
            answer: Mutex::new(Some(Pieces {
                document: Document::new(),
                piece: Vec::new(),
                written: 0,
                moved: Instant::now(),
            })),
        };
        asker.deadline();
        assert!(asker.answer.lock().is_some());
        asker.begin = begin(LONGEST);
        asker.deadline();
        assert!(asker.answer.lock().is_none());
        desk.engine.remove(&desk.socket, desk.token);
    }
}
