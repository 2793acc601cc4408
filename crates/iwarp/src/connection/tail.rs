//! Written data of a stream that is not sent yet, because the peer still has much to read.
//!
//! A system call, a TCP segment and a wake-up cost more than copying 64 KiB. So while the peer is
//! busy, further writes are gathered in a slot: while its program has not finished with [`FULL`]
//! bytes, or has not returned half of its places, as it would if it waited. The data is sent when
//! there are [`ENOUGH`] bytes, when the peer has read, and before anything else is sent. Nothing
//! waits for a timer, and nothing waits while the peer has little to read.
//!
//! Order: gathered data enters the backlog of the connection while it is locked, so a message that
//! is sent later follows it. It is posted after unlocking.

use super::channel::{Credit, Shared};
use super::large::{Announced, Granted};
use super::payload::Payload;
use super::request::Op;
use super::waiters::Ticket;
use crate::error::Result;
use crate::verbs::MemoryRegion;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

/// Bytes that the peer's program has not finished with, from which writes are gathered.
const FULL: u64 = 256 << 10;
/// Bytes that are sent at once. Also the length of a stream's longest message: the two ends copy
/// and check one message while the next one is on its way, in the caches of their processors.
pub(super) const ENOUGH: usize = 384 << 10;

#[derive(Debug, Default)]
pub(super) struct Tail {
    gathered: Mutex<Option<Gathered>>,
    /// Waiting for a message of the peer.
    ticket: Mutex<Option<Ticket>>,
}

/// Writes of a stream in a slot.
#[derive(Debug)]
struct Gathered {
    slot: Granted,
    memory: MemoryRegion,
    len: usize,
}

impl Gathered {
    /// Copies as much as there is room for. Returns how much that is.
    fn append(&mut self, octets: &[u8]) -> Result<usize> {
        let room = ENOUGH.min(self.memory.len()) - self.len;
        let octets = &octets[..room.min(octets.len())];
        self.memory.write_at(self.len, octets)?;
        self.len += octets.len();
        Ok(octets.len())
    }

    fn is_full(&self) -> bool {
        self.len >= ENOUGH.min(self.memory.len())
    }
}

/// Sends gathered data when the peer has read. A weak reference, so that the waker does not keep
/// the channel alive.
struct Watcher(Weak<Shared>);

impl Wake for Watcher {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            *shared.tail.ticket.lock() = None;
            // An error ends the connection, which the next write notices.
            let _ = shared.pump();
            shared.watch_tail();
        }
    }
}

impl Shared {
    /// Returns `true` if the peer has much to read. `unsent` places were taken for gathered data,
    /// which the peer cannot return.
    fn is_peer_busy(&self, unsent: u32) -> bool {
        let state = self.state.lock();
        let places = (state.window - state.credits).saturating_sub(unsent);
        places >= state.window.div_ceil(2) || state.peer_slots.in_flight() >= FULL
    }

    /// Gathers data if the peer has much to read. Returns how many bytes were copied; `None` if
    /// they should be sent at once.
    pub(super) fn gather(self: &Arc<Self>, octets: &[u8]) -> Result<Option<usize>> {
        let ended = self.connection.inner.router.has_message() && self.pump()?;
        let mut place = self.tail.gathered.lock();
        if ended {
            *place = None;
            return Ok(None);
        }
        if place.is_none() {
            *place = self.start_gathering()?;
        }
        let Some(gathered) = place.as_mut() else {
            return Ok(None);
        };
        let copied = gathered.append(octets)?;
        let full = gathered.is_full();
        drop(place);
        match full {
            true => self.send_tail(),
            false => self.watch_tail(),
        }
        Ok(Some(copied))
    }

    /// Takes a credit and a slot, if the peer has much to read.
    fn start_gathering(&self) -> Result<Option<Gathered>> {
        if !self.is_peer_busy(0) || !self.has_slots() {
            return Ok(None);
        }
        let Credit::Large(slot) = self.take_credit(&mut None, true)? else {
            return Ok(None);
        };
        let memory = self.staging(slot.slot).inspect_err(|_| {
            self.return_credit(Credit::Large(slot));
        })?;
        Ok(Some(Gathered {
            slot,
            memory,
            len: 0,
        }))
    }

    /// Sends gathered data if the peer has little to read.
    pub(super) fn send_due_tail(&self) {
        if self.tail.gathered.lock().is_some() && !self.is_peer_busy(1) {
            self.send_tail();
        }
    }

    /// Sends gathered data.
    pub(super) fn send_tail(&self) {
        {
            let mut place = self.tail.gathered.lock();
            let Some(Gathered { slot, memory, len }) = place.take() else {
                return;
            };
            let nothing = Payload::<u8>::from(&[]);
            let mut operation = self.connection.sending_checked(Ok(()), Op::Send, nothing);
            let staged = Some((memory, len));
            if operation
                .aim(staged, |len| self.write_to(slot, len))
                .is_ok()
            {
                operation.enqueue();
            }
        }
        self.connection.inner.router.post_queued();
    }

    /// Returns the operation that writes `len` bytes to a slot.
    pub(super) fn write_to(&self, slot: Granted, len: u32) -> Op {
        self.state.lock().peer_slots.set_len(slot.slot, len);
        let announced = Announced {
            slot: slot.slot,
            len,
            starved: slot.starved,
        };
        Op::WriteImmediate(slot.target(), announced.encode())
    }

    /// Waits for the next message of the peer while there is gathered data.
    fn watch_tail(self: &Arc<Self>) {
        let router = &self.connection.inner.router;
        while self.tail.gathered.lock().is_some() {
            {
                let mut ticket = self.tail.ticket.lock();
                if ticket.is_some() {
                    return;
                }
                let waker = Waker::from(Arc::new(Watcher(Arc::downgrade(self))));
                router.wait_for_message(&mut ticket, &waker);
            }
            router.watch();
            // The message may have come before the waker was registered.
            if !router.has_message() {
                return;
            }
            let ticket = self.tail.ticket.lock().take();
            router.leave_readers(ticket);
            if !matches!(self.pump(), Ok(false)) {
                // The connection has ended, and the next write notices that.
                return;
            }
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::testing::{channels, until};
    use super::super::{Options, Stream};
    use super::*;

    #[test]
    fn watching_ends_with_the_connection() {
        let (a, b) = channels(&Options::new());
        let ends = [a.connection(), b.connection()];
        until("slots are lent", &ends, || {
            b.shared.pump().unwrap();
            a.shared.pump().unwrap();
            a.shared.has_slots()
        });
        // The peer's program reads nothing.
        let (_read, mut write) = Stream::from(a.clone()).into_split();
        until("data is gathered", &ends, || {
            assert!(write.poll_write(b"x", Waker::noop()).is_ready());
            a.shared.tail.gathered.lock().is_some()
        });
        a.connection().close().unwrap();
        until("the end", &ends, || a.shared.pump().unwrap());
        a.shared.watch_tail();
        let refused = write.poll_write(b"x", Waker::noop());
        assert!(matches!(refused, std::task::Poll::Ready(Err(_))));
    }
}
