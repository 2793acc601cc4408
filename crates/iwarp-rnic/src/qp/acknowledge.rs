//! Completion when the peer has the data, instead of when the stream has taken it.
//!
//! Programs that connect queue pairs by GID and number were written for InfiniBand. There a Send or Write completes when the
//! responder has acknowledged it, so these programs look at the peer's memory as soon as their Write is complete, and expect
//! an error status if the peer refuses it. iWARP has no acknowledgement, but RFC 5040 section 5.5 orders placement: the
//! answer to an RDMA Read tells that everything sent before the request is placed. So a queue pair in this mode sends a
//! zero-length RDMA Read, a *probe*, behind its Sends and Writes, and completes them when any later Read is answered.
//! The peer needs no support for this.
//!
//! Only the peer's own words complete a request: the answer to a later Read or probe, or a Terminate about a later request. The
//! end of the stream, however orderly, does not: octets that TCP has acknowledged may lie in a buffer that nobody reads any more.

use super::plan::TxPlan;
use super::segment::Wire;
use super::send_queue::Awaited;
use super::send_queue::Slot;
use super::tx::{Job, Stage};
use super::{Direction, Host, QueuePair, RxBuffer};
use crate::memory::Memory;
use crate::{Cqe, SendOp};
use iwarp_proto::ddp::{Header, Stag, TAGGED_HEADER_LEN, TaggedHeader};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};

/// Requests that may be sent before a probe follows, even if there are more to send.
const BURST: u32 = 16;

/// The state of requests that were sent and not acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acknowledge {
    /// Is the mode on?
    pub(super) on: bool,
    /// Is there no connection as far as the program knows?
    connectionless: bool,
    /// Requests since the last one whose answer acknowledges them.
    unasked: u32,
    /// A probe is on its way. There is one at a time: the next one covers all that was sent meanwhile.
    probing: bool,
}

impl Acknowledge {
    /// A stream begins.
    pub(super) const fn reset(&mut self) {
        self.unasked = 0;
        self.probing = false;
    }

    /// A Send or Write was put into the plan.
    pub(super) const fn sent(&mut self) {
        // Where it would wrap, nobody has asked for the mode: it begins with a count of its own.
        self.unasked = self.unasked.wrapping_add(1);
    }

    /// A request was put into the plan whose answer acknowledges what was sent before.
    pub(super) const fn asked(&mut self) {
        self.unasked = 0;
    }

    /// Returns `true` if the peer is to be asked about requests, and is not being asked already.
    #[inline]
    pub(super) const fn is_due(&self) -> bool {
        self.on && self.unasked > 0 && !self.probing
    }

    /// Returns `true` after `BURST` requests without a probe, so that a program that never pauses still gets completions.
    pub(super) const fn is_impatient(&self) -> bool {
        self.unasked >= BURST
    }
}

impl QueuePair {
    /// Lets Sends and Writes complete when the peer has placed them, from now on, and with the peer's error status if it refuses
    /// them. This costs a zero-length RDMA Read for each burst of them.
    pub fn complete_when_placed(&mut self) {
        if !self.acknowledge.on {
            self.acknowledge.on = true;
            // What is complete already needs no probe.
            self.acknowledge.unasked = self.sq.started().count() as u32;
        }
    }

    /// Returns `true` if the program knows of no connection, only of a peer that has a number.
    pub const fn is_connectionless(&self) -> bool {
        self.acknowledge.connectionless
    }

    /// Hides the connection from the program from now on; see [`is_connectionless`](Self::is_connectionless).
    pub const fn hide_connection(&mut self) {
        self.acknowledge.connectionless = true;
    }

    /// Returns `true` if the program must not see that the stream has ended: the queue pair was connected by number, and no
    /// message was cut off. The caller then keeps the queue pair as it is, and lets it fail when a request has waited for long
    /// enough. Nobody knows whether requests that wait now were placed.
    pub fn peer_left(&self, buffer: &RxBuffer) -> bool {
        self.acknowledge.connectionless
            && self.life.is_up_for_good()
            && self.is_between_messages(buffer)
    }

    /// Writes a probe into the plan: a zero-length Read.
    #[cold]
    #[inline(never)]
    pub(super) fn emit_probe(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        let sink_stag = self.next_sink();
        let msn = self.emit_empty_read(Stag(sink_stag), plan, w);
        self.probed(sink_stag, msn);
    }

    /// The probe with this message sequence number was put into the plan.
    fn probed(&mut self, sink_stag: u32, msn: u32) {
        let Some(seq) = self.sq.last_started() else {
            return;
        };
        let probe = Awaited {
            seq,
            sink_stag,
            msn,
            probe: true,
            ..Awaited::default()
        };
        if self.sq.awaited.push(probe).is_ok() {
            self.acknowledge.probing = true;
            self.acknowledge.asked();
        }
    }

    /// An answer has come: the peer has placed everything up to its request.
    pub(super) fn acknowledged<H: Host>(&mut self, awaited: &Awaited, host: &mut H) {
        if awaited.probe {
            self.acknowledge.probing = false;
        }
        self.complete_through(awaited.seq, host);
    }

    /// Completes the requests before `seq` that need no answer of their own, because the peer has processed them in order.
    pub(super) fn complete_before<H: Host>(&mut self, seq: u32, host: &mut H) {
        if !self.acknowledge.on {
            return;
        }
        let end = match self.first_unanswered() {
            Some(read) if (read.wrapping_sub(seq) as i32) < 0 => read,
            _ => seq,
        };
        self.complete_through(end.wrapping_sub(1), host);
    }

    /// Returns the program's oldest RDMA Read or atomic that waits for its answer.
    fn first_unanswered(&self) -> Option<u32> {
        let awaited = &self.sq.awaited;
        (0..awaited.len())
            .filter_map(|i| awaited.get(i))
            .find(|a| !a.probe)
            .map(|a| a.seq)
    }

    fn complete_through<H: Host>(&mut self, seq: u32, host: &mut H) {
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        self.sq.complete_through(seq, |cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
    }

    /// Finds the Send or Write that a Terminate is about; without a header in it, the oldest one.
    ///
    /// If several requests fit, it is the oldest of them, so that no request is taken for placed that may have been refused.
    pub(super) fn refused_request(&self, terminate: &Terminate) -> Option<u32> {
        if !self.acknowledge.on {
            return None;
        }
        let is_meant = |slot: &Slot| match terminate.ddp_header {
            Some(Header::Tagged(h)) => may_have_sent(slot, &h, terminate.ddp_segment_len),
            _ => !slot.done && !slot.op.has_response(),
        };
        match terminate.ddp_header {
            Some(Header::Untagged(h)) if h.qn == 0 => self.request_of_message(h.msn),
            Some(Header::Untagged(_)) => None,
            Some(Header::Tagged(h)) if h.opcode != Opcode::WRITE => None,
            None if terminate.code.layer != TerminateCode::RDMAP_LOCAL_CATASTROPHIC.layer => None,
            Some(Header::Tagged(_)) | None => {
                let mut started = self.sq.started();
                started.find(|(_, s)| is_meant(s)).map(|(seq, _)| seq)
            }
        }
    }

    /// Finds the request that sent the message with this sequence number on queue 0.
    fn request_of_message(&self, msn: u32) -> Option<u32> {
        let begun = |seq: u32, slot: &Slot| match self.tx.job {
            Some(Job::Request {
                seq: unsent,
                off,
                stage,
            }) if unsent == seq => messages_begun(&slot.op, stage, off),
            _ => messages(&slot.op),
        };
        // The sequence number after the last message is known, so count back from it.
        let next = self.tx.msn.first().copied().unwrap_or(1);
        let total = self.sq.started().map(|(seq, slot)| begun(seq, slot)).sum();
        let mut left = msn.wrapping_sub(next.wrapping_sub(total));
        for (seq, slot) in self.sq.started() {
            let n = begun(seq, slot);
            if left < n {
                return Some(seq);
            }
            left -= n;
        }
        None
    }
}

/// Returns `true` if the Write may have sent a segment with this header. The segment's length, header included, tells more than
/// the header alone; not every peer returns it.
fn may_have_sent(slot: &Slot, h: &TaggedHeader, segment_len: Option<u16>) -> bool {
    let (SendOp::Write { remote_addr, rkey }
    | SendOp::WriteImm {
        remote_addr, rkey, ..
    }) = slot.op
    else {
        return false;
    };
    let (off, len) = (h.to.wrapping_sub(remote_addr), u64::from(slot.len));
    if rkey != h.stag.0 || off >= len {
        return false;
    }
    let Some(segment_len) = segment_len else {
        return true;
    };
    let payload = u64::from(segment_len).saturating_sub(TAGGED_HEADER_LEN as u64);
    let end = off.saturating_add(payload);
    if h.last { end == len } else { end < len }
}

/// Returns how many messages on queue 0 a request sends.
const fn messages(op: &SendOp) -> u32 {
    match op {
        SendOp::Send | SendOp::SendInv(_) | SendOp::WriteImm { .. } => 1,
        SendOp::SendImm(_) => 2,
        _ => 0,
    }
}

/// Returns how many of them a request has begun whose next segment is at `off` of `stage`.
const fn messages_begun(op: &SendOp, stage: Stage, off: u32) -> u32 {
    let body = matches!(stage, Stage::Body) && off > 0;
    match op {
        SendOp::Send | SendOp::SendInv(_) => body as u32,
        SendOp::SendImm(_) if matches!(stage, Stage::Body) => 1 + body as u32,
        // The immediate data are the only message of a Write on that queue, and its last.
        _ => 0,
    }
}
