//! Channels: ordered messages with flow control, received without a copy.
//!
//! RDMA has no flow control for messages: a Send needs a receive at the other end, or the
//! connection ends after a while. Therefore the ends of a channel announce credits, the number of
//! messages they can receive, and return them as messages are dropped. docs/wire.md describes the
//! format.
//!
//! Most posted receives are for data; their number is the sender's credit, and each data message
//! takes one. The receiver returns credits in halves of the window, so at most two credit messages
//! are in flight, besides the hello or the end of the other direction: [`RESERVED`] receives.
//!
//! A message that is longer than a receive buffer is written to a slot ([`large`](super::large)),
//! and so are several messages while the peer has much to read ([`tail`](super::tail)).
//! Each credit message that returns slots returns at least one, so there are at most as many as
//! slots. Two more lend additional slots, and one message asks for slots: [`RESERVED_WITH_SLOTS`].

use super::channel_state::{CREDIT_MAX, MOST_CREDITS, State, header, kind};
use super::channel_wait::{Open, Receiving, Sending, Tickets};
use super::handle::Connection;
use super::large::{self, ENCODED_SLOT, Granted, Owed, OwnSlots, SLOTS_MAX};
use super::operation::Operation;
use super::output::Done;
use super::payload::Payload;
use super::request::{HEADER, Op, Request};
use super::router::{Inbox, call_all};
use super::tail::{Kind, Tail};
use super::waiters::Ticket;
use crate::error::{Error, Result};
use crate::verbs::MemoryRegion;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Receives reserved for messages other than data, without and with slots.
const RESERVED: usize = 4;
const RESERVED_WITH_SLOTS: usize = RESERVED + SLOTS_MAX + 3;
/// Least number of receives with which a channel receives large messages.
const RECEIVES_WITH_SLOTS: usize = 2 * RESERVED_WITH_SLOTS;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) connection: Connection,
    pub(super) state: Mutex<State>,
    /// Memory to which data for the peer's slots are copied, by slot.
    pub(super) staging: Mutex<Vec<Option<MemoryRegion>>>,
    pub(super) tail: Tail,
    /// Data messages that the peer may send without a new credit.
    pub(super) window: u32,
    /// Number of [`Handle`]s.
    handles: AtomicUsize,
}

/// A handle of a channel. Dropping the last one finishes the channel at once, even if another
/// thread processes messages at that moment.
#[derive(Debug)]
pub(super) struct Handle(Arc<Shared>);

impl Handle {
    fn new(shared: Shared) -> Self {
        shared.handles.store(1, Ordering::Relaxed);
        Self(Arc::new(shared))
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // Relaxed: this handle is counted, so the count cannot reach 0 meanwhile.
        self.0.handles.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl Deref for Handle {
    type Target = Arc<Shared>;

    fn deref(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.finish_open();
        }
    }
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
    pub(super) shared: Handle,
}

impl Channel {
    /// Opens a channel; the peer must do the same. The connection must then not be used for other
    /// messages, and needs at least 6 receive buffers.
    pub fn open(connection: Connection) -> Open {
        let receives = connection.receives();
        // The longest credit message must fit into a receive buffer.
        let offers = receives >= RECEIVES_WITH_SLOTS && connection.message_size() >= CREDIT_MAX;
        let reserved = if offers {
            RESERVED_WITH_SLOTS
        } else {
            RESERVED
        };
        let data = receives.saturating_sub(reserved);
        let window = u32::try_from(data).unwrap_or(u32::MAX).min(MOST_CREDITS);
        let shared = Handle::new(Shared {
            connection,
            state: Mutex::new(State {
                allowed: window,
                own_slots: OwnSlots::new(offers),
                ..State::default()
            }),
            staging: Mutex::default(),
            tail: Tail::default(),
            window,
            handles: AtomicUsize::new(0),
        });
        Open::new(shared)
    }

    /// Returns the connection, for one-sided requests beside the messages.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    /// Returns the length of the longest message that the peer accepts, in bytes: 1 MiB, or less if
    /// the peer has few or short receive buffers.
    pub fn max_len(&self) -> usize {
        let state = self.shared.state.lock();
        state.most.max(state.peer_slots.len)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.shared.state.lock().finished
    }

    /// Sends a message of up to [`max_len`](Self::max_len) bytes. Completes when the payload may be
    /// reused. A message that is longer than a receive buffer is written to memory that the peer
    /// has lent for it.
    ///
    /// While the peer has not received half of the messages for which it has room, or 256 KiB,
    /// messages of up to 128 KiB are copied, and several are sent together: when there are 640 KiB,
    /// when the peer has received, before any other request of the connection, or when the process
    /// exits. Messages in a [`Region`](super::Region) are not copied.
    pub fn send<'a>(&self, payload: impl Into<Payload<'a, u8>>) -> Sending<'a> {
        Sending::new(
            &self.shared,
            payload.into(),
            Kind::Message,
            Tickets::default(),
        )
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
        self.shared.send_tail();
        self.shared.state.lock().finished = true;
        self.shared.say_farewell()
    }
}

impl Shared {
    /// Returns the length of the longest message that is sent to a receive buffer, in bytes.
    /// `copied` is `true` if this end copies it, too.
    pub(super) fn most_small(&self, copied: bool) -> usize {
        let most = self.state.lock().most;
        match copied {
            true => most.min(self.connection.message_size() - HEADER),
            false => most,
        }
    }

    /// Finishes the channel, unless it is finished or was never opened.
    fn finish_open(&self) {
        if self.connection.inner.router.origin.is_foreign() {
            return;
        }
        let open = {
            let state = self.state.lock();
            state.window > 0 && !state.finished
        };
        if open {
            self.send_tail();
            drop(self.say_farewell());
        }
    }

    /// Starts a control message, which needs no credit.
    fn control_now(&self, kind: u8, number: u32) -> Operation<'static, Done> {
        self.control_with(kind, number, &[]).started()
    }

    /// Starts the message that no more messages follow. Even if the result is dropped, the
    /// connection stays until this and all earlier messages are sent.
    fn say_farewell(&self) -> Operation<'static, Done> {
        let request = Request::farewell(Arc::clone(&self.connection.inner));
        let operation = Operation::new(&self.connection, Ok(()), request, Done);
        operation.with_header(header(kind::FINISH, 0, 0)).started()
    }

    fn control_with<'a>(&self, kind: u8, number: u32, more: &'a [u8]) -> Operation<'a, Done> {
        let operation = self
            .connection
            .sending(Ok(()), Op::Send, Payload::from(more));
        operation.with_header(header(kind, 0, number))
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
        let mut state = self.state.lock();
        if let Some(rule) = state.broken {
            drop(state);
            self.connection.close()?;
            return Err(Error::Handshake(rule.into()));
        }
        let missing = state.own_slots.missing();
        let returned = state.take_owed(self.window);
        // Data that is gathered has taken one place, which the peer cannot return.
        let is_peer_busy = state.is_peer_busy(1);
        drop(state);
        if missing > 0 {
            self.lend_more(missing)?;
        }
        self.give_back(returned)?;
        if !is_peer_busy {
            self.send_tail();
        }
        Ok(ended)
    }

    /// Lends `count` more slots to the peer.
    fn lend_more(&self, count: usize) -> Result<()> {
        let inner = &self.connection.inner;
        let slots = large::allocate(inner.pd(), inner.qp().num(), count);
        match slots {
            Ok(slots) => {
                let mut state = self.state.lock();
                state.own_slots.add(slots);
                let returned = state.take_owed(self.window);
                drop(state);
                self.give_back(returned)?;
            }
            Err(error) => {
                let mut state = self.state.lock();
                state.own_slots.add(Vec::new());
                let none = state.own_slots.are_none();
                drop(state);
                tracing::debug!(%error, "no memory for more slots");
                if none {
                    // The peer's message would wait without limit.
                    self.connection.close()?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Returns credits and slots to the peer.
    fn give_back(&self, returned: Option<(u32, Owed)>) -> Result<()> {
        let Some((credits, slots)) = returned else {
            return Ok(());
        };
        let mut encoded = [0; ENCODED_SLOT * SLOTS_MAX];
        let len = match slots.lend(&mut encoded) {
            Ok(len) => len,
            Err(error) => {
                // The peer may wait for a slot without limit.
                self.connection.close()?;
                return Err(error);
            }
        };
        // If it is refused, the connection has ended.
        drop(
            self.control_with(kind::CREDIT, credits, &encoded[..len])
                .started(),
        );
        Ok(())
    }

    /// Records that a message of the peer was dropped, and that its slot was finished.
    pub(super) fn owe(&self, slot: Option<u8>) {
        let returned = {
            let mut state = self.state.lock();
            state.owed += 1;
            if let Some(slot) = slot {
                state.own_slots.finished(slot);
            }
            state.take_owed(self.window)
        };
        if let Err(error) = self.give_back(returned) {
            tracing::debug!(%error, "a slot cannot be lent again");
        }
    }

    /// Takes a credit for the sender with this ticket, and a slot if it needs or prefers one.
    pub(super) fn take_credit(&self, ticket: &mut Option<Ticket>, need: Need) -> Result<Credit> {
        let mut state = self.state.lock();
        if state.finished {
            return Err(Error::InvalidState(
                "this end of the channel has finished already",
            ));
        }
        let gathers = need.gathers && state.is_peer_busy(0);
        if (need.slot || gathers) && state.peer_slots.want() {
            drop(state);
            drop(self.control_now(kind::WANT, 0));
            state = self.state.lock();
        }
        if state.credits == 0 || !state.writers.may_take(*ticket) {
            return Ok(Credit::None);
        }
        let takes_slot = need.slot || (gathers && state.peer_slots.has_free());
        let credit = match takes_slot.then(|| state.peer_slots.take()) {
            None => Credit::Small,
            Some(None) => return Ok(Credit::None),
            Some(Some(slot)) if gathers => Credit::Gathering(slot),
            Some(Some(slot)) => Credit::Large(slot),
        };
        state.credits -= 1;
        let gone = state.leave_writers(ticket.take()).1;
        let next = state.next_writer();
        drop(state);
        drop(gone);
        call_all(next);
        Ok(credit)
    }

    /// Returns an unused credit.
    pub(super) fn return_credit(&self, credit: Credit) {
        let mut state = self.state.lock();
        if let Credit::Large(slot) | Credit::Gathering(slot) = credit {
            state.peer_slots.put_back(slot);
        }
        state.credits += 1;
        let next = state.next_writer();
        drop(state);
        call_all(next);
    }

    /// Returns `true` if the peer has lent slots. Asks for them if it offers some.
    pub(super) fn has_slots(&self) -> bool {
        let mut state = self.state.lock();
        if state.peer_slots.are_lent() {
            return true;
        }
        if !state.finished && state.peer_slots.want() {
            drop(state);
            drop(self.control_now(kind::WANT, 0));
        }
        false
    }
}

/// What a sender has taken to send a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Credit {
    None,
    Small,
    Large(Granted),
    /// A slot in which the message should be gathered with later ones.
    Gathering(Granted),
}

/// What a message needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    /// A slot: it is too long for a receive buffer.
    pub(super) slot: bool,
    /// It can be gathered with others if the peer is busy; see [`super::tail`].
    pub(super) gathers: bool,
}
