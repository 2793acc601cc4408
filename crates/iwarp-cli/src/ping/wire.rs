//! The messages of `rping`: 16 bytes that describe a buffer, and the text in the buffer.
//!
//! One ping: the client advertises its source; the server reads it with an RDMA Read and sends "go
//! ahead"; the client advertises its sink; the server writes the data there with an RDMA Write and
//! sends "go ahead". A "go ahead" is a 16-byte message whose content has no meaning.

use iwarp_cli_common::text;

/// Description of a buffer; big-endian on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Info {
    /// Tagged offset.
    pub(super) addr: u64,
    /// STag.
    pub(super) rkey: u32,
    /// Size in bytes.
    pub(super) size: u32,
}

impl Info {
    pub(super) const LEN: usize = 16;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..].copy_from_slice(&self.size.to_be_bytes());
        out
    }

    pub(super) fn decode(octets: [u8; Self::LEN]) -> Self {
        let n = u128::from_be_bytes(octets);
        Self {
            addr: (n >> 64) as u64,
            rkey: (n >> 32) as u32,
            size: n as u32,
        }
    }
}

/// First and last character of the pattern.
const PATTERN: std::ops::RangeInclusive<u8> = b'A'..=b'z';

/// Returns the data of ping `number`: a text, the pattern and a NUL. The pattern starts one
/// character later with each ping.
pub(super) fn data(number: u64, size: usize) -> Vec<u8> {
    let mut out = format!("rdma-ping-{number}: ").into_bytes();
    let period = u64::from(PATTERN.end() - PATTERN.start()) + 1;
    let skip = (number % period) as usize;
    out.extend(
        PATTERN
            .cycle()
            .skip(skip)
            .take(size.saturating_sub(out.len())),
    );
    out.truncate(size);
    if let Some(last) = out.last_mut() {
        *last = 0;
    }
    out
}

/// Returns the text up to the NUL. Control characters are escaped, because the peer is untrusted.
pub(super) fn printable(data: &[u8]) -> String {
    let end = data.iter().position(|b| *b == 0).unwrap_or(data.len());
    text::printable(&String::from_utf8_lossy(
        data.get(..end).unwrap_or_default(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_rping_layout() {
        let info = Info {
            addr: 0x0102_0304_0506_0708,
            rkey: 0x0a0b_0c0d,
            size: 64,
        };
        let octets = info.encode();
        assert_eq!(
            octets,
            [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 0, 0, 0, 64]
        );
        assert_eq!(Info::decode(octets), info);
    }

    #[test]
    fn texts_match_rping() {
        // Captured from `rping -S 64`, first and second ping.
        assert_eq!(
            printable(&data(0, 64)),
            "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr"
        );
        assert_eq!(
            printable(&data(1, 64)),
            "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs"
        );
        // 'z' is followed by 'A', within a ping and between pings.
        assert_eq!(&data(0, 100)[13 + 57..][..3], b"zAB");
        assert_eq!(data(57, 40)[14..20], *b"zABCDE");
        assert_eq!(data(58, 40)[14..20], *b"ABCDEF");
        for size in [16, 17, 26, 64, 65535] {
            let d = data(u64::MAX, size);
            assert_eq!((d.len(), d.last()), (size, Some(&0)), "{size}");
        }
        assert_eq!(printable(b"a\x1b[2J\xff\0b"), "a\\u{1b}[2J\u{fffd}");
    }
}
