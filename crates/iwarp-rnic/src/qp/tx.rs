//! The transmit side: which message goes next, how plans are filled, and what happens when they are written
//! (RFC 5041 section 5.1, RFC 5044 section 4.5).
//!
//! Order: a Terminate that is due, then answers to the peer up to a limit, then the send queue. A message is finished before
//! another starts, because some receivers cannot handle interleaved tagged messages.

use super::local::LocalRequest;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::segment::Wire;
use super::send_queue::Slot;
use super::{Direction, Env, Host, QueuePair, Rtr, StreamConfig};
use crate::limits::{MAX_FPDU, RESPONSE_BURST, SUM_PART, TX_COPY_MAX};
use crate::memory::Memory;
use crate::{Cqe, FastRegister, SendFlags, SendOp};
use iwarp_proto::ddp::UNTAGGED_HEADER_LEN;
use iwarp_proto::mpa::framing::{MarkerClock, mulpdu};

/// Scratch that an FPDU needs: with its payload copied, and with its payload elsewhere.
pub(super) const SMALL_FRAME: usize = TX_COPY_MAX as usize + 128;
/// Scratch that an FPDU with a CRC needs whose payload stays elsewhere: parts of it are copied to be summed.
const SUMMED_FRAME: usize = SUM_PART + 128;
const _: () = assert!(SUMMED_FRAME >= SMALL_FRAME);

/// The result of [`QueuePair::tx_fill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum TxFill {
    /// There is nothing to write.
    Idle,
    /// The plan holds octets: write them.
    Ready,
    /// A bind is next: call [`QueuePair::tx_memory`] with the table locked for writing, then fill again.
    Memory,
}

/// The message being sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Job {
    /// The front of the response queue, sent up to `off`.
    Response { off: u32 },
    /// A send work request, sent up to `off`.
    Request { seq: u32, off: u32, stage: Stage },
}

/// Which message of a work request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Immediate data in front of a Send.
    ImmediateFirst,
    /// The main message.
    Body,
    /// Immediate data behind an RDMA Write.
    ImmediateLast,
}

#[derive(Debug)]
pub(super) struct Tx {
    crc: bool,
    markers: bool,
    /// Effective maximum segment size of the stream.
    emss: u32,
    /// Requests of the peer that are answered before a graceful end: up to this mark of the response queue.
    pub(super) answer_until: Option<u32>,
    pub(super) job: Option<Job>,
    /// The request at the head of the send queue, if it changes the memory table.
    pub(super) local: LocalRequest,
    rtr: Option<Rtr>,
    /// An FPDU was sent on this stream.
    pub(super) spoke: bool,
    /// Octets in a TCP segment, if every segment shall begin with an FPDU.
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
            rtr: None,
            spoke: false,
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
            // Any value except 0 serves; the peer only returns it.
            next_sink: 0x5100_0001,
            ..Self::default()
        };
    }

    /// Sends this message before all others.
    pub(super) const fn send_rtr(&mut self, rtr: Rtr) {
        self.rtr = Some(rtr);
    }

    pub(super) const fn rtr_pending(&self) -> bool {
        self.rtr.is_some()
    }

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
    /// Returns `true` if the stream would end inside an FPDU now: a plan was begun and not all of it is known to be written.
    pub const fn has_unwritten(&self) -> bool {
        self.life.has_unwritten()
    }

    /// Returns `true` if there is something to write, or something to do before that.
    #[inline]
    pub fn wants_tx(&self) -> bool {
        self.life.has_octets_due()
            || self.life.may_send()
                && (self.tx.job.is_some()
                    || self.tx.rtr.is_some()
                    || !self.responses.is_empty()
                    || self.startable().is_some()
                    || self.wants_probe())
            || self.life.waits() && self.startable().is_some()
    }

    /// From now on every TCP segment begins with an FPDU and holds whole FPDUs only, if it has `segment` octets or is the last
    /// of a write that [`TxPlan::ends_segment`] asks to keep apart.
    ///
    /// Does nothing if FPDUs are made for larger segments than that.
    pub fn align(&mut self, segment: u32) {
        if self.tx.emss <= segment {
            self.tx.segment = Some(segment);
        }
    }

    /// Octets in a TCP segment, if every segment begins with an FPDU.
    #[inline]
    pub const fn alignment(&self) -> Option<u32> {
        self.tx.segment
    }

    /// Returns `true` if the next message is cut into segments, so that their size matters.
    pub fn is_segmenting(&self) -> bool {
        let most = u32::from(self.tx.mulpdu).saturating_sub(UNTAGGED_HEADER_LEN as u32);
        let long =
            |response: &Response| matches!(response, Response::Read { len, .. } if *len > most);
        self.tx.job.is_some()
            || self.responses.front().is_some_and(long)
            || self.sq.next().is_some_and(|(_, slot)| slot.len > most)
    }

    /// Notes that the stream's maximum segment size has changed.
    pub fn set_emss(&mut self, emss: u32) {
        self.tx.emss = emss;
        //= rfc5041 section 3
        //# 2. In the event of a MULPDU change, DDP MUST NOT be required by the LLP to
        //# re-segment DDP Segments that have been previously posted to the LLP.
        self.tx.mulpdu = mulpdu(emss, self.tx.markers);
    }

    /// Returns the send work request that may start now, if any.
    #[inline]
    pub(super) fn startable(&self) -> Option<(u32, &Slot)> {
        if !self.life.starts_requests() || self.tx.local.waits {
            return None;
        }
        let (seq, slot) = self.sq.next()?;
        if slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty() {
            return None;
        }
        if slot.op.has_response() {
            // With an ORD of zero it could never be served: let it start, so that it fails.
            // An RTR message by Read also waits for an answer of the peer.
            //= rfc5040 section 6.1
            //# For outbound RDMA Read Requests, the RDMAP layer MUST NOT exceed the
            //# maximum number of outstanding, outbound RDMA Read Requests that were
            //# negotiated between the ULP and the Local Peer's RDMAP layer.
            let outstanding = self.sq.awaited.len() + u32::from(self.rx.rtr_response_due);
            if self.sq.ord() > 0 && outstanding >= u32::from(self.sq.ord()) {
                return None;
            }
            // Some peers answer a zero-length Read behind another one with the octets of the other.
            if slot.len == 0 && !self.sq.awaited.is_empty() {
                return None;
            }
            if self.tx.rtr_pending() {
                return None;
            }
        }
        if self.life.waits() && !slot.op.is_local() {
            return None;
        }
        Some((seq, slot))
    }

    /// Carries out requests that send nothing, for a responder that waits for the initiator's first FPDU.
    #[cold]
    fn local_requests<H: Host>(&mut self, env: &mut Env<'_, H>) -> TxFill {
        self.retry_memory();
        while let Some((seq, slot)) = self.startable() {
            match slot.op {
                SendOp::LocalInvalidate { stag } => self.local_invalidate(seq, stag, env),
                SendOp::FastRegister(wr) => self.fast_register(seq, &wr, env),
                _ => return TxFill::Memory,
            }
        }
        self.note_drained();
        TxFill::Idle
    }

    /// Returns `true` if a send work request may start now.
    pub(super) fn has_startable(&self) -> bool {
        self.startable().is_some()
    }

    /// Fills a plan with as many FPDUs as are due and fit.
    ///
    /// The plan must be empty. Afterwards write it, in one or more steps, and call
    /// [`tx_written`](Self::tx_written) after each; only then fill again.
    pub fn tx_fill<H: Host>(&mut self, plan: &mut TxPlan, env: &mut Env<'_, H>) -> TxFill {
        if !self.life.may_send() && !self.life.has_octets_due() {
            return match self.life.waits() {
                true => self.local_requests(env),
                false => TxFill::Idle,
            };
        }
        let wire = Wire {
            memory: env.memory,
            who: self.accessor(),
            crc: self.tx.crc.then_some(env.crc32c),
            markers: self.tx.markers,
            snapshot: self.config.snapshot,
        };
        self.retry_memory();
        let mut memory_next = false;
        loop {
            let scratch = Self::scratch_for(self.tx.job, &wire);
            if !plan.has_room(scratch) {
                break;
            }
            if !self.life.may_send() {
                if let Some(terminate) = self.life.take_terminate() {
                    self.emit_terminate(&terminate, plan, &wire);
                }
                break;
            }
            self.respond_burst(plan, &wire);
            self.send_burst(plan, &wire);
            let scratch = Self::scratch_for(self.tx.job, &wire);
            if !plan.has_room(scratch) {
                break;
            }
            match self.tx.job {
                Some(job) => self.step(job, plan, &wire, env.host),
                None => match self.select() {
                    Selected::Nothing => break,
                    // Its first FPDU may need more room than was checked.
                    Selected::Job(job) if Self::scratch_for(Some(job), &wire) > scratch => {
                        self.tx.job = Some(job);
                    }
                    Selected::Job(job) => self.step(job, plan, &wire, env.host),
                    Selected::Rtr(rtr) => self.emit_rtr(rtr, plan, &wire),
                    Selected::Probe => self.emit_probe(plan, &wire),
                    // Earlier requests may send from that memory, so they are written first.
                    Selected::Invalidate { .. } if !plan.is_empty() => break,
                    Selected::Invalidate { seq, stag } => self.local_invalidate(seq, stag, env),
                    Selected::Register { seq, wr } => self.fast_register(seq, &wr, env),
                    Selected::Memory => {
                        memory_next = true;
                        break;
                    }
                },
            }
        }
        self.life.written(!plan.is_done());
        if !plan.is_empty() {
            return TxFill::Ready;
        }
        if memory_next {
            return TxFill::Memory;
        }
        self.note_drained();
        TxFill::Idle
    }

    /// Returns how many octets of scratch the next FPDU of a message may need.
    #[inline]
    const fn scratch_for(job: Option<Job>, w: &Wire<'_, impl Memory>) -> usize {
        match job {
            _ if w.markers => 2 * MAX_FPDU,
            Some(Job::Response { .. }) if w.crc.is_some() => MAX_FPDU,
            _ if w.copies_local() => MAX_FPDU,
            _ if w.crc.is_some() => SUMMED_FRAME,
            _ => SMALL_FRAME,
        }
    }

    /// Reports that the stream took `n` more octets of the plan, and completes what is sent by that.
    /// A plan that is written in full is cleared.
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
                // It completes when the peer has answered.
                Milestone::Request(_) if self.acknowledge.on => {}
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
            self.note_drained();
        }
    }

    #[inline]
    pub(super) fn complete_request<H: Host>(&mut self, seq: u32, host: &mut H) {
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        self.sq.complete(seq, |cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
    }

    //= rfc5040 section 5.1
    //# The Data Source RDMAP layer MUST issue RDMA Write Messages to the DDP
    //# layer in the order they were submitted by the ULP.
    //= rfc5040 section 5.5
    //# The RDMAP layer MUST submit RDMA Messages to the DDP layer in the order
    //# the RDMA Operations are submitted to the RDMAP layer by the ULP.
    //= rfc5041 section 5.3
    //# MUST transmit DDP Messages in the order they were submitted to the DDP
    //# layer,
    fn select(&mut self) -> Selected {
        //= rfc6581 section 5
        //# The RDMA connection initiator MUST NOT allow any later FULPDUs to be
        //# transmitted before the RTR indication.
        if let Some(rtr) = self.tx.rtr.take() {
            return Selected::Rtr(rtr);
        }
        let request = self.startable().map(|(seq, slot)| match slot.op {
            SendOp::Bind(_) => Selected::Memory,
            SendOp::FastRegister(wr) => Selected::Register { seq, wr },
            SendOp::LocalInvalidate { stag } => Selected::Invalidate { seq, stag },
            SendOp::SendImm(_) => Selected::request(seq, Stage::ImmediateFirst),
            _ => Selected::request(seq, Stage::Body),
        });
        let respond = !self.responses.is_empty()
            && (self.tx.responses_in_row < RESPONSE_BURST || request.is_none());
        if respond {
            self.tx.responses_in_row = self.tx.responses_in_row.saturating_add(1);
            return Selected::Job(Job::Response { off: 0 });
        }
        if (request.is_none() || self.acknowledge.is_impatient()) && self.wants_probe() {
            return Selected::Probe;
        }
        let Some(request) = request else {
            return Selected::Nothing;
        };
        self.tx.responses_in_row = 0;
        if matches!(request, Selected::Job(_)) {
            self.sq.advance();
        }
        request
    }
}

/// The result of [`QueuePair::select`].
enum Selected {
    Nothing,
    Job(Job),
    Rtr(Rtr),
    Probe,
    Invalidate { seq: u32, stag: u32 },
    Register { seq: u32, wr: FastRegister },
    Memory,
}

impl Selected {
    const fn request(seq: u32, stage: Stage) -> Self {
        Self::Job(Job::Request { seq, off: 0, stage })
    }
}
