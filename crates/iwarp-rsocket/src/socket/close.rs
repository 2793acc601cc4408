//! The end of a socket: `shutdown`, `close`, and process exit.

use super::{Phase, Socket, State};
use crate::errno::{Errno, Result};
use crate::service;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long closing waits for a peer that accepts no data.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the peer may take to close after the farewell message; see the service thread.
const FAREWELL: Duration = Duration::from_secs(5);
/// Time limit for closing all sockets together at process exit.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

impl Socket {
    /// Shuts down one or both directions. Data sent before still arrives. Fails with EINVAL: an
    /// unknown direction; ENOTCONN.
    pub(crate) fn shutdown(&self, how: i32) -> Result<()> {
        let (read, write) = match how {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVAL),
        };
        {
            let mut s = self.state.lock();
            self.pump(&mut s, true);
            if let Phase::Listening(_) = s.phase {
                // As with TCP, the listener wakes up and stops listening.
                self.stop_listening(&mut s);
            } else {
                s.stream().map_err(|_| Errno::NOTCONN)?.shut(read, write);
            }
        }
        self.waiters.notify();
        if write {
            self.drain(PATIENCE);
        }
        Ok(())
    }

    fn stop_listening(&self, s: &mut State) {
        s.phase = Phase::Idle;
        self.event
            .service
            .store(false, std::sync::atomic::Ordering::Release);
        s.id.destroy();
        s.id = iwarp::runtime::cm::CmId::create(&self.channel, None);
        s.bound = None;
    }

    /// Waits until everything is sent, or no data has moved for `patience`.
    fn drain(&self, patience: Duration) {
        let mut free = 0;
        loop {
            let moved = self.until(true, Some(patience), |s| match &mut s.phase {
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
            let mut s = self.state.lock();
            self.pump(&mut s, true);
            if let Phase::Listening(_) = s.phase {
                self.stop_listening(&mut s);
            }
            let linger = s.options.linger;
            if let (Phase::Connected(stream), Some(Duration::ZERO)) = (&mut s.phase, linger) {
                stream.destroy(true);
            } else if let Phase::Connected(stream) = &mut s.phase {
                stream.shut(true, true);
            }
            linger
        };
        self.waiters.notify();
        if linger != Some(Duration::ZERO) {
            self.drain(linger.unwrap_or(PATIENCE));
        }
        let (gone, id) = {
            let mut s = self.state.lock();
            self.pump(&mut s, true);
            (std::mem::replace(&mut s.phase, Phase::Closed), s.id.clone())
        };
        match gone {
            Phase::Connected(stream) if !stream.is_over() => service::end(stream, id, FAREWELL),
            Phase::Connected(mut stream) | Phase::Connecting(mut stream) => {
                id.destroy();
                stream.destroy(false);
            }
            _ => id.destroy(),
        }
        self.waiters.notify();
    }

    /// Sends the farewell of an exiting process behind the queued data. Returns `true` when it has
    /// been sent or never will be.
    pub(crate) fn send_last_farewell(&self) -> bool {
        // A thread may have exited with the lock held.
        let Some(mut s) = self.state.try_lock_for(Duration::from_millis(100)) else {
            return true;
        };
        let Phase::Connected(stream) = &mut s.phase else {
            return true;
        };
        stream.shut(true, true);
        stream.process(true);
        let done = stream.is_over();
        if done {
            stream.destroy(false);
        }
        done
    }
}

pub(crate) fn close_all_at_exit(mut sockets: Vec<Arc<Socket>>) {
    let deadline = Instant::now() + LAST_PATIENCE;
    loop {
        sockets.retain(|s| {
            let stays = !s.send_last_farewell();
            if !stays {
                // The kernel frees the rest.
                std::mem::forget(Arc::clone(s));
            }
            stays
        });
        if sockets.is_empty() && service::endings() == 0 || Instant::now() >= deadline {
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
        // Accepted, but never fetched by the program.
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
            let waiter = Waiter::of_thread().unwrap();
            let entered = socket.waiters().enter(&waiter);
            std::thread::scope(|scope| {
                socket.with_state(|_| {
                    scope.spawn(|| socket.shutdown(how).unwrap());
                    // Nothing changes while this thread holds the lock.
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(!waiter.take_signal(), "{how}: too early");
                });
            });
            assert!(waiter.take_signal(), "{how}: no wake-up");
            drop(entered);
            for fd in [client, server, listener] {
                calls::close(fd).unwrap();
            }
        }
    }
}
