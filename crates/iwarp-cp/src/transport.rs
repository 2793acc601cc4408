//! The trait [`Link`] (what a copy needs from its connection), and functions that receive messages.

use crate::protocol::{Grant, Message};
use iwarp_cli_common::error::{Error, Result};
use std::time::Duration;

/// Interval of `Working` messages, much shorter than the silence that either end tolerates.
pub(crate) const WORKING_INTERVAL: Duration = Duration::from_secs(5);

/// The connection as a copy uses it.
pub(crate) trait Link {
    /// Sends one message. For `n` slots, each end has at most `2 * n + 4` messages in flight.
    fn send(&mut self, message: &Message) -> Result<()>;

    /// Waits for one message. Returns `None` if the peer closed the connection. The implementation
    /// limits the wait; the limit exceeds [`WORKING_INTERVAL`].
    ///
    /// # Errors
    /// Fails if the connection breaks, if a message is malformed, or after the time limit.
    fn recv(&mut self) -> Result<Option<Message>>;

    /// Returns a message if one has arrived, without waiting.
    fn try_recv(&mut self) -> Result<Option<Message>>;

    /// Records whether the peer, which has made a valid request, is waiting for this end. A waiting
    /// peer does not count as idle.
    fn set_peer_waiting(&mut self, waiting: bool);

    /// Server: records that the handshake is complete, which ends its time limit. Until the first
    /// request, data from the client do not count as progress.
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

    /// Sender: returns the largest number of bytes for one [`write_slot`](Self::write_slot). It may
    /// be less than a slot of the peer, which must not determine the sender's memory use.
    fn max_write_len(&mut self, to: &Grant) -> Result<u32>;

    /// Sender: lets `fill` produce `len` bytes and writes them to `slot` of the peer. The bytes
    /// must be placed before a later message arrives.
    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()>;
}

/// Returns the next message other than `Working`, or `None` if the peer closed the connection.
pub(crate) fn receive_message(link: &mut impl Link) -> Result<Option<Message>> {
    loop {
        match link.recv()? {
            Some(Message::Working) => {}
            other => return Ok(other),
        }
    }
}

/// Like [`receive_message`], but fails if the peer closed the connection.
pub(crate) fn expect_message(link: &mut impl Link) -> Result<Message> {
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
