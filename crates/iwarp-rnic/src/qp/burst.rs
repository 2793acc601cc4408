//! The short path: runs of small messages, received without the general code.
//!
//! Each function does exactly what the general path (`rx` and `deliver`) would do with the same messages. It stops at the first message
//! that it does not handle, and the general path goes on there. Such messages are: an operation other than Send, Write or Read
//! (`burst_reads`), a message of more than one element, and each error. A test compares the two paths octet for octet.

use super::buffer::RxBuffer;
use super::{Env, Host, QueuePair};
use crate::memory::Span;
use crate::{Access, WcFlags, WcOpcode};
use iwarp_proto::ddp::{
    TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader, control_octets,
};
use iwarp_proto::mpa::framing::{CRC_LEN, MPA_LEN_FIELD, fpdu_len};
use iwarp_proto::rdmap::Opcode;

impl QueuePair {
    /// Processes whole FPDUs at the start of the buffer, as long as they are RDMA Writes, Reads, or Sends of one segment.
    ///
    /// The caller has checked that the stream is in full operation and without markers, and that no FPDU is being read directly.
    pub(super) fn receive_burst<H: Host>(&mut self, buffer: &mut RxBuffer, env: &mut Env<'_, H>) {
        if !self.life.has_heard() || self.is_plodding() {
            return;
        }
        let octets = buffer.octets();
        let crc = self.rx.checks_crc().then_some(env.crc32c);
        let mut rest = octets;
        let mut frames = 0;
        while let Some(&[high, low, ddp, rdmap]) = rest.first_chunk::<4>() {
            let Some(kind) = Kind::of([ddp, rdmap]) else {
                break;
            };
            let ulpdu_len = usize::from(u16::from_be_bytes([high, low]));
            let Some((fpdu, behind)) = rest.split_at_checked(fpdu_len(ulpdu_len)) else {
                break;
            };
            let Some((covered, trailer)) = fpdu.split_last_chunk::<CRC_LEN>() else {
                break;
            };
            if let Some(crc) = crc
                && crc(0, covered).to_le_bytes() != *trailer
            {
                break;
            }
            let ulpdu = covered
                .get(MPA_LEN_FIELD..MPA_LEN_FIELD + ulpdu_len)
                .unwrap_or(&[]);
            let taken = match kind {
                Kind::Write => self.place_write(ulpdu, env),
                Kind::Send => self.take_send(ulpdu, env),
                Kind::ReadRequest => self.take_read_request(ulpdu, env),
                Kind::ReadResponse => self.place_response(ulpdu, env),
            };
            if taken.is_none() {
                break;
            }
            frames += 1;
            rest = behind;
        }
        if frames > 0 {
            let n = octets.len() - rest.len();
            buffer.consume(n);
            self.rx.small_fpdus(frames);
            self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(frames);
        }
    }

    /// Processes one segment of an RDMA Write. Returns `None` if nothing was done.
    #[inline]
    fn place_write<H: Host>(&mut self, ulpdu: &[u8], env: &Env<'_, H>) -> Option<()> {
        let (header, payload) = ulpdu.split_at_checked(TAGGED_HEADER_LEN)?;
        let h = TaggedHeader::decode(header)?;
        let len = payload.len() as u32;
        if len == 0 || !self.remote.contains(Access::REMOTE_WRITE) {
            return None;
        }
        let message_len = self.rx.write_len.checked_add(len)?;
        let access = Access::REMOTE_WRITE;
        let range = (h.stag.0, h.to, len);
        let place = |span: Span<'_, H::Memory>| span.write_last_octet_last(payload);
        let placed = env.memory.access(range, access, self.accessor(), place);
        placed.ok()?;
        if h.last {
            self.rx.last_write_len = message_len;
            self.rx.write_len = 0;
            self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
        } else {
            self.rx.write_len = message_len;
        }
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(len));
        Some(())
    }

    /// Processes a whole Send. Returns `None` if nothing was placed; a receive may have been taken for it.
    #[inline]
    fn take_send<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Option<()> {
        let (header, payload) = ulpdu.split_at_checked(UNTAGGED_HEADER_LEN)?;
        let h = UntaggedHeader::decode(header)?;
        let len = payload.len() as u32;
        let expected = h.qn == 0
            && h.mo == 0
            && self.rx.msn.first() == Some(&h.msn)
            && len > 0
            && !self.rx.receiving
            && !self.rx.rtr_send_expected
            && self.rx.immediate.is_none();
        // The general path finds the receive that was taken.
        if !expected || !self.take_receive(env.host) || u64::from(len) > self.rx.receive.len {
            return None;
        }
        let sge = self
            .rx
            .receive
            .sges()
            .first()
            .filter(|sge| sge.len >= len)?;
        let access = Access::LOCAL_WRITE;
        let range = (sge.lkey, sge.addr, len);
        let place = |span: Span<'_, H::Memory>| span.write_last_octet_last(payload);
        let placed = env.memory.access(range, access, self.accessor(), place);
        placed.ok()?;
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(len));
        self.advance_msn(0);
        self.rx.last_write_len = 0;
        let mut cqe = self.receive_cqe(WcOpcode::Recv, len);
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        self.finish_receive(cqe, env.host);
        Some(())
    }

    /// Returns `true` if the short path is off, for tests that compare the two.
    #[inline]
    pub(super) const fn is_plodding(&self) -> bool {
        #[cfg(test)]
        return self.plodding;
        #[cfg(not(test))]
        false
    }
}

/// The messages that the short path takes, by the first two octets of a segment.
#[derive(Clone, Copy)]
enum Kind {
    Write,
    Send,
    ReadRequest,
    ReadResponse,
}

impl Kind {
    #[inline]
    const fn of(control: [u8; 2]) -> Option<Self> {
        const fn is(tagged: bool, last: bool, opcode: Opcode) -> u16 {
            u16::from_be_bytes(control_octets(tagged, last, opcode))
        }
        const WRITE: u16 = is(true, false, Opcode::WRITE);
        const LAST_WRITE: u16 = is(true, true, Opcode::WRITE);
        const LAST_SEND: u16 = is(false, true, Opcode::SEND);
        const LAST_SEND_SE: u16 = is(false, true, Opcode::SEND_SE);
        const REQUEST: u16 = is(false, true, Opcode::READ_REQUEST);
        const RESPONSE: u16 = is(true, false, Opcode::READ_RESPONSE);
        const LAST_RESPONSE: u16 = is(true, true, Opcode::READ_RESPONSE);
        match u16::from_be_bytes(control) {
            LAST_WRITE | WRITE => Some(Self::Write),
            LAST_SEND | LAST_SEND_SE => Some(Self::Send),
            REQUEST => Some(Self::ReadRequest),
            LAST_RESPONSE | RESPONSE => Some(Self::ReadResponse),
            _ => None,
        }
    }
}
