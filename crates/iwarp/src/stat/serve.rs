//! Answers other processes: the listening socket, and a few connections at a time.
//!
//! All work is done by the progress thread. It writes one piece and then pauses, so that it soon
//! returns to the sockets of queue pairs. If an application thread that polls the whole set sees a
//! new connection first, it only removes the socket from the set and starts a timer for the
//! progress thread.

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

/// Maximum of connections answered at the same time. Others wait until one of these is done.
const CLIENTS_MAX: usize = 4;
/// Maximum of connections accepted or refused per turn.
const TURN_MAX: usize = 16;
/// Pause between two pieces of an answer.
const PAUSE: Duration = Duration::from_micros(500);
/// Time without progress after which a connection is closed.
const DEADLINE: Duration = Duration::from_secs(2);
/// Total time after which a slow connection is closed.
const LONGEST: Duration = Duration::from_secs(30);

const TIMER_TURN: u32 = 0;
const TIMER_DEADLINE: u32 = 1;

/// The socket that other processes connect to.
pub(super) struct Server {
    engine: Arc<Engine>,
    token: u64,
    socket: OwnedFd,
    clients: AtomicUsize,
}

impl Server {
    /// Serves the listening socket `socket` until the process ends.
    ///
    /// # Errors
    /// The kernel's error if the socket cannot be watched.
    pub(super) fn open(engine: &Arc<Engine>, socket: OwnedFd) -> std::io::Result<Arc<Self>> {
        let token = engine.token();
        let server = Arc::new(Self {
            engine: Arc::clone(engine),
            token,
            socket,
            clients: AtomicUsize::new(0),
        });
        engine.add(
            &server.socket,
            token,
            Interest::READ,
            Arc::clone(&server) as Arc<dyn Source>,
        )?;
        Ok(server)
    }

    /// Accepts waiting connections. Returns `false` if it has to pause.
    fn accept(self: &Arc<Self>) -> bool {
        for _ in 0..TURN_MAX {
            if self.clients.load(Ordering::Relaxed) >= CLIENTS_MAX {
                return false;
            }
            match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) if may_ask(socket.as_fd()) => Client::begin(self, socket),
                Ok(_) | Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                // No file descriptors are left. Retry later.
                Err(_) => {
                    self.engine.after(DEADLINE, self.token, TIMER_TURN);
                    return false;
                }
            }
        }
        true
    }

    fn leave(&self) {
        self.clients.fetch_sub(1, Ordering::Relaxed);
        self.engine.after(Duration::ZERO, self.token, TIMER_TURN);
    }
}

/// Returns `true` if the client belongs to the same user or to root. The socket's mode ensures the
/// same unless it was changed.
fn may_ask(socket: BorrowedFd<'_>) -> bool {
    let own = rustix::process::geteuid().as_raw();
    peer_credentials(socket).is_ok_and(|who| who.uid == 0 || who.uid == own)
}

impl Source for Server {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.engine.pause(&self.socket);
        self.engine.after(Duration::ZERO, self.token, TIMER_TURN);
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        if self.accept() {
            // The socket may already be in the set, if two timers were started.
            let _ = self.engine.resume(&self.socket, self.token, Interest::READ);
        }
    }
}

struct Client {
    server: Arc<Server>,
    token: u64,
    socket: OwnedFd,
    begin: Instant,
    /// The answer; `None` after its end.
    answer: Mutex<Option<Pieces>>,
}

struct Pieces {
    document: Document,
    /// Current piece, including what was written.
    piece: Vec<u8>,
    written: usize,
    /// Time of the last progress.
    moved: Instant,
}

enum Turn {
    Again,
    Full,
    /// The answer is complete, or the client has disconnected.
    Over,
}

impl Client {
    fn begin(server: &Arc<Server>, socket: OwnedFd) {
        let engine = &server.engine;
        let token = engine.token();
        server.clients.fetch_add(1, Ordering::Relaxed);
        let client = Arc::new(Self {
            server: Arc::clone(server),
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
        engine.add_timed(token, client);
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

    /// Closes the connection if the client has not read for too long.
    fn deadline(&self) {
        let silent = match &*self.answer.lock() {
            Some(pieces) => pieces.moved.elapsed(),
            None => return,
        };
        let left = DEADLINE.saturating_sub(silent);
        if left.is_zero() || self.begin.elapsed() >= LONGEST {
            self.end();
        } else {
            self.server.engine.after(left, self.token, TIMER_DEADLINE);
        }
    }

    fn end(&self) {
        if self.answer.lock().take().is_none() {
            return;
        }
        // A child forked meanwhile has this descriptor, too, so closing it here would not end the
        // answer.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.server.engine.remove(&self.socket, self.token);
        self.server.leave();
    }
}

impl Source for Client {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.server.engine.pause(&self.socket);
        self.server
            .engine
            .after(Duration::ZERO, self.token, TIMER_TURN);
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        let engine = &self.server.engine;
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

    /// A socket that cannot be accepted, for lack of descriptors, is tried again later.
    #[test]
    fn failed_accept_is_retried() {
        let name = format!("iwarp-serve-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &address).unwrap();
        let engine = Engine::current().unwrap();
        // Not watched, so that no other thread accepts.
        let token = engine.token();
        let server = Arc::new(Server {
            engine: Arc::clone(&engine),
            token,
            socket,
            clients: AtomicUsize::new(0),
        });
        engine.add_timed(token, Arc::clone(&server) as Arc<dyn Source>);
        assert!(!server.accept(), "it does not listen");
        listen(&server.socket, 8).unwrap();
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let mut asks = UnixStream::connect_addr(&address).unwrap();
        asks.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut answer = String::new();
        asks.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with('{'), "{answer}");
        engine.remove(&server.socket, token);
    }

    /// Returns a server with a listening socket that no engine watches.
    fn listening_server(name: &str) -> (Arc<Server>, SocketAddr) {
        let name = format!("iwarp-serve-{name}-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &address).unwrap();
        listen(&socket, 8).unwrap();
        let engine = Engine::current().unwrap();
        let token = engine.token();
        let server = Arc::new(Server {
            engine: Arc::clone(&engine),
            token,
            socket,
            clients: AtomicUsize::new(0),
        });
        engine.add_timed(token, Arc::clone(&server) as Arc<dyn Source>);
        (server, SocketAddr::from_abstract_name(name).unwrap())
    }

    #[test]
    fn free_place_admits_waiting_connection() {
        let (server, address) = listening_server("place");
        server.clients.store(CLIENTS_MAX, Ordering::Relaxed);
        let mut asks = UnixStream::connect_addr(&address).unwrap();
        asks.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert!(!server.accept(), "all places are taken");
        server.leave();
        let mut answer = String::new();
        asks.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with('{'), "{answer}");
        server.engine.remove(&server.socket, server.token);
    }

    /// A connection that reads slowly is closed nevertheless.
    #[test]
    fn slow_answer_has_a_limit() {
        let (server, address) = listening_server("limit");
        let _asks = UnixStream::connect_addr(&address).unwrap();
        let socket = accept_with(&server.socket, SocketFlags::NONBLOCK).unwrap();
        server.clients.fetch_add(1, Ordering::Relaxed);
        let begin = |age| {
            Instant::now()
                .checked_sub(age)
                .expect("the clock began earlier")
        };
        let mut client = Client {
            token: server.engine.token(),
            server: Arc::clone(&server),
            socket,
            begin: begin(Duration::ZERO),
            answer: Mutex::new(Some(Pieces {
                document: Document::new(),
                piece: Vec::new(),
                written: 0,
                moved: Instant::now(),
            })),
        };
        client.deadline();
        assert!(client.answer.lock().is_some());
        client.begin = begin(LONGEST);
        client.deadline();
        assert!(client.answer.lock().is_none());
        server.engine.remove(&server.socket, server.token);
    }
}
