//! What a copy needs from its connection: the trait [`Link`], and receiving messages through it.

use crate::protocol::{Grant, Message};
use iwarp_cli_common::error::{Error, Result};
use std::time::Duration;

/// Interval between messages that tell the peer that this end is still working; well below the silence that either end accepts.
pub(crate) const STILL_THERE: Duration = Duration::from_secs(5);

/// The functions of the connection that a copy uses.
pub(crate) trait Link {
    /// Sends one message. Both ends have at most twice as many messages in flight as there are slots, plus four.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&mut self, message: &Message) -> Result<()>;

    /// Waits for one message; `None` when the peer has closed. Must be bounded, by a time above [`STILL_THERE`].
    ///
    /// # Errors
    /// On a broken connection, a malformed message or when the time is over.
    fn recv(&mut self) -> Result<Option<Message>>;

    /// One message if it is there already.
    ///
    /// # Errors
    /// As [`Link::recv`].
    fn try_recv(&mut self) -> Result<Option<Message>>;

    /// Notes that the peer waits for this end, or no longer does. While it waits, it must not be taken for idle. The peer has made
    /// a valid request.
    fn peer_waits(&mut self, yes: bool);

    /// Server: notes that the peer has given the proof that it had to give. Before that, its time is limited in all. Until its first
    /// request, what it sends does not count as progress.
    fn welcomed(&mut self);

    /// Receiver: the ring of slots that the peer may write to; registered at the first call.
    ///
    /// # Errors
    /// When memory cannot be registered.
    fn grant(&mut self) -> Result<Grant>;

    /// Receiver: shows the first `len` octets of one of the own slots.
    ///
    /// # Errors
    /// Fails if `f` fails or the slot does not exist.
    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()>;

    /// Sender: how many octets one [`write_slot`](Self::write_slot) to these slots may carry at most. That is the sender's own
    /// choice: a peer that grants large slots must not decide how much memory is spent here.
    ///
    /// # Errors
    /// When there is no memory.
    fn chunk(&mut self, to: &Grant) -> Result<u32>;

    /// Sender: lets `fill` produce `len` octets and writes them to `slot` of the peer. They must be placed before a message
    /// that is sent afterwards arrives.
    ///
    /// # Errors
    /// Fails if `fill` fails or the connection is broken.
    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()>;
}

/// Returns the next message that is about the copy, or `None` when the peer has closed.
pub(crate) fn hear(link: &mut impl Link) -> Result<Option<Message>> {
    loop {
        match link.recv()? {
            Some(Message::Working) => {}
            other => return Ok(other),
        }
    }
}

/// Returns the next message, as [`hear`] does. It is an error if the peer has closed.
pub(crate) fn expect(link: &mut impl Link) -> Result<Message> {
    hear(link)?
        .ok_or_else(|| Error::failed("the peer closed the connection before the copy was complete"))
}

/// Returns the error for a message that does not fit the state of the copy.
pub(crate) fn unexpected(m: &Message) -> Error {
    match m {
        Message::Error { text } => peer_says(text),
        other => Error::failed(format!("unexpected message from the peer: {other:?}")),
    }
}

/// Returns the error that the peer has reported.
pub(crate) fn peer_says(text: &str) -> Error {
    Error::failed(format!("the peer says: {text}"))
}
