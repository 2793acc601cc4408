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

use super::farewell::Parting;
use super::numbered::Rnr;
use super::plan::TxPlan;
use super::segment::Wire;
use super::send_queue::Awaited;
use super::send_queue::Slot;
use super::tx::{Job, Stage};
use super::{Direction, Host, QueuePair};
use crate::memory::Memory;
use crate::{Cqe, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, TAGGED_HEADER_LEN, TaggedHeader};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};

/// Messages that may be sent before a probe follows, even if there are more to send.
const BURST: u32 = 16;

/// The state of requests that were sent and not acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acknowledge {
    /// Is the mode on?
    pub(super) on: bool,
    /// Is there no connection as far as the program knows?
    connectionless: bool,
    /// Messages of Sends and Writes that were put into plans since the start of the stream; it wraps.
    pub(super) sent: u32,
    /// How many of them the last request acknowledges that was put into a plan and has an answer.
    asked: u32,
    /// A probe is on its way. There is one at a time: the next one covers all that was sent meanwhile.
    probing: bool,
    /// The peer has refused a request, and it is not known yet which.
    sought: Option<(Sought, Verdict)>,
    /// The stream leads back to this queue pair.
    pub(super) own_peer: bool,
    /// How Sends that find no receive are tried again.
    pub(super) rnr: Rnr,
    /// The farewell to the peer.
    pub(super) parting: Parting,
    /// The peer has said farewell.
    pub(super) peer_left: bool,
    /// The end of the present stream does not change the queue pair.
    end_hidden: bool,
}

impl Acknowledge {
    /// Forgets everything but the mode: the queue pair was reset. Only then may the next stream begin.
    pub(super) const fn reset(&mut self) {
        self.asked = self.sent;
        self.probing = false;
        self.sought = None;
        self.parting = Parting::No;
    }

    /// A new stream begins: no message was sent, and nobody leaves.
    pub(super) const fn start(&mut self) {
        self.sent = 0;
        self.asked = 0;
        self.parting = Parting::No;
        self.peer_left = false;
        self.end_hidden = false;
        self.rnr.start();
    }

    /// A message of a Send or Write was put into the plan.
    pub(super) const fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// A request was put into the plan whose answer acknowledges what was sent before.
    pub(super) const fn asked(&mut self) {
        self.asked = self.sent;
    }

    /// Returns how many messages were sent since then.
    const fn unasked(&self) -> u32 {
        // Where it would wrap, nobody has asked for the mode: it begins with a count of its own.
        self.sent.wrapping_sub(self.asked)
    }

    /// Returns `true` if the peer is to be asked about requests, and is not being asked already.
    #[inline]
    pub(super) const fn is_due(&self) -> bool {
        self.on && self.unasked() > 0 && !self.probing
    }

    /// Returns `true` after `BURST` messages without a probe, so that a program that never pauses still gets completions.
    pub(super) const fn is_impatient(&self) -> bool {
        self.unasked() >= BURST
    }
}

/// Completion when placed.
impl QueuePair {
    /// Lets Sends and Writes complete when the peer has placed them, from now on, and with the peer's error status if it refuses
    /// them. This costs a zero-length RDMA Read for each burst of them.
    pub fn complete_when_placed(&mut self) {
        if !self.acknowledge.on {
            self.acknowledge.on = true;
            let open = u32::from(self.has_open_messages());
            self.acknowledge.asked = self.acknowledge.sent.wrapping_sub(open);
        }
    }

    /// Returns `true` if a Send or Write was started that needs a probe: it is not complete, and there is no request with an answer behind it,
    /// which tells of it, too. A probe for others would belong to no request when those are done.
    fn has_open_messages(&self) -> bool {
        (0..self.sq.unacknowledged())
            .map_while(|i| self.sq.started_from_end(i))
            .map(|(_, slot)| slot)
            .take_while(|slot| !slot.op.has_response())
            .any(|slot| !slot.done && !slot.op.is_local())
    }

    /// Returns `true` if the program knows of no connection, only of a peer that has a number.
    pub const fn is_connectionless(&self) -> bool {
        self.acknowledge.connectionless
    }

    /// Hides the connection from the program from now on; see [`is_connectionless`](Self::is_connectionless).
    pub const fn hide_connection(&mut self) {
        self.acknowledge.connectionless = true;
    }

    /// Hides the end of the present stream from the queue pair, as InfiniBand does on connections
    /// of the connection manager: the program is notified by an event, and decides itself when its
    /// queue pair ends ([`hides_end`](Self::hides_end)).
    pub const fn hide_end(&mut self) {
        self.acknowledge.end_hidden = true;
    }

    /// Returns `true` if the end of the stream must not change the queue pair: it was connected by number, or
    /// [`hide_end`](Self::hide_end) was called, and the program has not begun to end the connection. The caller keeps the queue
    /// pair as it is, and lets it fail when a request has waited for long enough. Nobody knows whether requests that wait now were
    /// placed. If the stream ends inside a message, the receive that the message has begun to fill stays in use until the queue pair
    /// ends, and completes as flushed then.
    pub const fn hides_end(&self) -> bool {
        (self.acknowledge.connectionless || self.acknowledge.end_hidden)
            && self.life.is_up_for_good()
    }

    /// Writes a probe into the plan: a zero-length Read.
    #[cold]
    #[inline(never)]
    pub(super) fn emit_probe(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        let sink_stag = self.next_sink();
        self.emit_empty_read(sink_stag, plan, w);
        self.probed();
    }

    /// The probe was put into the plan. It asks for no octets, so nothing is compared with its sink, and no request is looked for by its number.
    fn probed(&mut self) {
        let Some(seq) = self.sq.last_started() else {
            return;
        };
        let probe = Awaited {
            seq,
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

    /// Returns `true` if an RDMA Read or atomic of the program waits for its answer.
    pub(super) fn awaits_answers(&self) -> bool {
        self.sq.awaited.len() > u32::from(self.acknowledge.probing)
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

    /// Returns what to look for to find the Send or Write that a Terminate is about; without a header in it, the oldest one.
    pub(super) fn sought(&self, terminate: &Terminate) -> Option<Sought> {
        if !self.acknowledge.on {
            return None;
        }
        match terminate.ddp_header {
            Some(Header::Untagged(h)) if h.qn == 0 => {
                Some(Sought::message(h.msn, self.next_send_msn()))
            }
            Some(Header::Tagged(header)) if header.opcode == Opcode::WRITE => Some(Sought::Write {
                header,
                segment_len: terminate.ddp_segment_len,
                older: 0,
            }),
            None if terminate.code.layer == TerminateCode::RDMAP_LOCAL_CATASTROPHIC.layer => {
                Some(Sought::Oldest { older: 0 })
            }
            _ => None,
        }
    }

    /// Returns the sequence number of the next message on queue 0.
    pub(super) fn next_send_msn(&self) -> u32 {
        self.tx.msn.first().copied().unwrap_or(1)
    }

    /// The peer has refused a request with this verdict; it is looked for before anything is flushed.
    pub(super) const fn seek(&mut self, sought: Option<Sought>, verdict: Verdict) {
        self.acknowledge.sought = match sought {
            Some(sought) => Some((sought, verdict)),
            None => None,
        };
    }

    /// Looks at up to `most` more requests for the one that the peer has refused. Returns `false` if there are more to look at.
    pub(super) fn look_for_refused<H: Host>(&mut self, most: u32, host: &mut H) -> bool {
        let Some((mut sought, verdict)) = self.acknowledge.sought.take() else {
            return true;
        };
        for _ in 0..most {
            match self.look_at(&mut sought) {
                Look::Other => {}
                Look::End => return true,
                Look::Found(seq) => {
                    self.refuse(seq, verdict, host);
                    return true;
                }
            }
        }
        self.acknowledge.sought = Some((sought, verdict));
        false
    }

    /// The peer has refused this request, and processed those before it.
    pub(super) fn refuse<H: Host>(&mut self, seq: u32, verdict: Verdict, host: &mut H) {
        self.complete_before(seq, host);
        self.sq.fail(seq, verdict.status, verdict.vendor_err);
    }

    /// Looks at one more request.
    ///
    /// If several requests fit, it is the oldest of them, so that no request is taken for placed that may have been refused.
    pub(super) fn look_at(&self, sought: &mut Sought) -> Look {
        let (fits, seq) = match sought {
            Sought::Message { msn, next, newer } => {
                let Some((seq, slot)) = self.sq.started_from_end(*newer) else {
                    return Look::End;
                };
                *newer = newer.saturating_add(1);
                let n = self.messages_begun(seq, slot);
                *next = next.wrapping_sub(n);
                (msn.wrapping_sub(*next) < n, seq)
            }
            Sought::Write {
                header,
                segment_len,
                older,
            } => {
                let Some((seq, slot)) = self.sq.started_from(*older) else {
                    return Look::End;
                };
                *older = older.saturating_add(1);
                (may_have_sent(slot, header, *segment_len), seq)
            }
            Sought::Oldest { older } => {
                let Some((seq, slot)) = self.sq.started_from(*older) else {
                    return Look::End;
                };
                *older = older.saturating_add(1);
                (!slot.done && !slot.op.has_response(), seq)
            }
        };
        if fits { Look::Found(seq) } else { Look::Other }
    }

    /// Returns how many messages on queue 0 a request has begun.
    fn messages_begun(&self, seq: u32, slot: &Slot) -> u32 {
        match self.tx.job {
            Some(Job::Request {
                seq: unsent,
                off,
                stage,
            }) if unsent == seq => messages_begun(&slot.op, stage, off),
            _ => messages(&slot.op),
        }
    }
}

/// What is looked for among the requests that were started and are not acknowledged, and how far that is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sought {
    /// The request that sent the message with this sequence number on queue 0, from the newest request on.
    Message {
        msn: u32,
        /// The sequence number of the message after those that were not looked at.
        next: u32,
        /// Requests that were looked at.
        newer: u32,
    },
    /// The Write that may have sent a segment with this header, from the oldest request on.
    Write {
        header: TaggedHeader,
        segment_len: Option<u16>,
        older: u32,
    },
    /// The oldest that is not done.
    Oldest { older: u32 },
}

impl Sought {
    /// The message with this sequence number, if `next` is that of the message after the last one: count back from it.
    pub(super) const fn message(msn: u32, next: u32) -> Self {
        let newer = 0;
        Self::Message { msn, next, newer }
    }
}

/// With what a request ends that the peer has refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) status: WcStatus,
    pub(super) vendor_err: u32,
}

/// What one look has shown.
pub(super) enum Look {
    Other,
    Found(u32),
    End,
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
pub(super) const fn messages(op: &SendOp) -> u32 {
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
        SendOp::SendImm(_) if body => 2,
        SendOp::SendImm(_) if matches!(stage, Stage::Body) => 1,
        // The immediate data are the only message of a Write on that queue, and its last.
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages on queue 0 of each kind of request, and how many of them have begun at each of its places.
    #[test]
    fn messages_are_counted_from_their_first_octet() {
        let write = SendOp::Write {
            remote_addr: 0,
            rkey: 0,
        };
        let write_imm = SendOp::WriteImm {
            remote_addr: 0,
            rkey: 0,
            imm: 0,
        };
        use Stage::{Body, ImmediateFirst, ImmediateLast};
        let cases = [
            (SendOp::Send, 1, [(Body, 0, 0), (Body, 1, 1), (Body, 9, 1)]),
            (
                SendOp::SendInv(1),
                1,
                [(Body, 0, 0), (Body, 1, 1), (Body, 9, 1)],
            ),
            (
                SendOp::SendImm(1),
                2,
                [(ImmediateFirst, 0, 0), (Body, 0, 1), (Body, 1, 2)],
            ),
            (write, 0, [(Body, 0, 0), (Body, 1, 0), (Body, 9, 0)]),
            (
                write_imm,
                1,
                [(Body, 0, 0), (Body, 1, 0), (ImmediateLast, 9, 0)],
            ),
        ];
        for (op, all, places) in cases {
            assert_eq!(messages(&op), all);
            for (stage, off, begun) in places {
                assert_eq!(
                    messages_begun(&op, stage, off),
                    begun,
                    "{op:?} {stage:?} {off}"
                );
            }
        }
    }
}
