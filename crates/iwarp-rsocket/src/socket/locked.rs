//! The lock of a socket, and the gathered data that is sent when the peer has read.
//!
//! The program may not call again for a long time after it has written. So while a stream has
//! gathered data, its completion queue has a waker, which processes the next completions. The
//! thread that calls it may hold the lock, because it may be the program's thread, while it drives
//! the connection. So the waker does not wait for the lock. It leaves a note, which every thread
//! checks after unlocking.

use super::{Phase, Socket, State};
use crate::service;
use parking_lot::MutexGuard;
use std::ops::{Deref, DerefMut};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::Wake;

/// The locked state.
pub(crate) struct Locked<'a> {
    socket: &'a Socket,
    state: MutexGuard<'a, State>,
    /// Dropped after the lock.
    _notes: Notes<'a>,
}

struct Notes<'a>(&'a Socket);

pub(super) struct TailWaker(pub(super) Weak<Socket>);

/// A completion may allow a stream to send its tail.
#[derive(Default)]
pub(super) struct Note(AtomicBool);

impl Note {
    fn leave(&self) {
        self.0.store(true, Ordering::Relaxed);
        // Either the following attempt to lock succeeds, or the thread that holds the lock sees
        // the note after unlocking.
        fence(Ordering::SeqCst);
    }

    fn is_left(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for TailWaker {
    fn wake(self: std::sync::Arc<Self>) {
        if let Some(socket) = self.0.upgrade() {
            socket.note.leave();
            socket.follow_notes();
        }
    }
}

impl Socket {
    pub(super) fn lock(&self) -> Locked<'_> {
        self.locked(self.state.lock())
    }

    fn locked<'a>(&'a self, state: MutexGuard<'a, State>) -> Locked<'a> {
        Locked {
            socket: self,
            state,
            _notes: Notes(self),
        }
    }

    /// Processes completions if there is a note, unless the lock is held. Its holder then does so.
    fn follow_notes(&self) {
        while self.note.is_left() {
            let Some(mut state) = self.state.try_lock() else {
                return;
            };
            if self.note.take()
                && let Phase::Connected(stream) = &mut state.phase
            {
                stream.is_tail_watched = false;
                stream.process(false);
            }
            self.watch_tail(&mut state);
        }
    }

    /// Requests a wake-up by the next completion, if there is gathered data.
    fn watch_tail(&self, state: &mut State) {
        let Phase::Connected(stream) = &mut state.phase else {
            return;
        };
        if stream.has_tail() && !stream.is_tail_watched && !stream.is_over() {
            if !stream.is_tail_timed {
                // Without the thread, the tail waits until the peer has read.
                stream.is_tail_timed = service::watch_tail(Weak::clone(&self.this)).is_ok();
            }
            stream.is_tail_watched = true;
            stream.cq.wake_at_next(&self.tail_waker);
            // A completion may have come before.
            stream.process(false);
        }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.socket.watch_tail(&mut self.state);
    }
}

impl Drop for Notes<'_> {
    fn drop(&mut self) {
        self.0.follow_notes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{calls, table};
    use std::time::{Duration, Instant};

    /// Returns the answer of `f` about the stream of a socket.
    fn with_stream<R>(number: i32, f: impl FnOnce(&mut crate::stream::Stream) -> R) -> R {
        let socket = table::find_stream(number).unwrap();
        socket.with_state(|state| match &mut state.phase {
            Phase::Connected(stream) => f(stream),
            _ => panic!("it is not connected"),
        })
    }

    /// The waker of the completion queue sends the tail without calls of the program, and without
    /// the service thread.
    #[test]
    fn returned_credits_send_tail() {
        let new = || calls::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let (listener, client) = (new(), new());
        calls::bind(listener, "127.0.0.1:0".parse().unwrap()).unwrap();
        calls::listen(listener, 1).unwrap();
        calls::connect(client, calls::local_address(listener).unwrap()).unwrap();
        let (server, _) = calls::accept(listener).unwrap();
        // The service thread does not check this stream.
        with_stream(client, |stream| stream.is_tail_timed = true);
        let mut total = 0;
        while !with_stream(client, |stream| stream.has_tail()) {
            total += calls::send(client, &[1], 0).unwrap();
        }
        // The last byte is in the tail.
        let mut received = 1;
        while received < total {
            received += calls::recv(server, &mut [0; 100], 0).unwrap();
        }
        let limit = Instant::now() + Duration::from_secs(20);
        while with_stream(client, |stream| stream.has_tail()) {
            assert!(Instant::now() < limit, "the tail was not sent");
            std::thread::sleep(Duration::from_millis(1));
        }
        for socket in [client, server, listener] {
            calls::close(socket).unwrap();
        }
    }
}
