//! Delivery of messages that consume a receive: the receive's completion, and the invalidation that
//! a Send may request (RFC 5040 section 5.3).

use super::admit::Refusal;
use super::fault::RxFault;
use super::rx::{Invalidating, Step};
use super::{Direction, Env, Host, QueuePair};
use crate::tally::Counted;
use crate::{Cqe, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::{Header, UNTAGGED_HEADER_LEN, UntaggedHeader};
use iwarp_proto::rdmap::Opcode;

impl QueuePair {
    #[inline(always)]
    pub(super) fn take_receive<H: Host>(&mut self, host: &mut H) -> bool {
        self.rx.receiving = if !host.receiver_ready() {
            false
        } else if self.config.shared_receive {
            // A receive that an earlier message did not need, or the next posted one.
            core::mem::take(&mut self.tagged.spare)
                || host.take_shared_receive(&mut self.rx.receive)
        } else {
            self.rq.take(&mut self.rx.receive)
        };
        self.rx.receiving
    }

    /// Ends the stream as required by RFC 5041 section 7.1, because a Send was held for the longest
    /// time that the policy allows.
    pub(super) fn hold_timed_out<H: Host>(&mut self, host: &mut H) {
        if let Some(missed) = self.rx.missed {
            self.fail_stream(&RxFault::no_buffer(&missed), host);
        }
    }

    #[inline(always)]
    pub(super) fn deliver_send<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        let byte_len = core::mem::take(&mut self.rx.message_off);
        self.advance_msn(0);
        self.rx.last_write_len = 0;
        if !self.rx.receiving {
            return self.end_without_receive();
        }
        if h.opcode != Opcode::SEND || self.receives_out_of_line {
            return self.deliver_out_of_line(h, byte_len, payload, env);
        }
        //= rfc5040 section 5.3
        //# At the Remote Peer, the Send Message Type MUST be Delivered to the
        //# Remote Peer's ULP in the order they were sent.
        //= rfc5040 section 5.5
        //# Send Messages MUST be Delivered to the ULP at the Remote Peer after they
        //# are Delivered to RDMAP by DDP and in the order that they were Delivered
        //# to RDMAP.
        let cqe = self.send_cqe(h, byte_len);
        self.finish_receive(cqe, env.host);
        Step::Next
    }

    /// Delivers a Send that is solicited, invalidates an STag, is counted, or may have a tag.
    #[inline(never)]
    fn deliver_out_of_line<H: Host>(
        &mut self,
        h: UntaggedHeader,
        byte_len: u32,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        if h.opcode.invalidates() {
            return self.deliver_with_invalidate(h, byte_len, payload, env);
        }
        if self.config.match_tags {
            return self.deliver_tagged(h, byte_len, payload, env);
        }
        let cqe = self.send_cqe(h, byte_len);
        self.finish_counted_receive(cqe, env.host);
        Step::Next
    }

    /// Ends a Send that has no receive: the RTR message, or a dropped message.
    #[cold]
    pub(super) const fn end_without_receive(&mut self) -> Step {
        if self.rx.dropping {
            self.rx.dropping = false;
            self.rx.immediate = None;
        } else {
            self.rx.rtr_send_expected = false;
        }
        Step::Next
    }

    #[inline(always)]
    pub(super) fn send_cqe(&mut self, h: UntaggedHeader, byte_len: u32) -> Cqe {
        //= rfc5041 section 5.4
        //# At the Data Sink, DDP MUST provide the ULP Message Length to the ULP
        //# when an Untagged DDP Message is Delivered.
        let mut cqe = self.receive_cqe(WcOpcode::Recv, byte_len);
        //= rfc5041 section 4.3
        //# At the Data Sink, DDP MUST provide RsvdULP field to the ULP when the ULP
        //# Message is Delivered.
        //= rfc5041 section 5.4
        //# At the Data Sink, DDP MUST provide the RsvdULP Field of the DDP Message to
        //# the ULP when the DDP Message is delivered.
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        if let Some(imm) = self.rx.immediate.take() {
            cqe.flags |= WcFlags::WITH_IMM;
            cqe.imm_or_stag = imm;
        }
        cqe
    }

    /// Invalidates the STag of a Send with Invalidate and delivers the Send. If the memory is in
    /// use, the Send is delivered later.
    #[cold]
    #[inline(never)]
    fn deliver_with_invalidate<H: Host>(
        &mut self,
        h: UntaggedHeader,
        byte_len: u32,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        let mut cqe = self.send_cqe(h, byte_len);
        //= rfc5040 section 7.2
        //# The Invalidate STag MUST be valid.
        //= rfc5040 section 5.3
        //# When the Send with Invalidate and Send with Solicited Event and
        //# Invalidate Message are Delivered to the Remote Peer's RDMAP layer, the
        //# RDMAP layer MUST:
        let stag = h.invalidate_stag;
        let Ok(complete) = env.memory.invalidate(stag, self.accessor(), true) else {
            let ulpdu_len = (UNTAGGED_HEADER_LEN as u32).wrapping_add(payload);
            let header = Some(Header::Untagged(h));
            return self.refuse_by_header(
                Refusal::Invalidation,
                header,
                ulpdu_len as u16,
                env.host,
            );
        };
        if self.config.match_tags {
            cqe.opcode = WcOpcode::TagNone;
        }
        cqe.flags |= WcFlags::WITH_INV;
        cqe.imm_or_stag = stag.0;
        if !complete {
            self.rx.invalidating = Some((stag, Invalidating::Receive(cqe)));
            return Step::Again;
        }
        self.finish_counted_receive(cqe, env.host);
        Step::Next
    }

    /// Completes the request that waits for an invalidation. Returns `false` if the memory is still
    /// in use.
    #[inline]
    pub(super) fn finish_invalidation<H: Host>(&mut self, env: &mut Env<'_, H>) -> bool {
        let Some((stag, ended)) = self.rx.invalidating else {
            return true;
        };
        if !env.memory.is_unused(stag) {
            return false;
        }
        self.rx.invalidating = None;
        match ended {
            Invalidating::Receive(cqe) => self.finish_counted_receive(cqe, env.host),
            Invalidating::Read(awaited) => self.complete_answered(&awaited, env.host),
        }
        true
    }

    pub(super) const fn receive_cqe(&self, opcode: WcOpcode, byte_len: u32) -> Cqe {
        Cqe {
            wr_id: self.rx.receive.wr_id,
            status: WcStatus::Success,
            opcode,
            byte_len,
            qp_num: self.config.qp_num,
            flags: WcFlags::empty(),
            imm_or_stag: 0,
            vendor_err: 0,
            timestamp_ns: 0,
            position: 0,
            account: 0,
        }
    }

    /// Completes the receive of a Send without adding it to the tally. Other receives complete in
    /// [`finish_counted_receive`](Self::finish_counted_receive), so that this is inlined once.
    #[inline(always)]
    pub(super) fn finish_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.rx.receiving = false;
        self.counters.completions = self.counters.completions.wrapping_add(1);
        host.complete(Direction::Recv, cqe);
    }

    #[cold]
    #[inline(never)]
    pub(super) fn finish_counted_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.sq.tally.add(Counted::Recv, cqe.byte_len);
        self.finish_receive(cqe, host);
    }
}
