//! Direct reading: a large payload is read from the stream straight to its destination. This
//! requires a stream without CRC and markers, because the payload cannot be verified first.

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

/// An FPDU whose payload is being read directly to its destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direct {
    pub(super) header: Header,
    pub(super) target: Target,
    pub(super) payload: u32,
    pub(super) placed: u32,
    /// End of the payload that may be read directly. The rest is copied from staging, so that it
    /// becomes visible last.
    pub(super) direct_end: u32,
    pub(super) ulpdu_len: u16,
}

impl Direct {
    /// Returns how many octets of the FPDU are missing.
    pub(super) fn rest(&self) -> usize {
        let payload = self.payload.saturating_sub(self.placed) as usize;
        payload
            .saturating_add(pad_len(usize::from(self.ulpdu_len)))
            .saturating_add(CRC_LEN)
    }
}

impl QueuePair {
    /// Adds the destination of the next `wanted` octets of payload to the plan, and returns its
    /// length. The result is less than `wanted` if there are too many runs or a region was
    /// deregistered, which `rx_filled` reports.
    pub(super) fn plan_direct<'t, M: Memory>(
        &'t self,
        d: &Direct,
        wanted: u32,
        memory: &'t MemoryTable<M>,
        plan: &mut RxPlan,
        visit: &mut impl FnMut(Run<'t>),
    ) -> usize {
        // One run is reserved for staging.
        let mut runs_left = plan.max_runs.saturating_sub(1);
        let mut direct = 0usize;
        let (places, accessor) = (self.places(memory), self.accessor());
        let users = &mut plan.users;
        let _ = places.for_each_range(d.target, d.placed, wanted, |stag, to, len, need| {
            if runs_left == 0 {
                return Ok(());
            }
            // The list has room for all elements of a request.
            if let Some(span) = users.check(memory, (stag, to, len), need, accessor)? {
                for fragment in span.fragments().take(runs_left) {
                    runs_left = runs_left.wrapping_sub(1);
                    direct = direct.saturating_add(fragment.len());
                    visit(Run::memory(fragment));
                }
            }
            Ok(())
        });
        direct
    }

    /// Handles a partial FPDU: starts direct reading if the header has arrived and much of the
    /// payload has not. Returns how many octets were consumed.
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
            // More octets are missing than the tail has, so all received octets were placed.
            Ok(DirectStart::Direct) => (octets.len(), Step::NeedMore),
            Ok(DirectStart::Hold) => (0, Step::Hold),
            Ok(DirectStart::No) => (0, Step::NeedMore),
            Err(refusal) => {
                let header = Header::decode(ulpdu);
                (
                    0,
                    self.refuse_by_header(refusal, header, ulpdu_len, env.host),
                )
            }
        }
    }

    /// Admits the segment and places the payload that has arrived.
    fn try_direct<H: Host>(
        &mut self,
        ulpdu: &[u8],
        body: &[u8],
        ulpdu_len: u16,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Result<DirectStart, Refusal> {
        // Segments that may have to be dropped are processed when complete, and memory whose pages
        // may be missing is never read into directly.
        if self.drops_messages() || env.memory.has_on_demand() {
            return Ok(DirectStart::No);
        }
        let header = Header::parse(ulpdu).map_err(Refusal::Header)?;
        if !self.life.has_first_fpdu() {
            self.on_first_fpdu(ulpdu);
        }
        if !header.opcode().is_send() && !matches!(header, Header::Tagged(_)) {
            return Ok(DirectStart::No);
        }
        let Some(target) = self.admit_direct(&header, payload, ulpdu_len, env)? else {
            return Ok(DirectStart::Hold);
        };
        let tail = match header {
            // Programs poll the last octet of a Write.
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
        // A small FPDU at the end of a message does not end direct reading.
        self.rx.large = 3;
        Ok(DirectStart::Direct)
    }

    /// Continues the FPDU in direct reading. Returns how many octets were consumed.
    #[inline(never)]
    pub(super) fn continue_direct<H: Host>(
        &mut self,
        d: &Direct,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        // Payload may be in staging, because it was read together with an earlier FPDU.
        let wanted = d.direct_end.saturating_sub(d.placed) as usize;
        let part = if wanted > 0 {
            octets.get(..octets.len().min(wanted))
        } else {
            octets.get(..d.rest())
        };
        let Some(part) = part else {
            return (0, Step::NeedMore);
        };
        let tail = d.payload.saturating_sub(d.placed) as usize;
        let received = part.get(..part.len().min(tail)).unwrap_or(&[]);
        let places = self.places(env.memory);
        // Check the access even without octets, to detect that the region was deregistered.
        let placed = places
            .permits(d.target, d.placed, wanted as u32)
            .and_then(|()| places.write(d.target, d.placed, received));
        if let Err(e) = placed {
            let refusal = Refusal::Memory(e);
            return (
                0,
                self.refuse_by_header(refusal, Some(d.header), d.ulpdu_len, env.host),
            );
        }
        if wanted > 0 {
            if let Some(d) = &mut self.rx.direct {
                d.placed = d.placed.saturating_add(part.len() as u32);
            }
            let is_complete = part.len() == wanted;
            return (
                part.len(),
                if is_complete {
                    Step::Again
                } else {
                    Step::NeedMore
                },
            );
        }
        self.rx.direct = None;
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(1);
        (part.len(), self.finish_direct(&d.header, d.payload, env))
    }
}

enum DirectStart {
    Direct,
    /// The FPDU waits for a receive.
    Hold,
    /// The FPDU is processed when it is complete.
    No,
}
