//! Responses to our Reads and atomics: their segments, and the completion of the request (RFC 5040
//! section 5.2, RFC 7306 section 5).

use super::admit::Refusal;
use super::rx::{Invalidating, Step};
use super::send_queue::Awaited;
use super::{Env, Host, QueuePair};
use crate::{Sge, WcStatus};
use iwarp_proto::ddp::{HeaderError, Stag, TAGGED_HEADER_LEN, TaggedHeader};

impl QueuePair {
    #[inline(never)]
    pub(super) fn receive_read_response<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Step {
        match self.read_response(ulpdu, env) {
            Ok(step) => step,
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    #[inline(always)]
    fn read_response<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, Refusal> {
        let h = TaggedHeader::decode(ulpdu).ok_or(Refusal::Header(HeaderError::TooShort))?;
        let payload = ulpdu.get(TAGGED_HEADER_LEN..).unwrap_or(&[]);
        let len = payload.len() as u32;
        let target = self.admit_read_response(h, len)?;
        self.place(target, payload, env)?;
        Ok(self.finish_read_response(h, len, env))
    }

    //= rfc5041 section 4.2
    //# At the Data Sink, DDP MUST provide the RsvdULP field to the ULP when the DDP
    //# Message is delivered.
    //= rfc5041 section 4.2
    //# At the Data Sink, the DDP MUST provide the STag field when the ULP Message
    //# is delivered.
    /// Completes a placed segment of the response to the oldest request.
    #[inline]
    pub(super) fn finish_read_response<H: Host>(
        &mut self,
        h: TaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        self.count_payload(payload);
        if self.rx.rtr_response_due {
            self.rx.rtr_response_due = false;
            self.count_message();
        } else if h.last {
            return self.finish_response(env);
        } else if let Some(awaited) = self.sq.awaited.front_mut() {
            awaited.received = awaited.received.saturating_add(payload);
        }
        Step::Next
    }

    /// Completes the oldest request that awaits a response.
    pub(super) fn finish_response<H: Host>(&mut self, env: &mut Env<'_, H>) -> Step {
        let Some(awaited) = self.sq.awaited.pop() else {
            return Step::Next;
        };
        self.count_message();
        if awaited.invalidates | awaited.internal {
            return self.finish_special_response(&awaited, env);
        }
        self.complete_answered(&awaited, env.host);
        Step::Next
    }

    #[inline]
    pub(super) fn complete_answered<H: Host>(&mut self, awaited: &Awaited, host: &mut H) {
        //= rfc5040 section 5.2.2
        //# The RDMAP layer MUST Deliver the RDMA Read Response Message to the ULP.
        //= rfc5040 section 5.5
        //# RDMA Read Response Messages MUST be Delivered to the ULP at the Remote
        //# Peer after they are Delivered to RDMAP by DDP and in the order that the
        //# they were Delivered to RDMAP.
        //= rfc5040 section 5.5
        //# An RDMA Read operation MUST NOT be Completed at the Local Peer until the
        //# DDP layer Delivers the associated incoming RDMA Read Response Message.
        //= rfc5040 section 5.5
        //# This simplifies Local Peer Completion processing for RDMA Reads in that
        //# a Delivered RDMA Read Response MUST be sufficient to Complete the RDMA
        //# Read operation.
        if self.acknowledge.enabled {
            self.acknowledged(awaited, host);
        } else {
            self.complete_request(awaited.seq, host);
        }
        // A draining send queue may have waited for this response.
        self.note_drained();
    }

    /// Like [`finish_response`](Self::finish_response), for a Read with Invalidate or an internal
    /// Read.
    #[cold]
    #[inline(never)]
    fn finish_special_response<H: Host>(
        &mut self,
        awaited: &Awaited,
        env: &mut Env<'_, H>,
    ) -> Step {
        if awaited.invalidates {
            return self.finish_invalidating_read(awaited, env);
        }
        self.finish_internal_read(awaited, env.host);
        self.complete_answered(awaited, env.host);
        Step::Next
    }

    /// Invalidates the STag of a Read's sink and completes the Read. If the memory is in use, the
    /// Read completes later.
    #[cold]
    #[inline(never)]
    fn finish_invalidating_read<H: Host>(
        &mut self,
        awaited: &Awaited,
        env: &mut Env<'_, H>,
    ) -> Step {
        // A Read with Invalidate has one element.
        let sink = self.sq.first_sge_of(awaited.seq).map_or(Stag(0), Sge::stag);
        match env.memory.invalidate(sink, self.accessor(), false) {
            Ok(true) => {
                self.complete_answered(awaited, env.host);
                Step::Next
            }
            Ok(false) => {
                self.rx.invalidating = Some((sink, Invalidating::Read(*awaited)));
                Step::Again
            }
            // Another request has invalidated the STag meanwhile, or it cannot be invalidated.
            Err(_) => {
                self.fail_request(awaited.seq, WcStatus::LocalProtection, env.host);
                Step::Failed
            }
        }
    }
}
