//! The transmit side: which message goes next, and its segmentation into FPDUs
//! (RFC 5041 section 5.1, RFC 5044 sections 4.4 and 4.5, RFC 5040 section 5).
//!
//! Order: a Terminate that is due, then answers to the peer within a burst limit, then the
//! send queue. A message is finished before another starts, because receivers exist that
//! cannot take tagged messages apart again.

use super::fault::PendingTerminate;
use super::place::for_each_part;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::send_queue::{Awaited, Slot};
use super::state::Closing;
use super::{Direction, Env, Host, QueuePair, Rtr, State, StreamConfig};
use crate::limits::{MAX_FPDU, RESPONSE_BURST, TX_COPY_MAX};
use crate::memory::{AccessError, Accessor, MemoryError, MemoryTable};
use crate::{Access, Cqe, SendFlags, SendOp, Sge, WcStatus};
use iwarp_proto::crc32c::Crc32cFn;
use iwarp_proto::ddp::{
    Header, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, MPA_LEN_FIELD, MarkerClock, encode_fpdu, fpdu_len_with_markers, mulpdu,
    pad_len,
};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest};

/// Receivers exist that refuse STag 0 whatever the length, so zero-length messages carry 1.
const STAG_OF_NOTHING: Stag = Stag(1);
const NO_MEMORY: Access = Access::empty();

/// What [`QueuePair::tx_fill`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum TxFill {
    /// There is nothing to write.
    Idle,
    /// The plan holds octets: write them.
    Ready,
    /// A bind or fast registration is next: call [`QueuePair::tx_memory`] with the table locked for writing, then fill again.
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

/// Which message of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Immediate data in front of a Send.
    ImmediateFirst,
    /// The message proper.
    Body,
    /// Immediate data behind an RDMA Write.
    ImmediateLast,
}

#[derive(Debug)]
pub(super) struct Tx {
    pub(super) stream: Option<StreamConfig>,
    pub(super) closing: Closing,
    /// A plan was filled and is not written in full.
    pub(super) unwritten: bool,
    pub(super) job: Option<Job>,
    pub(super) terminate: PendingTerminate,
    pub(super) drained_told: bool,
    /// FPDUs may be sent; a responder waits for the initiator's first (RFC 5044 section 7.1.2).
    open: bool,
    rtr: Option<Rtr>,
    mulpdu: u16,
    clock: MarkerClock,
    /// Next message sequence number of queues 0 to 3.
    msn: [u32; 4],
    next_sink: u32,
    responses_in_row: u32,
}

impl Default for Tx {
    fn default() -> Self {
        Self {
            stream: None,
            closing: Closing::No,
            unwritten: false,
            job: None,
            terminate: PendingTerminate::default(),
            drained_told: false,
            open: false,
            rtr: None,
            mulpdu: 128,
            clock: MarkerClock::new(),
            msn: [1; 4],
            next_sink: 0,
            responses_in_row: 0,
        }
    }
}

/// Where the payload of a segment comes from.
#[derive(Clone, Copy)]
enum Payload<'a> {
    Bytes(&'a [u8]),
    Local { sges: &'a [Sge], off: u32, len: u32 },
    Remote { stag: u32, to: u64, len: u32 },
}

impl Payload<'_> {
    const fn len(&self) -> usize {
        match self {
            Self::Bytes(b) => b.len(),
            Self::Local { len, .. } | Self::Remote { len, .. } => *len as usize,
        }
    }
}

/// What all emissions of one fill share.
#[derive(Clone, Copy)]
struct Wire<'a> {
    memory: &'a MemoryTable,
    who: Accessor,
    crc: Option<Crc32cFn>,
    markers: bool,
}

impl Tx {
    pub(super) fn start(&mut self, stream: &StreamConfig) {
        *self = Self {
            stream: Some(*stream),
            open: stream.initiator,
            rtr: stream.rtr,
            mulpdu: mulpdu(stream.emss, stream.markers_tx),
            // Any value but 0 will do; the peer only echoes it.
            next_sink: 0x5100_0001,
            ..Self::default()
        };
    }

    pub(super) const fn may_send(&self) -> bool {
        self.stream.is_some()
            && self.open
            && matches!(self.closing, Closing::No | Closing::Draining)
    }

    /// FPDUs may be sent at all.
    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    /// The first FPDU has come. True if it was waited for.
    pub(super) const fn open_by_peer(&mut self) -> bool {
        let was = self.open;
        self.open = true;
        !was
    }

    pub(super) const fn rtr_pending(&self) -> bool {
        self.rtr.is_some()
    }

    fn next_msn(&mut self, qn: u32) -> u32 {
        match self.msn.get_mut(qn as usize) {
            Some(msn) => {
                let now = *msn;
                *msn = now.wrapping_add(1);
                now
            }
            None => 0,
        }
    }

    /// Appends one FPDU to the plan. On error the plan is as before.
    #[inline]
    fn emit(
        &mut self,
        plan: &mut TxPlan,
        header: &Header,
        payload: Payload<'_>,
        w: &Wire<'_>,
    ) -> Result<(), AccessError> {
        let from = plan.scratch.len();
        let copy = w.markers
            || payload.len() <= TX_COPY_MAX as usize
            // A response's source may be written by anyone at any time: its CRC must cover what is sent.
            || (w.crc.is_some() && matches!(payload, Payload::Remote { .. }));
        let ulpdu_len = header.len() + payload.len();
        let mut head = [0u8; MPA_LEN_FIELD + UNTAGGED_HEADER_LEN];
        let (len_field, rest) = head.split_at_mut(MPA_LEN_FIELD);
        len_field.copy_from_slice(&(ulpdu_len as u16).to_be_bytes());
        let n = header.emit(rest);
        plan.scratch
            .extend_from_slice(head.get(..MPA_LEN_FIELD + n).unwrap_or(&[]));
        if copy {
            if let Err(e) = append_payload(plan, payload, w) {
                plan.scratch.truncate(from);
                return Err(e);
            }
            if w.markers {
                self.finish_with_markers(plan, from, w);
            } else {
                finish(plan, from, ulpdu_len, |b| w.crc.map(|f| f(0, b)));
                plan.add_scratch(from);
            }
            return Ok(());
        }
        self.emit_in_place(plan, from, payload, w)
    }

    /// Completes an FPDU whose payload stays where it is. The length field and header lie at `from`.
    fn emit_in_place(
        &mut self,
        plan: &mut TxPlan,
        from: usize,
        payload: Payload<'_>,
        w: &Wire<'_>,
    ) -> Result<(), AccessError> {
        let mut crc = w.crc.map(|f| f(0, plan.scratch.get(from..).unwrap_or(&[])));
        // First look at all of it, so that an error leaves the plan alone.
        let checked = each_piece(payload, w, |stag, to, len, need| {
            let span = w.memory.check(stag, to, len, need, w.who)?;
            if let (Some(f), Some(crc)) = (w.crc, crc.as_mut()) {
                *crc = span.crc32c(f, *crc);
            }
            Ok(())
        });
        if let Err(e) = checked {
            plan.scratch.truncate(from);
            return Err(e);
        }
        let ulpdu_len = plan.scratch.len() - from - MPA_LEN_FIELD + payload.len();
        plan.add_scratch(from);
        let _ = each_piece(payload, w, |stag, to, len, need| {
            plan.add_memory(stag, to, len, need);
            Ok(())
        });
        let trailer = plan.scratch.len();
        finish(plan, trailer, ulpdu_len, |pad| {
            crc.and_then(|crc| w.crc.map(|f| f(crc, pad)))
        });
        plan.add_scratch(trailer);
        Ok(())
    }

    /// Puts markers into the FPDU that was built at `from`.
    fn finish_with_markers(&mut self, plan: &mut TxPlan, from: usize, w: &Wire<'_>) {
        let at = plan.scratch.len();
        let ulpdu_len = at.saturating_sub(from + MPA_LEN_FIELD);
        let total = fpdu_len_with_markers(self.clock.next_marker_in(), ulpdu_len);
        plan.scratch.resize(at + total, 0);
        let (plain, out) = plan.scratch.split_at_mut(at);
        let options = FpduOptions {
            markers: true,
            crc: w.crc,
        };
        let ulpdu = plain.get(from + MPA_LEN_FIELD..).unwrap_or(&[]);
        // It fits: `out` has just been made long enough, and MULPDU bounds the rest.
        let _ = encode_fpdu(ulpdu, &options, &mut self.clock, out);
        plan.add_scratch(at);
    }
}

/// Appends pad and CRC. `crc` gets what `from..` holds with the pad.
#[inline]
fn finish(
    plan: &mut TxPlan,
    from: usize,
    ulpdu_len: usize,
    crc: impl FnOnce(&[u8]) -> Option<u32>,
) {
    let pad = pad_len(ulpdu_len);
    plan.scratch
        .extend_from_slice([0u8; 3].get(..pad).unwrap_or(&[]));
    let crc = crc(plan.scratch.get(from..).unwrap_or(&[])).unwrap_or(0);
    let trailer: [u8; CRC_LEN] = crc.to_le_bytes();
    plan.scratch.extend_from_slice(&trailer);
}

/// Visits the registered ranges of a payload.
#[inline]
fn each_piece(
    payload: Payload<'_>,
    _w: &Wire<'_>,
    mut visit: impl FnMut(u32, u64, u32, Access) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    match payload {
        Payload::Bytes(_) => Ok(()),
        Payload::Local { sges, off, len } => for_each_part(sges, off, len, |lkey, addr, len| {
            visit(lkey, addr, len, NO_MEMORY)
        }),
        Payload::Remote { stag, to, len } => visit(stag, to, len, Access::REMOTE_READ),
    }
}

/// Copies a payload to the end of the scratch.
#[inline]
fn append_payload(
    plan: &mut TxPlan,
    payload: Payload<'_>,
    w: &Wire<'_>,
) -> Result<(), AccessError> {
    if let Payload::Bytes(b) = payload {
        plan.scratch.extend_from_slice(b);
        return Ok(());
    }
    each_piece(payload, w, |stag, to, len, need| {
        let span = w.memory.check(stag, to, len, need, w.who)?;
        let at = plan.scratch.len();
        plan.scratch.resize(at + len as usize, 0);
        span.read(plan.scratch.get_mut(at..).unwrap_or(&mut []));
        Ok(())
    })
}

impl QueuePair {
    /// Is there anything to write, or to do before something can be written?
    #[inline]
    pub fn wants_tx(&self) -> bool {
        if self.tx.stream.is_none() || self.tx.closing >= Closing::Drained {
            return self.tx.unwritten && self.tx.closing < Closing::Abort;
        }
        self.tx.unwritten
            || self.tx.terminate.is_pending()
            || self.tx.job.is_some()
            || self.tx.may_send()
                && self.state != State::Error
                && (self.tx.rtr.is_some()
                    || !self.responses.is_empty()
                    || self.startable().is_some())
    }

    /// The stream's maximum segment size has changed.
    pub fn set_emss(&mut self, emss: u32) {
        if let Some(stream) = &mut self.tx.stream {
            stream.emss = emss;
            self.tx.mulpdu = mulpdu(emss, stream.markers_tx);
        }
    }

    /// The send work request that may start now, if any.
    #[inline]
    fn startable(&self) -> Option<(u32, &Slot)> {
        if self.state != State::Rts {
            return None;
        }
        let (seq, slot) = self.sq.next()?;
        if slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty() {
            return None;
        }
        if slot.op.has_response() {
            // ORD zero cannot ever be served: let it start, and fail.
            // The RTR message by Read is one of those that the peer has to answer.
            let outstanding = self.sq.awaited.len() + u32::from(self.rx.rtr_response_due);
            if self.sq.ord() > 0 && outstanding >= u32::from(self.sq.ord()) {
                return None;
            }
            // A peer exists that answers a zero-length read behind another one with stale octets.
            if slot.len == 0 && !self.sq.awaited.is_empty() {
                return None;
            }
            if self.tx.rtr_pending() {
                return None;
            }
        }
        Some((seq, slot))
    }

    /// Fills a plan with as many FPDUs as are due and fit.
    ///
    /// The plan must be empty. Afterwards write it, in one or more steps, and call
    /// [`tx_written`](Self::tx_written) after each; only then fill again.
    pub fn tx_fill<H: Host>(&mut self, plan: &mut TxPlan, env: &mut Env<'_, H>) -> TxFill {
        let Some(stream) = self.tx.stream else {
            return TxFill::Idle;
        };
        if self.tx.closing >= Closing::Drained {
            return TxFill::Idle;
        }
        let wire = Wire {
            memory: env.memory,
            who: self.accessor(),
            crc: stream.crc.then_some(env.crc32c),
            markers: stream.markers_tx,
        };
        let mut memory_next = false;
        loop {
            let scratch = match self.tx.job {
                _ if wire.markers => 2 * MAX_FPDU,
                Some(Job::Response { .. }) if wire.crc.is_some() => MAX_FPDU,
                _ => TX_COPY_MAX as usize + 128,
            };
            if !plan.has_room(scratch) {
                break;
            }
            if self.tx.terminate.is_pending() {
                self.emit_terminate(plan, &wire);
                break;
            }
            if !self.tx.may_send() || self.state == State::Error {
                break;
            }
            match self.tx.job {
                Some(job) => self.step(job, plan, &wire, env.host),
                None => match self.select() {
                    Selected::Nothing => break,
                    Selected::Job(job) => self.tx.job = Some(job),
                    Selected::Rtr(rtr) => self.emit_rtr(rtr, plan, &wire),
                    // The requests before it may send from that memory: they are written first.
                    Selected::Invalidate { .. } if !plan.is_empty() => break,
                    Selected::Invalidate { seq, stag } => self.local_invalidate(seq, stag, env),
                    Selected::Memory => {
                        memory_next = true;
                        break;
                    }
                },
            }
        }
        self.tx.unwritten = !plan.is_done();
        if !plan.is_empty() {
            return TxFill::Ready;
        }
        if memory_next {
            return TxFill::Memory;
        }
        self.note_drained();
        TxFill::Idle
    }

    /// Reports that the stream took `n` more octets of the plan, and completes what is sent by that.
    /// A plan that is written in full is cleared.
    pub fn tx_written<H: Host>(&mut self, plan: &mut TxPlan, n: usize, host: &mut H) {
        plan.advance(n);
        self.counters.tx_bytes = self.counters.tx_bytes.wrapping_add(n as u64);
        while let Some(event) = plan.next_event() {
            self.counters.tx_messages = self.counters.tx_messages.wrapping_add(1);
            match event {
                Milestone::Request(seq) => self.complete_request(seq, host),
                Milestone::Response => {}
                Milestone::Terminate => {
                    self.counters.terminates_sent = self.counters.terminates_sent.wrapping_add(1);
                    if self.tx.closing < Closing::Draining {
                        self.tx.closing = Closing::Draining;
                    }
                }
            }
        }
        self.tx.unwritten = !plan.is_done();
        if plan.is_done() {
            plan.clear();
            self.note_drained();
        }
    }

    /// Carries out the bind or fast registration that [`TxFill::Memory`] announced.
    pub fn tx_memory<H: Host>(&mut self, table: &mut MemoryTable, host: &mut H) {
        let Some((seq, slot)) = self.startable() else {
            return;
        };
        let who = self.accessor();
        let result = match slot.op {
            SendOp::Bind(bind) => table.bind(&bind, who),
            SendOp::FastRegister(wr) => table.fast_register(&wr, who.pd),
            _ => return,
        };
        self.sq.advance();
        self.finish_memory(seq, result, host);
        // It may have been the last request of a stream that is closing.
        self.note_drained();
    }

    fn finish_memory<H: Host>(&mut self, seq: u32, result: Result<(), MemoryError>, host: &mut H) {
        match result {
            Ok(()) => self.complete_request(seq, host),
            Err(_) => self.fail_request(seq, WcStatus::MwBind, host),
        }
    }

    fn local_invalidate<H: Host>(&mut self, seq: u32, stag: u32, env: &mut Env<'_, H>) {
        self.sq.advance();
        match env.memory.invalidate(stag, self.accessor(), false) {
            Ok(()) => self.complete_request(seq, env.host),
            Err(_) => self.fail_request(seq, WcStatus::LocalProtection, env.host),
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

    fn select(&mut self) -> Selected {
        if let Some(rtr) = self.tx.rtr.take() {
            return Selected::Rtr(rtr);
        }
        let request = self.startable().map(|(seq, slot)| (seq, slot.op));
        let respond = !self.responses.is_empty()
            && (self.tx.responses_in_row < RESPONSE_BURST || request.is_none());
        if respond {
            self.tx.responses_in_row = self.tx.responses_in_row.saturating_add(1);
            return Selected::Job(Job::Response { off: 0 });
        }
        let Some((seq, op)) = request else {
            return Selected::Nothing;
        };
        self.tx.responses_in_row = 0;
        let stage = match op {
            SendOp::Bind(_) | SendOp::FastRegister(_) => return Selected::Memory,
            SendOp::LocalInvalidate { stag } => return Selected::Invalidate { seq, stag },
            SendOp::SendImm(_) => Stage::ImmediateFirst,
            _ => Stage::Body,
        };
        self.sq.advance();
        Selected::Job(Job::Request { seq, off: 0, stage })
    }

    /// Emits the next FPDU of a job.
    #[inline]
    fn step<H: Host>(&mut self, job: Job, plan: &mut TxPlan, w: &Wire<'_>, host: &mut H) {
        match job {
            Job::Response { off } => self.step_response(off, plan, w, host),
            Job::Request { seq, off, stage } => {
                let Some(slot) = self.sq.slot(seq).copied() else {
                    self.tx.job = None;
                    return;
                };
                if let Err(status) = self.step_request(seq, off, stage, &slot, plan, w) {
                    self.fail_request(seq, status, host);
                }
            }
        }
    }

    #[inline]
    fn step_request(
        &mut self,
        seq: u32,
        off: u32,
        stage: Stage,
        slot: &Slot,
        plan: &mut TxPlan,
        w: &Wire<'_>,
    ) -> Result<(), WcStatus> {
        let imm = match slot.op {
            SendOp::SendImm(imm) | SendOp::WriteImm { imm, .. } => imm,
            _ => 0,
        };
        let solicited = slot.flags.contains(SendFlags::SOLICITED);
        match (stage, slot.op) {
            (Stage::ImmediateFirst, _) => {
                self.emit_immediate(Immediate::before_send(imm), false, plan, w);
                self.tx.job = Some(Job::Request {
                    seq,
                    off: 0,
                    stage: Stage::Body,
                });
                Ok(())
            }
            (Stage::ImmediateLast, _) => {
                self.emit_immediate(Immediate::plain(imm), solicited, plan, w);
                self.sent(seq, plan);
                Ok(())
            }
            (Stage::Body, SendOp::Read { remote_addr, rkey }) => {
                self.emit_read(seq, slot.len, remote_addr, rkey, plan, w)
            }
            (Stage::Body, SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }) => {
                self.emit_atomic(seq, &slot.op, plan, w)
            }
            (Stage::Body, _) => self.emit_payload(seq, off, slot, plan, w),
        }
    }

    /// The whole request is in the plan.
    #[inline]
    fn sent(&mut self, seq: u32, plan: &mut TxPlan) {
        plan.add_milestone(Milestone::Request(seq));
        self.tx.job = None;
    }

    /// Emits the next segment of a Send or RDMA Write.
    #[inline]
    fn emit_payload(
        &mut self,
        seq: u32,
        off: u32,
        slot: &Slot,
        plan: &mut TxPlan,
        w: &Wire<'_>,
    ) -> Result<(), WcStatus> {
        let left = slot.len.wrapping_sub(off);
        let tagged = match slot.op {
            SendOp::Write { remote_addr, rkey }
            | SendOp::WriteImm {
                remote_addr, rkey, ..
            } => Some((remote_addr, rkey)),
            _ => None,
        };
        let header_len = if tagged.is_some() {
            TAGGED_HEADER_LEN
        } else {
            UNTAGGED_HEADER_LEN
        };
        let room = u32::from(self.tx.mulpdu).saturating_sub(header_len as u32);
        let len = left.min(room);
        let last = len == left;
        let inline = slot.flags.contains(SendFlags::INLINE);
        if off == 0 {
            if !last && !inline {
                self.check_local(seq, NO_MEMORY, w)?;
            }
            if tagged.is_none() {
                self.tx.next_msn(0);
            }
        }
        let header = match tagged {
            Some((to, rkey)) => Header::Tagged(TaggedHeader {
                last,
                opcode: Opcode::WRITE,
                stag: if slot.len == 0 && rkey == 0 {
                    STAG_OF_NOTHING
                } else {
                    Stag(rkey)
                },
                to: to.wrapping_add(u64::from(off)),
            }),
            None => {
                let (opcode, invalidate) = send_opcode(slot);
                Header::Untagged(UntaggedHeader {
                    last,
                    opcode,
                    invalidate_stag: Stag(invalidate),
                    qn: 0,
                    //= rfc5041 section 4.3
                    //# The initial
                    //# value for MSN MUST be one (1).
                    msn: self.tx.msn.first().copied().unwrap_or(1).wrapping_sub(1),
                    mo: off,
                })
            }
        };
        let payload = if inline {
            let data = self.sq.inline(seq);
            Payload::Bytes(data.get(off as usize..(off + len) as usize).unwrap_or(&[]))
        } else {
            Payload::Local {
                sges: self.sq.sges(seq),
                off,
                len,
            }
        };
        self.tx
            .emit(plan, &header, payload, w)
            .map_err(|_| WcStatus::LocalProtection)?;
        self.count_fpdu(len);
        if !last {
            self.tx.job = Some(Job::Request {
                seq,
                off: off.wrapping_add(len),
                stage: Stage::Body,
            });
        } else if matches!(slot.op, SendOp::WriteImm { .. }) {
            self.tx.job = Some(Job::Request {
                seq,
                off: 0,
                stage: Stage::ImmediateLast,
            });
        } else {
            self.sent(seq, plan);
        }
        Ok(())
    }

    #[inline]
    const fn count_fpdu(&mut self, payload: u32) {
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(1);
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(payload as u64);
    }

    /// May the local elements of a request be used like this, all of them?
    fn check_local(&self, seq: u32, need: Access, w: &Wire<'_>) -> Result<(), WcStatus> {
        for sge in self.sq.sges(seq) {
            w.memory
                .covers(sge.lkey, sge.addr, u64::from(sge.len), need, w.who)
                .map_err(|_| WcStatus::LocalProtection)?;
        }
        Ok(())
    }

    fn emit_control(
        &mut self,
        opcode: Opcode,
        qn: u32,
        body: &[u8],
        plan: &mut TxPlan,
        w: &Wire<'_>,
    ) -> u32 {
        let msn = self.tx.next_msn(qn);
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode,
            invalidate_stag: Stag(0),
            qn,
            msn,
            mo: 0,
        });
        // Octets of our own: nothing about memory can fail.
        let _ = self.tx.emit(plan, &header, Payload::Bytes(body), w);
        self.count_fpdu(0);
        msn
    }

    fn emit_immediate(&mut self, imm: Immediate, solicited: bool, plan: &mut TxPlan, w: &Wire<'_>) {
        let opcode = if solicited {
            Opcode::IMMEDIATE_SE
        } else {
            Opcode::IMMEDIATE
        };
        self.emit_control(opcode, 0, &imm.octets(), plan, w);
    }

    /// A sink STag for one read, never 0 or 1.
    const fn next_sink(&mut self) -> u32 {
        let sink = self.tx.next_sink;
        self.tx.next_sink = if sink == u32::MAX {
            2
        } else {
            sink.wrapping_add(1)
        };
        sink
    }

    fn emit_read(
        &mut self,
        seq: u32,
        len: u32,
        to: u64,
        rkey: u32,
        plan: &mut TxPlan,
        w: &Wire<'_>,
    ) -> Result<(), WcStatus> {
        if self.sq.ord() == 0 {
            return Err(WcStatus::LocalQpOperation);
        }
        self.check_local(seq, Access::LOCAL_WRITE, w)?;
        let sink_stag = self.next_sink();
        let request = ReadRequest {
            sink_stag: Stag(sink_stag),
            sink_to: 0,
            size: len,
            source_stag: if len == 0 && rkey == 0 {
                STAG_OF_NOTHING
            } else {
                Stag(rkey)
            },
            source_to: to,
        };
        let mut body = [0u8; ReadRequest::LEN];
        request.emit(&mut body);
        let msn = self.emit_control(Opcode::READ_REQUEST, 1, &body, plan, w);
        // There is room: `startable` compared with the ORD.
        let _ = self.sq.awaited.push(Awaited {
            seq,
            sink_stag,
            len,
            received: 0,
            msn,
            atomic: false,
        });
        self.tx.job = None;
        Ok(())
    }

    fn emit_atomic(
        &mut self,
        seq: u32,
        op: &SendOp,
        plan: &mut TxPlan,
        w: &Wire<'_>,
    ) -> Result<(), WcStatus> {
        if self.sq.ord() == 0 {
            return Err(WcStatus::LocalQpOperation);
        }
        self.check_local(seq, Access::LOCAL_WRITE, w)?;
        let request = match *op {
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add,
                mask,
            } => AtomicRequest {
                op: AtomicOp::FETCH_ADD,
                request_id: seq,
                stag: Stag(rkey),
                to: remote_addr,
                add_swap: add,
                add_swap_mask: mask,
                compare: 0,
                compare_mask: 0,
            },
            SendOp::CmpSwap {
                remote_addr,
                rkey,
                compare,
                swap,
                compare_mask,
                swap_mask,
            } => AtomicRequest {
                op: AtomicOp::CMP_SWAP,
                request_id: seq,
                stag: Stag(rkey),
                to: remote_addr,
                add_swap: swap,
                add_swap_mask: swap_mask,
                compare,
                compare_mask,
            },
            _ => return Err(WcStatus::LocalQpOperation),
        };
        let mut body = [0u8; AtomicRequest::LEN];
        request.emit(&mut body);
        let msn = self.emit_control(Opcode::ATOMIC_REQUEST, 1, &body, plan, w);
        let _ = self.sq.awaited.push(Awaited {
            seq,
            sink_stag: 0,
            len: 8,
            received: 0,
            msn,
            atomic: true,
        });
        self.tx.job = None;
        Ok(())
    }

    fn emit_rtr(&mut self, rtr: Rtr, plan: &mut TxPlan, w: &Wire<'_>) {
        match rtr {
            Rtr::Send => {
                self.emit_control(Opcode::SEND, 0, &[], plan, w);
            }
            Rtr::Write => {
                let header = TaggedHeader {
                    last: true,
                    opcode: Opcode::WRITE,
                    stag: STAG_OF_NOTHING,
                    to: 0,
                };
                let _ = self
                    .tx
                    .emit(plan, &Header::Tagged(header), Payload::Bytes(&[]), w);
                self.count_fpdu(0);
            }
            Rtr::Read => {
                let request = ReadRequest {
                    sink_stag: STAG_OF_NOTHING,
                    sink_to: 0,
                    size: 0,
                    source_stag: STAG_OF_NOTHING,
                    source_to: 0,
                };
                let mut body = [0u8; ReadRequest::LEN];
                request.emit(&mut body);
                self.emit_control(Opcode::READ_REQUEST, 1, &body, plan, w);
                self.rx.expect_rtr_response();
            }
        }
    }

    fn step_response<H: Host>(&mut self, off: u32, plan: &mut TxPlan, w: &Wire<'_>, host: &mut H) {
        let Some(response) = self.responses.front().copied() else {
            self.tx.job = None;
            return;
        };
        let done = match response {
            Response::Atomic {
                request_id,
                original,
            } => {
                let mut body = [0u8; AtomicResponse::LEN];
                AtomicResponse {
                    request_id,
                    original,
                }
                .emit(&mut body);
                self.emit_control(Opcode::ATOMIC_RESPONSE, 3, &body, plan, w);
                true
            }
            Response::Read {
                sink_stag,
                sink_to,
                source_stag,
                source_to,
                len: total,
            } => {
                let left = total.wrapping_sub(off);
                let len =
                    left.min(u32::from(self.tx.mulpdu).saturating_sub(TAGGED_HEADER_LEN as u32));
                let header = Header::Tagged(TaggedHeader {
                    last: len == left,
                    opcode: Opcode::READ_RESPONSE,
                    stag: Stag(sink_stag),
                    to: sink_to.wrapping_add(u64::from(off)),
                });
                let to = source_to.wrapping_add(u64::from(off));
                if let Err(e) = self.tx.emit(
                    plan,
                    &header,
                    Payload::Remote {
                        stag: source_stag,
                        to,
                        len,
                    },
                    w,
                ) {
                    // The region went away between the request and its answer.
                    let request = ReadRequest {
                        sink_stag: Stag(sink_stag),
                        sink_to: sink_to.wrapping_add(u64::from(off)),
                        size: left,
                        source_stag: Stag(source_stag),
                        source_to: to,
                    };
                    self.fail_response(e, &request, host);
                    return;
                }
                self.count_fpdu(len);
                self.tx.job = Some(Job::Response {
                    off: off.wrapping_add(len),
                });
                len == left
            }
        };
        if done {
            plan.add_milestone(Milestone::Response);
            self.responses.pop();
            self.tx.job = None;
        }
    }

    fn emit_terminate(&mut self, plan: &mut TxPlan, w: &Wire<'_>) {
        let (body, len) = self.tx.terminate.take();
        self.emit_control(
            Opcode::TERMINATE,
            2,
            body.get(..len).unwrap_or(&[]),
            plan,
            w,
        );
        plan.add_milestone(Milestone::Terminate);
    }
}

/// What [`QueuePair::select`] found.
enum Selected {
    Nothing,
    Job(Job),
    Rtr(Rtr),
    Invalidate { seq: u32, stag: u32 },
    Memory,
}

/// Opcode of a Send, and the STag it invalidates.
const fn send_opcode(slot: &Slot) -> (Opcode, u32) {
    let solicited = slot.flags.contains(SendFlags::SOLICITED);
    match (slot.op, solicited) {
        (SendOp::SendInv(stag), false) => (Opcode::SEND_INV, stag),
        (SendOp::SendInv(stag), true) => (Opcode::SEND_SE_INV, stag),
        (_, false) => (Opcode::SEND, 0),
        (_, true) => (Opcode::SEND_SE, 0),
    }
}
