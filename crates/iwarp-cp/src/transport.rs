//! The trait [`Link`]: what a copy needs from its connection; and receiving messages through it.

use crate::protocol::{Grant, Message};
use iwarp_cli_common::error::{Error, Result};
use std::time::Duration;

/// Interval of `Working` messages; well below the silence that either end tolerates.
pub(crate) const STILL_THERE: Duration = Duration::from_secs(5);

/// The connection as a copy uses it.
pub(crate) trait Link {
    /// Sends one message. Each end has at most twice as many messages in flight as there are slots,
    /// plus four.
    fn send(&mut self, message: &Message) -> Result<()>;

    /// Waits for one message; returns `None` if the peer has closed. The time limit must exceed
    /// [`STILL_THERE`].
    ///
    /// # Errors
    /// Fails if the connection is broken, a message is malformed or the limit is exceeded.
    fn recv(&mut self) -> Result<Option<Message>>;

    /// Returns a message if one has arrived, without waiting.
    fn try_recv(&mut self) -> Result<Option<Message>>;

    /// Records whether the peer, which has made a valid request, is waiting for this end. While it
    /// waits, it does not count as idle.
    fn peer_waits(&mut self, yes: bool);

    /// Server: records that the handshake is complete. Before, its total time is limited. Until the
    /// first request, data from the client do not count as progress.
    fn authenticated(&mut self);

    /// Receiver: returns the slots that the peer may write to, and registers them at the first
    /// call.
    fn grant(&mut self) -> Result<Grant>;

    /// Receiver: passes the first `len` bytes of a slot to `f`.
    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()>;

    /// Sender: returns the largest number of bytes for one [`write_slot`](Self::write_slot). The
    /// sender decides: a peer that grants large slots must not determine its memory use.
    fn chunk(&mut self, to: &Grant) -> Result<u32>;

    /// Sender: lets `fill` produce `len` bytes and writes them to `slot` of the peer. They must be
    /// placed before a later message arrives.
    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()>;
}

/// Returns the next message about the copy, or `None` if the peer has closed.
pub(crate) fn receive_message(link: &mut impl Link) -> Result<Option<Message>> {
    loop {
        match link.recv()? {
            Some(Message::Working) => {}
            other => return Ok(other),
        }
    }
}

/// Like [`receive_message`], but fails if the peer has closed.
pub(crate) fn expect(link: &mut impl Link) -> Result<Message> {
    receive_message(link)?
        .ok_or_else(|| Error::failed("the peer closed the connection before the copy was complete"))
}

/// Returns the error for a message that is invalid in the current state.
pub(crate) fn unexpected(m: &Message) -> Error {
    match m {
        Message::Error { text } => peer_error(text),
        other => Error::failed(format!("unexpected message from the peer: {other:?}")),
    }
}

pub(crate) fn peer_error(text: &str) -> Error {
    Error::failed(format!("the peer says: {text}"))
}
