//! Reading a large payload straight to its destination (no CRC and no markers: nothing has to be verified
//! first).

use super::admit::Refusal;
use super::buffer::RxPlan;
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
        payload
            .saturating_add(pad_len(usize::from(self.ulpdu_len)))
            .saturating_add(CRC_LEN)
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
        let mut direct = 0usize;
        let (places, who) = (self.places(memory), self.accessor());
        let users = &mut plan.users;
        let _ = places.for_each_range(d.target, d.placed, want, |stag, to, len, need| {
            if left == 0 {
                return Ok(());
            }
            // There is room for every element of a request.
            if let Some(span) = users.check(memory, (stag, to, len), need, who)? {
                for fragment in span.fragments().take(left) {
                    left = left.wrapping_sub(1);
                    direct = direct.saturating_add(fragment.len());
                    visit(Run::memory(fragment));
                }
            }
            Ok(())
        });
        direct
    }

    /// Handles an FPDU that has come in part: if its header is there and much of its payload is not, begins direct reading. Returns how
    /// many octets were taken.
    #[inline(never)]
    pub(super) fn begin_direct<H: Host>(
        &mut self,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        let Some((len_field, ulpdu)) = octets.split_first_chunk::<MPA_LEN_FIELD>() else {
            return (0, Step::NeedMore);
        };
        let ulpdu_len = u16::from_be_bytes(*len_field);
        let ulpdu = ulpdu
            .get(..ulpdu.len().min(ulpdu_len.into()))
            .unwrap_or(&[]);
        let Some(first) = ulpdu.first() else {
            return (0, Step::NeedMore);
        };
        let header_len = ddp::header_len(*first);
        let Some(body) = ulpdu.get(header_len..) else {
            return (0, Step::NeedMore);
        };
        let payload = usize::from(ulpdu_len).saturating_sub(header_len);
        if payload.saturating_sub(body.len()) < RX_DIRECT_MIN as usize {
            return (0, Step::NeedMore);
        }
        match self.try_direct(ulpdu, body, ulpdu_len, payload as u32, env) {
            // More is missing than the tail, so these were all.
            Ok(Begun::Direct) => (octets.len(), Step::NeedMore),
            Ok(Begun::Hold) => (0, Step::Hold),
            Ok(Begun::No) => (0, Step::NeedMore),
            Err(refusal) => {
                let header = Header::decode(ulpdu);
                (0, self.refuse_known(refusal, header, ulpdu_len, env.host))
            }
        }
    }

    /// Admits the segment, and places what has come of its payload.
    fn try_direct<H: Host>(
        &mut self,
        ulpdu: &[u8],
        body: &[u8],
        ulpdu_len: u16,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Result<Begun, Refusal> {
        // What may be lost is decided about a whole segment, and memory whose pages may be missing is never read to directly.
        if self.drops() || env.memory.has_on_demand() {
            return Ok(Begun::No);
        }
        let header = Header::parse(ulpdu).map_err(Refusal::Header)?;
        if !self.life.has_heard() {
            self.hear(ulpdu);
        }
        if !header.opcode().is_send() && !matches!(header, Header::Tagged(_)) {
            return Ok(Begun::No);
        }
        let Some(target) = self.admit_direct(&header, payload, ulpdu_len, env)? else {
            return Ok(Begun::Hold);
        };
        let tail = match header {
            // Programs wait for a Write by looking at its last octet.
            Header::Tagged(h) if h.last => WRITE_TAIL,
            _ => 0,
        };
        self.places(env.memory)
            .write(target, 0, body)
            .map_err(Refusal::Memory)?;
        self.rx.direct = Some(Direct {
            header,
            target,
            payload,
            placed: body.len() as u32,
            direct_end: payload.saturating_sub(tail),
            ulpdu_len,
        });
        // The mode stays on for the small FPDU that ends a message.
        self.rx.large = 3;
        Ok(Begun::Direct)
    }

    /// Goes on with an FPDU in direct reading. Returns how many octets were taken.
    #[inline(never)]
    pub(super) fn continue_direct<H: Host>(
        &mut self,
        d: &Direct,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        // Payload may still come through staging, if it was read together with an earlier FPDU.
        let want = d.direct_end.saturating_sub(d.placed) as usize;
        let part = if want > 0 {
            octets.get(..octets.len().min(want))
        } else {
            octets.get(..d.rest())
        };
        let Some(part) = part else {
            return (0, Step::NeedMore);
        };
        let tail = d.payload.saturating_sub(d.placed) as usize;
        let here = part.get(..part.len().min(tail)).unwrap_or(&[]);
        let places = self.places(env.memory);
        // Where more is wanted, also if no octets are here, so that a region that was deregistered is noticed.
        let placed = places
            .permits(d.target, d.placed, want as u32)
            .and_then(|()| places.write(d.target, d.placed, here));
        if let Err(e) = placed {
            let refusal = Refusal::Memory(e);
            return (
                0,
                self.refuse_known(refusal, Some(d.header), d.ulpdu_len, env.host),
            );
        }
        if want > 0 {
            if let Some(d) = &mut self.rx.direct {
                d.placed = d.placed.saturating_add(part.len() as u32);
            }
            let whole = part.len() == want;
            return (part.len(), if whole { Step::Again } else { Step::NeedMore });
        }
        self.rx.direct = None;
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(1);
        (part.len(), self.finish_direct(&d.header, d.payload, env))
    }
}

/// What became of an FPDU that has come in part.
enum Begun {
    Direct,
    /// It has to wait for a receive.
    Hold,
    /// It is taken when it is whole.
    No,
}
