//! Clients that connect and send nothing. They reconnect when they are refused or evicted, and at
//! least once a second, so that none of them is ever idle for long.

use std::io::{self, ErrorKind, Read as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const THREADS: usize = 4;
/// Longest duration of a client's connection.
const STAY: Duration = Duration::from_secs(1);

/// Connects, and sends what a client may send before its first request.
pub(crate) type Connect = fn(SocketAddr) -> io::Result<TcpStream>;

/// A crowd of clients. It disconnects on drop.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    attempts: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// Starts `clients` clients, each of which checks every `pause` whether it must reconnect.
    pub(crate) fn start(at: SocketAddr, clients: usize, pause: Duration, connect: Connect) -> Self {
        let (stop, attempts) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let threads = (0..THREADS).map(|_| {
            let (stop, attempts) = (Arc::clone(&stop), Arc::clone(&attempts));
            std::thread::spawn(move || {
                let mut places: Vec<Option<(TcpStream, Instant)>> = Vec::new();
                places.resize_with(clients / THREADS, || None);
                while !stop.load(Ordering::Relaxed) {
                    for place in &mut places {
                        let stays = |(s, since): &mut (TcpStream, Instant)| {
                            since.elapsed() < STAY && !has_ended(s)
                        };
                        if !place.as_mut().is_some_and(stays) {
                            *place = connect(at).ok().map(|s| (s, Instant::now()));
                            attempts.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    std::thread::sleep(pause);
                }
            })
        });
        let threads = threads.collect();
        Self {
            stop,
            attempts,
            threads,
        }
    }

    /// Returns the number of connection attempts of all clients.
    pub(crate) fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Returns `true` if the peer closed the connection. Discards received data.
pub(crate) fn has_ended(stream: &mut TcpStream) -> bool {
    let mut sink = [0; 4096];
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() != ErrorKind::WouldBlock,
        }
    }
}
