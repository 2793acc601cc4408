//! Extraction of FPDUs from received octets (RFC 5044 sections 4.2 to 4.4 and 6).

use super::fault::RxFault;
use super::rx::Step;
use super::{Env, Host, QueuePair};
use crate::memory::Crc32c;
use core::mem;
use iwarp_proto::ddp::{Header, TAGGED_HEADER_LEN, UNTAGGED_HEADER_LEN};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, FramingError, MARKER_LEN, MPA_LEN_FIELD, decode_fpdu, fpdu_len,
    fpdu_len_with_markers,
};
use iwarp_proto::rdmap::Opcode;

struct CompleteFpdu<'a> {
    /// The part covered by the CRC.
    covered: &'a [u8],
    trailer: [u8; CRC_LEN],
    ulpdu: &'a [u8],
    rest_after: &'a [u8],
}

impl<'a> CompleteFpdu<'a> {
    /// Returns `None` if the FPDU is incomplete.
    #[inline]
    fn parse(octets: &'a [u8]) -> Option<Self> {
        let len_field = octets.first_chunk::<MPA_LEN_FIELD>()?;
        let ulpdu_len = usize::from(u16::from_be_bytes(*len_field));
        let (fpdu, rest_after) = octets.split_at_checked(fpdu_len(ulpdu_len))?;
        let (covered, trailer) = fpdu.split_last_chunk::<CRC_LEN>()?;
        Some(Self {
            covered,
            trailer: *trailer,
            ulpdu: covered.get(MPA_LEN_FIELD..MPA_LEN_FIELD + ulpdu_len)?,
            rest_after,
        })
    }

    //= rfc5044 section 6
    //# An MPA receiver MUST first verify the FPDU before passing the ULPDU
    //# to DDP.
    #[inline]
    fn is_intact(&self, crc: Option<Crc32c>) -> bool {
        crc.is_none_or(|crc| crc.append(0, self.covered).to_le_bytes() == self.trailer)
    }
}

/// Returns the part of the first FPDU's ULPDU that has arrived.
#[inline(always)]
fn arrived_ulpdu(octets: &[u8]) -> &[u8] {
    let Some((len_field, rest_after)) = octets.split_first_chunk::<MPA_LEN_FIELD>() else {
        return &[];
    };
    let ulpdu_len = usize::from(u16::from_be_bytes(*len_field));
    rest_after.get(..ulpdu_len).unwrap_or(rest_after)
}

/// Returns `true` if a segment is a Write with payload. Empty Writes are rare and may be notes.
#[inline(always)]
fn is_write(ulpdu: &[u8]) -> bool {
    // The length check implies that the control octets are present.
    ulpdu.len() > TAGGED_HEADER_LEN && Header::is_any_of(ulpdu, &[Opcode::WRITE])
}

/// Returns `true` if a segment is a Send with a complete header.
#[inline(always)]
fn is_send(ulpdu: &[u8]) -> bool {
    ulpdu.len() >= UNTAGGED_HEADER_LEN && Header::is_any_of(ulpdu, &Opcode::SENDS)
}

/// Returns `true` if a segment is neither a Write with payload nor a Send.
#[inline(always)]
fn is_other(ulpdu: &[u8]) -> bool {
    !is_write(ulpdu) && !is_send(ulpdu)
}

struct Progress<'a> {
    /// Octets after the processed FPDUs.
    rest: &'a [u8],
    /// How many more FPDUs may be processed, at least one.
    left: u64,
}

impl QueuePair {
    /// Processes up to `limit` complete FPDUs of a stream without markers.
    /// Returns how many octets were consumed, and the next step.
    #[inline]
    pub(super) fn process_complete_fpdus<H: Host>(
        &mut self,
        octets: &[u8],
        limit: u64,
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        if self.expects_first_fpdu() {
            return self.process_first_fpdu(octets, env);
        }
        let mut run = Progress {
            rest: octets,
            left: limit,
        };
        let step = loop {
            // The FPDU may be incomplete. If it is complete, the loop for its kind processes it.
            let ulpdu = arrived_ulpdu(run.rest);
            // In the loop over Writes, a refused Write ends the stream. Writes that may have to be
            // dropped are therefore processed one by one.
            let step = if is_write(ulpdu) && !self.drops_messages() {
                self.process_writes(&mut run, env)
            } else if is_send(ulpdu) {
                self.process_sends(&mut run, env)
            } else {
                self.process_others(&mut run, env)
            };
            if step != Step::Next {
                break step;
            }
        };
        let fpdus = limit.wrapping_sub(run.left);
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(fpdus);
        self.rx.count_undivided_fpdus(fpdus);
        (octets.len().wrapping_sub(run.rest.len()), step)
    }

    /// Processes consecutive RDMA Writes. Writes and Sends have separate loops so that the compiler
    /// keeps the loops' variables in registers.
    #[inline(never)]
    fn process_writes<H: Host>(&mut self, run: &mut Progress<'_>, env: &mut Env<'_, H>) -> Step {
        self.process_run(run, is_write, Self::receive_write, env)
    }

    #[inline(never)]
    fn process_sends<H: Host>(&mut self, run: &mut Progress<'_>, env: &mut Env<'_, H>) -> Step {
        self.process_run(run, is_send, Self::receive_send, env)
    }

    #[inline(never)]
    fn process_others<H: Host>(&mut self, run: &mut Progress<'_>, env: &mut Env<'_, H>) -> Step {
        // The caller has classified the first FPDU, which is often the only one.
        let mut known = true;
        let is_of_kind = |ulpdu: &[u8]| mem::take(&mut known) || is_other(ulpdu);
        self.process_run(run, is_of_kind, Self::receive_other, env)
    }

    /// Processes consecutive segments of one kind. `Step::Next` means that the next segment is of
    /// another kind.
    #[inline(always)]
    fn process_run<'e, H: Host>(
        &mut self,
        run: &mut Progress<'_>,
        mut is_of_kind: impl FnMut(&[u8]) -> bool,
        receive: impl Fn(&mut Self, &[u8], &mut Env<'e, H>) -> Step,
        env: &mut Env<'e, H>,
    ) -> Step {
        let crc = self.rx.crc.then_some(env.crc32c);
        let Progress { mut rest, mut left } = *run;
        let step = loop {
            let Some(fpdu) = CompleteFpdu::parse(rest) else {
                break Step::NeedMore;
            };
            if !is_of_kind(fpdu.ulpdu) {
                break Step::Next;
            }
            if !fpdu.is_intact(crc) {
                break self.refuse_crc(env.host);
            }
            let step = receive(self, fpdu.ulpdu, env);
            if !matches!(step, Step::Next | Step::Again) {
                break step;
            }
            rest = fpdu.rest_after;
            left = left.wrapping_sub(1);
            if step == Step::Again || left == 0 {
                break Step::Again;
            }
        };
        *run = Progress { rest, left };
        step
    }

    /// Like [`process_complete_fpdus`](Self::process_complete_fpdus), for one FPDU whose arrival
    /// has an effect by itself.
    #[cold]
    fn process_first_fpdu<H: Host>(
        &mut self,
        octets: &[u8],
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        let crc = self.rx.crc.then_some(env.crc32c);
        let Some(fpdu) = CompleteFpdu::parse(octets) else {
            return (0, Step::NeedMore);
        };
        if !fpdu.is_intact(crc) {
            return (0, self.refuse_crc(env.host));
        }
        let step = match self.on_first_fpdu(fpdu.ulpdu) {
            true => Step::Next,
            false => self.receive_ulpdu(fpdu.ulpdu, env),
        };
        if !matches!(step, Step::Next | Step::Again) {
            return (0, step);
        }
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(1);
        self.rx.count_undivided_fpdus(1);
        (
            octets.len().wrapping_sub(fpdu.rest_after.len()),
            Step::Again,
        )
    }

    #[cold]
    #[inline(never)]
    fn refuse_crc<H: Host>(&mut self, host: &mut H) -> Step {
        self.counters.crc_errors = self.counters.crc_errors.wrapping_add(1);
        self.fail_stream(&RxFault::crc(), host);
        Step::Failed
    }

    #[cold]
    fn refuse_framing<H: Host>(&mut self, e: FramingError, host: &mut H) -> Step {
        let fault = self.framing_fault(e);
        self.fail_stream(&fault, host);
        Step::Failed
    }

    /// Processes the next FPDU of a stream with markers. Returns how many octets were consumed.
    /// `unmarked` is room for one ULPDU.
    #[inline(never)]
    pub(super) fn process_marked<H: Host>(
        &mut self,
        octets: &[u8],
        unmarked: &mut [u8],
        env: &mut Env<'_, H>,
    ) -> (usize, Step) {
        let Some((ulpdu_len, total)) = self.fpdu_at(octets) else {
            return (0, Step::NeedMore);
        };
        let Some(fpdu) = octets.get(..total) else {
            return (0, Step::NeedMore);
        };
        let mut clock = self.rx.clock;
        let options = FpduOptions {
            markers: true,
            crc: self.rx.crc.then_some(env.crc32c.octets()),
        };
        let ulpdu = unmarked.get_mut(..ulpdu_len).unwrap_or(&mut []);
        if let Err(e) = decode_fpdu(fpdu, &options, &mut clock, ulpdu) {
            return (0, self.refuse_framing(e, env.host));
        }
        let step = match self.expects_first_fpdu() && self.on_first_fpdu(ulpdu) {
            true => Step::Next,
            false => self.receive_ulpdu(ulpdu, env),
        };
        if !matches!(step, Step::Next | Step::Again) {
            return (0, step);
        }
        self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(1);
        self.rx.clock = clock;
        (total, step)
    }

    /// Returns the number of octets before the length field of the next FPDU.
    const fn octets_before_length(&self) -> usize {
        if self.rx.markers && self.rx.clock.next_marker_in() == 0 {
            MARKER_LEN
        } else {
            0
        }
    }

    /// Returns the lengths of the ULPDU and of the FPDU at the start of `octets`, if the length
    /// field has arrived.
    fn fpdu_at(&self, octets: &[u8]) -> Option<(usize, usize)> {
        // FPDUs start at multiples of four, so no marker splits the length field.
        let len_field = octets
            .get(self.octets_before_length()..)?
            .first_chunk::<MPA_LEN_FIELD>()?;
        let ulpdu_len = usize::from(u16::from_be_bytes(*len_field));
        let total = if self.rx.markers {
            fpdu_len_with_markers(self.rx.clock.next_marker_in(), ulpdu_len)
        } else {
            fpdu_len(ulpdu_len)
        };
        Some((ulpdu_len, total))
    }

    /// Returns how many octets are missing from the FPDU (or length field) that starts with
    /// `arrived`.
    pub(super) fn missing(&self, arrived: &[u8]) -> usize {
        let needed = match (&self.rx.direct, self.fpdu_at(arrived)) {
            (Some(direct), _) => direct.rest(),
            (None, Some((_, total))) => total,
            (None, None) => self.octets_before_length().wrapping_add(MPA_LEN_FIELD),
        };
        needed.saturating_sub(arrived.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iwarp_proto::ddp::TaggedHeader;
    use std::vec::Vec;

    /// Each FPDU belongs to one of the three loops. An empty Write belongs to the last loop because
    /// it may be a note, and so does a Write with a truncated header.
    #[test]
    fn each_segment_belongs_to_one_loop() {
        let tagged = |opcode| {
            let mut octets = [0u8; 64];
            let header = Header::Tagged(TaggedHeader {
                opcode,
                ..TaggedHeader::default()
            });
            header.emit(&mut octets);
            octets
        };
        let (write, answer) = (tagged(Opcode::WRITE), tagged(Opcode::READ_RESPONSE));
        let kinds = |ulpdu: &[u8]| [is_write(ulpdu), is_send(ulpdu), is_other(ulpdu)];
        for len in TAGGED_HEADER_LEN + 1..write.len() {
            assert_eq!(kinds(&write[..len]), [true, false, false], "{len}");
        }
        for len in 0..=TAGGED_HEADER_LEN {
            assert_eq!(kinds(&write[..len]), [false, false, true], "{len}");
        }
        assert_eq!(kinds(&answer), [false, false, true]);
        for opcode in Opcode::SENDS {
            let mut send: Vec<u8> = tagged(opcode).into();
            // An untagged segment.
            send[0] &= 0x7f;
            assert_eq!(kinds(&send), [false, true, false], "{opcode:?}");
        }
    }
}
