//! Extended reliable connections (XRC), as InfiniBand knows them: an *initiator* that only sends, and a *target* that only receives and
//! answers. Each request names the shared receive queue that its message is for, by a number.
//!
//! iWARP has no place for that number, so the initiator tells it in a note (`numbered`) in front of the first request that names
//! another queue than the request before. The target takes its receives from that queue until the next note. It also accesses memory with the
//! protection domain of that queue, because a target has none of its own.
//!
//! The protection domain must not change while answers are outstanding: an answer is sent from memory that was checked before. So a request
//! that needs a note waits until all Reads and atomics before it are answered.

use super::admit::Refusal;
use super::send_queue::Slot;
use super::{Host, QueuePair};
use crate::{PostError, SendWr};
use iwarp_proto::rdmap::TerminateCode;

/// The two ends of an extended reliable connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XrcEnd {
    /// It sends requests and receives nothing (`IBV_QPT_XRC_SEND`).
    Initiator,
    /// It receives into shared receive queues and serves Reads and atomics (`IBV_QPT_XRC_RECV`).
    Target,
}

/// What a queue pair knows of the shared receive queues that requests name.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Xrc {
    end: Option<XrcEnd>,
    /// As initiator: the number in our last note; 0 if there was none.
    told: u32,
    /// As target: the number in the peer's last note.
    named: Option<u32>,
}

impl Xrc {
    /// The queue pair is reset, or a new stream begins: neither end has told anything.
    pub(super) const fn start(&mut self) {
        self.told = 0;
        self.named = None;
    }

    /// The number was put into a note.
    pub(super) const fn has_told(&mut self, number: u32) {
        self.told = number;
    }
}

/// Extended reliable connections.
impl QueuePair {
    /// Makes it one end of an extended reliable connection. This is done once, before anything is posted.
    ///
    /// A target is created with a shared receive queue ([`QpConfig::shared_receive`](super::QpConfig::shared_receive)), and its host finds
    /// the queues ([`Host::select_shared_receive`]).
    pub const fn set_xrc(&mut self, end: XrcEnd) {
        self.xrc.end = Some(end);
        self.set_remote_access(self.remote);
    }

    /// Returns which end of an extended reliable connection it is; `None` if it is an ordinary queue pair.
    pub const fn xrc_end(&self) -> Option<XrcEnd> {
        self.xrc.end
    }

    /// Sets the protection domain with which a target accesses memory until its peer names a shared receive queue.
    pub const fn set_default_pd(&mut self, pd: u32) {
        if self.xrc.named.is_none() {
            self.config.pd = pd;
        }
    }

    /// As [`post_send`](Self::post_send), for a message that is for the shared receive queue with this number at the peer. 0 names none,
    /// which is enough for RDMA Writes, Reads and atomics.
    pub fn post_send_to<H: Host>(
        &mut self,
        wr: &SendWr<'_>,
        srq: u32,
        host: &mut H,
    ) -> Result<(), PostError> {
        self.post_send(wr, host)?;
        if !wr.op.is_local() {
            self.sq.name_last(srq);
        }
        Ok(())
    }

    /// Returns `true` if requests go one by one, because a note may be due in front of each.
    #[inline]
    pub(super) const fn names_queues(&self) -> bool {
        matches!(self.xrc.end, Some(XrcEnd::Initiator))
    }

    /// Returns the number of the shared receive queue that the peer has to know before this request.
    #[inline]
    pub(super) const fn queue_to_tell(&self, slot: &Slot) -> Option<u32> {
        match slot.srq {
            same if same == self.xrc.told => None,
            0 if !slot.op.takes_receive() => None,
            other => Some(other),
        }
    }

    /// Returns `true` if a request needs a note, and Reads or atomics before it are not answered. See the module.
    #[inline]
    pub(super) fn waits_to_name(&self, slot: &Slot) -> bool {
        self.queue_to_tell(slot).is_some() && self.awaits_answers()
    }

    /// Handles the peer's note that the messages from now on are for this shared receive queue. The number is looked at when a message needs
    /// a receive.
    pub(super) fn is_named<H: Host>(&mut self, number: u32, host: &mut H) -> Result<(), Refusal> {
        if self.xrc.end != Some(XrcEnd::Target) {
            return Ok(());
        }
        if self.rx.receiving || self.rx.message_off > 0 {
            // The rest of the message would go to another queue than its beginning.
            return Err(Refusal::Protocol(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        }
        self.xrc.named = Some(number);
        if let Some(pd) = host.select_shared_receive(number) {
            self.config.pd = pd;
        }
        Ok(())
    }

    /// A message has met no receive. Refuses it if it can never have one: it is for a shared receive queue that does not exist (any more), or
    /// this is the end that receives nothing.
    #[cold]
    pub(super) fn check_queue<H: Host>(&self, host: &mut H) -> Result<(), Refusal> {
        match self.xrc.end {
            None => Ok(()),
            Some(XrcEnd::Initiator) => {
                Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_NO_BUFFER))
            }
            Some(XrcEnd::Target) => {
                let number = self.xrc.named;
                match number.and_then(|number| host.select_shared_receive(number)) {
                    Some(_) => Ok(()),
                    None => Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_QN)),
                }
            }
        }
    }
}
