//! Reading a large payload straight to its destination (no CRC and no markers: nothing has to be verified
//! first).

use super::admit::Refusal;
use super::buffer::RxPlan;
use super::fault::RxFault;
use super::place::Target;
use super::plan::Run;
use super::rx::Step;
use super::{Env, Host, QueuePair};
use crate::limits::{RX_DIRECT_MIN, WRITE_TAIL};
use crate::memory::{Memory, MemoryTable};
use iwarp_proto::ddp::{self, Header};
use iwarp_proto::mpa::framing::{CRC_LEN, MPA_LEN_FIELD, pad_len};

/// An FPDU whose payload is being read straight to its destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direct {
    pub(super) header: Header,
    pub(super) target: Target,
    /// Payload of the whole segment.
    pub(super) payload: u32,
    /// Payload that is placed.
    pub(super) placed: u32,
    /// Payload that may be read directly; the rest comes through staging so that it becomes visible last.
    pub(super) direct_end: u32,
    pub(super) ulpdu_len: u16,
}

impl Direct {
    /// Octets of the FPDU that have not come.
    pub(super) fn rest(&self) -> usize {
        let payload = self.payload.saturating_sub(self.placed) as usize;
        payload + pad_len(usize::from(self.ulpdu_len)) + CRC_LEN
    }
}

impl QueuePair {
    /// Visits the memory that the rest of a segment's payload is read to, `want` octets. Returns how many octets it named: fewer
    /// if there are too many runs, or if a region was deregistered meanwhile, which `rx_filled` reports.
    pub(super) fn plan_direct<'t, M: Memory>(
        &'t self,
        d: &Direct,
        want: u32,
        memory: &'t MemoryTable<M>,
        plan: &mut RxPlan,
        visit: &mut impl FnMut(Run<'t>),
    ) -> usize {
        // One run is kept for staging.
        let mut left = plan.most.saturating_sub(1);
        let mut direct = 0;
        let (places, who) = (self.places(memory), self.accessor());
        let users = &mut plan.users;
        let _ = places.for_each_range(d.target, d.placed, want, |stag, to, len, need| {
            if left == 0 {
                return Ok(());
            }
            // There is room for every element of a request.
            if let Some(span) = users.check(memory, (stag, to, len), need, who)? {
                for fragment in span.fragments().take(left) {
                    left -= 1;
                    direct += fragment.len();
                    visit(Run::memory(fragment));
                }
            }
            Ok(())
        });
        direct
    }

    /// Handles an FPDU that has come in part: if its header is there and much of its payload is not, begins direct reading. Returns how
    /// many octets were taken.
    pub(super) fn begin_direct<H: Host>(
        &mut self,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<(usize, Step), RxFault> {
        let Some((len_field, ulpdu)) = octets.split_first_chunk::<MPA_LEN_FIELD>() else {
            return Ok((0, Step::NeedMore));
        };
        let ulpdu_len = usize::from(u16::from_be_bytes(*len_field));
        let ulpdu = ulpdu.get(..ulpdu.len().min(ulpdu_len)).unwrap_or(&[]);
        let Some(first) = ulpdu.first() else {
            return Ok((0, Step::NeedMore));
        };
        let header_len = ddp::header_len(*first);
        let Some(body) = ulpdu.get(header_len..) else {
            return Ok((0, Step::NeedMore));
        };
        let payload = ulpdu_len.saturating_sub(header_len);
        if payload.saturating_sub(body.len()) < RX_DIRECT_MIN as usize {
            return Ok((0, Step::NeedMore));
        }
        let header = Header::parse(ulpdu).map_err(|e| {
            self.fault_of(Refusal::Header(e), Header::decode(ulpdu), ulpdu_len as u16)
        })?;
        if !self.life.has_heard() {
            self.hear(ulpdu);
        }
        if !header.opcode().is_send() && !matches!(header, Header::Tagged(_)) {
            return Ok((0, Step::NeedMore));
        }
        let target = match self.admit_direct(&header, payload as u32, ulpdu_len as u16, env) {
            Ok(Some(target)) => target,
            Ok(None) => return Ok((0, Step::Hold)),
            Err(refusal) => return Err(self.fault_of(refusal, Some(header), ulpdu_len as u16)),
        };
        let tail = match header {
            // Programs wait for a Write by looking at its last octet.
            Header::Tagged(h) if h.last => WRITE_TAIL,
            _ => 0,
        };
        self.places(env.memory)
            .write(target, 0, body)
            .map_err(|e| self.placement_fault(e, &header, ulpdu_len as u16))?;
        self.rx.direct = Some(Direct {
            header,
            target,
            payload: payload as u32,
            placed: body.len() as u32,
            direct_end: (payload as u32).saturating_sub(tail),
            ulpdu_len: ulpdu_len as u16,
        });
        // The mode stays on for the small FPDU that ends a message.
        self.rx.large = 3;
        // More is missing than the tail, so these were all.
        Ok((octets.len(), Step::NeedMore))
    }

    /// Goes on with an FPDU in direct reading. Returns how many octets were taken.
    pub(super) fn continue_direct<H: Host>(
        &mut self,
        d: Direct,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<(usize, Step), RxFault> {
        // Payload may still come through staging, if it was read together with an earlier FPDU.
        let want = d.direct_end.saturating_sub(d.placed) as usize;
        if want > 0 {
            let here = octets.get(..octets.len().min(want)).unwrap_or(&[]);
            let places = self.places(env.memory);
            // Checked even if no octets are here, so that a region that was deregistered is noticed.
            places
                .for_each(d.target, d.placed, want as u32, |_| {})
                .and_then(|()| places.write(d.target, d.placed, here))
                .map_err(|e| self.placement_fault(e, &d.header, d.ulpdu_len))?;
            let n = here.len();
            if let Some(d) = &mut self.rx.direct {
                d.placed = d.placed.saturating_add(n as u32);
            }
            let whole = n == want;
            return Ok((n, if whole { Step::Again } else { Step::NeedMore }));
        }
        let Some(rest) = octets.get(..d.rest()) else {
            return Ok((0, Step::NeedMore));
        };
        let tail = d.payload.saturating_sub(d.placed) as usize;
        self.places(env.memory)
            .write(d.target, d.placed, rest.get(..tail).unwrap_or(&[]))
            .map_err(|e| self.placement_fault(e, &d.header, d.ulpdu_len))?;
        self.rx.direct = None;
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(1);
        self.finish_direct(&d.header, d.payload, env)
            .map_err(|refusal| self.fault_of(refusal, Some(d.header), d.ulpdu_len))?;
        Ok((rest.len(), Step::Again))
    }
}
