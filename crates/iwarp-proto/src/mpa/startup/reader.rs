//! Collects one frame from a stream, whose octets may arrive in portions of any size. RFC 5044
//! §7.1.2 rules 5, 8 and 9.

use super::{FRAME_HEADER_LEN, Frame, FrameHeader, FrameKind, MAX_FRAME_LEN, StartupError};
use core::fmt;

/// The result of [`FrameReader::push`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// All octets were consumed, and the frame is not complete yet.
    NeedMore,
    /// The frame is complete.
    Frame {
        /// Number of octets of the last input that belong to the frame. Full operation starts with
        /// the octet after them.
        consumed: usize,
    },
}

/// Collects one frame in its own buffer. It never consumes an octet after the frame.
#[derive(Clone)]
pub struct FrameReader {
    kind: FrameKind,
    buf: [u8; MAX_FRAME_LEN],
    len: usize,
}

impl FrameReader {
    /// Creates a reader that expects this kind of frame.
    pub const fn new(kind: FrameKind) -> Self {
        Self {
            kind,
            buf: [0; MAX_FRAME_LEN],
            len: 0,
        }
    }

    /// Consumes octets of the stream. Reports errors as early as possible: a wrong key at its first
    /// wrong octet, and an excessive length when the header is complete. After an error, the
    /// connection is unusable. Once the frame is complete, no more octets are consumed.
    pub fn push(&mut self, mut input: &[u8]) -> Result<Progress, StartupError> {
        let mut consumed = 0;
        // There are at most two iterations. The first one ends with the header, which contains the
        // length of the private data.
        loop {
            let missing = self.missing()?;
            if missing == 0 {
                return Ok(Progress::Frame { consumed });
            }
            let n = missing.min(input.len());
            let (now, later) = input.split_at_checked(n).unwrap_or((input, &[]));
            if now.is_empty() {
                self.check_key()?;
                return Ok(Progress::NeedMore);
            }
            let end = self.len.wrapping_add(n);
            if let Some(dst) = self.buf.get_mut(self.len..end) {
                dst.copy_from_slice(now);
            }
            self.len = end;
            consumed = n.wrapping_add(consumed);
            input = later;
        }
    }

    /// Returns the number of octets to read from the stream next, or zero if the frame is complete.
    /// If the caller never reads more than that, the octets after the frame remain in the socket.
    pub fn missing(&self) -> Result<usize, StartupError> {
        let header = FRAME_HEADER_LEN.saturating_sub(self.len);
        if header > 0 {
            return Ok(header);
        }
        self.check_key()?;
        let header = FrameHeader::parse(self.filled())?;
        Ok(header.frame_len().saturating_sub(self.len))
    }

    /// Returns `true` if any octet has arrived.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the frame if it is complete.
    pub fn frame(&self) -> Option<Frame<'_>> {
        Frame::parse(self.filled()).ok().flatten()
    }

    fn filled(&self) -> &[u8] {
        self.buf.get(..self.len).unwrap_or_default()
    }

    /// Compares the part of the key that has arrived.
    fn check_key(&self) -> Result<(), StartupError> {
        //= rfc5044 section 7.1.2
        //# If a received "Key" does not match the expected value (see
        //# Section 7.1.1, MPA Request and Reply Frame Format) the TCP/DDP
        //# connection MUST be closed, and an error returned to the ULP.
        //= rfc5044 section 7.1.2
        //# MPA implementations MUST use the difference between the MPA
        //# Request Frame and the MPA Reply Frame to check for incorrect
        //# "Initiator/Initiator" startups.
        let n = self.len.min(16);
        let got = self.buf.get(..n);
        if got == self.kind.key().get(..n) {
            Ok(())
        } else if got == self.kind.other().key().get(..n) {
            Err(StartupError::WrongRole)
        } else {
            Err(StartupError::BadKey)
        }
    }
}

impl fmt::Debug for FrameReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameReader")
            .field("kind", &self.kind)
            .field("len", &self.len)
            .finish()
    }
}
