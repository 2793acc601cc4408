//! Unreliable datagrams (UD) over UDP: the framing of one message.
//!
//! No RFC defines datagrams for iWARP. This framing is the project's own, and docs/wire.md
//! describes it for other implementations. A message is one UDP datagram: a header of fixed size,
//! then the payload. All numbers are in network order.
//!
//! ```text
//!  0      4 5 6      8      12     16     20     24     28     32
//!  │ iWUD │v│f│ len  │ dst  │ src  │ qkey │ imm  │ psn  │ CRC  │ payload …
//! ```
//! UDP's own checksum has 16 bits and may be absent, so a CRC32C covers the other fields of the
//! header and the payload.
//!
//! The header contains no memory address: a datagram can only fill a posted receive.

use crate::crc32c::Crc32cFn;

/// Octets before the payload.
pub const HEADER_LEN: usize = 32;
/// The largest payload in octets: the largest MTU of the verbs. IP fragments datagrams that exceed
/// a link's MTU.
pub const PAYLOAD_MAX: usize = 4096;
/// The largest datagram in octets.
pub const DATAGRAM_MAX: usize = HEADER_LEN + PAYLOAD_MAX;
/// The version of this framing.
pub const VERSION: u8 = 1;
/// The number that stands for all queue pairs attached to a multicast group, as on InfiniBand.
pub const MULTICAST_QP: u32 = 0x00ff_ffff;

const MAGIC: [u8; 4] = *b"iWUD";
const FLAG_IMMEDIATE: u8 = 1;
const FLAG_SOLICITED: u8 = 1 << 1;
/// The largest queue pair number (24 bits).
const QP_MAX: u32 = 0x00ff_ffff;

/// The offsets of the fields.
mod field {
    use core::ops::Range;

    pub(super) const MAGIC: Range<usize> = 0..4;
    pub(super) const VERSION: usize = 4;
    pub(super) const FLAGS: usize = 5;
    pub(super) const LENGTH: Range<usize> = 6..8;
    pub(super) const DESTINATION: Range<usize> = 8..12;
    pub(super) const SOURCE: Range<usize> = 12..16;
    pub(super) const QKEY: Range<usize> = 16..20;
    pub(super) const IMMEDIATE: Range<usize> = 20..24;
    pub(super) const SEQUENCE: Range<usize> = 24..28;
    pub(super) const CRC: Range<usize> = 28..32;
}

/// The header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of the destination queue pair, 24 bits; [`MULTICAST_QP`] in a datagram to a group.
    pub destination: u32,
    /// Number of the sending queue pair, 24 bits.
    pub source: u32,
    /// The key that the receiving queue pair must have.
    pub qkey: u32,
    /// Immediate data in host order.
    pub immediate: Option<u32>,
    /// The receiver should raise a solicited event.
    pub solicited: bool,
    /// Packet sequence number. A queue pair starts with any number and counts its datagrams. So a
    /// receiver can detect a datagram that the network has duplicated.
    pub sequence: u32,
}

/// Why a datagram is invalid. The receiver drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// The datagram is shorter than a header, or does not start with `iWUD`.
    Foreign,
    /// The version is not supported.
    Version(u8),
    /// A flag is unknown, a queue pair number has more than 24 bits, or immediate data are present
    /// without their flag.
    Field,
    /// The length in the header is not that of the payload, or exceeds [`PAYLOAD_MAX`].
    Length,
    /// The CRC is wrong.
    Crc,
}

/// A message that the framing cannot carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsendable;

impl Header {
    /// Writes the header to the first [`HEADER_LEN`] octets of `datagram`. The other octets are the
    /// payload.
    ///
    /// # Errors
    /// [`Unsendable`] if `datagram` is shorter than a header or longer than [`DATAGRAM_MAX`], or if
    /// a queue pair number has more than 24 bits.
    pub fn seal(&self, crc: Crc32cFn, datagram: &mut [u8]) -> Result<(), Unsendable> {
        let (header, payload) = datagram
            .split_first_chunk_mut::<HEADER_LEN>()
            .ok_or(Unsendable)?;
        if payload.len() > PAYLOAD_MAX || self.destination > QP_MAX || self.source > QP_MAX {
            return Err(Unsendable);
        }
        let mut flags = 0;
        if self.immediate.is_some() {
            flags |= FLAG_IMMEDIATE;
        }
        if self.solicited {
            flags |= FLAG_SOLICITED;
        }
        *header = [0; HEADER_LEN];
        put(header, field::MAGIC, MAGIC);
        put(
            header,
            field::VERSION..field::LENGTH.start,
            [VERSION, flags],
        );
        put(header, field::LENGTH, (payload.len() as u16).to_be_bytes());
        put(header, field::DESTINATION, self.destination.to_be_bytes());
        put(header, field::SOURCE, self.source.to_be_bytes());
        put(header, field::QKEY, self.qkey.to_be_bytes());
        let immediate = self.immediate.unwrap_or(0);
        put(header, field::IMMEDIATE, immediate.to_be_bytes());
        put(header, field::SEQUENCE, self.sequence.to_be_bytes());
        let crc = compute_crc(crc, header, payload);
        put(header, field::CRC, crc.to_be_bytes());
        Ok(())
    }

    /// Checks a datagram. Returns its header and its payload.
    ///
    /// # Errors
    /// [`Malformed`] if the datagram must be dropped.
    pub fn open(crc: Crc32cFn, datagram: &[u8]) -> Result<(Self, &[u8]), Malformed> {
        let (header, payload) = datagram
            .split_first_chunk::<HEADER_LEN>()
            .ok_or(Malformed::Foreign)?;
        if get(header, field::MAGIC) != MAGIC {
            return Err(Malformed::Foreign);
        }
        let [version, flags] = get(header, field::VERSION..field::LENGTH.start);
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        let length = u16::from_be_bytes(get(header, field::LENGTH));
        if usize::from(length) != payload.len() || payload.len() > PAYLOAD_MAX {
            return Err(Malformed::Length);
        }
        if u32::from_be_bytes(get(header, field::CRC)) != compute_crc(crc, header, payload) {
            return Err(Malformed::Crc);
        }
        let number = |at| u32::from_be_bytes(get(header, at));
        let immediate = number(field::IMMEDIATE);
        let this = Self {
            destination: number(field::DESTINATION),
            source: number(field::SOURCE),
            qkey: number(field::QKEY),
            immediate: (flags & FLAG_IMMEDIATE != 0).then_some(immediate),
            solicited: flags & FLAG_SOLICITED != 0,
            sequence: number(field::SEQUENCE),
        };
        let invalid = flags & !(FLAG_IMMEDIATE | FLAG_SOLICITED) != 0
            || this.destination > QP_MAX
            || this.source > QP_MAX
            || this.immediate.is_none() && immediate != 0;
        if invalid {
            return Err(Malformed::Field);
        }
        Ok((this, payload))
    }
}

/// Returns the CRC of a datagram, over the header before the CRC field and the payload.
fn compute_crc(crc: Crc32cFn, header: &[u8; HEADER_LEN], payload: &[u8]) -> u32 {
    let before = header.get(..field::CRC.start).unwrap_or_default();
    crc(crc(0, before), payload)
}

/// Stores a field. The ranges in [`field`] are inside the header and have the right lengths.
fn put<const N: usize>(header: &mut [u8; HEADER_LEN], at: core::ops::Range<usize>, value: [u8; N]) {
    if let Some(to) = header.get_mut(at).and_then(|to| to.first_chunk_mut()) {
        *to = value;
    }
}

fn get<const N: usize>(header: &[u8; HEADER_LEN], at: core::ops::Range<usize>) -> [u8; N] {
    header
        .get(at)
        .and_then(|from| from.first_chunk())
        .copied()
        .unwrap_or([0; N])
}

const _: () = assert!(field::CRC.end == HEADER_LEN && field::FLAGS + 1 == field::LENGTH.start);
const _: () = assert!(PAYLOAD_MAX <= u16::MAX as usize && DATAGRAM_MAX <= 65_507);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crc32c::append;
    use proptest::prelude::*;

    extern crate std;
    use std::vec;
    use std::vec::Vec;

    const EXAMPLE: Header = Header {
        destination: 0x12_3456,
        source: 0xab_cdef,
        qkey: 0x1111_1111,
        immediate: Some(0x0102_0304),
        solicited: true,
        sequence: 0xfffe_fdfc,
    };

    fn sealed(header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut datagram = vec![0xa5; HEADER_LEN];
        datagram.extend_from_slice(payload);
        header.seal(append, &mut datagram).unwrap();
        datagram
    }

    fn update_crc(datagram: &mut [u8]) {
        let crc = append(append(0, &datagram[..28]), &datagram[32..]);
        datagram[28..32].copy_from_slice(&crc.to_be_bytes());
    }

    #[test]
    fn encoding_matches_document() {
        let datagram = sealed(&EXAMPLE, b"hello");
        let expected = [
            b'i', b'W', b'U', b'D', 1, 3, 0, 5, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0x11,
            0x11, 0x11, 0x11, 1, 2, 3, 4, 0xff, 0xfe, 0xfd, 0xfc,
        ];
        assert_eq!(datagram[..28], expected);
        let crc = append(append(0, &expected), b"hello");
        assert_eq!(datagram[28..32], crc.to_be_bytes());
        assert_eq!(datagram[32..], *b"hello");
        let (header, payload) = Header::open(append, &datagram).unwrap();
        assert_eq!((header, payload), (EXAMPLE, &b"hello"[..]));
    }

    #[test]
    fn plain_datagram_has_no_flags() {
        let plain = Header {
            immediate: None,
            solicited: false,
            ..EXAMPLE
        };
        let datagram = sealed(&plain, &[]);
        assert_eq!((datagram[5], &datagram[20..24]), (0, &[0; 4][..]));
        assert_eq!(Header::open(append, &datagram), Ok((plain, &[][..])));
    }

    #[test]
    fn malformed_datagrams_are_refused() {
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut datagram = sealed(&EXAMPLE, b"hello");
            change(&mut datagram);
            update_crc(&mut datagram);
            Header::open(append, &datagram).map(|_| ()).unwrap_err()
        };
        assert_eq!(refused(&|d| d[0] = b'I'), Malformed::Foreign);
        assert_eq!(refused(&|d| d[4] = 2), Malformed::Version(2));
        assert_eq!(refused(&|d| d[5] = 4), Malformed::Field);
        assert_eq!(refused(&|d| d[5] = 2), Malformed::Field, "immediate data");
        assert_eq!(refused(&|d| d[8] = 1), Malformed::Field, "25 bits");
        assert_eq!(refused(&|d| d[12] = 1), Malformed::Field, "25 bits");
        assert_eq!(refused(&|d| d[7] = 6), Malformed::Length);
        assert_eq!(refused(&|d| d.push(0)), Malformed::Length);
        assert_eq!(refused(&|d| d.truncate(36)), Malformed::Length);
        let short = &sealed(&EXAMPLE, &[])[..31];
        assert_eq!(Header::open(append, short), Err(Malformed::Foreign));
    }

    #[test]
    fn unsendable_messages_are_refused() {
        let seal = |header: &Header, len: usize| header.seal(append, &mut vec![0; len]);
        assert_eq!(seal(&EXAMPLE, DATAGRAM_MAX), Ok(()));
        assert_eq!(seal(&EXAMPLE, DATAGRAM_MAX + 1), Err(Unsendable));
        assert_eq!(seal(&EXAMPLE, HEADER_LEN - 1), Err(Unsendable));
        for (destination, source) in [(1 << 24, 1), (1, 1 << 24)] {
            let header = Header {
                destination,
                source,
                ..EXAMPLE
            };
            assert_eq!(seal(&header, HEADER_LEN), Err(Unsendable));
        }
        let longest = sealed(&EXAMPLE, &[7; PAYLOAD_MAX]);
        let (header, payload) = Header::open(append, &longest).unwrap();
        assert_eq!((header, payload), (EXAMPLE, &[7; PAYLOAD_MAX][..]));
        let last = Header {
            destination: QP_MAX,
            source: QP_MAX,
            ..EXAMPLE
        };
        let datagram = sealed(&last, &[]);
        assert_eq!(Header::open(append, &datagram), Ok((last, &[][..])));
    }

    fn headers() -> impl Strategy<Value = Header> {
        (
            (0..=QP_MAX, 0..=QP_MAX),
            any::<(u32, Option<u32>, bool, u32)>(),
        )
            .prop_map(
                |((destination, source), (qkey, immediate, solicited, sequence))| Header {
                    destination,
                    source,
                    qkey,
                    immediate,
                    solicited,
                    sequence,
                },
            )
    }

    proptest! {
        #[test]
        fn sealed_datagrams_open(
            header in headers(),
            payload in proptest::collection::vec(any::<u8>(), 0..=PAYLOAD_MAX),
        ) {
            let datagram = sealed(&header, &payload);
            prop_assert_eq!(Header::open(append, &datagram), Ok((header, &payload[..])));
        }

        /// CRC32C detects every burst error of up to 32 bits.
        #[test]
        fn changed_octets_are_detected(
            header in headers(),
            payload in proptest::collection::vec(any::<u8>(), 0..200),
            index in any::<proptest::sample::Index>(),
            change in 1u8..,
        ) {
            let mut datagram = sealed(&header, &payload);
            let index = index.index(datagram.len());
            datagram[index] ^= change;
            prop_assert!(Header::open(append, &datagram).is_err());
        }

        #[test]
        fn arbitrary_input_is_handled(
            octets in proptest::collection::vec(any::<u8>(), 0..100),
            has_magic in any::<bool>(),
        ) {
            let mut octets = octets;
            if has_magic && octets.len() > 5 {
                octets[..5].copy_from_slice(b"iWUD\x01");
            }
            let _ = Header::open(append, &octets);
        }
    }
}
