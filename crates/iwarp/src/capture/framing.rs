//! Splits one direction of a stream with MPA markers into FPDUs (RFC 5044 sections 4.1 and 4.3).
//!
//! Wireshark finds markers only if each TCP segment carries exactly one FPDU. If one direction has
//! markers, it expects one FPDU per segment in the other direction, too. Without markers Wireshark
//! reassembles FPDUs itself, and streams need not be split.

use iwarp_proto::mpa::framing::{MARKER_LEN, MarkerClock, fpdu_len_with_markers};

pub(super) struct Framing {
    /// `None` if this direction has no markers.
    clock: Option<MarkerClock>,
    /// Octets that are not yet recorded; between calls, an incomplete FPDU.
    pending: Vec<u8>,
}

impl Framing {
    pub(super) fn new(markers: bool) -> Self {
        Self {
            clock: markers.then(MarkerClock::new),
            pending: Vec::new(),
        }
    }

    /// Returns the buffer to which the next octets of the stream are appended.
    pub(super) fn input(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Removes all complete FPDUs from the buffer and passes each to `out`.
    pub(super) fn split(&mut self, mut out: impl FnMut(&[u8])) {
        let mut offset = 0;
        while let Some(len) = self.next_len(offset) {
            let Some(fpdu) = self.pending.get(offset..offset + len) else {
                break;
            };
            out(fpdu);
            offset += len;
            if let Some(clock) = &mut self.clock {
                clock.advance(len);
            }
        }
        self.pending.drain(..offset);
    }

    /// Returns the length of the FPDU at `offset`; `None` if its length field has not arrived.
    fn next_len(&self, offset: usize) -> Option<usize> {
        let next = self
            .clock
            .as_ref()
            .map_or(usize::MAX, |clock| clock.next_marker_in());
        let header = offset + if next == 0 { MARKER_LEN } else { 0 };
        let len = self.pending.get(header..)?.first_chunk()?;
        Some(fpdu_len_with_markers(
            next,
            usize::from(u16::from_be_bytes(*len)),
        ))
    }

    /// Takes the incomplete FPDU at the end of the stream.
    pub(super) fn take_fragment(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iwarp_proto::mpa::framing::{FpduOptions, encode_fpdu};

    #[test]
    fn segments_are_fpdus_for_any_split() {
        for markers in [false, true] {
            let options = FpduOptions { markers, crc: None };
            let mut clock = MarkerClock::new();
            let mut fpdus = Vec::new();
            for len in [14usize, 500, 20, 1400, 480, 18, 9000, 0, 60_000] {
                let mut octets = vec![0; 70_000];
                let n = encode_fpdu(&vec![7; len], &options, &mut clock, &mut octets).unwrap();
                octets.truncate(n);
                fpdus.push(octets);
            }
            let stream = fpdus.concat();
            for chunk in [1, 3, 511, 70_000] {
                let mut framing = Framing::new(markers);
                let mut seen = Vec::new();
                for part in stream.chunks(chunk) {
                    framing.input().extend_from_slice(part);
                    framing.split(|fpdu| seen.push(fpdu.to_vec()));
                }
                assert_eq!(seen, fpdus, "{markers} {chunk}");
                assert!(framing.take_fragment().is_empty());
            }
        }
    }
}
