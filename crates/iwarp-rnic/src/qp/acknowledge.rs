//! Completion when the peer has the data, instead of when the stream has taken it.
//!
//! Programs that connect queue pairs by GID and number were written for InfiniBand. There a Send or Write completes when the
//! responder has acknowledged it, so these programs look at the peer's memory as soon as their Write is complete, and expect
//! an error status if the peer refuses it. iWARP has no acknowledgement, but RFC 5040 section 5.5 orders placement: the
//! answer to an RDMA Read tells that everything sent before the request is placed. So a queue pair in this mode sends a
//! zero-length RDMA Read, a *probe*, behind its Sends and Writes, and completes them when any later Read is answered.
//! The peer needs no support for this.

use super::plan::TxPlan;
use super::segment::Wire;
use super::send_queue::Awaited;
use super::tx::{Job, Stage};
use super::{Direction, Host, QueuePair, RxBuffer};
use crate::memory::Memory;
use crate::{Cqe, SendOp};
use iwarp_proto::ddp::{Header, Stag};
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
    /// The last request that the stream has taken.
    written: Option<u32>,
}

impl Acknowledge {
    /// A stream begins or is gone.
    pub(super) const fn reset(&mut self) {
        self.unasked = 0;
        self.probing = false;
        self.written = None;
    }

    /// A Send or Write was put into the plan.
    pub(super) const fn sent(&mut self) {
        self.unasked = self.unasked.saturating_add(1);
    }

    /// A request was put into the plan whose answer acknowledges what was sent before.
    pub(super) const fn asked(&mut self) {
        self.unasked = 0;
    }

    /// The stream has taken request `seq`.
    pub(super) const fn note_written(&mut self, seq: u32) {
        self.written = Some(seq);
    }

    /// Returns `true` after `BURST` requests without a probe, so that a program that never pauses still gets completions.
    pub(super) const fn is_impatient(&self) -> bool {
        self.unasked >= BURST
    }
}

impl QueuePair {
    /// Lets Sends and Writes complete when the peer has placed them, from now on, and with the peer's error status if it refuses
    /// them. This costs a zero-length RDMA Read for each burst of them.
    pub const fn complete_when_placed(&mut self) {
        self.acknowledge.on = true;
    }

    /// Returns `true` if the program knows of no connection, only of a peer that has a number.
    pub const fn is_connectionless(&self) -> bool {
        self.acknowledge.connectionless
    }

    /// Hides the connection from the program from now on; see [`is_connectionless`](Self::is_connectionless).
    pub const fn hide_connection(&mut self) {
        self.acknowledge.connectionless = true;
    }

    /// Handles the end of the stream. Returns `true` if the program must not see a disconnect: the queue pair was connected by
    /// number, and no message was cut off. The caller then keeps the queue pair as it is, and lets it fail when a request has
    /// waited for long enough. `complete` means that the peer's TCP has all that was sent.
    pub fn peer_left<H: Host>(&mut self, buffer: &RxBuffer, complete: bool, host: &mut H) -> bool {
        let kept = self.acknowledge.connectionless
            && self.life.is_up_for_good()
            && self.is_between_messages(buffer);
        if kept && complete {
            self.end_acknowledging(host);
        }
        kept
    }

    /// Returns `true` if a probe is due and may be sent.
    #[inline]
    pub(super) fn wants_probe(&self) -> bool {
        let a = &self.acknowledge;
        a.on && a.unasked > 0
            && !a.probing
            && self.life.may_probe()
            && !self.tx.rtr_pending()
            // A probe takes one of the peer's places for Reads. Peers serve zero-length Reads even if they granted none.
            && self.sq.awaited.len() + u32::from(self.rx.rtr_response_due)
                < u32::from(self.sq.ord()).max(1)
    }

    /// Writes a probe into the plan: a zero-length Read.
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

    /// Handles an orderly end of the stream: the peer's TCP has what ours has taken. Other queue pairs complete requests on the
    /// same knowledge.
    pub(super) fn end_acknowledging<H: Host>(&mut self, host: &mut H) {
        if let Some(seq) = self.acknowledge.written.take()
            && self.acknowledge.on
        {
            let end = self.first_unanswered().map_or(seq, |read| {
                // Reads and atomics have not got their answer.
                if read.wrapping_sub(seq) as i32 > 0 {
                    seq
                } else {
                    read.wrapping_sub(1)
                }
            });
            self.complete_through(end, host);
        }
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
    pub(super) fn refused_request(&self, terminate: &Terminate) -> Option<u32> {
        if !self.acknowledge.on {
            return None;
        }
        let started = || self.sq.started();
        match terminate.ddp_header {
            Some(Header::Tagged(h)) if h.opcode == Opcode::WRITE => started()
                .find(|(_, slot)| match slot.op {
                    SendOp::Write { remote_addr, rkey }
                    | SendOp::WriteImm {
                        remote_addr, rkey, ..
                    } => rkey == h.stag.0 && h.to.wrapping_sub(remote_addr) <= u64::from(slot.len),
                    _ => false,
                })
                .map(|(seq, _)| seq),
            Some(Header::Untagged(h)) if h.qn == 0 => {
                let (unsent, stage) = match self.tx.job {
                    Some(Job::Request { seq, off: 0, stage }) => (Some(seq), stage),
                    _ => (None, Stage::Body),
                };
                let total: u32 = started()
                    .map(|(seq, slot)| match unsent {
                        Some(s) if s == seq => messages_before(&slot.op, stage),
                        _ => messages(&slot.op),
                    })
                    .sum();
                // The sequence number after the last one sent is known, so count back from it.
                let next = self.tx.msn.first().copied().unwrap_or(1);
                let mut left = h.msn.wrapping_sub(next.wrapping_sub(total));
                for (seq, slot) in started() {
                    let n = messages(&slot.op);
                    if left < n {
                        return Some(seq);
                    }
                    left -= n;
                }
                None
            }
            None if terminate.code.layer == TerminateCode::RDMAP_LOCAL_CATASTROPHIC.layer => {
                started()
                    .find(|(_, slot)| !slot.done && !slot.op.has_response())
                    .map(|(seq, _)| seq)
            }
            _ => None,
        }
    }
}

/// Returns how many messages on queue 0 a request sends.
const fn messages(op: &SendOp) -> u32 {
    match op {
        SendOp::Send | SendOp::SendInv(_) | SendOp::WriteImm { .. } => 1,
        SendOp::SendImm(_) => 2,
        _ => 0,
    }
}

/// Returns how many of them it has sent before `stage`.
const fn messages_before(op: &SendOp, stage: Stage) -> u32 {
    match (op, stage) {
        (SendOp::SendImm(_), Stage::Body) => 1,
        _ => 0,
    }
}
