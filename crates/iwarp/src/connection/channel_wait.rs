//! The operations of a channel: open it, send a message, receive one.

use super::channel::{Channel, Credit, Handle, Need, Shared};
use super::channel_state::{Received, State, VERSION, header, kind};
use super::large::{Granted, SLOT_LEN};
use super::operation::Operation;
use super::output::Done;
use super::payload::{Carried, Checked, Payload, refused};
use super::region::resolve;
use super::request::{HEADER, Op};
use super::router::{Router, call_all};
use super::tail::{Kind, MESSAGE_MAX};
use super::wait::{Wait, impl_future_and_wait};
use super::waiters::{Place, Ticket};
use crate::error::{Error, Result};
use crate::failure::Refusal;
use crate::verbs::MemoryRegion;
use iwarp_rnic::Access;
use std::ops::{Deref, RangeBounds};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// Opens a channel; see [`Channel::open`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Open {
    shared: Handle,
    greeted: bool,
    ticket: Option<Ticket>,
}

impl_future_and_wait!(Open => Channel);

impl Open {
    pub(super) const fn new(shared: Handle) -> Self {
        Self {
            shared,
            greeted: false,
            ticket: None,
        }
    }

    fn greet(&mut self) -> Result<()> {
        let connection = &self.shared.connection;
        let slot_len = match self.shared.state.lock().own_slots.offered {
            true => SLOT_LEN,
            false => 0,
        };
        let lengths = [connection.inner.message_size, slot_len].map(u32::to_be_bytes);
        let hello = connection.sending(Ok(()), Op::Send, Payload::from(lengths.as_flattened()));
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
        let shared = self.shared.clone();
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

impl Tickets {
    pub(super) const fn is_waiting(&self) -> bool {
        self.channel.is_some()
    }
}

/// Sends a message; see [`Channel::send`]. If it is dropped, the message is either sent as a whole
/// or not sent.
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Sending<'a> {
    shared: Handle,
    operation: Operation<'a, Done>,
    kind: Kind,
    need: Need,
    tickets: Tickets,
}

impl_future_and_wait!(['a] Sending<'a> => ());

impl<'a> Sending<'a> {
    pub(super) fn new(
        shared: &Handle,
        payload: Payload<'a, u8>,
        kind: Kind,
        tickets: Tickets,
    ) -> Self {
        let copied = matches!(payload.0, Carried::Copied(_));
        let octets = payload.octets();
        let need = Need {
            slot: octets > shared.most_small(copied) as u64,
            gathers: match (kind, &payload.0) {
                // Data of a region is sent from where it is.
                (_, Carried::Region(_)) => false,
                (Kind::Message, _) => octets <= MESSAGE_MAX as u64,
                (Kind::Bytes, _) => true,
            },
        };
        let (checked, connection) = (shared.check(&payload), &shared.connection);
        let operation = connection.sending_checked(checked, Op::Send, payload);
        Self {
            shared: shared.clone(),
            operation: match need.slot {
                true => operation,
                false => operation.with_header(header(kind::DATA, 0, 0)),
            },
            kind,
            need,
            tickets,
        }
    }

    /// Returns the tickets, for the next attempt.
    pub(super) fn pause(mut self) -> Tickets {
        std::mem::take(&mut self.tickets)
    }
}

/// What was done with a message.
enum Start {
    /// Nothing: there is no room.
    None,
    Posted,
    /// It is sent with others.
    Gathered,
}

impl Sending<'_> {
    fn start(&mut self) -> Result<Start> {
        let shared = &self.shared;
        let gathered = match (self.kind, self.operation.unsent()) {
            // A writer that has waited has its place among the writers.
            (Kind::Message, Some(octets)) if self.need.gathers && !self.tickets.is_waiting() => {
                shared.append_message(octets)?
            }
            _ => {
                shared.send_tail();
                false
            }
        };
        if gathered {
            self.operation.supersede();
            return Ok(Start::Gathered);
        }
        let credit = shared.take_credit(&mut self.tickets.channel, self.need)?;
        match credit {
            Credit::None => return Ok(Start::None),
            Credit::Small => {}
            Credit::Large(slot) => self.aim(slot)?,
            Credit::Gathering(slot) => {
                let octets = self.operation.unsent().unwrap_or_default();
                shared.start_gathering(slot, self.kind, octets)?;
                self.operation.supersede();
                return Ok(Start::Gathered);
            }
        }
        // With a credit it is sent even if this value is dropped.
        self.operation.detach();
        if self.operation.is_refused() {
            self.shared.return_credit(credit);
        }
        Ok(Start::Posted)
    }

    /// Lets the operation write the slot. Data that this end copies are copied to the memory that
    /// belongs to the slot: the peer returns the slot after the data have arrived.
    fn aim(&mut self, slot: Granted) -> Result<()> {
        let staging = match self.operation.is_copied() {
            true => match self.shared.staging(slot.slot) {
                Ok(staging) => Some((staging, self.shared.farewell())),
                Err(error) => {
                    self.shared.return_credit(Credit::Large(slot));
                    return Err(error);
                }
            },
            false => None,
        };
        let shared = &self.shared;
        let write = |len| shared.write_to(slot, len, Kind::Bytes);
        self.operation.aim(staging, write)
    }
}

impl Shared {
    /// Builds the message for the program. If the peer has broken a rule, closes the connection.
    fn message(
        self: &Arc<Self>,
        received: Result<Received, &'static str>,
    ) -> Result<ChannelMessage> {
        match received {
            Ok(bytes) => Ok(ChannelMessage {
                bytes,
                channel: Arc::downgrade(self),
            }),
            Err(rule) => {
                self.connection.close()?;
                Err(Error::Handshake(rule.into()))
            }
        }
    }

    /// Returns the memory to which data for a slot of the peer are copied.
    pub(super) fn staging(&self, slot: u8) -> Result<MemoryRegion> {
        let mut staging = self.staging.lock();
        let slot = usize::from(slot);
        if staging.len() <= slot {
            staging.resize(slot + 1, None);
        }
        let Some(place) = staging.get_mut(slot) else {
            return Err(Error::OutOfMemory);
        };
        if let Some(memory) = place {
            return Ok(memory.clone());
        }
        let len = self.state.lock().peer_slots.len;
        let memory = self
            .connection
            .inner
            .pd()
            .reg_mr(len, Access::LOCAL_WRITE)?;
        Ok(place.insert(memory).clone())
    }

    /// Removes a waiter from the lists.
    fn leave(
        &self,
        tickets: &Tickets,
        leave: impl FnOnce(&mut State, Option<Ticket>) -> (Place, Option<Waker>),
    ) {
        let router = &self.connection.inner.router;
        if router.origin.is_foreign() {
            return;
        }
        router.leave_readers(tickets.connection);
        if tickets.channel.is_none() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = leave(&mut state, tickets.channel);
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
        let state = self.state.lock();
        let room = state.most.max(state.peer_slots.len) as u64;
        if octets > room {
            return refused(Refusal::TooLong { octets, room });
        }
        match &payload.0 {
            Carried::Copied(copied) => {
                let most = self.connection.message_size() - HEADER;
                if copied.len() > most && state.peer_slots.len < copied.len() {
                    let octets = copied.len();
                    return refused(Refusal::TooLongToCopy { octets, most });
                }
                Ok(())
            }
            Carried::Owned(_) => Ok(()),
            Carried::Region(region) => self.connection.inner.check_own(region),
        }
    }
}

impl Wait for Sending<'_> {
    type Output = ();

    fn poll_now(&mut self) -> Poll<Result<()>> {
        let ended = self.shared.pump()?;
        if !self.operation.has_begun() && !self.operation.is_refused() && !ended {
            match self.start()? {
                Start::None => return Poll::Pending,
                Start::Gathered => return Poll::Ready(Ok(())),
                Start::Posted => {}
            }
        }
        match self.operation.poll_now() {
            // The data was copied. A process that exits waits for staged data.
            Poll::Pending if self.kind == Kind::Bytes || self.operation.is_staged() => {
                Poll::Ready(Ok(()))
            }
            done => done,
        }
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
        let ticket = &mut self.tickets.channel;
        let old = state.writers.wait(ticket, waker);
        if let Some(ticket) =
            ticket.filter(|ticket| self.need.slot && !state.slot_writers.contains(ticket))
        {
            state.slot_writers.push(ticket);
        }
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
        self.shared.leave(&self.tickets, State::leave_writers);
    }
}

/// A received message of a channel; dereferences to bytes without a copy. A clone or a
/// [slice](Self::slice) is cheap, and refers to the same bytes. When the last of them is dropped,
/// the peer gets a credit.
#[derive(Debug, Clone)]
pub struct ChannelMessage {
    bytes: Received,
    channel: Weak<Shared>,
}

impl ChannelMessage {
    /// Returns a part of the message, which keeps the memory of the whole message.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (at, len) = resolve(range, self.len())?;
        let mut part = self.clone();
        match &mut part.bytes {
            Received::Small(message) => message.restrict(at, len),
            Received::Large(_, bytes) => bytes.restrict(at, len),
        }
        Ok(part)
    }
}

impl Deref for ChannelMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Received::Small(message) => message,
            Received::Large(_, bytes) => bytes,
        }
    }
}

#[cfg(feature = "bytes")]
impl From<ChannelMessage> for bytes::Bytes {
    /// Keeps the bytes where they were received.
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
        // The receive is posted again, or the slot has no reader, before the peer gets the credit.
        let (was_last, slot) = match &mut self.bytes {
            Received::Small(message) => (message.give_up(), None),
            Received::Large(slot, bytes) => (bytes.end().is_some(), Some(*slot)),
        };
        if was_last && let Some(shared) = self.channel.upgrade() {
            shared.owe(slot);
        }
    }
}

/// Waits for a message. See [`Channel::recv`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Receiving {
    shared: Handle,
    tickets: Tickets,
}

impl_future_and_wait!(Receiving => Option<ChannelMessage>);

impl Receiving {
    pub(super) fn new(shared: &Handle, tickets: Tickets) -> Self {
        Self {
            shared: shared.clone(),
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
        let received = match state.next_message() {
            Some(received) => received,
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
        Poll::Ready(self.shared.message(received).map(Some))
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
        self.shared
            .leave(&self.tickets, |state, ticket| state.readers.leave(ticket));
    }
}
