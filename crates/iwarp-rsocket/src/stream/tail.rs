//! Written data that is not sent yet, because the peer still has much to read.
//!
//! A system call, a TCP segment and a wake-up cost more than copying 64 KiB. So while the peer is
//! busy, further writes are gathered in the send buffer, and become one transfer. The peer is busy
//! while it has not returned a whole half of its receive buffer, or half of its credits. It returns
//! them when its program has read that much. The tail is sent when they arrive, when there is
//! enough, and before anything else is sent. If the peer's program reads nothing, but peeks until
//! there is more, it returns nothing. So the service thread sends a tail after some milliseconds.
//!
//! The tail has its place in the peer's buffer, a credit and two work requests from its first byte
//! on. So it can be sent at any time without waiting, for example when the program closes the
//! socket or exits.

use super::send::Gather;
use super::{Stream, TRANSFER_MAX};
use crate::wire::{Message, Window};

#[derive(Debug)]
pub(super) struct Tail {
    /// Where the peer wants the data.
    target: Window,
    /// Position in the send buffer.
    start: u32,
    /// Number of bytes, at least 1.
    len: u32,
    /// The tail was there at a check already.
    is_old: bool,
}

/// Number of checks without a tail after which checks end.
const IDLE_CHECKS: u32 = 20;

#[cfg(test)]
impl Tail {
    pub(super) const fn len(&self) -> u32 {
        self.len
    }
}

impl Stream {
    /// Returns `true` if the peer has much to read, and will return buffers or credits when its
    /// program has read it.
    pub(super) fn is_peer_busy(&self) -> bool {
        let Some(peer) = &self.peer else { return false };
        let returned = self.allowed.wrapping_sub(peer.credits);
        let sent = self.sent.wrapping_sub(returned);
        // The peer cannot return the credit of data that was not sent.
        let sent = sent.saturating_sub(u16::from(self.tail.is_some()));
        sent >= peer.credits.div_ceil(2) || self.in_flight >= u64::from(peer.buffer.len)
    }

    /// Returns `true` if written data waits until the peer has read. Somebody must then
    /// [`process`](Self::process) the next completions.
    pub(crate) const fn has_tail(&self) -> bool {
        self.tail.is_some()
    }

    /// Returns `true` if the next data must be added to the tail.
    pub(super) fn gathers(&self) -> bool {
        self.tail.is_some() || self.is_peer_busy()
    }

    /// Maximum length of the tail. Half of the buffer remains for data that is being sent.
    fn tail_max(&self) -> u32 {
        TRANSFER_MAX.min(self.sizes.send_buffer / 2)
    }

    /// Adds as much as there is room for, and sends the tail if it is long enough. The caller has
    /// checked [`can_send`](Self::can_send).
    pub(super) fn gather(&mut self, data: &mut Gather<'_>) {
        let Some(front) = self.offers.front().copied() else {
            return;
        };
        let before = self.tail.as_ref().map_or(0, |tail| tail.len);
        let remaining = u32::try_from(data.remaining()).unwrap_or(u32::MAX);
        let len = remaining
            .min(self.tail_max() - before)
            .min(front.len)
            .min(self.free_buffer());
        let start = self.write_at;
        self.store(data, len);
        let offer_is_used = self.use_offer(len);
        match &mut self.tail {
            Some(tail) => tail.len += len,
            None => {
                self.sent = self.sent.wrapping_add(1);
                self.sq_free -= 2;
                let target = front;
                self.tail = Some(Tail {
                    target,
                    start,
                    len,
                    is_old: false,
                });
            }
        }
        if offer_is_used || before + len == self.tail_max() || !self.has_buffer() {
            self.send_tail();
        }
    }

    /// Sends gathered data.
    pub(super) fn send_tail(&mut self) {
        let Some(tail) = self.tail.take() else {
            return;
        };
        let Tail {
            target, start, len, ..
        } = tail;
        let (sges, n) = self.stored(start, len);
        // Posting counts the requests again.
        self.sq_free += 2;
        self.in_flight += u64::from(len);
        let message = Some(Message::Data(len));
        self.post_buffered(target.addr, target.key, &sges[..n], len, message);
    }

    /// Sends gathered data if the peer has read.
    pub(super) fn send_due_tail(&mut self) {
        if self.tail.is_some() && !self.over && !self.is_peer_busy() {
            self.send_tail();
        }
    }

    /// Sends the tail if it was there at the last check already. Returns `false` if there was none
    /// at the last checks.
    pub(crate) fn check_tail(&mut self) -> bool {
        match &mut self.tail {
            Some(_) if self.over => return false,
            Some(tail) if !tail.is_old => tail.is_old = true,
            Some(_) => self.send_tail(),
            None => {
                self.idle_checks += 1;
                self.is_tail_timed = self.idle_checks < IDLE_CHECKS;
                return self.is_tail_timed;
            }
        }
        self.idle_checks = 0;
        true
    }
}
