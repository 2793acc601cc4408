//! Acknowledged mode: Sends and Writes complete when the peer has placed them, instead of when they
//! are written to the stream.
//!
//! Programs that connect queue pairs by GID and number were written for InfiniBand, where a Send or
//! Write completes when the responder has acknowledged it. They read the peer's memory as soon as
//! their Write completes, and expect an error status if the peer refuses it. iWARP has no
//! acknowledgements, but RFC 5040 section 5.5 orders placement: the response to an RDMA Read
//! implies that everything sent before the request is placed. In this mode a queue pair therefore
//! sends a zero-length RDMA Read, a *probe*, after its Sends and Writes, and completes them when a
//! later Read is answered. The peer needs no support for this.
//!
//! Only messages of the peer complete a request: the response to a later Read or probe, or a
//! Terminate about a later request. An orderly end of the stream does not: octets acknowledged by
//! TCP may lie in a buffer that nobody reads.

use super::by_number::Rnr;
use super::farewell::Parting;
use super::fpdu::Wire;
use super::plan::TxPlan;
use super::send_queue::Awaited;
use super::send_queue::Slot;
use super::tx::{Job, Stage};
use super::{Direction, Host, QueuePair};
use crate::memory::Memory;
use crate::{Cqe, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, TAGGED_HEADER_LEN, TaggedHeader};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};

/// Maximum messages before a probe is sent, even if more are waiting.
const BURST: u32 = 16;

/// Requests that were sent and not acknowledged yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acknowledge {
    pub(super) enabled: bool,
    by_number: bool,
    /// Messages of Sends and Writes planned since the start of the stream; wraps.
    pub(super) sent: u32,
    /// The value of `sent` at the last planned request whose response acknowledges the earlier
    /// messages.
    covered: u32,
    /// A probe is in flight. There is only one at a time: the next one covers everything sent
    /// since.
    probing: bool,
    /// The peer has refused a request, and the search for it is not finished.
    search: Option<(Search, Verdict)>,
    /// The stream is connected to this queue pair itself.
    pub(super) own_peer: bool,
    /// How Sends that find no receive are retried.
    pub(super) rnr: Rnr,
    pub(super) parting: Parting,
    /// The peer has sent its farewell.
    pub(super) peer_gone: bool,
    /// The end of the current stream does not change the queue pair.
    end_hidden: bool,
}

impl Acknowledge {
    /// Clears everything except the mode, when the queue pair is reset.
    pub(super) const fn reset(&mut self) {
        self.covered = self.sent;
        self.probing = false;
        self.search = None;
        self.parting = Parting::No;
    }

    pub(super) const fn start(&mut self) {
        self.sent = 0;
        self.covered = 0;
        self.parting = Parting::No;
        self.peer_gone = false;
        self.end_hidden = false;
        self.rnr.start();
    }

    pub(super) const fn count_sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Records a planned request whose response will acknowledge all earlier messages.
    pub(super) const fn cover_sent(&mut self) {
        self.covered = self.sent;
    }

    /// Returns how many messages no planned request will acknowledge.
    const fn uncovered(&self) -> u32 {
        // This cannot wrap in acknowledged mode: enabling the mode sets `covered`.
        self.sent.wrapping_sub(self.covered)
    }

    /// Returns `true` if a probe is needed and none is in flight.
    #[inline]
    pub(super) const fn is_probe_due(&self) -> bool {
        self.enabled && self.uncovered() > 0 && !self.probing
    }

    /// Returns `true` after `BURST` messages without a probe, so that a program that never pauses
    /// still gets completions.
    pub(super) const fn is_burst_complete(&self) -> bool {
        self.uncovered() >= BURST
    }
}

impl QueuePair {
    /// Enables acknowledged mode: from now on Sends and Writes complete when the peer has placed
    /// them, or with the peer's error status if it refuses them. This costs a zero-length RDMA Read
    /// for each burst of requests.
    pub fn complete_when_placed(&mut self) {
        if !self.acknowledge.enabled {
            self.acknowledge.enabled = true;
            let open = u32::from(self.has_open_messages());
            self.acknowledge.covered = self.acknowledge.sent.wrapping_sub(open);
        }
    }

    /// Returns `true` if a started Send or Write needs a probe: it is incomplete, and no later
    /// request has a response that would acknowledge it. A probe sent for completed requests would
    /// belong to no request.
    fn has_open_messages(&self) -> bool {
        (0..self.sq.unacknowledged())
            .map_while(|i| self.sq.started_from_end(i))
            .map(|(_, slot)| slot)
            .take_while(|slot| !slot.op.has_response())
            .any(|slot| !slot.done && !slot.op.is_local())
    }

    /// Returns `true` if the program knows the peer by its number only, and not the connection.
    pub const fn is_by_number(&self) -> bool {
        self.acknowledge.by_number
    }

    /// Hides the connection from the program; see [`is_by_number`](Self::is_by_number).
    pub const fn set_by_number(&mut self) {
        self.acknowledge.by_number = true;
    }

    /// Hides the end of the current stream from the queue pair, as InfiniBand does for connections
    /// of the connection manager. The program gets an event, and decides when its queue pair ends
    /// ([`hides_end`](Self::hides_end)).
    pub const fn hide_end(&mut self) {
        self.acknowledge.end_hidden = true;
    }

    /// Returns `true` if the end of the stream must not change the queue pair. This is so if it was
    /// connected by number or [`hide_end`](Self::hide_end) was called, unless the program has
    /// started to disconnect. The caller keeps the queue pair as it is, and fails it when a request
    /// has been pending for too long. It is unknown whether pending requests were placed. If the
    /// stream ends inside a message, its receive stays in use until the queue pair ends, and is
    /// then flushed.
    pub const fn hides_end(&self) -> bool {
        (self.acknowledge.by_number || self.acknowledge.end_hidden) && self.life.is_open()
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit_probe(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        let sink_stag = self.next_sink();
        self.emit_empty_read(sink_stag, plan, w);
        self.record_probe();
    }

    /// Records a planned probe. It reads nothing, so its sink is not checked; it completes earlier
    /// requests only.
    fn record_probe(&mut self) {
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
            self.acknowledge.cover_sent();
        }
    }

    /// Handles a response, which acknowledges everything up to its request.
    pub(super) fn acknowledged<H: Host>(&mut self, awaited: &Awaited, host: &mut H) {
        if awaited.probe {
            self.acknowledge.probing = false;
        }
        self.complete_through(awaited.seq, host);
    }

    /// Completes the requests before `seq` that have no response of their own. The peer has
    /// processed them in order.
    pub(super) fn complete_before<H: Host>(&mut self, seq: u32, host: &mut H) {
        if !self.acknowledge.enabled {
            return;
        }
        let end = match self.first_unanswered() {
            Some(read) if (read.wrapping_sub(seq) as i32) < 0 => read,
            _ => seq,
        };
        self.complete_through(end.wrapping_sub(1), host);
    }

    /// Returns `true` if an RDMA Read or atomic of the program awaits its response.
    pub(super) fn awaits_answers(&self) -> bool {
        self.sq.awaited.len() > u32::from(self.acknowledge.probing)
    }

    /// Returns the program's oldest RDMA Read or atomic without a response.
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

    /// Returns how to search for the Send or Write that a Terminate refers to. If the Terminate
    /// contains no header, this is the oldest one.
    pub(super) fn search(&self, terminate: &Terminate) -> Option<Search> {
        if !self.acknowledge.enabled {
            return None;
        }
        match terminate.ddp_header {
            Some(Header::Untagged(h)) if h.qn == 0 => {
                Some(Search::message(h.msn, self.next_send_msn()))
            }
            Some(Header::Tagged(header)) if header.opcode == Opcode::WRITE => Some(Search::Write {
                header,
                segment_len: terminate.ddp_segment_len,
                examined: 0,
            }),
            None if terminate.code.layer == TerminateCode::RDMAP_LOCAL_CATASTROPHIC.layer => {
                Some(Search::Oldest { examined: 0 })
            }
            _ => None,
        }
    }

    pub(super) fn next_send_msn(&self) -> u32 {
        self.tx.msn.first().copied().unwrap_or(1)
    }

    /// Starts the search for a refused request. Nothing is flushed before the search ends.
    pub(super) const fn start_search(&mut self, search: Option<Search>, verdict: Verdict) {
        self.acknowledge.search = match search {
            Some(search) => Some((search, verdict)),
            None => None,
        };
    }

    /// Examines up to `most` more requests in the search for the refused one. Returns `false` if
    /// the search has to be continued.
    pub(super) fn search_refused<H: Host>(&mut self, most: u32, host: &mut H) -> bool {
        let Some((mut search, verdict)) = self.acknowledge.search.take() else {
            return true;
        };
        for _ in 0..most {
            match self.examine(&mut search) {
                Examined::Other => {}
                Examined::End => return true,
                Examined::Found(seq) => {
                    self.refuse(seq, verdict, host);
                    return true;
                }
            }
        }
        self.acknowledge.search = Some((search, verdict));
        false
    }

    /// Fails the refused request with the verdict, and completes the requests before it.
    pub(super) fn refuse<H: Host>(&mut self, seq: u32, verdict: Verdict, host: &mut H) {
        self.complete_before(seq, host);
        self.sq.fail(seq, verdict.status, verdict.vendor_err);
    }

    /// Examines one more request.
    ///
    /// If several requests match, the oldest one is selected, so that no request that may have been
    /// refused is reported as placed.
    pub(super) fn examine(&self, search: &mut Search) -> Examined {
        let (is_match, seq) = match search {
            Search::Message {
                msn,
                next,
                examined,
            } => {
                let Some((seq, slot)) = self.sq.started_from_end(*examined) else {
                    return Examined::End;
                };
                *examined = examined.saturating_add(1);
                let n = self.messages_begun(seq, slot);
                *next = next.wrapping_sub(n);
                (msn.wrapping_sub(*next) < n, seq)
            }
            Search::Write {
                header,
                segment_len,
                examined,
            } => {
                let Some((seq, slot)) = self.sq.started_from(*examined) else {
                    return Examined::End;
                };
                *examined = examined.saturating_add(1);
                (may_have_sent(slot, header, *segment_len), seq)
            }
            Search::Oldest { examined } => {
                let Some((seq, slot)) = self.sq.started_from(*examined) else {
                    return Examined::End;
                };
                *examined = examined.saturating_add(1);
                (!slot.done && !slot.op.has_response(), seq)
            }
        };
        if is_match {
            Examined::Found(seq)
        } else {
            Examined::Other
        }
    }

    fn messages_begun(&self, seq: u32, slot: &Slot) -> u32 {
        match self.tx.job {
            Some(Job::Request {
                seq: unsent,
                off,
                stage,
            }) if unsent == seq => messages_begun(&slot.op, stage, off),
            _ => messages_on_queue_0(&slot.op),
        }
    }
}

/// A search among the started, unacknowledged requests, and its progress.
#[derive(Debug, Clone, Copy)]
pub(super) enum Search {
    /// The request that sent this message on queue 0. The search runs from newest to oldest.
    Message {
        msn: u32,
        /// MSN after that of the newest message not examined yet.
        next: u32,
        examined: u32,
    },
    /// The Write that may have sent a segment with this header. The search runs from oldest to
    /// newest.
    Write {
        header: TaggedHeader,
        segment_len: Option<u16>,
        examined: u32,
    },
    Oldest {
        examined: u32,
    },
}

impl Search {
    /// Searches for a message on queue 0; `next` is the MSN after the last one sent.
    pub(super) const fn message(msn: u32, next: u32) -> Self {
        let examined = 0;
        Self::Message {
            msn,
            next,
            examined,
        }
    }
}

/// How a request that the peer has refused completes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) status: WcStatus,
    pub(super) vendor_err: u32,
}

pub(super) enum Examined {
    Other,
    Found(u32),
    End,
}

/// Returns `true` if the Write may have sent a segment with this header. The segment's length
/// (header included) narrows the choice, but not every peer returns it.
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

/// Returns how many messages on queue 0 (Sends and immediate data) an operation sends.
pub(super) const fn messages_on_queue_0(op: &SendOp) -> u32 {
    match op {
        SendOp::Send | SendOp::SendInv(_) | SendOp::WriteImm { .. } => 1,
        SendOp::SendImm(_) => 2,
        _ => 0,
    }
}

/// Returns how many messages on queue 0 a request has started if its next segment is at `off` of
/// `stage`.
const fn messages_begun(op: &SendOp, stage: Stage, off: u32) -> u32 {
    let body = matches!(stage, Stage::Body) && off > 0;
    match op {
        SendOp::Send | SendOp::SendInv(_) => body as u32,
        SendOp::SendImm(_) if body => 2,
        SendOp::SendImm(_) if matches!(stage, Stage::Body) => 1,
        // Immediate data are the last message of a Write, and its only one on that queue.
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_count_from_first_octet() {
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
            assert_eq!(messages_on_queue_0(&op), all);
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
