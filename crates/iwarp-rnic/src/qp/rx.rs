//! The receive side: from octets to FPDUs (RFC 5044 sections 4.2 to 4.4 and 6).
//!
//! With CRC or markers, a complete FPDU is gathered in staging and verified before any part of it
//! is used, as RFC 5044 section 6 requires. Without CRC and markers, the rest of a large payload is
//! read directly to its destination. `deliver` processes the segments.

use super::buffer::{RxBuffer, RxPlan};
use super::direct::Direct;
use super::life::Hold;
use super::place::Places;
use super::plan::Run;
use super::send_queue::Awaited;
use super::{Env, Events, Host, QueuePair, StreamConfig};
use crate::Cqe;
use crate::limits::{RX_DIRECT_TAIL, RX_READ_MAX};
use crate::memory::{Fragment, Memory, MemoryTable};
use crate::receive_queue::TakenRecv;
use core::mem;
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::mpa::framing::MarkerClock;

/// What the driver should do with incoming octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RxInterest {
    /// Read.
    Read,
    /// A Send waits for a receive: do not read, so that TCP stops the peer.
    Held,
    /// The queue pair has ended: read and discard until the peer closes.
    Discard,
    /// An STag invalidated by a Send or a Read is still in use: do not read while
    /// [`waits_for_memory`](QueuePair::waits_for_memory) returns `true`.
    Waits,
    /// There is no stream.
    None,
}

/// The result of processing received octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum RxStatus {
    /// Everything that can be processed now is processed.
    Ok,
    /// The budget of FPDUs for one call is used up ([`Budget`](super::Budget)). Before reading
    /// more, call again: [`QueuePair::rx_filled`] with zero octets, or [`QueuePair::rx_input`] with
    /// the octets not consumed.
    More,
    /// A Send waits for a receive. When one is posted, call again as for `More`.
    Held,
    /// An STag invalidated by a Send or a Read is still in use. When [`MemoryTable::take_unused`]
    /// returns `true`, call again as for `More`.
    Waits,
    /// The stream has failed; a Terminate may be pending.
    Failed,
}

/// The first segment of a message that found no receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Missed {
    pub(super) header: Header,
    pub(super) ulpdu_len: u16,
}

/// A request that completes when the memory of an invalidated STag has no more users.
#[derive(Debug, Clone, Copy)]
pub(super) enum Invalidating {
    /// The receive of a Send with Invalidate, with this completion.
    Receive(Cqe),
    /// A Read with Invalidate.
    Read(Awaited),
}

#[derive(Debug)]
pub(super) struct Rx {
    pub(super) crc: bool,
    pub(super) markers: bool,
    pub(super) clock: MarkerClock,
    pub(super) direct: Option<Direct>,
    /// If not zero, large FPDUs are arriving: their headers are read separately, so that their
    /// payload can be read directly to memory. Each FPDU that arrives in one piece subtracts one.
    pub(super) large: u8,
    /// The last message that found no receive.
    pub(super) missed: Option<Missed>,
    /// Next message sequence number expected on queues 0, 1 and 3.
    pub(super) msn: [u32; 4],
    pub(super) receive: TakenRecv,
    pub(super) receiving: bool,
    /// Octets received of the current untagged message.
    pub(super) message_off: u32,
    /// Immediate data that belong to the next Send.
    pub(super) immediate: Option<u32>,
    /// A placed message has invalidated this STag, whose memory is still in use. Later messages are
    /// not processed before this one completes.
    pub(super) invalidating: Option<(Stag, Invalidating)>,
    /// The current untagged message is dropped
    /// ([`ReceiverNotReady::Drop`](super::ReceiverNotReady::Drop)).
    pub(super) dropping: bool,
    /// Value of `Counters::rx_messages` when an RDMA Write was dropped.
    pub(super) dropped_write: Option<u64>,
    /// Octets received of the current RDMA Write.
    pub(super) write_len: u32,
    /// Octets of the last complete RDMA Write.
    pub(super) last_write_len: u32,
    /// Complete RDMA Writes of the peer's program, modulo 2^32.
    pub(super) writes: u32,
    pub(super) rtr_response_due: bool,
    pub(super) rtr_send_expected: bool,
    /// [`Events::MESSAGE_IN_RTR`] may have to be raised.
    watches_rtr: bool,
}

impl Rx {
    /// Returns the state without a stream. `receive` is the storage for the receive in use.
    pub(super) const fn new(receive: TakenRecv) -> Self {
        Self {
            crc: false,
            markers: false,
            clock: MarkerClock::new(),
            direct: None,
            large: 0,
            missed: None,
            msn: [1; 4],
            receive,
            receiving: false,
            message_off: 0,
            immediate: None,
            invalidating: None,
            dropping: false,
            dropped_write: None,
            write_len: 0,
            last_write_len: 0,
            writes: 0,
            rtr_response_due: false,
            rtr_send_expected: false,
            watches_rtr: true,
        }
    }

    pub(super) fn start(&mut self, stream: &StreamConfig) {
        self.reset();
        self.crc = stream.crc;
        self.markers = stream.markers_rx;
        self.rtr_send_expected = stream.rtr_send_expected;
    }

    pub(super) fn reset(&mut self) {
        *self = Self::new(mem::take(&mut self.receive));
    }

    /// Records that this many FPDUs have arrived in one piece.
    #[inline]
    pub(super) fn count_undivided_fpdus(&mut self, fpdus: u64) {
        self.large = (u64::from(self.large)).saturating_sub(fpdus) as u8;
    }

    pub(super) const fn expect_rtr_response(&mut self) {
        self.rtr_response_due = true;
    }

    /// Drops the receive that is being filled, and returns its identifier.
    pub(super) const fn abandon_receive(&mut self) -> Option<u64> {
        self.direct = None;
        self.invalidating = None;
        if self.receiving {
            self.receiving = false;
            Some(self.receive.wr_id)
        } else {
            None
        }
    }
}

impl QueuePair {
    /// Returns whether the stream may be read now.
    pub const fn rx_interest(&self) -> RxInterest {
        match self.life.rx_interest() {
            RxInterest::Read if self.rx.invalidating.is_some() => RxInterest::Waits,
            interest => interest,
        }
    }

    pub(super) fn places<'a, M>(&'a self, memory: &'a MemoryTable<M>) -> Places<'a, M> {
        Places {
            memory,
            accessor: self.accessor(),
            receive: &self.rx.receive,
            sends: &self.sq,
        }
    }

    /// Calls a function for the runs that the next octets should be read to: registered memory
    /// first, staging last.
    ///
    /// `buffer` must be the partly filled buffer of this queue pair or, if there is none, an empty
    /// buffer. Read into the runs in order, then call [`rx_filled`](Self::rx_filled) with the same
    /// buffer and plan. The runs are valid while `memory` is borrowed and the buffer does not
    /// change.
    pub fn rx_plan<'t, M: Memory>(
        &'t self,
        buffer: &'t mut RxBuffer,
        memory: &'t MemoryTable<M>,
        plan: &mut RxPlan,
        mut visit: impl FnMut(Run<'t>),
    ) {
        plan.release(memory);
        plan.clear();
        let mut max_read = RX_READ_MAX;
        if let Some(d) = &self.rx.direct {
            let wanted = d.direct_end.saturating_sub(d.placed);
            if wanted > 0 {
                plan.direct = self.plan_direct(d, wanted, memory, plan, &mut visit);
                plan.room = plan.direct;
                if plan.direct < wanted as usize && plan.direct > 0 {
                    return;
                }
            }
        }
        if self.rx.large > 0 {
            max_read = RX_DIRECT_TAIL;
        }
        let room = buffer.room(max_read);
        plan.room = plan.room.saturating_add(room.len());
        visit(Run::scratch(Fragment::of_mut(room)));
    }

    /// Returns `true` if the next plan includes registered memory. If not,
    /// [`rx_plan`](Self::rx_plan) does not use the table.
    #[inline]
    pub const fn rx_is_direct(&self) -> bool {
        self.rx.direct.is_some()
    }

    /// Processes `n` octets that were read as planned. If `n` is zero, processes what is in the
    /// buffer.
    pub fn rx_filled<H: Host>(
        &mut self,
        buffer: &mut RxBuffer,
        plan: &mut RxPlan,
        n: usize,
        env: &mut Env<'_, H>,
    ) -> RxStatus {
        plan.release(env.memory);
        self.counters.rx_bytes = self.counters.rx_bytes.wrapping_add(n as u64);
        let direct = n.min(plan.direct);
        buffer.filled(n.wrapping_sub(direct));
        if let Some(d) = &mut self.rx.direct {
            d.placed = d.placed.saturating_add(direct as u32);
            self.counters.rx_direct = self.counters.rx_direct.wrapping_add(direct as u64);
        }
        let until = self.rx_until();
        let status = self.process_kept(buffer, until, env);
        self.note_message_in_rtr();
        status
    }

    /// Processes octets in the caller's memory. Returns how many were consumed; the caller passes
    /// the others again.
    ///
    /// Complete FPDUs are processed in place. The beginning of a partial FPDU is kept in `buffer`,
    /// and the next octets complete it; a buffer that is not empty must be this queue pair's own.
    /// With [`RxStatus::Ok`] all octets are therefore consumed; other results stop before an FPDU.
    /// Calls of this function and of [`rx_plan`](Self::rx_plan) may alternate.
    pub fn rx_input<H: Host>(
        &mut self,
        octets: &[u8],
        buffer: &mut RxBuffer,
        env: &mut Env<'_, H>,
    ) -> (usize, RxStatus) {
        let until = self.rx_until();
        let mut rest = octets;
        let status = loop {
            if buffer.is_empty() {
                let room = buffer.unmarked();
                let (taken, status) = self.rx_process(rest, room, until, env);
                rest = rest.get(taken..).unwrap_or(&[]);
                if status == RxStatus::Ok {
                    // This fits: the rest is less than one FPDU.
                    let kept = buffer.keep(rest);
                    rest = rest.get(kept..).unwrap_or(&[]);
                }
                break status;
            }
            let missing = self.missing(buffer.octets()).min(rest.len());
            let kept = buffer.keep(rest.get(..missing).unwrap_or(&[]));
            rest = rest.get(kept..).unwrap_or(&[]);
            let status = self.process_kept(buffer, until, env);
            if status == RxStatus::Failed {
                rest = &[];
            }
            if status != RxStatus::Ok || rest.is_empty() {
                break status;
            }
        };
        let taken = octets.len().wrapping_sub(rest.len());
        self.counters.rx_bytes = self.counters.rx_bytes.wrapping_add(taken as u64);
        self.note_message_in_rtr();
        (taken, status)
    }

    /// Raises the event for a message that arrives before the program's change to RTS.
    #[inline]
    fn note_message_in_rtr(&mut self) {
        if !self.rx.watches_rtr {
            return;
        }
        // No stream returns from RTS to RTR.
        self.rx.watches_rtr = !self.life.starts_requests();
        if self.life.is_rtr() && self.messages_arrived() != 0 {
            self.events |= Events::MESSAGE_IN_RTR;
            self.rx.watches_rtr = false;
        }
    }

    /// Returns the FPDU count that ends this call.
    const fn rx_until(&self) -> u64 {
        let budget = self.config.budget.fpdus();
        self.counters.rx_fpdus.wrapping_add(budget as u64)
    }

    #[inline]
    fn process_kept<H: Host>(
        &mut self,
        buffer: &mut RxBuffer,
        until: u64,
        env: &mut Env<'_, H>,
    ) -> RxStatus {
        let (octets, unmarked) = buffer.octets_and_unmarked();
        let (taken, status) = self.rx_process(octets, unmarked, until, env);
        buffer.consume(taken);
        status
    }

    /// Processes octets until the FPDU count reaches `until`. Returns how many octets were
    /// consumed.
    fn rx_process<H: Host>(
        &mut self,
        octets: &[u8],
        unmarked: &mut [u8],
        until: u64,
        env: &mut Env<'_, H>,
    ) -> (usize, RxStatus) {
        if octets.is_empty() && self.rx_interest() == RxInterest::Held {
            // Octets that are held stay with the caller.
            return (0, RxStatus::Held);
        }
        let earlier_hold = self.life.end_hold();
        let fpdus = self.counters.rx_fpdus;
        let mut rest = octets;
        loop {
            //= rfc5041 section 7.1
            //# DDP MUST silently drop any subsequent incoming DDP Segments.
            if !self.life.is_up() {
                return (octets.len(), RxStatus::Failed);
            }
            let done = octets.len().wrapping_sub(rest.len());
            if !self.finish_invalidation(env) {
                return (done, RxStatus::Waits);
            }
            let left = until.wrapping_sub(self.counters.rx_fpdus);
            if left == 0 && !rest.is_empty() {
                return (done, RxStatus::More);
            }
            let (taken, step) = if let Some(direct) = self.rx.direct {
                self.continue_direct(&direct, rest, env)
            } else if self.rx.markers {
                self.process_marked(rest, unmarked, env)
            } else {
                self.process_unmarked(rest, left, env)
            };
            rest = rest.get(taken..).unwrap_or(&[]);
            let done = octets.len().wrapping_sub(rest.len());
            match step {
                Step::Next | Step::Again => {}
                Step::NeedMore => return (done, RxStatus::Ok),
                Step::Failed => return (octets.len(), RxStatus::Failed),
                Step::Hold => {
                    // A Send that was already held keeps its deadline.
                    let kept_hold = earlier_hold.filter(|_| self.counters.rx_fpdus == fpdus);
                    if let Some(hold) = self.life.hold() {
                        *hold = kept_hold.unwrap_or(Hold::Begins);
                    }
                    return (done, RxStatus::Held);
                }
            }
        }
    }

    /// Processes up to `limit` FPDUs of a stream without markers. Returns how many octets were
    /// consumed.
    #[inline]
    fn process_unmarked<H: Host>(
        &mut self,
        octets: &[u8],
        limit: u64,
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        let (taken, step) = self.process_complete_fpdus(octets, limit, env);
        if step != Step::NeedMore {
            return (taken, step);
        }
        if self.rx.crc {
            self.rx.large = 0;
        }
        let rest = octets.get(taken..).unwrap_or(&[]);
        if self.rx.crc || rest.is_empty() {
            return (taken, step);
        }
        let (begun, step) = self.begin_direct(rest, env);
        (taken.wrapping_add(begun), step)
    }

    /// Returns `true` if the octets received so far end with a complete message.
    pub(super) fn is_between_messages(&self, buffer: &RxBuffer) -> bool {
        let in_response = self.sq.awaited.front().is_some_and(|a| a.received > 0);
        buffer.is_empty()
            && self.rx.direct.is_none()
            && !self.rx.receiving
            && !self.rx.dropping
            && self.rx.write_len == 0
            && !in_response
            // Immediate data may have arrived before their Send.
            && self.rx.immediate.is_none()
    }

    /// Handles the peer closing its direction of the stream (RFC 5044 section 7.2).
    pub fn rx_eof<H: Host>(&mut self, buffer: &mut RxBuffer, host: &mut H) {
        let was_up = self.life.is_up();
        // The end of an FPDU need not be the end of a message.
        let between = self.is_between_messages(buffer);
        buffer.clear();
        if was_up && !between {
            self.record_fault(super::Fault::transport());
            self.events |= Events::FATAL;
        }
        // The verbs have no half-close (see the exceptions to RFC 5041 section 6.2.1): outstanding
        // requests are flushed, and our direction is closed as well.
        let mut disconnected = false;
        self.step_and_flush(|life| disconnected = life.eof(), host);
        //= rfc5044 section 7.2
        //# A mechanism SHOULD be provided by MPA to DDP for DDP to be made aware that a
        //# graceful close of the TCP connection has been received by the TCP (e.g., FIN
        //# is received).
        //= rfc5041 section 3
        //# 9. For a specific LLP Stream, the LLP MUST provide a mechanism to indicate
        //# that the LLP Stream has been gracefully torn down.
        //= rfc5041 section 3
        //# For a specific LLP Connection, the LLP MUST provide a mechanism to indicate
        //# that the LLP Connection has been gracefully torn down.
        if disconnected {
            self.events |= Events::DISCONNECTED;
        }
    }

    /// Handles a stream that broke: reset, time-out, or a system error.
    pub fn stream_failed<H: Host>(&mut self, host: &mut H) {
        if self.life.is_up() {
            //= rfc5041 section 3
            //# 3. The LLP MUST ensure that, if it accepts a DDP Segment, it will transfer
            //# it reliably to the receiver or return with an error stating that the
            //# transfer failed to complete.
            //= rfc5041 section 6.2.2
            //# Thus, any of the following fatal errors on a DDP Stream MUST cause DDP to
            //# indicate to the ULP that a fatal error has occurred:
            //= rfc5041 section 7
            //# All LLP errors reported to DDP SHOULD be passed up to the ULP.
            self.record_fault(super::Fault::transport());
            self.events |= Events::FATAL;
        }
        if self.rx_interest() != RxInterest::None {
            self.events |= Events::DISCONNECTED;
        }
        self.stream_gone(host);
    }
}

/// What to do after a step of the receive side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Continue with the next FPDU.
    Next,
    /// Check whether the stream has ended before continuing.
    Again,
    NeedMore,
    /// The message waits for a receive. Nothing has changed.
    Hold,
    Failed,
}
