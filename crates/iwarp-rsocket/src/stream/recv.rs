//! The receiving half of a stream.

use super::Stream;
use crate::errno::{Errno, Result};

impl Stream {
    pub(super) fn on_data_message(&mut self, len: u32) {
        if len > self.offered || self.announced.len() >= usize::from(self.sizes.receive_queue) {
            self.fail(Errno::PROTO);
            return;
        }
        if len == 0 {
            self.consumed = self.consumed.wrapping_add(1);
            return;
        }
        self.offered -= len;
        self.unread += len;
        self.announced.push_back(len);
    }

    /// Returns `true` if there is data, the end of the stream, or an error to read.
    pub(crate) const fn is_readable(&self) -> bool {
        self.unread > 0 || self.is_at_end()
    }

    /// Returns `true` if no more data will arrive.
    pub(crate) const fn is_at_end(&self) -> bool {
        self.peer_done || self.over || !self.reading
    }

    /// Returns the number of bytes that can be read immediately.
    pub(crate) const fn available(&self) -> u32 {
        self.unread
    }

    /// Copies data to `out` and frees its part of the buffer. With `peek`, does not free it, and
    /// starts at that offset. Returns 0 at the end of the stream, if `out` is not empty. Fails with
    /// EAGAIN if there is no data, and once with the error that broke the connection.
    pub(crate) fn receive(&mut self, out: &mut [u8], peek: Option<usize>) -> Result<usize> {
        let skip = peek.unwrap_or(0);
        let available = (self.unread as usize).saturating_sub(skip);
        if available == 0 {
            if !self.is_at_end() {
                return Err(Errno::AGAIN);
            }
            return self.take_error().map_or(Ok(0), Err);
        }
        let n = out.len().min(available);
        let size = self.sizes.receive_buffer as usize;
        let start = (self.read_at as usize + skip) % size;
        let first = n.min(size - start);
        let (head, tail) = out[..n].split_at_mut(first);
        self.rbuf.read_at(start, head)?;
        self.rbuf.read_at(0, tail)?;
        if peek.is_none() {
            self.free(n as u32);
        }
        Ok(n)
    }

    fn free(&mut self, len: u32) {
        self.read_at = (self.read_at + len) % self.sizes.receive_buffer;
        self.unread -= len;
        self.freed += len;
        let mut remaining = len;
        while let Some(front) = self.announced.front_mut() {
            if *front > remaining {
                *front -= remaining;
                break;
            }
            remaining -= *front;
            self.announced.pop_front();
            self.consumed = self.consumed.wrapping_add(1);
        }
        // Send credits now, because the program may not call again for a long time.
        self.send_due();
    }
}
