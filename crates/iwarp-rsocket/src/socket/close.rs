//! The end of a socket: `shutdown`, `close`, and process exit.

use super::{Phase, Socket, State};
use crate::errno::{Errno, Result};
use crate::service;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that `close` waits for a peer that accepts no data.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the peer must close after the farewell message; see the service thread.
const PEER_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for closing all sockets at process exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

impl Socket {
    /// Shuts down one or both directions, after the data that was sent before. Fails with EINVAL if
    /// the direction is unknown, and with ENOTCONN.
    pub(crate) fn shutdown(&self, how: i32) -> Result<()> {
        let (read, write) = match how {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVAL),
        };
        {
            let mut s = self.lock();
            self.pump(&mut s, true);
            if let Phase::Listening(_) = s.phase {
                // As with TCP, the listener wakes up and stops listening.
                self.stop_listening(&mut s);
            } else {
                s.stream()
                    .map_err(|_| Errno::NOTCONN)?
                    .shut_down(read, write);
            }
        }
        self.waiters.notify();
        if write {
            self.drain(CLOSE_TIMEOUT);
        }
        Ok(())
    }

    fn stop_listening(&self, s: &mut State) {
        s.phase = Phase::Idle;
        self.event
            .is_listening
            .store(false, std::sync::atomic::Ordering::Release);
        s.id.destroy();
        s.id = iwarp::runtime::cm::CmId::create(&self.channel, None);
        s.bound = None;
    }

    /// Waits until everything is sent, or until the peer has accepted no data for `timeout`.
    fn drain(&self, timeout: Duration) {
        let mut free = 0;
        loop {
            let moved = self.wait_until(true, Some(timeout), |s| match &mut s.phase {
                Phase::Connected(stream) if stream.is_drained() => Some(Ok(None)),
                Phase::Connected(stream) => {
                    let now = stream.free_requests();
                    (now != std::mem::replace(&mut free, now)).then_some(Ok(Some(())))
                }
                _ => Some(Ok(None)),
            });
            match moved {
                Ok(Some(())) | Err(Errno::INTR) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    pub(crate) fn close(&self) {
        let linger = {
            let mut s = self.lock();
            self.pump(&mut s, true);
            if let Phase::Listening(_) = s.phase {
                self.stop_listening(&mut s);
            }
            let linger = s.options.linger;
            if let (Phase::Connected(stream), Some(Duration::ZERO)) = (&mut s.phase, linger) {
                stream.destroy(true);
            } else if let Phase::Connected(stream) = &mut s.phase {
                stream.shut_down(true, true);
            }
            linger
        };
        self.waiters.notify();
        if linger != Some(Duration::ZERO) {
            self.drain(linger.unwrap_or(CLOSE_TIMEOUT));
        }
        let (phase, id) = {
            let mut s = self.lock();
            self.pump(&mut s, true);
            (std::mem::replace(&mut s.phase, Phase::Closed), s.id.clone())
        };
        match phase {
            Phase::Connected(stream) if !stream.is_over() => {
                service::end(stream, id, PEER_CLOSE_TIMEOUT)
            }
            Phase::Connected(mut stream) | Phase::Connecting(mut stream) => {
                id.destroy();
                stream.destroy(false);
            }
            _ => id.destroy(),
        }
        self.waiters.notify();
    }

    /// Sends the farewell message after the queued data, when the process exits. Returns `true` if
    /// it has been sent, or cannot be sent.
    pub(crate) fn send_last_farewell(&self) -> bool {
        // A thread may have exited with the lock held.
        let Some(mut s) = self.state.try_lock_for(Duration::from_millis(100)) else {
            return true;
        };
        let Phase::Connected(stream) = &mut s.phase else {
            return true;
        };
        stream.shut_down(true, true);
        stream.process(true);
        let done = stream.is_over();
        if done {
            stream.destroy(false);
        }
        done
    }
}

pub(crate) fn close_all_at_exit(mut sockets: Vec<Arc<Socket>>) {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    loop {
        sockets.retain(|s| {
            let pending = !s.send_last_farewell();
            if !pending {
                // The kernel frees the memory and the descriptors.
                std::mem::forget(Arc::clone(s));
            }
            pending
        });
        if sockets.is_empty() && service::ending_count() == 0 || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    for socket in sockets {
        if let Some(mut s) = socket.state.try_lock_for(Duration::from_millis(100))
            && let Phase::Connected(stream) = &mut s.phase
        {
            stream.destroy(false);
        }
        std::mem::forget(socket);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // An established connection that the program never accepted.
        let s = self.state.get_mut();
        if let Phase::Connected(stream) = &mut s.phase
            && self.generation == crate::fork::generation()
        {
            stream.destroy(false);
            s.id.destroy();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notify::Waiter;
    use crate::{calls, table};

    /// A woken thread checks the socket and sleeps again if nothing has changed, so the wake-up
    /// must follow the change.
    #[test]
    fn shutdown_wakes_after_change() {
        for how in [libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR] {
            let new = || calls::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
            let (listener, client) = (new(), new());
            calls::bind(listener, "127.0.0.1:0".parse().unwrap()).unwrap();
            calls::listen(listener, 1).unwrap();
            calls::connect(client, calls::local_address(listener).unwrap()).unwrap();
            let (server, _) = calls::accept(listener).unwrap();
            let socket = table::find_stream(client).unwrap();
            let waiter = Waiter::for_this_thread().unwrap();
            let joined = socket.waiters().join(&waiter);
            std::thread::scope(|scope| {
                socket.with_state(|_| {
                    scope.spawn(|| socket.shutdown(how).unwrap());
                    // Nothing changes while this thread holds the lock.
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(!waiter.take_signal(), "{how}: woken before the change");
                });
            });
            assert!(waiter.take_signal(), "{how}: not woken");
            drop(joined);
            for fd in [client, server, listener] {
                calls::close(fd).unwrap();
            }
        }
    }
}
