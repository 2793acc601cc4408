//! The farewell of a queue pair that was connected by GID and number: before it ends the stream, it
//! notifies the peer which messages have arrived.
//!
//! On InfiniBand a responder acknowledges a message when it has placed it. A program may therefore
//! destroy its queue pair as soon as it has the last message, and the sender's request still
//! completes. On iWARP, the sender waits for the response to a probe (see `acknowledge`), which
//! follows the message in the stream. A queue pair destroyed in between never reads the probe, and
//! the request would fail although its message has arrived.
//!
//! The end that is destroyed therefore sends one more note (see `by_number`) after its responses.
//! The note contains the number of messages that it has processed, and the peer completes exactly
//! these. Messages are Sends, immediate data and RDMA Writes; both ends count them from the start
//! of the stream. Zero-length Writes with the reserved STag are not counted, because they belong to
//! the protocol.

use super::acknowledge::messages_on_queue_0;
use super::send_queue::Slot;
use super::tx::{Job, Stage};
use super::{Host, QueuePair};
use crate::SendOp;

/// The state of the farewell that this end sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Parting {
    /// No farewell is due.
    #[default]
    No,
    /// The farewell is due as soon as the peer's requests are answered. If `then_silent`, nothing
    /// is sent after it.
    Due { then_silent: bool },
    /// Nothing is sent any more.
    Silent,
}

impl QueuePair {
    /// Notifies the peer which of its messages have arrived, before the queue pair ends the stream.
    /// If `then_silent`, no request starts afterwards. Returns `false` if no farewell will be sent:
    /// the peer is not connected by number or has sent nothing, the stream is not operational, or
    /// one of our messages is incomplete.
    ///
    /// The driver then writes everything that is due ([`tx_fill`](Self::tx_fill)), and calls
    /// [`close`](Self::close), or [`modify`](Self::modify) with ERR or RESET.
    pub fn say_farewell(&mut self, then_silent: bool) -> bool {
        let is_wanted = self.is_by_number()
            && self.acknowledge.enabled
            && !self.acknowledge.own_peer
            && self.life.may_send()
            && self.tx.job.is_none()
            && self.messages_arrived() != 0;
        if is_wanted {
            self.acknowledge.parting = Parting::Due { then_silent };
        }
        is_wanted
    }

    /// Returns how many of the peer's messages were processed since the start of the stream, modulo
    /// 2^32.
    pub(super) const fn messages_arrived(&self) -> u32 {
        let [on_queue_0, ..] = self.rx.msn;
        self.rx.writes.wrapping_add(on_queue_0.wrapping_sub(1))
    }

    /// Records that the farewell was planned.
    pub(super) const fn record_farewell(&mut self) {
        self.acknowledge.parting = match self.acknowledge.parting {
            Parting::Due { then_silent: true } | Parting::Silent => Parting::Silent,
            _ => Parting::No,
        };
    }

    /// Handles the farewell of a peer that has processed `arrived` of our messages: completes the
    /// requests of these messages.
    pub(super) fn process_farewell<H: Host>(&mut self, arrived: u32, host: &mut H) {
        // Ignore all farewells but the first, and one that claims more messages than were sent.
        let beyond = arrived.wrapping_sub(self.acknowledge.sent) as i32;
        if core::mem::replace(&mut self.acknowledge.peer_gone, true) || beyond > 0 {
            return;
        }
        let mut end = self.acknowledge.sent;
        let mut examined = 0;
        while let Some((seq, slot)) = self.sq.started_from_end(examined) {
            examined = examined.saturating_add(1);
            let (complete, is_partial) = self.messages_sent(seq, slot);
            if complete != 0 && !is_partial && arrived.wrapping_sub(end) as i32 >= 0 {
                return self.complete_before(seq.wrapping_add(1), host);
            }
            end = end.wrapping_sub(complete);
        }
    }

    /// Returns how many messages of a started request were planned completely, and whether the
    /// request has more.
    fn messages_sent(&self, seq: u32, slot: &Slot) -> (u32, bool) {
        match self.tx.job {
            Some(Job::Request {
                seq: unsent, stage, ..
            }) if unsent == seq => {
                let complete = match (slot.op, stage) {
                    (SendOp::SendImm(_), Stage::Body)
                    | (SendOp::WriteImm { .. }, Stage::ImmediateLast) => 1,
                    _ => 0,
                };
                (complete, true)
            }
            _ => (
                messages_on_queue_0(&slot.op).wrapping_add(writes(&slot.op)),
                false,
            ),
        }
    }
}

const fn writes(op: &SendOp) -> u32 {
    match op {
        SendOp::Write { .. } | SendOp::WriteImm { .. } => 1,
        _ => 0,
    }
}
