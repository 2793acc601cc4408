//! The rsocket protocol: private data of the connection set-up, and messages of four octets.
//!
//! The values are those of rdma-core's rsockets over iWARP, where each message is a Send, because
//! RFC 5040 has no RDMA Write with immediate data. A stream is a sequence of RDMA Writes into the
//! peer's receive buffer, each followed by a message with its length. All messages and directory
//! entries have the sender's byte order.

pub(crate) const HELLO_LEN: usize = 40;
pub(crate) const MESSAGE_LEN: usize = 4;
/// Octets of a directory entry for a receive buffer.
pub(crate) const WINDOW_LEN: usize = 16;
/// Octets of a directory entry for a mapped buffer.
pub(crate) const MAPPING_LEN: usize = 24;
/// Entries for receive buffers in the local directory.
pub(crate) const DIRECTORY: u32 = 2;

const VERSION: u8 = 1;
const FLAG_BIG_ENDIAN: u8 = 1;
/// The field for the number of mapped buffers is valid.
const FLAG_IOMAP: u8 = 2;

/// Memory that the peer may write: a receive buffer, a mapped buffer, or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Window {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    /// Length in octets; for a directory, the number of entries.
    pub(crate) len: u32,
}

impl Window {
    fn to_be(self) -> [u8; WINDOW_LEN] {
        let mut out = [0; WINDOW_LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.key.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    fn from_be(bytes: &[u8; WINDOW_LEN]) -> Self {
        Self {
            addr: u64::from_be_bytes(octets_at(bytes, 0)),
            key: u32::from_be_bytes(octets_at(bytes, 8)),
            len: u32::from_be_bytes(octets_at(bytes, 12)),
        }
    }

    pub(crate) fn to_native(self) -> [u8; WINDOW_LEN] {
        let mut out = [0; WINDOW_LEN];
        out[..8].copy_from_slice(&self.addr.to_ne_bytes());
        out[8..12].copy_from_slice(&self.key.to_ne_bytes());
        out[12..].copy_from_slice(&self.len.to_ne_bytes());
        out
    }

    pub(crate) fn from_native(bytes: &[u8; WINDOW_LEN]) -> Self {
        Self {
            addr: u64::from_ne_bytes(octets_at(bytes, 0)),
            key: u32::from_ne_bytes(octets_at(bytes, 8)),
            len: u32::from_ne_bytes(octets_at(bytes, 12)),
        }
    }
}

/// A buffer that a program mapped for its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Mapping {
    /// The offset of its first octet, as programs use it.
    pub(crate) offset: u64,
    pub(crate) window: Window,
}

impl Mapping {
    pub(crate) fn to_native(self) -> [u8; MAPPING_LEN] {
        let mut out = [0; MAPPING_LEN];
        out[..8].copy_from_slice(&self.offset.to_ne_bytes());
        out[8..].copy_from_slice(&self.window.to_native());
        out
    }

    pub(crate) fn from_native(bytes: &[u8; MAPPING_LEN]) -> Self {
        Self {
            offset: u64::from_ne_bytes(octets_at(bytes, 0)),
            window: Window::from_native(&octets_at(bytes, 8)),
        }
    }

    /// Returns the distance of `offset` from the first octet, if the buffer contains it.
    pub(crate) fn find(&self, offset: u64) -> Option<u64> {
        let within = offset.checked_sub(self.offset)?;
        (within < u64::from(self.window.len)).then_some(within)
    }
}

/// Returns the `N` octets at `offset`; the caller has checked that they exist.
fn octets_at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[offset..offset + N]);
    out
}

/// The private data with which each end starts a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Data messages that may be in flight.
    pub(crate) credits: u16,
    /// Buffers that the peer may map for this end.
    pub(crate) mappings: u16,
    /// Memory in which the peer offers receive buffers, followed by entries for mapped buffers.
    pub(crate) directory: Window,
    pub(crate) buffer: Window,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadHello {
    /// Too short or of another version: the peer is not an rsocket.
    Foreign,
    /// The peer has the other byte order, so its messages cannot be read.
    ByteOrder,
    /// The peer has no receives, no buffer, or too few directory entries.
    Unusable,
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[0] = VERSION;
        out[1] = FLAG_IOMAP;
        if cfg!(target_endian = "big") {
            out[1] |= FLAG_BIG_ENDIAN;
        }
        out[2..4].copy_from_slice(&self.credits.to_be_bytes());
        out[7] = to_scale(self.mappings);
        out[8..24].copy_from_slice(&self.directory.to_be());
        out[24..].copy_from_slice(&self.buffer.to_be());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, BadHello> {
        let Some(bytes) = bytes.first_chunk::<HELLO_LEN>() else {
            return Err(BadHello::Foreign);
        };
        if bytes[0] != VERSION {
            return Err(BadHello::Foreign);
        }
        let big = bytes[1] & FLAG_BIG_ENDIAN != 0;
        if big != cfg!(target_endian = "big") {
            return Err(BadHello::ByteOrder);
        }
        let hello = Self {
            credits: u16::from_be_bytes(octets_at(bytes, 2)),
            mappings: match bytes[1] & FLAG_IOMAP {
                0 => 0,
                _ => from_scale(bytes[7]),
            },
            directory: Window::from_be(&octets_at(bytes, 8)),
            buffer: Window::from_be(&octets_at(bytes, 24)),
        };
        // In a directory with one entry, a new offer could overwrite an offer still in use.
        if hello.credits == 0 || hello.buffer.len == 0 || hello.directory.len < 2 {
            return Err(BadHello::Unusable);
        }
        Ok(hello)
    }
}

/// The number of mappings is encoded in eight bits: exactly up to 128, then in steps of 256.
const fn to_scale(value: u16) -> u8 {
    if value <= 128 {
        value as u8
    } else {
        128 | (value >> 8) as u8
    }
}

const fn from_scale(scale: u8) -> u16 {
    if scale <= 128 {
        scale as u16
    } else {
        ((scale & 127) as u16) << 8
    }
}

/// Returns the nearest number of mappings that can be encoded.
pub(crate) const fn round_mappings(value: u16) -> u16 {
    from_scale(to_scale(value))
}

const OP_DATA: u32 = 0;
const OP_CREDIT: u32 = 4;
const OP_MAPPING: u32 = 6;
const OP_CONTROL: u32 = 7;
const CONTROL_DISCONNECT: u32 = 0;
const CONTROL_KEEPALIVE: u32 = 1;
const CONTROL_SHUTDOWN: u32 = 2;
const VALUE: u32 = (1 << 29) - 1;

/// A message: three bits for the kind, 29 bits for the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    /// The sender wrote this many further octets.
    Data(u32),
    /// Raises the limit of data messages to this number. The directory may have a new offer.
    Credit(u16),
    /// The sender wrote this entry for a mapped buffer.
    Mapping(u32),
    /// The sender stops reading and writing.
    Disconnect,
    Keepalive,
    /// The sender stops writing.
    Shutdown,
    Unknown(u32),
}

impl Message {
    pub(crate) const fn encode(self) -> [u8; MESSAGE_LEN] {
        let (op, value) = match self {
            Self::Data(n) => (OP_DATA, n),
            Self::Credit(n) => (OP_CREDIT, n as u32),
            Self::Mapping(n) => (OP_MAPPING, n),
            Self::Disconnect => (OP_CONTROL, CONTROL_DISCONNECT),
            Self::Keepalive => (OP_CONTROL, CONTROL_KEEPALIVE),
            Self::Shutdown => (OP_CONTROL, CONTROL_SHUTDOWN),
            Self::Unknown(raw) => return raw.to_ne_bytes(),
        };
        (op << 29 | (value & VALUE)).to_ne_bytes()
    }

    pub(crate) const fn decode(bytes: [u8; MESSAGE_LEN]) -> Self {
        let raw = u32::from_ne_bytes(bytes);
        let value = raw & VALUE;
        match (raw >> 29, value) {
            (OP_DATA, n) => Self::Data(n),
            // Sequence numbers have 16 bits; higher bits are a carry.
            (OP_CREDIT, n) => Self::Credit(n as u16),
            (OP_MAPPING, n) => Self::Mapping(n),
            (OP_CONTROL, CONTROL_DISCONNECT) => Self::Disconnect,
            (OP_CONTROL, CONTROL_KEEPALIVE) => Self::Keepalive,
            (OP_CONTROL, CONTROL_SHUTDOWN) => Self::Shutdown,
            _ => Self::Unknown(raw),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello = Hello {
        credits: 384,
        mappings: 512,
        directory: Window {
            addr: 0x0102_0304_0506_0708,
            key: 0x1122_3344,
            len: 2,
        },
        buffer: Window {
            addr: 0xa1a2_a3a4_a5a6_a7a8,
            key: 0x5566_7788,
            len: 0x0001_0000,
        },
    };

    #[test]
    fn private_data_encoding() {
        let order = u8::from(cfg!(target_endian = "big"));
        let mut want = vec![1, 2 | order, 1, 0x80, 0, 0, 0, 0x82];
        want.extend([1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 2]);
        want.extend([0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8]);
        want.extend([0x55, 0x66, 0x77, 0x88, 0, 1, 0, 0]);
        assert_eq!(HELLO.encode().to_vec(), want);
        assert_eq!(Hello::decode(&want), Ok(HELLO));
        // Trailing octets are ignored: the transport may pad.
        want.extend([9; 12]);
        assert_eq!(Hello::decode(&want), Ok(HELLO));
    }

    #[test]
    fn foreign_private_data_is_refused() {
        let good = HELLO.encode();
        assert_eq!(Hello::decode(&good[..39]), Err(BadHello::Foreign));
        assert_eq!(Hello::decode(&[]), Err(BadHello::Foreign));
        let with = |offset: usize, value: u8| {
            let mut bytes = good;
            bytes[offset] = value;
            Hello::decode(&bytes)
        };
        assert_eq!(with(0, 2), Err(BadHello::Foreign));
        assert_eq!(with(1, good[1] ^ 1), Err(BadHello::ByteOrder));
        assert_eq!(with(23, 1), Err(BadHello::Unusable));
        let mut bytes = good;
        bytes[36..].fill(0);
        assert_eq!(Hello::decode(&bytes), Err(BadHello::Unusable));
        // Older peers do not set the flag, and then the field has no meaning.
        assert_eq!(with(1, good[1] & !2).unwrap().mappings, 0);
    }

    #[test]
    fn mapping_count_encoding() {
        for (value, scale, back) in [
            (0, 0, 0),
            (1, 1, 1),
            (128, 128, 128),
            (255, 128, 128),
            (256, 129, 256),
            (700, 130, 512),
            (0xffff, 255, 127 << 8),
        ] {
            assert_eq!(
                (to_scale(value), round_mappings(value)),
                (scale, back),
                "{value}"
            );
        }
    }

    #[test]
    fn message_encoding() {
        let raw = |m: Message| u32::from_ne_bytes(m.encode());
        assert_eq!(raw(Message::Data(0x1_0000)), 0x0001_0000);
        assert_eq!(raw(Message::Credit(0xffff)), 0x8000_ffff);
        assert_eq!(raw(Message::Mapping(3)), 0xc000_0003);
        assert_eq!(raw(Message::Disconnect), 0xe000_0000);
        assert_eq!(raw(Message::Keepalive), 0xe000_0001);
        assert_eq!(raw(Message::Shutdown), 0xe000_0002);
        for raw in [
            0u32,
            5,
            VALUE,
            0x8000_0000,
            0xc000_0001,
            0xe000_0000,
            0xe000_0009,
            0x2000_0001,
        ] {
            let bytes = raw.to_ne_bytes();
            assert_eq!(Message::decode(bytes).encode(), bytes, "{raw:#x}");
        }
        // Peers may send a sum of more than 16 bits.
        assert_eq!(
            Message::decode(0x8001_0005u32.to_ne_bytes()),
            Message::Credit(5)
        );
    }

    #[test]
    fn mapping_contains_offsets() {
        let mapping = Mapping {
            offset: 100,
            window: Window {
                addr: 0x1000,
                key: 1,
                len: 10,
            },
        };
        assert_eq!(Mapping::from_native(&mapping.to_native()), mapping);
        let found: Vec<_> = [99, 100, 109, 110].map(|o| mapping.find(o)).into();
        assert_eq!(found, [None, Some(0), Some(9), None]);
        assert_eq!(Mapping::default().find(0), None);
    }
}
