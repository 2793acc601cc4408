//! Channels: messages in order, with flow control, and a receive without a copy.
//!
//! RDMA has no flow control for messages: a Send needs a receive that the other end has posted, or the connection ends after a while.
//! So the ends of a channel tell each other how many messages they can take, and give that back as messages are dropped.
//! docs/wire.md describes the octets.
//!
//! Which receives are posted: of `receives`, all but [`RESERVED`] are for data. The sender of data has that many credits, and each data
//! message takes one. The receiver gives back half of them at a time, so at most two messages that give back are on their way, besides the
//! hello or the end of the other direction. These four have the reserved receives.

use super::channel_state::{MOST_CREDITS, State, header, kind};
use super::channel_wait::{Open, Receiving, Sending, Tickets};
use super::handle::Connection;
use super::operation::{Done, HEADER, Operation, Payload, Request};
use super::router::{Inbox, Priority, call_all};
use super::waiters::Ticket;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// Receives that are not for data.
const RESERVED: usize = 4;
/// Places of the send queue that data leave for other messages.
pub(super) const PLACES: u8 = 3;
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) connection: Connection,
    pub(super) state: Mutex<State>,
    /// Credits that the peer has for this end.
    pub(super) window: u32,
}

/// A message channel over a connection. A clone is another handle to it, and any number of tasks and threads may use it.
///
/// Messages arrive whole, in order, and without a copy: a [`ChannelMessage`](super::ChannelMessage) reads as a slice of octets. A sender waits while the
/// receiver has no room, for as long as it takes. When the last handle is dropped, the peer receives what was sent, and then the end.
///
/// ```
/// use iwarp::Channel;
/// # fn main() -> iwarp::Result<()> {
/// let listener = iwarp::listen("127.0.0.1:0").bind()?;
/// let address = listener.local_addr();
/// let server = std::thread::spawn(move || -> iwarp::Result<usize> {
///     let channel = Channel::open(listener.accept().wait()?).wait()?;
///     let mut octets = 0;
///     while let Some(message) = channel.recv().wait()? {
///         octets += message.len();
///     }
///     Ok(octets)
/// });
/// let channel = Channel::open(iwarp::connect(address).wait()?).wait()?;
/// for _ in 0..1000 {
///     channel.send(&[7; 100]).wait()?;
/// }
/// drop(channel);
/// assert_eq!(server.join().unwrap()?, 100_000);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Channel {
    pub(super) shared: Arc<Shared>,
}

impl Channel {
    /// Opens a channel on a connection whose other end does the same. Both ends must use the connection for nothing else that sends
    /// messages. It needs 6 receive buffers at least.
    pub fn open(connection: Connection) -> Open {
        let data = connection.receives().saturating_sub(RESERVED);
        let window = u32::try_from(data).unwrap_or(u32::MAX).min(MOST_CREDITS);
        let shared = Arc::new(Shared {
            connection,
            state: Mutex::new(State {
                allowed: window,
                ..State::default()
            }),
            window,
        });
        Open::new(shared)
    }

    /// Returns the connection, for one-sided requests beside the messages.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    /// Returns the octets of the longest message that the peer takes.
    pub fn max_len(&self) -> usize {
        self.shared.state.lock().most
    }

    /// Returns the octets of the longest message that both ends copy.
    pub(super) fn most_copied(&self) -> usize {
        self.max_len()
            .min(self.shared.connection.message_size() - HEADER)
    }

    /// Returns `true` if this end has finished.
    pub(super) fn is_finished(&self) -> bool {
        self.shared.state.lock().finished
    }

    /// Sends a message. It has completed when its octets may be used again. Octets of the program may be as many as
    /// [`Connection::message_size`] less 8, and a region's as many as [`max_len`](Self::max_len).
    pub fn send<'a>(&'a self, payload: impl Into<Payload<'a, u8>>) -> Sending<'a> {
        Sending::new(&self.shared, payload.into(), Tickets::default())
    }

    /// Waits for a message. Returns `None` when the peer has finished. Dropping the future loses no message.
    ///
    /// # Errors
    /// [`Error::Closed`], or why the connection has ended, if the peer has not finished before.
    pub fn recv(&self) -> Receiving<'_> {
        Receiving::new(&self.shared, Tickets::default())
    }

    /// Tells the peer that no more messages come; [`send`](Self::send) fails from now on. Messages of the peer still arrive. It is posted
    /// at once, also if the result is not waited for. Dropping the last handle does the same.
    ///
    /// # Errors
    /// As those of [`Connection::send`].
    pub fn finish(&self) -> Operation<'_, Done> {
        self.shared.state.lock().finished = true;
        self.shared.control_now(kind::FINISH, 0)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let open = state.window > 0 && !state.finished;
        if open && !self.connection.inner.router.origin.is_foreign() {
            // It is posted now, and sent before the connection ends.
            drop(self.control_now(kind::FINISH, 0));
        }
    }
}

impl Shared {
    /// Posts a message that needs no credit. There is nearly always room for it.
    fn control_now(&self, kind: u8, number: u32) -> Operation<'_, Done> {
        let operation = self.control(kind, number).started();
        if operation.is_posted() || operation.is_refused() {
            return operation;
        }
        // Earlier ones may be done, and nobody has looked.
        self.connection.inner.router.drive();
        operation.started()
    }

    /// A message that needs no credit.
    fn control(&self, kind: u8, number: u32) -> Operation<'_, Done> {
        let request = Request::empty().with_header(header(kind, 0, number));
        let operation = Operation::new(&self.connection, Ok(()), request, Done);
        operation.priority(Priority::First)
    }

    /// Sorts all messages that have arrived. Returns `true` if no more will come.
    pub(super) fn pump(&self) -> Result<bool> {
        let inner = &self.connection.inner;
        let ended = loop {
            let mut state = self.state.lock();
            let (other, done) = match inner.router.pop_message() {
                Inbox::Message(arrived) => {
                    let message = inner.message(arrived);
                    (state.take(message), None)
                }
                Inbox::Empty => (None, Some(false)),
                Inbox::Ended => (None, Some(true)),
            };
            let wakers = [state.next_writer(), state.next_reader()];
            drop(state);
            // Its receive is posted again, and wakers are called, when nothing is locked. At the end, also that of a broken channel, the
            // router wakes all the others: they are in its lists, too.
            drop(other);
            call_all(wakers.into_iter().flatten());
            if let Some(ended) = done {
                break ended;
            }
        };
        self.give_back();
        let Some(rule) = self.state.lock().broken else {
            return Ok(ended);
        };
        self.connection.close()?;
        Err(Error::Handshake(rule.into()))
    }

    /// Tells the peer that it may send more, if it is time.
    fn give_back(&self) {
        let due = {
            let mut state = self.state.lock();
            match state.owed >= self.window.div_ceil(2) && !state.peer_finished {
                true => {
                    let due = std::mem::take(&mut state.owed);
                    state.allowed += due;
                    due
                }
                false => return,
            }
        };
        if !self.control_now(kind::CREDIT, due).is_posted() {
            // The next look at the channel tries again.
            let mut state = self.state.lock();
            state.allowed -= due;
            state.owed += due;
        }
    }

    /// A message of the peer was dropped.
    pub(super) fn owe(&self) {
        self.state.lock().owed += 1;
        self.give_back();
    }

    /// Takes a credit, for a writer with this ticket.
    pub(super) fn take_credit(&self, ticket: &mut Option<Ticket>) -> Result<bool> {
        let mut state = self.state.lock();
        if state.finished {
            return Err(Error::InvalidState(
                "this end of the channel has finished already",
            ));
        }
        if state.credits == 0 || !state.writers.may_take(*ticket) {
            return Ok(false);
        }
        state.credits -= 1;
        let gone = state.writers.leave(ticket.take()).1;
        let next = state.next_writer();
        drop(state);
        drop(gone);
        call_all(next);
        Ok(true)
    }

    /// Gives a credit back that was not used.
    pub(super) fn return_credit(&self) {
        let mut state = self.state.lock();
        state.credits += 1;
        let next = state.next_writer();
        drop(state);
        call_all(next);
    }
}
