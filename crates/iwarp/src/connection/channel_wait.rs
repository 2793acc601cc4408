//! The operations of a channel: open it, send a message, receive one.

use super::channel::{Channel, Shared};
use super::channel_state::{State, VERSION, header, kind};
use super::operation::{Carried, Checked, Done, HEADER, Op, Operation, Payload, refused};
use super::receive::Message;
use super::router::{Router, call_all};
use super::wait::{Wait, impl_future_and_wait};
use super::waiters::{Place, Ticket, Waiters};
use crate::error::{Error, Result};
use crate::failure::Refusal;
use std::ops::{Deref, RangeBounds};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// Opens a channel; see [`Channel::open`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Open {
    shared: Arc<Shared>,
    greeted: bool,
    ticket: Option<Ticket>,
}

impl_future_and_wait!(Open => Channel);

impl Open {
    pub(super) const fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            greeted: false,
            ticket: None,
        }
    }

    fn greet(&mut self) -> Result<()> {
        let connection = &self.shared.connection;
        let size = connection.inner.message_size.to_be_bytes();
        let hello = connection.sending(Ok(()), Op::Send, Payload::from(&size));
        let hello = hello.with_header(header(kind::HELLO, VERSION, self.shared.window));
        let mut hello = hello.started();
        if let Poll::Ready(Err(error)) = hello.poll_now() {
            return Err(error);
        }
        self.greeted = true;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        match self.shared.window >= 2 {
            true => Ok(()),
            false => Err(Error::InvalidArgument(
                "a channel needs at least 6 receive buffers",
            )),
        }
    }
}

impl Wait for Open {
    type Output = Channel;

    fn poll_now(&mut self) -> Poll<Result<Channel>> {
        self.check()?;
        // The end that has connected speaks first, as MPA wants it.
        if self.shared.connection.is_initiator() && !self.greeted {
            self.greet()?;
        }
        let ended = self.shared.pump()?;
        if self.shared.state.lock().window == 0 {
            return match ended {
                true => Poll::Ready(Err(self.shared.connection.inner.no_message())),
                false => Poll::Pending,
            };
        }
        if !self.greeted {
            self.greet()?;
        }
        let shared = Arc::clone(&self.shared);
        Poll::Ready(Ok(Channel { shared }))
    }

    fn is_likely_ready(&self) -> bool {
        self.router().has_message()
    }

    fn register(&mut self, waker: &Waker) {
        let router = &self.shared.connection.inner.router;
        router.wait_for_message(&mut self.ticket, waker);
    }

    fn router(&self) -> &Router {
        &self.shared.connection.inner.router
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.router().leave_readers(self.ticket);
    }
}

/// Tickets of one wait. They outlive the wait, which `poll` functions create anew each time.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// Waiting for messages of the connection.
    connection: Option<Ticket>,
    /// Waiting for a message or credit of the channel.
    channel: Option<Ticket>,
}

/// Sends a message; see [`Channel::send`]. If it is dropped, the message is either sent as a whole
/// or not sent.
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Sending<'a> {
    shared: Arc<Shared>,
    operation: Operation<'a, Done>,
    tickets: Tickets,
}

impl_future_and_wait!(['a] Sending<'a> => ());

impl<'a> Sending<'a> {
    pub(super) fn new(shared: &Arc<Shared>, payload: Payload<'a, u8>, tickets: Tickets) -> Self {
        let (checked, connection) = (shared.check(&payload), &shared.connection);
        let operation = connection.sending(checked, Op::Send, payload);
        Self {
            shared: Arc::clone(shared),
            operation: operation.with_header(header(kind::DATA, 0, 0)),
            tickets,
        }
    }

    /// Starts it if there is a credit. Returns ready when it is started; data of the program is
    /// copied then.
    pub(super) fn post(&mut self) -> Poll<Result<()>> {
        match self.poll_now() {
            Poll::Pending if !self.operation.is_started() => Poll::Pending,
            Poll::Pending => Poll::Ready(Ok(())),
            done => done,
        }
    }

    /// Returns the tickets, for the next attempt.
    pub(super) fn pause(mut self) -> Tickets {
        std::mem::take(&mut self.tickets)
    }
}

impl Shared {
    /// Removes a waiter from the lists.
    fn leave(&self, tickets: &Tickets, of: fn(&mut State) -> &mut Waiters) {
        let router = &self.connection.inner.router;
        if router.origin.is_foreign() {
            return;
        }
        router.leave_readers(tickets.connection);
        if tickets.channel.is_none() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = of(&mut state).leave(tickets.channel);
        let next = match place {
            Place::Woken => [state.next_writer(), state.next_reader()],
            Place::Waiting => [None, None],
        };
        drop(state);
        drop(gone);
        call_all(next.into_iter().flatten());
    }

    fn check(&self, payload: &Payload<'_, u8>) -> Checked {
        let octets = payload.octets();
        let most = self.state.lock().most;
        let room = most as u64;
        if octets > room {
            return refused(Refusal::TooLong { octets, room });
        }
        if let Carried::Copied(copied) = &payload.0 {
            let most = self.connection.message_size() - HEADER;
            if copied.len() > most {
                let octets = copied.len();
                return refused(Refusal::TooLongToCopy { octets, most });
            }
        }
        Ok(())
    }
}

impl Wait for Sending<'_> {
    type Output = ();

    fn poll_now(&mut self) -> Poll<Result<()>> {
        let ended = self.shared.pump()?;
        if !self.operation.has_begun() && !self.operation.is_refused() && !ended {
            if !self.shared.take_credit(&mut self.tickets.channel)? {
                return Poll::Pending;
            }
            // With a credit it is sent even if this value is dropped.
            self.operation.detach();
            if self.operation.is_refused() {
                self.shared.return_credit();
            }
        }
        self.operation.poll_now()
    }

    fn is_likely_ready(&self) -> bool {
        self.operation.is_likely_ready() || (!self.has_begun() && self.router().has_message())
    }

    fn register(&mut self, waker: &Waker) {
        if self.has_begun() {
            return self.operation.register(waker);
        }
        let router = &self.shared.connection.inner.router;
        router.wait_for_message(&mut self.tickets.connection, waker);
        let waker = waker.clone();
        let mut state = self.shared.state.lock();
        let old = state.writers.wait(&mut self.tickets.channel, waker);
        drop(state);
        drop(old);
    }

    fn has_begun(&self) -> bool {
        self.operation.has_begun()
    }

    fn router(&self) -> &Router {
        &self.shared.connection.inner.router
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if self.router().origin.is_foreign() {
            return;
        }
        self.shared.leave(&self.tickets, |state| &mut state.writers);
    }
}

/// A received message of a channel; dereferences to bytes without a copy. A clone or a
/// [slice](Self::slice) is cheap, and refers to the same bytes. When the last of them is dropped,
/// the peer gets a credit.
#[derive(Debug, Clone)]
pub struct ChannelMessage {
    /// Without the header.
    message: Message,
    channel: Weak<Shared>,
}

impl ChannelMessage {
    /// Returns a part of the message, which keeps the receive buffer, too.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        Ok(Self {
            message: self.message.slice(range)?,
            channel: Weak::clone(&self.channel),
        })
    }
}

impl Deref for ChannelMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.message
    }
}

#[cfg(feature = "bytes")]
impl From<ChannelMessage> for bytes::Bytes {
    /// Keeps the bytes in the receive buffer.
    fn from(message: ChannelMessage) -> Self {
        Self::from_owner(message)
    }
}

impl AsRef<[u8]> for ChannelMessage {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for ChannelMessage {
    fn drop(&mut self) {
        // The receive is posted again before the peer gets the credit.
        if self.message.give_up()
            && let Some(shared) = self.channel.upgrade()
        {
            shared.owe();
        }
    }
}

/// Waits for a message. See [`Channel::recv`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Receiving {
    shared: Arc<Shared>,
    tickets: Tickets,
}

impl_future_and_wait!(Receiving => Option<ChannelMessage>);

impl Receiving {
    pub(super) fn new(shared: &Arc<Shared>, tickets: Tickets) -> Self {
        Self {
            shared: Arc::clone(shared),
            tickets,
        }
    }

    /// Returns the tickets, for the next attempt.
    pub(super) fn pause(mut self) -> Tickets {
        std::mem::take(&mut self.tickets)
    }
}

impl Wait for Receiving {
    type Output = Option<ChannelMessage>;

    fn poll_now(&mut self) -> Poll<Result<Option<ChannelMessage>>> {
        let ended = match self.shared.pump() {
            Ok(ended) => ended,
            // Messages that arrived before the end are still delivered.
            Err(error) if self.shared.state.lock().inbox.is_empty() => {
                return Poll::Ready(Err(error));
            }
            Err(_) => true,
        };
        let mut state = self.shared.state.lock();
        if !ended && !state.readers.may_take(self.tickets.channel) {
            return Poll::Pending;
        }
        let mut message = match state.inbox.pop_front() {
            Some(message) => message,
            None if state.peer_finished => return Poll::Ready(Ok(None)),
            None if ended => {
                drop(state);
                return Poll::Ready(Err(self.shared.connection.inner.no_message()));
            }
            None => return Poll::Pending,
        };
        let gone = state.readers.leave(self.tickets.channel.take()).1;
        let next = state.next_reader();
        drop(state);
        drop(gone);
        call_all(next);
        message.skip(HEADER);
        Poll::Ready(Ok(Some(ChannelMessage {
            message,
            channel: Arc::downgrade(&self.shared),
        })))
    }

    fn is_likely_ready(&self) -> bool {
        self.router().has_message()
    }

    fn register(&mut self, waker: &Waker) {
        let router = &self.shared.connection.inner.router;
        router.wait_for_message(&mut self.tickets.connection, waker);
        let waker = waker.clone();
        let mut state = self.shared.state.lock();
        let old = state.readers.wait(&mut self.tickets.channel, waker);
        drop(state);
        drop(old);
    }

    fn router(&self) -> &Router {
        &self.shared.connection.inner.router
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.shared.leave(&self.tickets, |state| &mut state.readers);
    }
}
