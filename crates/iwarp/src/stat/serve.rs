//! Answers queries of other processes, on a listening socket and a few connections at a time.
//!
//! The progress thread does all the work. It pauses after each piece of an answer, so that it soon
//! returns to the sockets of queue pairs. If an application thread that polls the engine's sockets
//! sees a new connection first, it only stops watching the socket and sets a timer for the progress
//! thread.

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

/// Maximum number of connections answered in parallel. Further connections wait.
const CLIENTS_MAX: usize = 4;
/// Maximum number of connections accepted or refused per timer.
const ACCEPTS_MAX: usize = 16;
/// Pause between two pieces of an answer.
const PAUSE: Duration = Duration::from_micros(500);
/// Time without progress after which a connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// Total time after which a slow connection is closed.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(30);

const TIMER_CONTINUE: u32 = 0;
const TIMER_IDLE: u32 = 1;

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

    /// Accepts waiting connections. Returns `false` if the limit is reached or `accept` failed.
    fn accept(self: &Arc<Self>) -> bool {
        for _ in 0..ACCEPTS_MAX {
            if self.clients.load(Ordering::Relaxed) >= CLIENTS_MAX {
                return false;
            }
            match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) if is_permitted(socket.as_fd()) => Client::begin(self, socket),
                Ok(_) | Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                // No file descriptor is left. Try again later.
                Err(_) => {
                    self.engine.after(IDLE_TIMEOUT, self.token, TIMER_CONTINUE);
                    return false;
                }
            }
        }
        true
    }

    fn client_ended(&self) {
        self.clients.fetch_sub(1, Ordering::Relaxed);
        self.engine
            .after(Duration::ZERO, self.token, TIMER_CONTINUE);
    }
}

/// Returns `true` if the client runs as the same user or root. The socket's mode ensures the same,
/// unless it was changed.
fn is_permitted(socket: BorrowedFd<'_>) -> bool {
    let own = rustix::process::geteuid().as_raw();
    peer_credentials(socket).is_ok_and(|peer| peer.uid == 0 || peer.uid == own)
}

impl Source for Server {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.engine.pause(&self.socket);
        self.engine
            .after(Duration::ZERO, self.token, TIMER_CONTINUE);
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        if self.accept() {
            // Ignore the error: if two timers were set, the engine watches the socket already.
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
    /// Current piece, including octets that were written already.
    piece: Vec<u8>,
    written: usize,
    last_progress: Instant,
}

enum Progress {
    Continue,
    Blocked,
    /// The answer is complete, or the client has disconnected.
    Done,
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
                last_progress: Instant::now(),
            })),
        });
        engine.add_timed(token, client);
        engine.after(Duration::ZERO, token, TIMER_CONTINUE);
        engine.after(IDLE_TIMEOUT, token, TIMER_IDLE);
    }

    fn write_piece(&self) -> Progress {
        let mut answer = self.answer.lock();
        let Some(pieces) = &mut *answer else {
            return Progress::Done;
        };
        if pieces.written == pieces.piece.len() {
            match pieces.document.next() {
                Some(text) => (pieces.piece, pieces.written) = (text.into_bytes(), 0),
                None => return Progress::Done,
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
                pieces.last_progress = Instant::now();
                Progress::Continue
            }
            Err(Errno::INTR) => Progress::Continue,
            Err(Errno::AGAIN) => Progress::Blocked,
            Err(_) => Progress::Done,
        }
    }

    /// Closes the connection if the client has not read for too long.
    fn check_timeout(&self) {
        let idle = match &*self.answer.lock() {
            Some(pieces) => pieces.last_progress.elapsed(),
            None => return,
        };
        let remaining = IDLE_TIMEOUT.saturating_sub(idle);
        if remaining.is_zero() || self.begin.elapsed() >= TOTAL_TIMEOUT {
            self.end();
        } else {
            self.server.engine.after(remaining, self.token, TIMER_IDLE);
        }
    }

    fn end(&self) {
        if self.answer.lock().take().is_none() {
            return;
        }
        // A forked child may have inherited the descriptor, so closing it would not end the
        // connection.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.server.engine.remove(&self.socket, self.token);
        self.server.client_ended();
    }
}

impl Source for Client {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.server.engine.pause(&self.socket);
        self.server
            .engine
            .after(Duration::ZERO, self.token, TIMER_CONTINUE);
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        let engine = &self.server.engine;
        if kind == TIMER_IDLE {
            self.check_timeout();
            return;
        }
        match self.write_piece() {
            Progress::Continue => engine.after(PAUSE, self.token, TIMER_CONTINUE),
            Progress::Blocked => {
                if engine
                    .resume(&self.socket, self.token, Interest::WRITE)
                    .is_err_and(|e| e.kind() != std::io::ErrorKind::AlreadyExists)
                {
                    self.end();
                }
            }
            Progress::Done => self.end(),
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

    /// If `accept` fails, for example for lack of descriptors, it is repeated later.
    #[test]
    fn failed_accept_is_retried() {
        let name = format!("iwarp-serve-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &address).unwrap();
        let engine = Engine::current().unwrap();
        // The socket is not watched, so that no other thread accepts.
        let token = engine.token();
        let server = Arc::new(Server {
            engine: Arc::clone(&engine),
            token,
            socket,
            clients: AtomicUsize::new(0),
        });
        engine.add_timed(token, Arc::clone(&server) as Arc<dyn Source>);
        assert!(!server.accept(), "the socket does not listen yet");
        listen(&server.socket, 8).unwrap();
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let mut client_socket = UnixStream::connect_addr(&address).unwrap();
        client_socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut answer = String::new();
        client_socket.read_to_string(&mut answer).unwrap();
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
    fn ended_client_admits_waiting_connection() {
        let (server, address) = listening_server("place");
        server.clients.store(CLIENTS_MAX, Ordering::Relaxed);
        let mut client_socket = UnixStream::connect_addr(&address).unwrap();
        client_socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert!(!server.accept(), "the limit of clients is reached");
        assert_eq!(server.clients.load(Ordering::Relaxed), CLIENTS_MAX);
        server.client_ended();
        let mut answer = String::new();
        client_socket.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with('{'), "{answer}");
        server.engine.remove(&server.socket, server.token);
    }

    /// A client that reads slowly, but makes progress, is closed after the total timeout.
    #[test]
    fn slow_client_is_closed() {
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
                last_progress: Instant::now(),
            })),
        };
        client.check_timeout();
        assert!(client.answer.lock().is_some());
        client.begin = begin(TOTAL_TIMEOUT);
        client.check_timeout();
        assert!(client.answer.lock().is_none());
        server.engine.remove(&server.socket, server.token);
    }
}
