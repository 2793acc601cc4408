//! The receiving half of a stream.

use super::Stream;
use crate::errno::{Errno, Result};

impl Stream {
    pub(super) fn announce(&mut self, len: u32) {
        if len > self.offered || self.announced.len() >= usize::from(self.sizes.receive_queue) {
            self.fail(Errno::PROTO);
            return;
        }
        if len == 0 {
            self.taken = self.taken.wrapping_add(1);
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

    /// Copies data out and frees its room. With `peek` it leaves the data and starts at that
    /// distance. `Ok(0)` with room in `out` is the end of the stream. Fails with EAGAIN if there is
    /// no data; once, the reason why the connection broke.
    pub(crate) fn receive(&mut self, out: &mut [u8], peek: Option<usize>) -> Result<usize> {
        let skip = peek.unwrap_or(0);
        let there = (self.unread as usize).saturating_sub(skip);
        if there == 0 {
            if !self.is_at_end() {
                return Err(Errno::AGAIN);
            }
            return self.take_error().map_or(Ok(0), Err);
        }
        let n = out.len().min(there);
        let size = self.sizes.receive_buffer as usize;
        let at = (self.read_at as usize + skip) % size;
        let first = n.min(size - at);
        let (head, tail) = out[..n].split_at_mut(first);
        self.rbuf.read_at(at, head)?;
        self.rbuf.read_at(0, tail)?;
        if peek.is_none() {
            self.consume(n as u32);
        }
        Ok(n)
    }

    fn consume(&mut self, len: u32) {
        self.read_at = (self.read_at + len) % self.sizes.receive_buffer;
        self.unread -= len;
        self.freed += len;
        let mut left = len;
        while let Some(front) = self.announced.front_mut() {
            if *front > left {
                *front -= left;
                break;
            }
            left -= *front;
            self.announced.pop_front();
            self.taken = self.taken.wrapping_add(1);
        }
        // Not in the next call, because the program may not make one for long.
        self.send_due();
    }
}
