//! The end of a socket: `shutdown`, `close`, the end of the process.

use super::{Phase, Socket, State};
use crate::errno::{Errno, Result};
use std::time::{Duration, Instant};

/// How long a closing socket waits for a peer that takes nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for all sockets together at the end of the process.
const LAST_PATIENCE: Duration = Duration::from_secs(2);

impl Socket {
    /// Closes one or both directions. What was sent before still arrives.
    ///
    /// # Errors
    /// EINVAL: no such direction; ENOTCONN.
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
                // As TCP does it: the listener is woken and listens no more.
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
        s.id = iwarp::raw::cm::CmId::create(&self.channel, None);
        s.bound = None;
    }

    /// Waits until everything is sent. Gives up if nothing moves for as long as `patience`.
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

    /// Closes it. It has left the table already.
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
        let gone = {
            let mut s = self.state.lock();
            s.id.destroy();
            std::mem::replace(&mut s.phase, Phase::Closed)
        };
        if let Phase::Connected(mut stream) | Phase::Connecting(mut stream) = gone {
            stream.destroy(false);
        }
        self.waiters.notify();
    }

    /// The process ends: what is on its way goes out, and the peer is told.
    pub(crate) fn say_goodbye(&self, deadline: Instant) {
        if let Some(mut s) = self.lock_soon()
            && let Phase::Connected(stream) = &mut s.phase
        {
            stream.shut(true, true);
        }
        while let Some(mut s) = self.lock_soon()
            && let Phase::Connected(stream) = &mut s.phase
        {
            stream.process(true);
            if stream.is_drained() || Instant::now() >= deadline {
                stream.destroy(false);
                return;
            }
            drop(s);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Until when goodbyes may take, from now on.
    pub(crate) fn last_deadline() -> Instant {
        Instant::now() + LAST_PATIENCE
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Accepted, but never asked for.
        let s = self.state.get_mut();
        if let Phase::Connected(stream) = &mut s.phase
            && self.generation == crate::fork::generation()
        {
            stream.destroy(false);
            s.id.destroy();
        }
    }
}
