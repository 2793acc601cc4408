//! Channels: ordered messages with flow control, received without a copy.
//!
//! RDMA has no flow control for messages: a Send needs a receive at the other end, or the
//! connection ends after a while. Therefore the ends of a channel announce credits, the number of
//! messages they can receive, and return them as messages are dropped. docs/wire.md describes the
//! format.
//!
//! Of the `receives` posted receives, all but [`RESERVED`] are for data; their number is the
//! sender's credit, and each data message takes one. The receiver returns credits in halves of the
//! window, so at most two credit messages are in flight, besides the hello or the end of the other
//! direction. The reserved receives are for these four.

use super::channel_state::{MOST_CREDITS, State, header, kind};
use super::channel_wait::{Open, Receiving, Sending, Tickets};
use super::handle::Connection;
use super::operation::{Done, HEADER, Operation, Payload, Request};
use super::router::{Inbox, call_all};
use super::waiters::Ticket;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// Receives reserved for messages other than data.
const RESERVED: usize = 4;
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) connection: Connection,
    pub(super) state: Mutex<State>,
    /// Data messages that the peer may send without a new credit.
    pub(super) window: u32,
}

/// A message channel over a connection. A clone is another handle; tasks and threads can share a
/// channel.
///
/// Messages arrive whole, in order, and without a copy: a [`ChannelMessage`](super::ChannelMessage)
/// dereferences to bytes. A sender waits without limit while the receiver has no room. Dropping the
/// last handle finishes the channel: the peer receives what was sent, and then the end.
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
    /// Opens a channel; the peer must do the same. The connection must then not be used for other
    /// messages, and needs at least 6 receive buffers.
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

    /// Returns the length of the longest message that the peer accepts, in bytes.
    pub fn max_len(&self) -> usize {
        self.shared.state.lock().most
    }

    /// Returns the length of the longest message that both ends copy, in bytes.
    pub(super) fn most_copied(&self) -> usize {
        self.max_len()
            .min(self.shared.connection.message_size() - HEADER)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.shared.state.lock().finished
    }

    /// Sends a message. Completes when the payload may be reused. Data of the program may have up
    /// to [`Connection::message_size`] less 8 bytes, a region up to [`max_len`](Self::max_len).
    pub fn send<'a>(&self, payload: impl Into<Payload<'a, u8>>) -> Sending<'a> {
        Sending::new(&self.shared, payload.into(), Tickets::default())
    }

    /// Waits for a message. Returns `None` when the peer has finished. Cancel safe: dropping the
    /// future loses no message.
    ///
    /// # Errors
    /// [`Error::Closed`] or the cause, if the connection ended before the peer finished.
    pub fn recv(&self) -> Receiving {
        Receiving::new(&self.shared, Tickets::default())
    }

    /// Notifies the peer that no more messages follow; [`send`](Self::send) fails from now on. The
    /// peer's messages still arrive. The notification is posted in this call, even if the result is
    /// dropped. Dropping the last handle does the same.
    ///
    /// # Errors
    /// See [`Connection::send`].
    pub fn finish(&self) -> Operation<'static, Done> {
        self.shared.state.lock().finished = true;
        self.shared.control_now(kind::FINISH, 0)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let open = state.window > 0 && !state.finished;
        if open && !self.connection.inner.router.origin.is_foreign() {
            // Posted now, and sent before the connection ends.
            drop(self.control_now(kind::FINISH, 0));
        }
    }
}

impl Shared {
    /// Starts a control message, which needs no credit.
    fn control_now(&self, kind: u8, number: u32) -> Operation<'static, Done> {
        let request = Request::empty().with_header(header(kind, 0, number));
        Operation::new(&self.connection, Ok(()), request, Done).started()
    }

    /// Handles all messages that have arrived. Returns `true` if no more will come.
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
            // Dropping a message reposts its receive, and wakers are called, so no lock may be
            // held. At the end of a channel, even a broken one, the router wakes the other waiters,
            // which are in its lists, too.
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

    /// Returns credits to the peer if half a window is owed.
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
        // If it is refused, the connection has ended.
        drop(self.control_now(kind::CREDIT, due));
    }

    /// Records that a message of the peer was dropped.
    pub(super) fn owe(&self) {
        self.state.lock().owed += 1;
        self.give_back();
    }

    /// Takes a credit for the sender with this ticket.
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

    /// Returns an unused credit.
    pub(super) fn return_credit(&self) {
        let mut state = self.state.lock();
        state.credits += 1;
        let next = state.next_writer();
        drop(state);
        call_all(next);
    }
}
