//! Extended reliable connections (XRC) as in InfiniBand: an *initiator* that only sends, and a
//! *target* that only receives and responds. Each request contains the number of the shared receive
//! queue that its message is for.
//!
//! iWARP has no field for that number, so the initiator sends it in a note (`by_number`) before
//! each request for a different queue than that of the previous request. Until the next note, the
//! target takes receives from the queue. It also accesses memory with the queue's protection
//! domain, because a target has no protection domain of its own.
//!
//! The protection domain must not change while responses are outstanding, because a response is
//! sent from memory that was checked before. A request that needs a note therefore waits until all
//! earlier Reads and atomics are answered.

use super::admit::Refusal;
use super::send_queue::Slot;
use super::{Host, QueuePair};
use crate::{PostError, SendWr};
use iwarp_proto::rdmap::TerminateCode;

/// The two ends of an extended reliable connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XrcEnd {
    /// Sends requests and receives nothing (`IBV_QPT_XRC_SEND`).
    Initiator,
    /// Receives into shared receive queues and serves Reads and atomics (`IBV_QPT_XRC_RECV`).
    Target,
}

/// The shared receive queues announced on this connection.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Xrc {
    end: Option<XrcEnd>,
    /// As initiator: the number in our last note; 0 if there was none.
    announced: u32,
    /// As target: the number in the peer's last note.
    selected: Option<u32>,
}

impl Xrc {
    /// Clears the state when the queue pair is reset or a stream is attached.
    pub(super) const fn start(&mut self) {
        self.announced = 0;
        self.selected = None;
    }

    pub(super) const fn note_sent(&mut self, number: u32) {
        self.announced = number;
    }
}

impl QueuePair {
    /// Makes the queue pair one end of an extended reliable connection. Call this once, before
    /// anything is posted.
    ///
    /// A target is created with a shared receive queue
    /// ([`QpConfig::shared_receive`](super::QpConfig::shared_receive)), and its host finds the
    /// queues ([`Host::select_shared_receive`]).
    pub const fn set_xrc(&mut self, end: XrcEnd) {
        self.xrc.end = Some(end);
        self.set_remote_access(self.remote);
    }

    /// Returns the end of an extended reliable connection; `None` for an ordinary queue pair.
    pub const fn xrc_end(&self) -> Option<XrcEnd> {
        self.xrc.end
    }

    /// Sets the protection domain of a target's memory accesses before the peer's first note.
    pub const fn set_default_pd(&mut self, pd: u32) {
        if self.xrc.selected.is_none() {
            self.config.pd = pd;
        }
    }

    /// Like [`post_send`](Self::post_send), for a message to the peer's shared receive queue with
    /// this number. 0 means none, which suffices for RDMA Writes, Reads and atomics.
    pub fn post_send_to<H: Host>(
        &mut self,
        wr: &SendWr<'_>,
        srq: u32,
        host: &mut H,
    ) -> Result<(), PostError> {
        self.post_send(wr, host)?;
        if !wr.op.is_local() {
            self.sq.set_last_srq(srq);
        }
        Ok(())
    }

    /// Returns `true` if requests are planned one by one, because a note may be due before each.
    #[inline]
    pub(super) const fn may_need_queue_notes(&self) -> bool {
        matches!(self.xrc.end, Some(XrcEnd::Initiator))
    }

    /// Returns the number of the shared receive queue to announce before this request.
    #[inline]
    pub(super) const fn queue_to_announce(&self, slot: &Slot) -> Option<u32> {
        match slot.srq {
            same if same == self.xrc.announced => None,
            0 if !slot.op.takes_receive() => None,
            other => Some(other),
        }
    }

    /// Returns `true` if a request needs a note, and earlier Reads or atomics are unanswered.
    #[inline]
    pub(super) fn waits_for_queue_note(&self, slot: &Slot) -> bool {
        self.queue_to_announce(slot).is_some() && self.awaits_answers()
    }

    /// Handles the peer's note that selects a shared receive queue. An unknown number is refused
    /// only when a message needs a receive.
    pub(super) fn select_queue<H: Host>(
        &mut self,
        number: u32,
        host: &mut H,
    ) -> Result<(), Refusal> {
        if self.xrc.end != Some(XrcEnd::Target) {
            return Ok(());
        }
        if self.rx.receiving || self.rx.message_off > 0 {
            // The note must not change the queue in the middle of a message.
            return Err(Refusal::Protocol(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        }
        self.xrc.selected = Some(number);
        if let Some(pd) = host.select_shared_receive(number) {
            self.config.pd = pd;
        }
        Ok(())
    }

    /// Refuses a message that can never get a receive, because its shared receive queue does not
    /// exist or this end receives nothing.
    #[cold]
    pub(super) fn check_queue<H: Host>(&self, host: &mut H) -> Result<(), Refusal> {
        match self.xrc.end {
            None => Ok(()),
            Some(XrcEnd::Initiator) => {
                Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_NO_BUFFER))
            }
            Some(XrcEnd::Target) => {
                let number = self.xrc.selected;
                match number.and_then(|number| host.select_shared_receive(number)) {
                    Some(_) => Ok(()),
                    None => Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_QN)),
                }
            }
        }
    }
}
