//! The farewell of a queue pair that was connected by GID and number: before it leaves, it notifies
//! the peer which messages have arrived.
//!
//! On InfiniBand a responder acknowledges a message when it has placed it. A program may therefore
//! destroy its queue pair as soon as it has the last message, and the sender's request still
//! completes. Here the sender waits for the response to a probe (see `acknowledge`), which follows
//! the message in the stream. A queue pair destroyed in between never reads the probe, and the
//! request would fail although its message has arrived.
//!
//! The leaving end therefore sends one more note (see `by_number`) after its responses: how many
//! messages of the peer it has processed. The peer completes exactly these. Messages are Sends,
//! immediate data and RDMA Writes; both ends count them from the start of the stream. Zero-length
//! Writes with the reserved STag belong to the protocol and are not counted.

use super::acknowledge::messages_on_queue_0;
use super::send_queue::Slot;
use super::tx::{Job, Stage};
use super::{Host, QueuePair};
use crate::SendOp;

/// The state of the farewell that this end sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Parting {
    /// None is due: the queue pair does not leave, or has sent it.
    #[default]
    No,
    /// It is due as soon as the peer's requests are answered. With `then_silent`, nothing follows
    /// it.
    Due { then_silent: bool },
    /// Nothing is sent any more.
    Silent,
}

impl QueuePair {
    /// Notifies the peer which of its messages have arrived, before the queue pair leaves the
    /// stream. With `then_silent`, no request starts afterwards. Returns `false` if no farewell is
    /// sent: the peer is not connected by number or needs none, or the stream is not operational or
    /// inside one of our messages.
    ///
    /// The driver writes what is due ([`tx_fill`](Self::tx_fill)), and then calls
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
    pub(super) const fn farewell_said(&mut self) {
        self.acknowledge.parting = match self.acknowledge.parting {
            Parting::Due { then_silent: true } | Parting::Silent => Parting::Silent,
            _ => Parting::No,
        };
    }

    /// Handles the farewell of a peer that processed `arrived` of our messages: completes their
    /// requests.
    pub(super) fn peer_says_farewell<H: Host>(&mut self, arrived: u32, host: &mut H) {
        // Only the first farewell counts, and it must not claim more than was sent.
        let beyond = arrived.wrapping_sub(self.acknowledge.sent) as i32;
        if core::mem::replace(&mut self.acknowledge.peer_gone, true) || beyond > 0 {
            return;
        }
        let mut end = self.acknowledge.sent;
        let mut newer = 0;
        while let Some((seq, slot)) = self.sq.started_from_end(newer) {
            newer = newer.saturating_add(1);
            let (whole, in_part) = self.messages_sent(seq, slot);
            if whole != 0 && !in_part && arrived.wrapping_sub(end) as i32 >= 0 {
                return self.complete_before(seq.wrapping_add(1), host);
            }
            end = end.wrapping_sub(whole);
        }
    }

    /// Returns how many whole messages of a started request were planned, and whether others were
    /// not.
    fn messages_sent(&self, seq: u32, slot: &Slot) -> (u32, bool) {
        match self.tx.job {
            Some(Job::Request {
                seq: unsent, stage, ..
            }) if unsent == seq => {
                let whole = match (slot.op, stage) {
                    (SendOp::SendImm(_), Stage::Body)
                    | (SendOp::WriteImm { .. }, Stage::ImmediateLast) => 1,
                    _ => 0,
                };
                (whole, true)
            }
            _ => (
                messages_on_queue_0(&slot.op).wrapping_add(writes(&slot.op)),
                false,
            ),
        }
    }
}

/// Returns the number of RDMA Writes that a request sends.
const fn writes(op: &SendOp) -> u32 {
    match op {
        SendOp::Write { .. } | SendOp::WriteImm { .. } => 1,
        _ => 0,
    }
}
