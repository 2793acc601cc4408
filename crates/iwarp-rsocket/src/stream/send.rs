//! The sending half of a stream.

use super::{CONTROL_CREDITS, CONTROL_SLOTS, Stream};
use crate::errno::{Errno, Result};
use crate::settings::MAX_INLINE;
use crate::wire::Message;
use iwarp::runtime::Sge;

/// Most octets of one transfer, so that the peer can read one while the next is under way.
const TRANSFER_MAX: u32 = 64 * 1024;
/// Smaller transfers wait for room in the buffer, so that there are not too many.
const LOW_WATER: u32 = 2048;

/// The program's octets in several pieces, taken from front to back.
pub(crate) struct Gather<'a> {
    pieces: &'a [&'a [u8]],
    /// Octets taken of the first piece.
    skip: usize,
    left: usize,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(pieces: &'a [&'a [u8]]) -> Self {
        Self {
            pieces,
            skip: 0,
            left: pieces.iter().map(|p| p.len()).sum(),
        }
    }

    pub(crate) const fn left(&self) -> usize {
        self.left
    }

    /// Passes on the next `len` octets piece by piece, with their distance from the first.
    fn take(&mut self, len: usize, mut put: impl FnMut(usize, &[u8])) {
        let mut done = 0;
        while done < len {
            let Some((first, rest)) = self.pieces.split_first() else {
                return;
            };
            let piece = &first[self.skip..];
            let n = piece.len().min(len - done);
            put(done, &piece[..n]);
            done += n;
            self.left -= n;
            self.skip += n;
            if self.skip == first.len() {
                (self.pieces, self.skip) = (rest, 0);
            }
        }
    }
}

impl Stream {
    /// Returns the room in the buffer.
    const fn room(&self) -> u32 {
        self.sizes.send_buffer - self.in_use
    }

    /// Returns `true` if the peer has receives for more messages about data.
    fn has_credit(&self) -> bool {
        let reserve = match &self.peer {
            Some(peer) if peer.credits > 2 * CONTROL_CREDITS => CONTROL_CREDITS,
            _ => 0,
        };
        self.allowed.wrapping_sub(self.sent) > reserve
    }

    fn has_slots(&self) -> bool {
        self.sq_free >= 2 + CONTROL_SLOTS && self.room() >= LOW_WATER
    }

    fn can_send(&self) -> bool {
        self.has_slots() && self.has_credit() && !self.targets.is_empty()
    }

    /// Returns `true` if the next send takes octets or fails at once.
    pub(crate) fn is_writable(&self) -> bool {
        self.cannot_write() || self.can_send()
    }

    /// Returns `true` if sending is over.
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

    /// Sends as much as can be sent now.
    ///
    /// # Errors
    /// EAGAIN: nothing could be sent. EPIPE: closed for writing here. ECONNRESET: the peer has gone.
    pub(crate) fn send(&mut self, data: &mut Gather<'_>) -> Result<usize> {
        let before = data.left();
        self.check_writing()?;
        self.send_mappings();
        while data.left() > 0 {
            if !self.can_send() {
                self.process(true);
            }
            if self.over || !self.can_send() {
                break;
            }
            self.transfer(data);
        }
        match before - data.left() {
            0 if before > 0 => self.check_writing().and(Err(Errno::AGAIN)),
            n => Ok(n),
        }
    }

    /// Sends one transfer. The caller has checked that there is room for it.
    fn transfer(&mut self, data: &mut Gather<'_>) {
        let Some(target) = self.targets.front().copied() else {
            return;
        };
        let left = u32::try_from(data.left()).unwrap_or(u32::MAX);
        let len = left.min(TRANSFER_MAX).min(target.len).min(self.room());
        // Do this before posting, because the peer may answer at once.
        if len == target.len {
            self.targets.pop_front();
        } else if let Some(front) = self.targets.front_mut() {
            front.addr = front.addr.wrapping_add(u64::from(len));
            front.len -= len;
        }
        self.sent = self.sent.wrapping_add(1);
        if len <= u32::from(self.sizes.inline) {
            let mut octets = [0; MAX_INLINE as usize];
            data.take(len as usize, |at, piece| {
                octets[at..at + piece.len()].copy_from_slice(piece)
            });
            let octets = &octets[..len as usize];
            self.post_inline_pair(target.addr, target.key, octets, Message::Data(len));
        } else {
            let (sges, n) = self.store(data, len);
            self.post_buffered(
                target.addr,
                target.key,
                &sges[..n],
                len,
                Some(Message::Data(len)),
            );
        }
    }

    /// Copies octets to the ring buffer, and returns where they are.
    fn store(&mut self, data: &mut Gather<'_>, len: u32) -> ([Sge; 2], usize) {
        let (base, key) = (self.sbuf.remote().addr, self.sbuf.lkey());
        let size = self.sizes.send_buffer;
        let start = self.write_at;
        let first = len.min(size - start);
        let sbuf = &self.sbuf;
        let mut put = |from: u32, count: u32| {
            // Inside the region, because the ring has its length.
            data.take(count as usize, |at, piece| {
                let _ = sbuf.write_at(from as usize + at, piece);
            });
        };
        put(start, first);
        put(0, len - first);
        self.write_at = (start + len) % size;
        self.in_use += len;
        let sge = |at: u32, len: u32| Sge {
            addr: base + u64::from(at),
            len,
            lkey: key,
        };
        (
            [sge(start, first), sge(0, len - first)],
            if first == len { 1 } else { 2 },
        )
    }

    /// Writes into a buffer that the peer has mapped, as much as can be written now.
    ///
    /// # Errors
    /// As [`send`](Self::send). If `Ok` is less than asked for, the rest is not mapped.
    pub(crate) fn write_mapped(
        &mut self,
        data: &mut Gather<'_>,
        offset: &mut u64,
    ) -> Result<usize> {
        let before = data.left();
        self.check_writing()?;
        self.send_mappings();
        while data.left() > 0 {
            let Some((mapping, within)) = self.iomaps.find(*offset) else {
                // The message about it may wait to be read.
                self.process(true);
                match self.iomaps.find(*offset) {
                    Some(_) => continue,
                    None => return Ok(before - data.left()),
                }
            };
            if !self.has_slots() {
                self.process(true);
            }
            if self.over || !self.has_slots() {
                break;
            }
            let rest = mapping.window.len - within as u32;
            let left = u32::try_from(data.left()).unwrap_or(u32::MAX);
            let len = left.min(TRANSFER_MAX).min(rest).min(self.room());
            let (sges, n) = self.store(data, len);
            let addr = mapping.window.addr.wrapping_add(within);
            self.post_buffered(addr, mapping.window.key, &sges[..n], len, None);
            *offset = offset.wrapping_add(u64::from(len));
        }
        match before - data.left() {
            0 if before > 0 => self.check_writing().and(Err(Errno::AGAIN)),
            n => Ok(n),
        }
    }

    /// Tells the peer about buffers mapped since the last time, as many as can be told now.
    pub(crate) fn send_mappings(&mut self) {
        while let Some(peer) = self.peer.filter(|_| self.iomaps.has_news() && !self.over) {
            if !self.has_slots() || !self.has_credit() {
                self.process(true);
                if !self.has_slots() || !self.has_credit() {
                    return;
                }
            }
            let Some((index, mapping)) = self.iomaps.next_news() else {
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
    fn pieces_are_taken_in_order() {
        let pieces: [&[u8]; 5] = [b"ab", b"", b"cdef", b"", b"g"];
        for step in 1..=7 {
            let mut gather = Gather::new(&pieces);
            let mut all = Vec::new();
            while gather.left() > 0 {
                let n = step.min(gather.left());
                let mut part = vec![0; n];
                gather.take(n, |at, p| part[at..at + p.len()].copy_from_slice(p));
                all.extend(part);
            }
            assert_eq!(all, b"abcdefg", "{step}");
        }
    }
}
