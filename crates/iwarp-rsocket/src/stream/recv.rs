//! The receiving half of a stream.

use super::Stream;
use crate::errno::{Errno, Result};

impl Stream {
    /// Handles the peer's message that it has written `len` octets more.
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

    /// Returns `true` if octets can be read, or the end of the stream or an error.
    pub(crate) const fn is_readable(&self) -> bool {
        self.unread > 0 || self.is_at_end()
    }

    /// Returns `true` if no more octets will come.
    pub(crate) const fn is_at_end(&self) -> bool {
        self.peer_done || self.over || !self.reading
    }

    /// Returns how many octets can be read at once.
    pub(crate) const fn available(&self) -> u32 {
        self.unread
    }

    /// Copies octets out and frees their room. With `peek` it leaves them, and begins so many octets behind the next one.
    /// `Ok(0)` with room in `out` is the end of the stream.
    ///
    /// # Errors
    /// EAGAIN: there is nothing yet; or, once, why the connection broke.
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
        // Send it now and not in the next call: the program may be busy elsewhere for long.
        self.settle();
    }
}
