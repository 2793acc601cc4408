//! Messages and data of a stream that are not sent yet, because the peer still has much to read.
//!
//! A system call, a TCP segment and a wake-up cost more than copying 64 KiB. So while the peer is
//! busy, further writes are gathered in a slot: while its program has not finished with [`FULL`]
//! bytes, or has not returned half of its places, as it would if it waited. The data is sent when
//! there are [`ENOUGH`] bytes, when the peer has read, before anything else is sent, and when the
//! process exits. Nothing waits for a timer, and nothing waits while the peer has little to read.
//!
//! Order: gathered data enters the backlog of the connection while it is locked, so a message that
//! is sent later follows it. It is posted after unlocking. The router calls [`Holder`] before it
//! posts any other request of the connection.

use super::channel::{Credit, Shared};
use super::farewell::{self, Farewell};
use super::frames::{self, FRAME};
use super::large::{Announced, Granted};
use super::operation::Operation;
use super::output::Done;
use super::request::{Op, Request};
use super::waiters::Ticket;
use crate::error::Result;
use crate::verbs::MemoryRegion;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Wake, Waker};

/// Bytes that the peer's program has not finished with, from which writes are gathered.
pub(super) const FULL: u64 = 256 << 10;
/// Bytes that are sent at once. Also the length of a stream's longest message: the two ends copy
/// and check one message while the next one is on its way, in the caches of their processors.
pub(super) const ENOUGH: usize = 640 << 10;
/// Length of the longest message that is gathered, with its header. Longer ones are sent from where
/// they are.
pub(super) const MESSAGE_MAX: usize = 128 << 10;

#[derive(Debug, Default)]
pub(super) struct Tail {
    gathered: Mutex<Option<Gathered>>,
    /// Waiting for a message of the peer.
    ticket: Mutex<Option<Ticket>>,
    wakers: OnceLock<Wakers>,
}

#[derive(Debug)]
struct Wakers {
    watcher: Waker,
    holder: Waker,
}

/// What a slot contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Messages with [frames](frames).
    Message,
    /// Bytes: one message, or data of a stream.
    Bytes,
}

/// Writes in a slot.
#[derive(Debug)]
struct Gathered {
    slot: Granted,
    memory: MemoryRegion,
    len: usize,
    kind: Kind,
    farewell: Farewell,
}

impl Gathered {
    fn room(&self) -> usize {
        ENOUGH.min(self.memory.len()) - self.len
    }

    /// Copies as much as there is room for. Returns how much that is.
    fn append(&mut self, octets: &[u8]) -> Result<usize> {
        let octets = &octets[..self.room().min(octets.len())];
        self.memory.write_at(self.len, octets)?;
        self.len += octets.len();
        Ok(octets.len())
    }

    /// Copies a message. The caller has checked that there is room.
    fn append_message(&mut self, octets: &[u8]) -> Result<()> {
        let header = frames::header(octets.len() as u32);
        self.memory.write_at(self.len, &header)?;
        self.memory.write_at(self.len + FRAME, octets)?;
        self.len += frames::framed(octets.len());
        Ok(())
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

/// Sends gathered data before another request.
struct Holder(Weak<Shared>);

impl Wake for Holder {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.send_tail();
        }
    }
}

impl Shared {
    /// Lets a process that exits wait for a message of which the program's data was copied.
    pub(super) fn farewell(self: &Arc<Self>) -> Farewell {
        self.tail_wakers();
        Farewell::of_copied(Arc::clone(&self.connection.inner))
    }

    fn tail_wakers(self: &Arc<Self>) -> &Wakers {
        self.tail.wakers.get_or_init(|| {
            farewell::remember(self);
            Wakers {
                watcher: Waker::from(Arc::new(Watcher(Arc::downgrade(self)))),
                holder: Waker::from(Arc::new(Holder(Arc::downgrade(self)))),
            }
        })
    }

    /// Adds bytes of a stream to gathered ones. Returns how many were copied; `None` if none are
    /// gathered.
    pub(super) fn append_bytes(self: &Arc<Self>, octets: &[u8]) -> Result<Option<usize>> {
        let ended = self.connection.inner.router.has_message() && self.pump()?;
        let mut place = self.tail.gathered.lock();
        if ended {
            self.connection.inner.router.stop_holding();
            *place = None;
        }
        let Some(gathered) = place
            .as_mut()
            .filter(|gathered| gathered.kind == Kind::Bytes)
        else {
            return Ok(None);
        };
        let copied = gathered.append(octets)?;
        let full = gathered.room() == 0;
        drop(place);
        match full {
            true => self.send_tail(),
            false => self.watch_tail(),
        }
        Ok(Some(copied))
    }

    /// Adds a message to gathered ones. If there is no room for it, they are sent. Returns `true`
    /// if it was copied.
    pub(super) fn append_message(&self, octets: &[u8]) -> Result<bool> {
        let mut place = self.tail.gathered.lock();
        let Some(gathered) = place.as_mut() else {
            return Ok(false);
        };
        let framed = frames::framed(octets.len());
        let fits = gathered.kind == Kind::Message && gathered.room() >= framed;
        if fits {
            gathered.append_message(octets)?;
        }
        // Or is there no room for another message of this length?
        if !fits || gathered.room() < framed {
            self.send_gathered(place);
        }
        Ok(fits)
    }

    /// Gathers messages, or bytes of a stream, in a slot that was taken. These are the first.
    pub(super) fn start_gathering(
        self: &Arc<Self>,
        slot: Granted,
        kind: Kind,
        octets: &[u8],
    ) -> Result<()> {
        let memory = self.staging(slot.slot).inspect_err(|_| {
            self.return_credit(Credit::Large(slot));
        })?;
        let holder = self.tail_wakers().holder.clone();
        // Another writer may have begun, too.
        self.send_tail();
        let mut place = self.tail.gathered.lock();
        self.connection.inner.router.hold_back(holder);
        let gathered = place.insert(Gathered {
            slot,
            memory,
            len: 0,
            kind,
            farewell: self.farewell(),
        });
        match kind {
            Kind::Message => gathered.append_message(octets)?,
            Kind::Bytes => drop(gathered.append(octets)?),
        }
        match gathered.room() {
            0 => self.send_gathered(place),
            _ => {
                drop(place);
                self.watch_tail();
            }
        }
        Ok(())
    }

    /// Sends gathered data of a process that exits, and refuses more. If another thread has locked
    /// it, that thread sends it.
    pub(super) fn send_tail_at_exit(&self) {
        if let Some(mut state) = self.state.try_lock() {
            state.finished = true;
        }
        if let Some(place) = self.tail.gathered.try_lock() {
            self.send_gathered(place);
        }
    }

    /// Sends gathered data.
    pub(super) fn send_tail(&self) {
        self.send_gathered(self.tail.gathered.lock());
    }

    fn send_gathered(&self, mut place: MutexGuard<'_, Option<Gathered>>) {
        let Some(gathered) = place.take() else {
            return;
        };
        let Gathered {
            slot,
            memory,
            len,
            kind,
            farewell,
        } = gathered;
        // Slots are shorter than 4 GiB.
        let op = self.write_to(slot, len as u32, kind);
        let request = Request::staged(op, memory, farewell, len as u64);
        Operation::new(&self.connection, Ok(()), request, Done).enqueue();
        self.connection.inner.router.stop_holding();
        drop(place);
        self.connection.inner.router.post_queued();
    }

    /// Returns the operation that writes `len` bytes to a slot.
    pub(super) fn write_to(&self, slot: Granted, len: u32, kind: Kind) -> Op {
        self.state.lock().peer_slots.set_len(slot.slot, len);
        let announced = Announced {
            slot: slot.slot,
            len,
            starved: slot.starved,
            several: kind == Kind::Message,
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
                router.wait_for_message(&mut ticket, &self.tail_wakers().watcher);
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
    use super::super::testing::{channels, done, until};
    use super::super::wait::Wait;
    use super::super::{Channel, Options, Stream, WriteHalf};
    use super::*;
    use iwarp_rnic::Access;

    /// Returns two ends and the writer of the first one. The peer's program reads nothing, so data
    /// is gathered.
    fn gathering() -> ([Channel; 2], WriteHalf) {
        let (a, b) = channels(&Options::new());
        let ends = [a.connection(), b.connection()];
        until("slots are lent", &ends, || {
            b.shared.pump().unwrap();
            a.shared.pump().unwrap();
            a.shared.has_slots()
        });
        let mut write = Stream::from(a.clone()).into_split().1;
        until("data is gathered", &ends, || {
            assert!(write.poll_write(b"x", Waker::noop()).is_ready());
            a.shared.tail.gathered.lock().is_some()
        });
        ([a, b], write)
    }

    #[test]
    fn other_requests_follow_gathered_data() {
        let ([a, b], mut write) = gathering();
        let region = b.connection().share::<u8>(8, Access::REMOTE_WRITE).unwrap();
        let (to, ends) = (region.remote(), [a.connection(), b.connection()]);
        let posted = || ends[0].stats().sent.messages;
        for _ in 0..2 {
            let before = posted();
            // As a thread does that has returned places.
            ends[0].inner.router.post_queued();
            drop(ends[0].write(&[7; 8], &to).started());
            assert!(a.shared.tail.gathered.lock().is_none());
            until("both are sent", &ends, || posted() == before + 2);
            // Then requests need no detour.
            drop(ends[0].write(&[8; 8], &to).started());
            until("it is sent", &ends, || posted() == before + 3);
            until("data is gathered again", &ends, || {
                assert!(write.poll_write(b"x", Waker::noop()).is_ready());
                a.shared.tail.gathered.lock().is_some()
            });
        }
    }

    #[test]
    fn message_follows_gathered_bytes() {
        let ([a, b], _write) = gathering();
        let ends = [a.connection(), b.connection()];
        let mut sending = a.send("message");
        assert!(sending.poll_now().is_ready(), "it is gathered, too");
        let next = || done(&mut b.recv(), &ends).unwrap();
        let first = std::iter::repeat_with(next).find(|message| !message.starts_with(b"x"));
        assert_eq!(*first.unwrap(), *b"message");
    }

    #[test]
    fn watching_ends_with_the_connection() {
        let ([a, b], mut write) = gathering();
        let ends = [a.connection(), b.connection()];
        a.connection().close().unwrap();
        until("the end", &ends, || a.shared.pump().unwrap());
        a.shared.watch_tail();
        let refused = write.poll_write(b"x", Waker::noop());
        assert!(matches!(refused, std::task::Poll::Ready(Err(_))));
    }
}
