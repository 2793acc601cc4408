//! The sending half of a stream.

use super::{CONTROL_CREDITS, CONTROL_SLOTS, Stream, TRANSFER_MAX};
use crate::errno::{Errno, Result};
use crate::settings::MAX_INLINE;
use crate::wire::Message;
use iwarp::runtime::Sge;

/// Minimum free bytes of the send buffer for another transfer, to avoid many small transfers.
const LOW_WATER: u32 = 2048;

/// The program's data in several pieces, consumed from front to back.
pub(crate) struct Gather<'a> {
    pieces: &'a [&'a [u8]],
    /// Bytes consumed of the first piece.
    skip: usize,
    remaining: usize,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(pieces: &'a [&'a [u8]]) -> Self {
        Self {
            pieces,
            skip: 0,
            remaining: pieces.iter().map(|p| p.len()).sum(),
        }
    }

    pub(crate) const fn remaining(&self) -> usize {
        self.remaining
    }

    /// Consumes `len` bytes: passes each piece to `put`, with its offset from the first byte.
    fn consume(&mut self, len: usize, mut put: impl FnMut(usize, &[u8])) {
        let mut done = 0;
        while done < len {
            let Some((first, rest)) = self.pieces.split_first() else {
                return;
            };
            let piece = &first[self.skip..];
            let n = piece.len().min(len - done);
            put(done, &piece[..n]);
            done += n;
            self.remaining -= n;
            self.skip += n;
            if self.skip == first.len() {
                (self.pieces, self.skip) = (rest, 0);
            }
        }
    }
}

impl Stream {
    pub(super) const fn free_buffer(&self) -> u32 {
        self.sizes.send_buffer - self.in_use
    }

    pub(super) const fn has_buffer(&self) -> bool {
        self.free_buffer() >= LOW_WATER
    }

    /// Returns `true` if the peer has receives for more data messages.
    fn has_credit(&self) -> bool {
        let reserve = match &self.peer {
            Some(peer) if peer.credits > 2 * CONTROL_CREDITS => CONTROL_CREDITS,
            _ => 0,
        };
        self.allowed.wrapping_sub(self.sent) > reserve
    }

    fn has_slots(&self) -> bool {
        self.sq_free >= 2 + CONTROL_SLOTS && self.has_buffer()
    }

    pub(super) fn can_send(&self) -> bool {
        // The tail has a credit and work requests already.
        let has_requests = self.has_tail() || self.has_slots() && self.has_credit();
        has_requests && self.has_buffer() && !self.offers.is_empty()
    }

    /// Returns `true` if the next send fails immediately, or accepts a third of what the buffers
    /// hold. With less, a program that waits for this would write little at a time. As with TCP, a
    /// send that does not wait for this accepts less.
    pub(crate) fn is_writable(&self) -> bool {
        self.cannot_write() || self.can_send() && self.has_much_room()
    }

    /// The peer returns a half of its buffer when it has read it. So if one half has no room, the
    /// other one has, or will have.
    fn has_much_room(&self) -> bool {
        let offered: u64 = self.offers.iter().map(|offer| u64::from(offer.len)).sum();
        let half = self.peer.as_ref().map_or(0, |peer| peer.buffer.len);
        let room = offered.min(u64::from(self.free_buffer()));
        room >= u64::from(half.min(self.sizes.send_buffer) / 3)
    }

    pub(crate) const fn cannot_write(&self) -> bool {
        self.over || !self.writing
    }

    fn check_writing(&mut self) -> Result<()> {
        if let Some(error) = self.take_error() {
            return Err(error);
        }
        match (self.writing, self.over) {
            (false, _) => Err(Errno::PIPE),
            (true, true) => Err(Errno::CONNRESET),
            (true, false) => Ok(()),
        }
    }

    /// Sends as much as possible now. Fails with EAGAIN if nothing can be sent, with EPIPE after a
    /// shutdown for writing, and with ECONNRESET if the peer is gone.
    pub(crate) fn send(&mut self, data: &mut Gather<'_>) -> Result<usize> {
        let before = data.remaining();
        self.check_writing()?;
        self.send_mappings();
        if self.has_tail() {
            // The peer may have read meanwhile.
            self.process(false);
        }
        while data.remaining() > 0 {
            if !self.can_send() {
                self.process(true);
            }
            if self.over || !self.can_send() {
                break;
            }
            match self.gathers() {
                true => self.gather(data),
                false => self.transfer(data),
            }
        }
        match before - data.remaining() {
            0 if before > 0 => self.check_writing().and(Err(Errno::AGAIN)),
            n => Ok(n),
        }
    }

    /// Sends one transfer. The caller has checked [`Self::can_send`].
    fn transfer(&mut self, data: &mut Gather<'_>) {
        let Some(target) = self.offers.front().copied() else {
            return;
        };
        let remaining = u32::try_from(data.remaining()).unwrap_or(u32::MAX);
        let len = remaining
            .min(TRANSFER_MAX)
            .min(target.len)
            .min(self.free_buffer());
        // Update the offer before posting, because the peer may reply immediately.
        self.use_offer(len);
        self.in_flight += u64::from(len);
        self.sent = self.sent.wrapping_add(1);
        if len <= u32::from(self.sizes.inline) {
            let mut inline = [0; MAX_INLINE as usize];
            data.consume(len as usize, |offset, piece| {
                inline[offset..offset + piece.len()].copy_from_slice(piece)
            });
            let inline = &inline[..len as usize];
            self.post_inline_pair(target.addr, target.key, inline, Message::Data(len));
        } else {
            let start = self.write_at;
            self.store(data, len);
            let (sges, n) = self.stored(start, len);
            self.post_buffered(
                target.addr,
                target.key,
                &sges[..n],
                len,
                Some(Message::Data(len)),
            );
        }
    }

    /// Uses `len` bytes of the oldest offer. Returns `true` if that is all of it.
    pub(super) fn use_offer(&mut self, len: u32) -> bool {
        let Some(front) = self.offers.front_mut() else {
            return false;
        };
        front.addr = front.addr.wrapping_add(u64::from(len));
        front.len -= len;
        let is_used = front.len == 0;
        if is_used {
            self.offers.pop_front();
        }
        is_used
    }

    /// Copies data to the send buffer.
    pub(super) fn store(&mut self, data: &mut Gather<'_>, len: u32) {
        let size = self.sizes.send_buffer;
        let start = self.write_at;
        let first = len.min(size - start);
        let sbuf = &self.sbuf;
        let mut put = |from: u32, count: u32| {
            // Never fails: the range is inside the region.
            data.consume(count as usize, |offset, piece| {
                let _ = sbuf.write_at(from as usize + offset, piece);
            });
        };
        put(start, first);
        put(0, len - first);
        self.write_at = (start + len) % size;
        self.in_use += len;
    }

    /// Returns the elements that describe data in the send buffer, and their number.
    pub(super) fn stored(&self, start: u32, len: u32) -> ([Sge; 2], usize) {
        let (base, key) = (self.sbuf.remote().addr, self.sbuf.lkey());
        let first = len.min(self.sizes.send_buffer - start);
        let sge = |offset: u32, len: u32| Sge {
            addr: base + u64::from(offset),
            len,
            lkey: key,
        };
        (
            [sge(start, first), sge(0, len - first)],
            if first == len { 1 } else { 2 },
        )
    }

    /// Writes as much as possible now into a buffer that the peer mapped. Returns fewer bytes than
    /// requested if the remainder is not mapped. Fails as [`send`](Self::send).
    pub(crate) fn write_mapped(
        &mut self,
        data: &mut Gather<'_>,
        offset: &mut u64,
    ) -> Result<usize> {
        let before = data.remaining();
        self.check_writing()?;
        self.send_tail();
        self.send_mappings();
        while data.remaining() > 0 {
            let Some((mapping, within)) = self.iomaps.find(*offset) else {
                // The message that announces the mapping may not have been processed yet.
                self.process(true);
                match self.iomaps.find(*offset) {
                    Some(_) => continue,
                    None => return Ok(before - data.remaining()),
                }
            };
            if !self.has_slots() {
                self.process(true);
            }
            if self.over || !self.has_slots() {
                break;
            }
            let mapped = mapping.window.len - within as u32;
            let remaining = u32::try_from(data.remaining()).unwrap_or(u32::MAX);
            let len = remaining
                .min(TRANSFER_MAX)
                .min(mapped)
                .min(self.free_buffer());
            let start = self.write_at;
            self.store(data, len);
            let (sges, n) = self.stored(start, len);
            let addr = mapping.window.addr.wrapping_add(within);
            self.post_buffered(addr, mapping.window.key, &sges[..n], len, None);
            *offset = offset.wrapping_add(u64::from(len));
        }
        match before - data.remaining() {
            0 if before > 0 => self.check_writing().and(Err(Errno::AGAIN)),
            n => Ok(n),
        }
    }

    /// Announces newly mapped buffers to the peer, as many as possible now.
    pub(crate) fn send_mappings(&mut self) {
        while let Some(peer) = self.peer.filter(|_| self.iomaps.has_unsent() && !self.over) {
            if !self.has_slots() || !self.has_credit() {
                self.process(true);
                if !self.has_slots() || !self.has_credit() {
                    return;
                }
            }
            let Some((index, mapping)) = self.iomaps.next_unsent() else {
                return;
            };
            let table = peer
                .directory
                .addr
                .wrapping_add(u64::from(peer.directory.len) * crate::wire::WINDOW_LEN as u64);
            let entry = table.wrapping_add(u64::from(index) * crate::wire::MAPPING_LEN as u64);
            self.post_inline_pair(
                entry,
                peer.directory.key,
                &mapping.to_native(),
                Message::Mapping(u32::from(index)),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_consumed_in_order() {
        let pieces: [&[u8]; 5] = [b"ab", b"", b"cdef", b"", b"g"];
        for step in 1..=7 {
            let mut gather = Gather::new(&pieces);
            let mut all = Vec::new();
            while gather.remaining() > 0 {
                let n = step.min(gather.remaining());
                let mut part = vec![0; n];
                gather.consume(n, |offset, p| {
                    part[offset..offset + p.len()].copy_from_slice(p)
                });
                all.extend(part);
            }
            assert_eq!(all, b"abcdefg", "{step}");
        }
    }
}
