//! The blocks of a pcapng file (draft-ietf-opsawg-pcapng sections 4.1 to 4.3). They are
//! little-endian on every machine.

/// Raw IP: the packet begins with an IPv4 or IPv6 header.
const LINKTYPE_RAW: u16 = 101;
const SECTION_HEADER: u32 = 0x0A0D_0D0A;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
/// Size of an Enhanced Packet Block without its packet.
const PACKET_OVERHEAD: usize = 32;

/// Appends the section header and the description of the only interface, with timestamps in
/// nanoseconds.
pub(super) fn file_header(out: &mut Vec<u8>) {
    let start = begin_block(out, SECTION_HEADER);
    out.extend_from_slice(&0x1A2B_3C4D_u32.to_le_bytes());
    out.extend_from_slice(&1u16.to_le_bytes());
    out.extend_from_slice(&0u16.to_le_bytes());
    // Length of the section: unspecified.
    out.extend_from_slice(&u64::MAX.to_le_bytes());
    option(out, 4, b"iwarp");
    end_of_options(out);
    end_block(out, start);

    let start = begin_block(out, INTERFACE_DESCRIPTION);
    out.extend_from_slice(&LINKTYPE_RAW.to_le_bytes());
    out.extend_from_slice(&0u16.to_le_bytes());
    // Packets are not truncated.
    out.extend_from_slice(&0u32.to_le_bytes());
    option(out, 2, b"iwarp");
    option(out, 3, b"software RNIC, synthetic TCP/IP headers");
    // Resolution of timestamps: 10^-9 s.
    option(out, 9, &[9]);
    end_of_options(out);
    end_block(out, start);
}

pub(super) fn block_len(packet_len: usize) -> usize {
    PACKET_OVERHEAD + packet_len.next_multiple_of(4)
}

/// Begins a packet. Callers append its octets, then call [`end_block`] with the result. `time` is
/// in nanoseconds since 1970.
pub(super) fn begin_packet(out: &mut Vec<u8>, time: u64, packet_len: usize) -> usize {
    let start = begin_block(out, ENHANCED_PACKET);
    out.extend_from_slice(&0u32.to_le_bytes());
    out.extend_from_slice(&((time >> 32) as u32).to_le_bytes());
    out.extend_from_slice(&(time as u32).to_le_bytes());
    // Captured and original length.
    out.extend_from_slice(&(packet_len as u32).to_le_bytes());
    out.extend_from_slice(&(packet_len as u32).to_le_bytes());
    start
}

/// Ends the block that begins at `start`: pads it, and writes its length at its start and end.
pub(super) fn end_block(out: &mut Vec<u8>, start: usize) {
    pad(out, start);
    let len = (out.len() - start + 4) as u32;
    out.extend_from_slice(&len.to_le_bytes());
    if let Some(place) = out.get_mut(start + 4..start + 8) {
        place.copy_from_slice(&len.to_le_bytes());
    }
}

/// Returns the size of the first block; `None` if there is no block.
pub(super) fn first_block_len(blocks: &[u8]) -> Option<usize> {
    let len = blocks.get(4..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*len)).ok()
}

fn begin_block(out: &mut Vec<u8>, kind: u32) -> usize {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    // The length. `end_block` overwrites it.
    out.extend_from_slice(&[0; 4]);
    start
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let start = out.len();
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out, start);
}

fn end_of_options(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0; 4]);
}

/// Appends zeros until the length from `start` is a multiple of four.
fn pad(out: &mut Vec<u8>, start: usize) {
    let len = (out.len() - start).next_multiple_of(4);
    out.resize(start + len, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_length_at_both_ends() {
        let mut out = Vec::new();
        file_header(&mut out);
        for len in 0..9 {
            let before = out.len();
            let start = begin_packet(&mut out, 0x0123_4567_89AB_CDEF, len);
            out.resize(out.len() + len, 0xEE);
            end_block(&mut out, start);
            assert_eq!(out.len() - before, block_len(len));
        }
        let word =
            |offset: usize| u32::from_le_bytes(out[offset..offset + 4].try_into().expect("word"));
        let (mut offset, mut kinds) = (0, Vec::new());
        while offset < out.len() {
            let len = word(offset + 4) as usize;
            assert_eq!(len % 4, 0);
            assert_eq!(word(offset + len - 4) as usize, len);
            assert_eq!(first_block_len(&out[offset..]), Some(len));
            kinds.push(word(offset));
            offset += len;
        }
        assert_eq!(offset, out.len());
        assert_eq!(first_block_len(&out[offset..]), None);
        assert_eq!(kinds[..2], [SECTION_HEADER, INTERFACE_DESCRIPTION]);
        assert_eq!(kinds[2..], [ENHANCED_PACKET; 9]);
    }
}
