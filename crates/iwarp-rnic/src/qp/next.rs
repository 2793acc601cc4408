//! The choice of the next message. These functions change nothing.
//!
//! A pending Terminate is the last message. A message in progress is finished before another one
//! starts, because some receivers cannot handle interleaved tagged messages. The order of the other
//! messages is: the RTR message, a limited number of responses to the peer, the send queue.

use super::by_number::Note;
use super::farewell::Parting;
use super::send_queue::Slot;
use super::tx::Job;
use super::{QueuePair, Rtr};
use crate::SendFlags;
use crate::limits::RESPONSE_BURST;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// There is nothing to send, or nothing may be sent now.
    Nothing,
    Terminate,
    Rest(Job),
    /// The message that notifies the responder that the connection is established.
    Rtr(Rtr),
    /// This many responses to the peer. Then choose again.
    Responses(u32),
    Note(Note),
    /// A zero-length Read that shows that the peer has placed what was sent.
    Probe,
    /// This many requests of the program that are messages. Then choose again.
    Requests(u32),
    /// A request of the program that only changes the memory table.
    Local,
}

impl QueuePair {
    //= rfc5040 section 5.1
    //# The Data Source RDMAP layer MUST issue RDMA Write Messages to the DDP
    //# layer in the order they were submitted by the ULP.
    //= rfc5040 section 5.5
    //# The RDMAP layer MUST submit RDMA Messages to the DDP layer in the order
    //# the RDMA Operations are submitted to the RDMAP layer by the ULP.
    //= rfc5041 section 5.3
    //# MUST transmit DDP Messages in the order they were submitted to the DDP
    //# layer,
    #[inline]
    pub(super) fn next_message(&self) -> Next {
        if !self.life.may_send() {
            return self.next_out_of_operation();
        }
        if let Some(job) = self.tx.job {
            return Next::Rest(job);
        }
        //= rfc6581 section 5
        //# The RDMA connection initiator MUST NOT allow any later FULPDUs to be
        //# transmitted before the RTR indication.
        if let Some(rtr) = self.tx.rtr {
            return Next::Rtr(rtr);
        }
        let request = self.startable();
        if let Some(note) = self.note(request.map(|(_, slot)| slot)) {
            return Next::Note(note);
        }
        if !self.responses.is_empty() {
            let most = match request {
                Some(_) => RESPONSE_BURST.saturating_sub(self.tx.responses_in_row),
                None => u32::MAX,
            };
            if most > 0 {
                return Next::Responses(most);
            }
        }
        if self.acknowledge.enabled
            && let Some(next) = self.next_farewell_or_probe(request.is_some())
        {
            return next;
        }
        match request {
            None => Next::Nothing,
            Some((_, slot)) if slot.op.is_local() => Next::Local,
            // A response, a probe or a note may be due after each request.
            Some(_)
                if self.acknowledge.enabled
                    || !self.responses.is_empty()
                    || self.may_need_queue_notes() =>
            {
                Next::Requests(1)
            }
            Some(_) => Next::Requests(u32::MAX),
        }
    }

    /// Returns the farewell or probe that is due in acknowledged mode. `more` is `true` if a
    /// request may start.
    #[inline]
    fn next_farewell_or_probe(&self, more: bool) -> Option<Next> {
        match self.acknowledge.parting {
            Parting::No => {}
            Parting::Due { .. } => return Some(Next::Note(Note::Done(self.messages_arrived()))),
            Parting::Silent => return Some(Next::Nothing),
        }
        let probe = self.may_send_probe() && (!more || self.acknowledge.is_burst_complete());
        probe.then_some(Next::Probe)
    }

    /// Like [`next_message`](Self::next_message), while messages may not be started or continued.
    #[cold]
    fn next_out_of_operation(&self) -> Next {
        if self.life.has_terminate() {
            return Next::Terminate;
        }
        // A responder that awaits the initiator's first FPDU sends nothing, but may change the
        // table.
        match self.life.awaits_first_fpdu() && self.startable().is_some() {
            true => Next::Local,
            false => Next::Nothing,
        }
    }

    /// Returns the send work request that may start now, if any.
    #[inline]
    pub(super) fn startable(&self) -> Option<(u32, &Slot)> {
        if !self.life.starts_requests() || self.tx.local.waits {
            return None;
        }
        let (seq, slot) = self.sq.next()?;
        let waits = self.life.awaits_first_fpdu() && !slot.op.is_local();
        (self.may_start(slot) && !waits && !self.waits_for_queue_note(slot)).then_some((seq, slot))
    }

    /// Returns `true` if fence and ORD allow the request to start.
    #[inline]
    pub(super) fn may_start(&self, slot: &Slot) -> bool {
        let fenced = slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty();
        !fenced && (!slot.op.has_response() || self.may_send_read(slot.len))
    }

    /// Returns `true` if one more request with a response of `len` octets may be sent.
    #[inline]
    fn may_send_read(&self, len: u32) -> bool {
        // Some peers answer a zero-length Read with the data of an unanswered Read before it.
        if len == 0 && !self.sq.awaited.is_empty() {
            return false;
        }
        //= rfc5040 section 6.1
        //# For outbound RDMA Read Requests, the RDMAP layer MUST NOT exceed the
        //# maximum number of outstanding, outbound RDMA Read Requests that were
        //# negotiated between the ULP and the Local Peer's RDMAP layer.
        // With an ORD of zero, the request could never be sent: let it start, so that it fails.
        self.sq.ord() == 0 || self.outstanding() < u32::from(self.sq.ord())
    }

    /// Returns how many responses of the peer are awaited, including one to an RTR message by Read.
    #[inline]
    fn outstanding(&self) -> u32 {
        let awaited = self.sq.awaited.len();
        awaited.wrapping_add(u32::from(self.rx.rtr_response_due))
    }

    /// Returns `true` if a probe is due and may be sent. A probe may be due in SQD, but not in RTR,
    /// where nothing was sent yet.
    #[inline]
    fn may_send_probe(&self) -> bool {
        self.acknowledge.is_probe_due()
            // A probe counts against the ORD. Peers serve a zero-length Read even if they granted
            // no Reads.
            && self.outstanding() < u32::from(self.sq.ord()).max(1)
    }
}
