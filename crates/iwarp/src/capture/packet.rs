//! Synthetic IPv4, IPv6 and TCP headers with valid checksums (RFC 791, RFC 8200, RFC 9293).

use std::net::{IpAddr, SocketAddr};

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

const TCP_PROTOCOL: u8 = 6;
const TCP_HEADER: usize = 20;
/// Maximum segment size 65483, no-operation, window scale 14 (the maximum).
const SYN_OPTIONS: [u8; 8] = [2, 4, 0xFF, 0xCB, 1, 3, 3, 14];
const TCP_CHECKSUM: usize = 16;

/// The addresses of both ends of a flow.
#[derive(Debug)]
pub(super) struct Addresses {
    local: SocketAddr,
    peer: SocketAddr,
    v6: bool,
}

#[derive(Debug)]
pub(super) struct Segment {
    /// `true` for a segment from the local end to the peer.
    pub(super) outgoing: bool,
    pub(super) flags: u8,
    pub(super) sequence: u32,
    pub(super) acknowledgement: u32,
}

impl Addresses {
    pub(super) fn new(local: SocketAddr, peer: SocketAddr) -> Self {
        Self {
            local,
            peer,
            // The caller passes one address family. If it did not, IPv6 could represent both.
            v6: local.is_ipv6() || peer.is_ipv6(),
        }
    }

    fn ip_header(&self) -> usize {
        if self.v6 { 40 } else { 20 }
    }

    pub(super) fn header_len(&self, segment: &Segment) -> usize {
        self.ip_header() + tcp_header(segment)
    }

    /// Appends the headers, with zeros for the checksums.
    pub(super) fn append_headers(&self, out: &mut Vec<u8>, segment: &Segment, payload_len: usize) {
        let (from, to) = if segment.outgoing {
            (self.local, self.peer)
        } else {
            (self.peer, self.local)
        };
        let tcp_len = (tcp_header(segment) + payload_len) as u16;
        if self.v6 {
            out.extend_from_slice(&[0x60, 0, 0, 0]);
            out.extend_from_slice(&tcp_len.to_be_bytes());
            // Next header, hop limit.
            out.extend_from_slice(&[TCP_PROTOCOL, 64]);
            for address in [from, to] {
                let ip = match address.ip() {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                out.extend_from_slice(&ip.octets());
            }
        } else {
            out.extend_from_slice(&[0x45, 0]);
            out.extend_from_slice(&tcp_len.saturating_add(20).to_be_bytes());
            // Identification 0 and "do not fragment", as RFC 6864 allows.
            out.extend_from_slice(&[0, 0, 0x40, 0]);
            // Time to live, protocol, checksum.
            out.extend_from_slice(&[64, TCP_PROTOCOL, 0, 0]);
            for address in [from, to] {
                if let IpAddr::V4(ip) = address.ip() {
                    out.extend_from_slice(&ip.octets());
                }
            }
        }
        out.extend_from_slice(&from.port().to_be_bytes());
        out.extend_from_slice(&to.port().to_be_bytes());
        out.extend_from_slice(&segment.sequence.to_be_bytes());
        out.extend_from_slice(&segment.acknowledgement.to_be_bytes());
        out.push((tcp_header(segment) as u8 / 4) << 4);
        out.push(segment.flags);
        // Window 65535, checksum, urgent pointer.
        out.extend_from_slice(&[0xFF, 0xFF, 0, 0, 0, 0]);
        if segment.flags & SYN != 0 {
            out.extend_from_slice(&SYN_OPTIONS);
        }
    }

    /// Writes the checksums of a complete packet begun by [`append_headers`](Self::append_headers).
    pub(super) fn finish_checksums(&self, packet: &mut [u8]) {
        let Some((ip, tcp)) = packet.split_at_mut_checked(self.ip_header()) else {
            return;
        };
        if !self.v6 {
            put(ip, 10, checksum(sum(ip)));
        }
        // The pseudo-header: both addresses, the protocol and the length of header and payload.
        let addresses = if self.v6 {
            ip.get(8..40)
        } else {
            ip.get(12..20)
        };
        let pseudo =
            sum(addresses.unwrap_or_default()) + u64::from(TCP_PROTOCOL) + tcp.len() as u64;
        put(tcp, TCP_CHECKSUM, checksum(pseudo + sum(tcp)));
    }
}

fn tcp_header(segment: &Segment) -> usize {
    TCP_HEADER
        + if segment.flags & SYN != 0 {
            SYN_OPTIONS.len()
        } else {
            0
        }
}

fn put(bytes: &mut [u8], offset: usize, value: u16) {
    if let Some(field) = bytes.get_mut(offset..offset + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// Returns the sum of all 16-bit words, without folding the carries. 64 KiB cannot overflow it.
fn sum(bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let words: u64 = pairs
        .iter()
        .map(|pair| u64::from(u16::from_be_bytes(*pair)))
        .sum();
    words + rest.first().map_or(0, |last| u64::from(*last) << 8)
}

/// The complement of the folded sum (RFC 1071).
fn checksum(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_rfc_example() {
        let data = [0x00, 0x01, 0xF2, 0x03, 0xF4, 0xF5, 0xF6, 0xF7];
        assert_eq!(!checksum(sum(&data)), 0xDDF2);
        assert_eq!(checksum(sum(&[0x12])), !0x1200);
    }

    #[test]
    fn finished_packet_sums_to_zero() {
        for (local, peer) in [
            ("10.1.2.3:4000", "10.9.8.7:5000"),
            ("[2001:db8::1]:4000", "[2001:db8::2]:5000"),
            ("10.1.2.3:4000", "[2001:db8::2]:5000"),
        ] {
            let addresses =
                Addresses::new(local.parse().expect("local"), peer.parse().expect("peer"));
            for (flags, payload) in [(SYN, &b""[..]), (PSH | ACK, b"odd"), (ACK, b"even")] {
                let segment = Segment {
                    outgoing: flags == SYN,
                    flags,
                    sequence: 7,
                    acknowledgement: 9,
                };
                let mut packet = Vec::new();
                addresses.append_headers(&mut packet, &segment, payload.len());
                assert_eq!(packet.len(), addresses.header_len(&segment));
                packet.extend_from_slice(payload);
                addresses.finish_checksums(&mut packet);
                let (ip, tcp) = packet.split_at(addresses.ip_header());
                let ends = if addresses.v6 {
                    &ip[8..40]
                } else {
                    &ip[12..20]
                };
                assert_eq!(checksum(sum(ends) + 6 + tcp.len() as u64 + sum(tcp)), 0);
                assert!(addresses.v6 || checksum(sum(ip)) == 0);
            }
        }
    }
}
