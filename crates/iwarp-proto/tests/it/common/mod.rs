//! Reads a classic pcap file and reassembles its TCP connections. Supports only what the captures
//! in `tests/data` contain.

use std::collections::BTreeMap;
use std::path::Path;

/// The octets of a TCP connection. The client sent the SYN.
#[derive(Debug, Default, Clone)]
pub(crate) struct Connection {
    pub(crate) client: Vec<u8>,
    pub(crate) server: Vec<u8>,
}

/// One direction of a connection. The key of a segment is its offset from the initial sequence
/// number.
#[derive(Default)]
struct Half {
    isn: Option<u32>,
    segments: BTreeMap<u32, Vec<u8>>,
}

impl Half {
    fn octets(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (&offset, data) in &self.segments {
            let offset = offset as usize;
            // Captures of the loopback interface are complete.
            assert!(offset <= out.len(), "gap in the capture at {offset}");
            out.truncate(offset.max(out.len().min(offset + data.len())));
            if offset + data.len() > out.len() {
                let overlap = out.len() - offset;
                out.extend_from_slice(&data[overlap..]);
            }
        }
        out
    }
}

/// Returns the connections of a capture that carried data, in the order of their SYNs.
pub(crate) fn connections(path: &Path) -> Vec<Connection> {
    let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(file[..4], [0xd4, 0xc3, 0xb2, 0xa1], "little-endian pcap");
    let link = u32::from_le_bytes(file[20..24].try_into().unwrap());
    assert_eq!(link, 1, "Ethernet");
    type Addresses = ([u8; 4], u16, [u8; 4], u16);
    let mut list: Vec<(Addresses, Half, Half)> = Vec::new();
    let mut rest = &file[24..];
    while rest.len() >= 16 {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let packet = &rest[16..16 + len];
        rest = &rest[16 + len..];
        if packet.len() < 54 || packet[12..14] != [8, 0] || packet[23] != 6 {
            continue;
        }
        let ip = &packet[14..];
        let ip_header = usize::from(ip[0] & 0xf) * 4;
        let ip = &ip[..usize::from(u16::from_be_bytes([ip[2], ip[3]]))];
        let src: [u8; 4] = ip[12..16].try_into().unwrap();
        let dst: [u8; 4] = ip[16..20].try_into().unwrap();
        let tcp = &ip[ip_header..];
        let port = |offset: usize| u16::from_be_bytes([tcp[offset], tcp[offset + 1]]);
        let (sport, dport) = (port(0), port(2));
        let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
        let data = &tcp[usize::from(tcp[12] >> 4) * 4..];
        let (syn, ack) = (tcp[13] & 0x02 != 0, tcp[13] & 0x10 != 0);
        if syn && !ack {
            let client = Half {
                isn: Some(seq.wrapping_add(1)),
                ..Half::default()
            };
            list.push(((src, sport, dst, dport), client, Half::default()));
            continue;
        }
        for (addresses, client, server) in list.iter_mut().rev() {
            let half = if *addresses == (src, sport, dst, dport) {
                client
            } else if *addresses == (dst, dport, src, sport) {
                server
            } else {
                continue;
            };
            if syn {
                half.isn = Some(seq.wrapping_add(1));
            } else if let Some(isn) = half.isn
                && !data.is_empty()
            {
                half.segments.insert(seq.wrapping_sub(isn), data.to_vec());
            }
            break;
        }
    }
    list.iter()
        .map(|(_, c, s)| Connection {
            client: c.octets(),
            server: s.octets(),
        })
        .filter(|c| !c.client.is_empty())
        .collect()
}
