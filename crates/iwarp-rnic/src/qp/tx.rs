//! The transmit side: filling plans, and handling their completion (RFC 5041 section 5.1, RFC 5044
//! section 4.5).
//!
//! The module `next` chooses the next message.

use super::fpdu::Wire;
use super::local::{LocalRequest, LocalStep};
use super::message::has_room_for_control;
use super::next::Next;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::send_queue::{RETIRE_MAX, Slot};
use super::{Direction, Env, Host, QueuePair, Rtr, StreamConfig};
use crate::memory::Memory;
use crate::{Cqe, SendOp};
use iwarp_proto::ddp::UNTAGGED_HEADER_LEN;
use iwarp_proto::mpa::framing::{MarkerClock, mulpdu};
use iwarp_proto::rdmap::ReadRequest;

/// The result of [`QueuePair::tx_fill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum TxFill {
    /// There is nothing to write.
    Idle,
    /// The plan has octets: write them.
    Ready,
    /// A bind is next: call [`QueuePair::tx_memory`] with the table locked for writing, then fill
    /// again.
    Memory,
    /// The plan is empty, but the budget of one call is used up
    /// ([`Budget::local_requests`](super::Budget)): fill again. Locks may be released in between.
    More,
}

/// The message in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Job {
    /// The front of the response queue, sent up to `off`.
    Response { off: u32 },
    /// A send work request, sent up to `off`.
    Request { seq: u32, off: u32, stage: Stage },
}

/// Which message of a work request is in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Immediate data before a Send.
    ImmediateFirst,
    Body,
    /// Immediate data after an RDMA Write.
    ImmediateLast,
}

#[derive(Debug)]
pub(super) struct Tx {
    crc: bool,
    markers: bool,
    /// Effective maximum segment size of the stream.
    emss: u32,
    /// Mark of the response queue: before a graceful end, the peer's requests before the mark are
    /// answered.
    pub(super) answer_until: Option<u32>,
    pub(super) job: Option<Job>,
    /// The request at the head of the send queue, if it changes the memory table.
    pub(super) local: LocalRequest,
    /// Number of requests that only change the memory table, executed by the current call.
    pub(super) local_done: u32,
    /// The RTR message, which precedes all others.
    pub(super) rtr: Option<Rtr>,
    /// An FPDU was sent on this stream.
    pub(super) has_sent: bool,
    /// Octets of a TCP segment, if every segment must begin with an FPDU.
    pub(super) segment: Option<u32>,
    pub(super) mulpdu: u16,
    pub(super) clock: MarkerClock,
    /// Next message sequence number of queues 0 to 3.
    pub(super) msn: [u32; 4],
    pub(super) next_sink: u32,
    pub(super) responses_in_row: u32,
}

impl Default for Tx {
    fn default() -> Self {
        Self {
            crc: false,
            markers: false,
            emss: u32::MAX,
            answer_until: None,
            job: None,
            local: LocalRequest::default(),
            local_done: 0,
            rtr: None,
            has_sent: false,
            segment: None,
            mulpdu: 128,
            clock: MarkerClock::new(),
            //= rfc5041 section 4.3
            //# The initial value for MSN MUST be one.
            msn: [1; 4],
            next_sink: 0,
            responses_in_row: 0,
        }
    }
}
impl Tx {
    pub(super) fn start(&mut self, stream: &StreamConfig) {
        *self = Self {
            crc: stream.crc,
            markers: stream.markers_tx,
            emss: stream.emss,
            rtr: stream.rtr,
            //= rfc5044 section 5.1
            //# MPA transmitters SHOULD calculate a MULPDU as described in Section 4.5.
            mulpdu: mulpdu(stream.emss, stream.markers_tx),
            // The peer only returns it, so any value except 0 and 1 works.
            next_sink: 0x5100_0001,
            ..Self::default()
        };
    }

    pub(super) const fn send_rtr(&mut self, rtr: Rtr) {
        self.rtr = Some(rtr);
    }

    /// Assigns the message sequence number of a Send that starts; returns zero for an RDMA Write.
    #[inline]
    pub(super) fn begin_payload(&mut self, slot: &Slot) -> u32 {
        match slot.op {
            SendOp::Write { .. } | SendOp::WriteImm { .. } => 0,
            //= rfc5040 section 5.3
            //# The Local Peer MUST issue Send Message Type Messages in the order they
            //# were submitted by the ULP.
            _ => self.next_msn(0),
        }
    }

    /// Frees the sequence number of a message of which no segment was planned.
    #[cold]
    pub(super) fn unassign_msn(&mut self, slot: &Slot) {
        let is_write = matches!(slot.op, SendOp::Write { .. } | SendOp::WriteImm { .. });
        if let (false, [msn, ..]) = (is_write, &mut self.msn) {
            *msn = msn.wrapping_sub(1);
        }
    }

    #[inline]
    pub(super) fn next_msn(&mut self, qn: u32) -> u32 {
        match self.msn.get_mut(qn as usize) {
            Some(msn) => {
                let now = *msn;
                //= rfc5041 section 4.3
                //# The Message Sequence Number specifies a sequence number that MUST be
                //# increased by one (modulo 2^32) with each DDP Message targeting the
                //# specific Queue Number on the DDP Stream associated with this DDP
                //# Segment.
                //= rfc5041 section 4.3
                //# The MSN value MUST wrap to 0 after a value of 0xFFFFFFFF.
                *msn = now.wrapping_add(1);
                now
            }
            None => 0,
        }
    }
}

impl QueuePair {
    /// Returns `true` if a plan was filled and is not written completely: if the stream ended now,
    /// it might end inside an FPDU.
    pub const fn has_unwritten(&self) -> bool {
        self.life.has_unwritten()
    }

    /// Returns `true` if [`tx_fill`](Self::tx_fill) should be called.
    #[inline]
    pub fn wants_tx(&self) -> bool {
        self.life.has_octets_due() || self.next_message() != Next::Nothing
    }

    /// Aligns FPDUs with TCP segments from now on: every segment begins with an FPDU and contains
    /// complete FPDUs only. TCP must end a segment after `segment` octets, and after each write
    /// for which [`TxPlan::ends_segment`] returns `true`.
    ///
    /// Has no effect if FPDUs are built for larger segments.
    pub fn align(&mut self, segment: u32) {
        if self.tx.emss <= segment {
            self.tx.segment = Some(segment);
        }
    }

    /// Returns the length of a TCP segment if FPDUs are [aligned](Self::align).
    #[inline]
    pub const fn alignment(&self) -> Option<u32> {
        self.tx.segment
    }

    /// Returns `true` if the next message has several segments, so that the segment size matters.
    pub fn is_segmenting(&self) -> bool {
        let most = u32::from(self.tx.mulpdu).saturating_sub(UNTAGGED_HEADER_LEN as u32);
        let long = |response: &Response| match response {
            Response::Read(ReadRequest { size, .. }) => *size > most,
            Response::Atomic { .. } => false,
        };
        self.tx.job.is_some()
            || self.responses.front().is_some_and(long)
            || self.sq.next().is_some_and(|(_, slot)| slot.len > most)
    }

    /// Sets the new maximum segment size of the stream.
    pub fn set_emss(&mut self, emss: u32) {
        self.tx.emss = emss;
        //= rfc5041 section 3
        //# 2. In the event of a MULPDU change, DDP MUST NOT be required by the LLP to
        //# re-segment DDP Segments that have been previously posted to the LLP.
        self.tx.mulpdu = mulpdu(emss, self.tx.markers);
    }

    pub(super) fn has_startable(&self) -> bool {
        self.startable().is_some()
    }

    /// Fills a plan with as many FPDUs as are due and fit.
    ///
    /// The plan must be empty. The caller then writes it in one or more steps, and calls
    /// [`tx_written`](Self::tx_written) after each step, before it fills the plan again.
    pub fn tx_fill<H: Host>(&mut self, plan: &mut TxPlan, env: &mut Env<'_, H>) -> TxFill {
        let may_send = self.life.may_send() || self.life.has_octets_due();
        if !may_send && !self.life.awaits_first_fpdu() {
            return TxFill::Idle;
        }
        let wire = Wire {
            memory: env.memory,
            accessor: self.accessor(),
            crc: self.tx.crc.then_some(env.crc32c),
            markers: self.tx.markers,
            snapshot: self.config.snapshot,
            copy_max: plan.copy_max(),
            copy_all: env.memory.has_on_demand(),
        };
        self.retry_memory();
        self.tx.local_done = 0;
        let stop = self.fill(plan, &wire, env);
        plan.seal();
        self.life.written(!plan.is_done());
        if !plan.is_empty() {
            return TxFill::Ready;
        }
        if stop == TxFill::Idle {
            self.note_drained();
        }
        stop
    }

    /// Adds due messages to a plan until it is full or the caller has to do something else. An
    /// empty plan has room for any FPDU.
    #[inline]
    fn fill<H: Host>(
        &mut self,
        plan: &mut TxPlan,
        w: &Wire<'_, H::Memory>,
        env: &mut Env<'_, H>,
    ) -> TxFill {
        loop {
            let has_room = match self.next_message() {
                Next::Nothing => return TxFill::Idle,
                Next::Requests(most) => self.send_requests(most, plan, w, env.host),
                Next::Responses(most) => self.send_responses(most, plan, w, env.host),
                Next::Rest(job) => self.send_rest(job, plan, w, env.host),
                Next::Local => match self.local_request(plan.is_empty(), env) {
                    LocalStep::Done => true,
                    LocalStep::Stop(stop) => return stop,
                },
                message => self.send_protocol_message(message, plan, w),
            };
            if !has_room {
                return TxFill::Idle;
            }
        }
    }

    /// Plans a protocol message. Returns `false` if there is no room.
    #[cold]
    #[inline(never)]
    fn send_protocol_message(
        &mut self,
        message: Next,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> bool {
        let has_room = has_room_for_control(plan, w);
        if has_room {
            match message {
                Next::Rtr(rtr) => self.emit_rtr(rtr, plan, w),
                Next::Probe => self.emit_probe(plan, w),
                Next::Note(note) => self.emit_note(note, plan, w),
                _ => {
                    if let Some(terminate) = self.life.take_terminate() {
                        self.emit_terminate(&terminate, plan, w);
                    }
                }
            }
        }
        has_room
    }

    /// Records that `n` more octets of the plan were written, and completes the requests that are
    /// now sent. A completely written plan is cleared.
    pub fn tx_written<H: Host>(&mut self, plan: &mut TxPlan, n: usize, host: &mut H) {
        plan.advance(n);
        self.counters.tx_bytes = self.counters.tx_bytes.wrapping_add(n as u64);
        while let Some(event) = plan.next_event() {
            self.counters.tx_messages = self.counters.tx_messages.wrapping_add(1);
            match event {
                //= rfc5040 section 5.5
                //# A Send or RDMA Write Message MUST NOT be considered Complete at the
                //# Local Peer (Data Source) until it has been successfully completed at the
                //# DDP layer.
                // The request completes when the peer has acknowledged it.
                Milestone::Request(_) if self.acknowledge.enabled => {}
                Milestone::Request(seq) => self.complete_request(seq, host),
                Milestone::Response => {}
                Milestone::Terminate => {
                    self.counters.terminates_sent = self.counters.terminates_sent.wrapping_add(1);
                }
            }
        }
        self.life.written(!plan.is_done());
        if plan.is_done() {
            plan.clear();
            if self.config.match_tags {
                // The send queue may have room for waiting rendezvous.
                self.start_reads(host);
            }
            self.note_drained();
        }
    }

    #[inline]
    pub(super) fn complete_request<H: Host>(&mut self, seq: u32, host: &mut H) {
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        let others_due = self.sq.complete(seq, |cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
        if others_due {
            self.retire_done(RETIRE_MAX, host);
        }
    }

    /// Completes up to `most` requests that are done. Not inlined, because few requests wait for
    /// earlier ones.
    #[inline(never)]
    pub(super) fn retire_done<H: Host>(&mut self, most: u32, host: &mut H) {
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        self.sq.retire_done(most, |cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
    }
}
