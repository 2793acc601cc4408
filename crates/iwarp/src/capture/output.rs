//! The file of a recorder. Blocks are buffered and written in large pieces
//! (draft-ietf-opsawg-pcapng section 3).

use super::packet::{Addresses, Segment};
use super::{BUFFER, MAX_SEGMENT, RecorderLimits, pcapng};
use std::fs::File;
use std::io::{self, Write as _};
use std::time::SystemTime;

pub(super) struct Output {
    pub(super) file: File,
    /// Blocks not yet written. Between calls all of them are complete.
    pub(super) buffer: Vec<u8>,
    pub(super) written: u64,
    pub(super) packets: u64,
    last_time: u64,
    limits: RecorderLimits,
}

impl Output {
    pub(super) fn new(file: File, limits: RecorderLimits) -> Self {
        Self {
            file,
            buffer: Vec::with_capacity(BUFFER + MAX_SEGMENT + 256),
            written: 0,
            packets: 0,
            last_time: 0,
            limits,
        }
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        let result = self.file.write_all(&self.buffer);
        if result.is_err() {
            self.truncate_to_whole_blocks();
        }
        self.written += self.buffer.len() as u64;
        // Also cleared after an error, so that nothing is written twice.
        self.buffer.clear();
        result
    }

    /// Truncates the file after its last complete block, so that it stays readable after a partial
    /// write on a full disk.
    pub(super) fn truncate_to_whole_blocks(&mut self) {
        let Ok(file_len) = self.file.metadata().map(|m| m.len()) else {
            return;
        };
        let mut whole_len = self.written;
        let mut rest = &self.buffer[..];
        while let Some(length) = pcapng::first_block_len(rest)
            && whole_len + length as u64 <= file_len
        {
            whole_len += length as u64;
            rest = rest.get(length..).unwrap_or_default();
        }
        if whole_len < file_len {
            let _ = self.file.set_len(whole_len);
        }
    }

    /// Returns `false` without recording if the limit is reached.
    pub(super) fn segment(
        &mut self,
        addresses: &Addresses,
        segment: &Segment,
        payload_len: usize,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<bool> {
        let packet_len = addresses.header_len(segment) + payload_len;
        let size = self.written + self.buffer.len() as u64 + pcapng::block_len(packet_len) as u64;
        if self
            .limits
            .max_packets
            .is_some_and(|max| self.packets >= max)
            || self.limits.max_bytes.is_some_and(|max| size > max)
        {
            self.flush()?;
            return Ok(false);
        }
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        // The clock may be set back, but the times of a recording must not decrease.
        self.last_time = self.last_time.max(now);
        let block = pcapng::begin_packet(&mut self.buffer, self.last_time, packet_len);
        let start = self.buffer.len();
        addresses.append_headers(&mut self.buffer, segment, payload_len);
        fill(&mut self.buffer);
        // The headers announce `payload_len`, even if `fill` appends another length.
        self.buffer.resize(start + packet_len, 0);
        if let Some(packet) = self.buffer.get_mut(start..) {
            addresses.finish_checksums(packet);
        }
        pcapng::end_block(&mut self.buffer, block);
        self.packets += 1;
        if self.buffer.len() >= BUFFER {
            self.flush()?;
        }
        Ok(true)
    }
}
