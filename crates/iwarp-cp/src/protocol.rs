//! The messages of `iwarp cp`. Each is one RDMA Send. File data are not in messages: the sender
//! writes them by RDMA Write into slots of the receiver's registered memory.
//!
//! ```text
//!   client                             server
//!   Hello                         →
//!                                 ←    Hello
//!   if both have a secret (see `auth`): Proof  →
//!                                 ←    Proof
//!   upload:   Put                 →
//!                                 ←    Ready (length and hash of the partial file, slots)
//!             Start               →         (continue there, or at 0 if the hash differs)
//!   download: Get (length and hash of the partial file, slots)  →
//!                                 ←    Start
//!   then the data, from sender to receiver:
//!     RDMA Write into a slot, Filled(slot, offset, length) …   and back Free(slot) …
//!     Finish(SHA-256)             →    Done when the file has its final name
//!   At any time, either end may send Error, which ends the connection, or Working in long tasks.
//! ```
//!
//! Layout: all integers are in network order. Octet 0 is the type, octet 1 is zero, then come the
//! fields in the order of the enum. Text is a 16-bit length and that many octets of UTF-8. Octets
//! after the last field are an error, except in Hello.

use crate::confine::MAX_PATH;
use crate::part::Hash;
use iwarp_cli_common::error::{Error, Result};
use iwarp_cli_common::text::printable;

/// Protocol version. Both ends must use the same version.
pub(crate) const VERSION: u16 = 2;
pub(crate) type Nonce = [u8; 32];
/// A message authentication code.
pub(crate) type Proof = [u8; 32];
/// Longest message, in octets. Each posted receive has this length.
pub(crate) const MAX_MESSAGE: usize = 2048;
/// Largest number of slots that a receiver may grant.
pub(crate) const MAX_SLOTS: u16 = 256;
/// Largest slot, in octets.
pub(crate) const MAX_SLOT_SIZE: u32 = 16 << 20;
/// Longest error text, in octets.
const MAX_TEXT: usize = 512;
const MAGIC: u32 = u32::from_be_bytes(*b"IWCP");

/// A ring of equal, adjacent slots in one registered region of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grant {
    /// STag of the region, with remote-write access.
    pub(crate) stag: u32,
    /// Tagged offset of slot 0.
    pub(crate) base: u64,
    /// Octets per slot, from 1 to [`MAX_SLOT_SIZE`].
    pub(crate) slot_size: u32,
    /// Number of slots, from 1 to [`MAX_SLOTS`].
    pub(crate) slots: u16,
}

impl Grant {
    /// Returns the tagged offset of a slot, or `None` if there is no slot with that number.
    pub(crate) fn slot_at(&self, slot: u16) -> Option<u64> {
        (slot < self.slots).then_some(())?;
        self.base
            .checked_add(u64::from(slot) * u64::from(self.slot_size))
    }
}

/// The part of a file that a receiver already has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Have {
    /// Octets from the beginning of the file.
    pub(crate) len: u64,
    /// SHA-256 of these octets.
    pub(crate) hash: Hash,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// 1: the first message. All versions begin with magic and version; version 2 added the rest.
    Hello {
        /// [`VERSION`] of the sender.
        version: u16,
        /// The sender has a secret and requires a proof that the peer has the same secret.
        secret: bool,
        /// A new random number for each connection.
        nonce: Nonce,
    },
    /// 2: the client wants to write a file.
    Put {
        /// Size of the file in octets.
        size: u64,
        mode: u32,
        /// Continue an existing partial file.
        resume: bool,
        /// Path below the served directory.
        path: String,
    },
    /// 3: answer to Put.
    Ready {
        /// The part of the file that the server already has.
        have: Have,
        /// Slots to write to.
        grant: Grant,
    },
    /// 4: the client wants to read a file.
    Get {
        /// The part of the file that the client already has.
        have: Have,
        /// Slots to write to.
        grant: Grant,
        /// Path below the served directory.
        path: String,
    },
    /// 5: announces the data, which start after the part that the receiver has, or at 0.
    Start {
        /// Offset of the first octet that is sent.
        offset: u64,
        /// Size of the whole file.
        size: u64,
        mode: u32,
    },
    /// 6: a slot contains data.
    Filled {
        slot: u16,
        /// Offset in the file, equal to the end of the previous data.
        offset: u64,
        /// Octets in the slot, at most the slot's size.
        len: u32,
    },
    /// 7: a slot may be reused.
    Free { slot: u16 },
    /// 8: all data have been sent.
    Finish {
        /// SHA-256 of the whole file.
        hash: Hash,
    },
    /// 9: the file has been verified and renamed.
    Done,
    /// 10: the request failed.
    Error {
        /// The reason, for the user.
        text: String,
    },
    /// 11: the sender proves that it knows the secret.
    Proof {
        /// The proof; see `auth`.
        proof: Proof,
    },
    /// 12: the sender hashes or writes a large file and is still alive.
    Working,
}

impl Message {
    /// Encodes the message, in at most [`MAX_MESSAGE`] octets.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut w = Writer(Vec::with_capacity(64));
        match self {
            Self::Hello {
                version,
                secret,
                nonce,
            } => w
                .head(1)
                .u32(MAGIC)
                .u16(*version)
                .u8(u8::from(*secret))
                .raw(nonce),
            Self::Put {
                size,
                mode,
                resume,
                path,
            } => w
                .head(2)
                .u64(*size)
                .u32(*mode)
                .u8(u8::from(*resume))
                .text(path, MAX_PATH)?,
            Self::Ready { have, grant } => w.head(3).have(have).grant(grant),
            Self::Get { have, grant, path } => {
                w.head(4).have(have).grant(grant).text(path, MAX_PATH)?
            }
            Self::Start { offset, size, mode } => w.head(5).u64(*offset).u64(*size).u32(*mode),
            Self::Filled { slot, offset, len } => w.head(6).u16(*slot).u64(*offset).u32(*len),
            Self::Free { slot } => w.head(7).u16(*slot),
            Self::Finish { hash } => w.head(8).raw(hash),
            Self::Done => w.head(9),
            Self::Error { text } => {
                // Truncate a long reason between two characters.
                let end = (0..=text.len().min(MAX_TEXT))
                    .rev()
                    .find(|&i| text.is_char_boundary(i))
                    .unwrap_or(0);
                w.head(10)
                    .text(text.get(..end).unwrap_or_default(), MAX_TEXT)?
            }
            Self::Proof { proof } => w.head(11).raw(proof),
            Self::Working => w.head(12),
        };
        Ok(w.0)
    }

    /// Decodes a message and checks each field.
    ///
    /// # Errors
    /// Fails if [`Message::encode`] would not write these octets.
    pub(crate) fn decode(octets: &[u8]) -> Result<Self> {
        if octets.len() > MAX_MESSAGE {
            return Err(malformed());
        }
        let mut r = Reader(octets);
        let kind = r.u8()?;
        if r.u8()? != 0 {
            return Err(malformed());
        }
        let message = match kind {
            1 => Self::decode_hello(&mut r)?,
            2 => Self::Put {
                size: r.u64()?,
                mode: r.u32()?,
                resume: r.bool()?,
                path: r.text(MAX_PATH)?,
            },
            3 => Self::Ready {
                have: r.have()?,
                grant: r.grant()?,
            },
            4 => Self::Get {
                have: r.have()?,
                grant: r.grant()?,
                path: r.text(MAX_PATH)?,
            },
            5 => Self::Start {
                offset: r.u64()?,
                size: r.u64()?,
                mode: r.u32()?,
            },
            6 => Self::Filled {
                slot: r.u16()?,
                offset: r.u64()?,
                len: r.u32()?,
            },
            7 => Self::Free { slot: r.u16()? },
            8 => Self::Finish { hash: r.hash()? },
            9 => Self::Done,
            // Escape the text here, so that no caller can forget it.
            10 => Self::Error {
                text: printable(&r.text(MAX_TEXT)?),
            },
            11 => Self::Proof { proof: r.array()? },
            12 => Self::Working,
            _ => return Err(malformed()),
        };
        if r.0.is_empty() {
            Ok(message)
        } else {
            Err(malformed())
        }
    }

    fn decode_hello(r: &mut Reader<'_>) -> Result<Self> {
        if r.u32()? != MAGIC {
            return Err(Error::failed(
                "the peer does not speak the iwarp cp protocol",
            ));
        }
        let version = r.u16()?;
        // Other versions may have other fields, so read only the version.
        let (secret, nonce) = match version {
            VERSION => (r.bool()?, r.array()?),
            _ => (false, Nonce::default()),
        };
        r.0 = &[];
        Ok(Self::Hello {
            version,
            secret,
            nonce,
        })
    }
}

fn malformed() -> Error {
    Error::failed("malformed message from the peer")
}

struct Writer(Vec<u8>);

impl Writer {
    fn raw(&mut self, b: &[u8]) -> &mut Self {
        self.0.extend_from_slice(b);
        self
    }
    fn head(&mut self, kind: u8) -> &mut Self {
        self.raw(&[kind, 0])
    }
    fn u8(&mut self, v: u8) -> &mut Self {
        self.raw(&[v])
    }
    fn u16(&mut self, v: u16) -> &mut Self {
        self.raw(&v.to_be_bytes())
    }
    fn u32(&mut self, v: u32) -> &mut Self {
        self.raw(&v.to_be_bytes())
    }
    fn u64(&mut self, v: u64) -> &mut Self {
        self.raw(&v.to_be_bytes())
    }
    fn have(&mut self, h: &Have) -> &mut Self {
        self.u64(h.len).raw(&h.hash)
    }
    fn grant(&mut self, g: &Grant) -> &mut Self {
        self.u32(g.stag).u64(g.base).u32(g.slot_size).u16(g.slots)
    }
    fn text(&mut self, t: &str, max: usize) -> Result<&mut Self> {
        match u16::try_from(t.len()) {
            Ok(n) if t.len() <= max => Ok(self.u16(n).raw(t.as_bytes())),
            _ => Err(Error::failed(format!(
                "a name or text is longer than {max} octets"
            ))),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n).ok_or_else(malformed)?;
        self.0 = rest;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| malformed())
    }
    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_be_bytes(self.array()?))
    }
    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes(self.array()?))
    }
    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.array()?))
    }
    fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(malformed()),
        }
    }
    fn hash(&mut self) -> Result<Hash> {
        self.array()
    }
    fn have(&mut self) -> Result<Have> {
        Ok(Have {
            len: self.u64()?,
            hash: self.hash()?,
        })
    }
    fn grant(&mut self) -> Result<Grant> {
        let g = Grant {
            stag: self.u32()?,
            base: self.u64()?,
            slot_size: self.u32()?,
            slots: self.u16()?,
        };
        let in_range =
            (1..=MAX_SLOT_SIZE).contains(&g.slot_size) && (1..=MAX_SLOTS).contains(&g.slots);
        let end = g
            .base
            .checked_add(u64::from(g.slot_size) * u64::from(g.slots));
        if in_range && end.is_some() {
            Ok(g)
        } else {
            Err(malformed())
        }
    }
    fn text(&mut self, max: usize) -> Result<String> {
        let n = usize::from(self.u16()?);
        if n > max {
            return Err(malformed());
        }
        String::from_utf8(self.take(n)?.to_vec()).map_err(|_| malformed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Message> {
        let have = Have {
            len: 77,
            hash: [7; 32],
        };
        let grant = Grant {
            stag: 0xabcd_ef01,
            base: 1 << 40,
            slot_size: 1 << 20,
            slots: 8,
        };
        vec![
            Message::Hello {
                version: VERSION,
                secret: true,
                nonce: [5; 32],
            },
            Message::Put {
                size: u64::MAX,
                mode: 0o644,
                resume: true,
                path: "d/ä".into(),
            },
            Message::Ready { have, grant },
            Message::Get {
                have,
                grant,
                path: "x".repeat(MAX_PATH),
            },
            Message::Start {
                offset: 5,
                size: 9,
                mode: 0o600,
            },
            Message::Filled {
                slot: 3,
                offset: 1 << 33,
                len: 65536,
            },
            Message::Free { slot: 255 },
            Message::Finish { hash: [9; 32] },
            Message::Done,
            Message::Error { text: "no".into() },
            Message::Proof { proof: [3; 32] },
            Message::Working,
        ]
    }

    #[test]
    fn decoding_reverses_encoding() {
        for m in samples() {
            let octets = m.encode().unwrap();
            assert!(octets.len() <= MAX_MESSAGE);
            assert_eq!(Message::decode(&octets).unwrap(), m);
        }
    }

    /// Different builds must understand each other, so the layout must not change.
    #[test]
    fn layout_matches_version_2() {
        let hash: Hash = [7; 32];
        let have = Have { len: 1, hash };
        let grant = Grant {
            stag: 0x0a0b_0c0d,
            base: 2,
            slot_size: 3,
            slots: 4,
        };
        let path = "p".to_owned();
        let (seven, ring) = (
            [7; 32],
            &b"\x0a\x0b\x0c\x0d\0\0\0\0\0\0\0\x02\0\0\0\x03\0\x04"[..],
        );
        let hello = Message::Hello {
            version: 2,
            secret: true,
            nonce: seven,
        };
        let put = Message::Put {
            size: 1,
            mode: 0o644,
            resume: true,
            path: path.clone(),
        };
        let start = Message::Start {
            offset: 1,
            size: 2,
            mode: 3,
        };
        let filled = Message::Filled {
            slot: 3,
            offset: 0x0102_0304_0506_0708,
            len: 9,
        };
        let one = &b"\0\0\0\0\0\0\0\x01"[..];
        for (message, parts) in [
            (hello, &[&b"\x01\0IWCP\0\x02\x01"[..], &seven][..]),
            (put, &[b"\x02\0", one, b"\0\0\x01\xa4\x01\0\x01p"]),
            (
                Message::Ready { have, grant },
                &[b"\x03\0", one, &seven, ring],
            ),
            (
                Message::Get { have, grant, path },
                &[b"\x04\0", one, &seven, ring, b"\0\x01p"],
            ),
            (start, &[b"\x05\0", one, b"\0\0\0\0\0\0\0\x02\0\0\0\x03"]),
            (
                filled,
                &[b"\x06\0\0\x03\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x09"],
            ),
            (Message::Free { slot: 0x0102 }, &[b"\x07\0\x01\x02"]),
            (Message::Finish { hash }, &[b"\x08\0", &seven]),
            (Message::Done, &[b"\x09\0"]),
            (Message::Error { text: "no".into() }, &[b"\x0a\0\0\x02no"]),
            (Message::Proof { proof: seven }, &[b"\x0b\0", &seven]),
            (Message::Working, &[b"\x0c\0"]),
        ] {
            let octets = parts.concat();
            assert_eq!(message.encode().unwrap(), octets, "{message:?}");
            assert_eq!(Message::decode(&octets).unwrap(), message);
        }
    }

    #[test]
    fn grants_are_bounded() {
        let accepted = |grant: Grant| {
            let have = Have {
                len: 0,
                hash: [0; 32],
            };
            Message::decode(&Message::Ready { have, grant }.encode().unwrap()).is_ok()
        };
        let grant = |slot_size, slots| Grant {
            stag: 1,
            base: 0,
            slot_size,
            slots,
        };
        assert!(accepted(grant(1, 1)) && accepted(grant(MAX_SLOT_SIZE, MAX_SLOTS)));
        assert!(!accepted(grant(0, 1)) && !accepted(grant(MAX_SLOT_SIZE + 1, 1)));
        assert!(!accepted(grant(1, 0)) && !accepted(grant(1, MAX_SLOTS + 1)));
        // The end of the last slot must not overflow either.
        let high = |base| Grant {
            base,
            ..grant(10, 3)
        };
        assert!(accepted(high(u64::MAX - 30)) && !accepted(high(u64::MAX - 29)));
        let slot = high(100);
        assert_eq!(
            [0, 1, 2, 3].map(|n| slot.slot_at(n)),
            [Some(100), Some(110), Some(120), None]
        );
    }

    #[test]
    fn damaged_messages_are_refused() {
        for m in samples() {
            let octets = m.encode().unwrap();
            for n in 0..octets.len() {
                assert!(Message::decode(&octets[..n]).is_err(), "{m:?} cut at {n}");
            }
            let longer = [&octets[..], &[0]].concat();
            // Only Hello may be longer.
            assert_eq!(
                Message::decode(&longer).is_ok(),
                matches!(m, Message::Hello { .. }),
                "{m:?}"
            );
            for i in 0..octets.len() {
                for bit in 0..8 {
                    let mut o = octets.clone();
                    o[i] ^= 1 << bit;
                    // A changed message is refused or has another meaning.
                    if let Ok(d) = Message::decode(&o) {
                        assert!(
                            d != m || matches!(m, Message::Error { .. }),
                            "{m:?}: bit {bit} of octet {i} is ignored"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn hello_of_other_protocols_is_distinguished() {
        assert!(
            Message::decode(&[1, 0, b'I', b'W', b'C', b'P', 0, 1]).is_ok(),
            "version 1 is decoded, so that the error can name it"
        );
        assert!(
            Message::decode(&[1, 0, b'S', b'S', b'H', b'-', 0, 1])
                .unwrap_err()
                .to_string()
                .contains("protocol")
        );
    }

    #[test]
    fn malformed_messages_are_refused() {
        let wide = Message::Ready {
            have: Have {
                len: 0,
                hash: [0; 32],
            },
            grant: Grant {
                stag: 1,
                base: u64::MAX,
                slot_size: 1,
                slots: 1,
            },
        };
        assert!(Message::decode(&wide.encode().unwrap()).is_err());
        assert!(
            Message::Put {
                size: 0,
                mode: 0,
                resume: false,
                path: "x".repeat(MAX_PATH + 1)
            }
            .encode()
            .is_err()
        );
        // A path of a peer that exceeds the limit.
        let long = [
            &b"\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x04\x01"[..],
            &[b'x'; MAX_PATH + 1],
        ]
        .concat();
        assert!(Message::decode(&long).is_err());
        let hello = &samples()[0].encode().unwrap();
        let padded = |len| [&hello[..], &vec![0; len - hello.len()]].concat();
        assert!(Message::decode(&padded(MAX_MESSAGE)).is_ok());
        assert!(Message::decode(&padded(MAX_MESSAGE + 1)).is_err());
    }

    #[test]
    fn error_texts_are_escaped_and_truncated() {
        let rude = Message::Error {
            text: "\u{1b}[2Jgpj.\u{202e}exe\n".into(),
        };
        assert_eq!(
            Message::decode(&rude.encode().unwrap()).unwrap(),
            Message::Error {
                text: "\\u{1b}[2Jgpj.\\u{202e}exe\\n".into()
            }
        );
        let long = Message::Error {
            text: "ä".repeat(1000),
        }
        .encode()
        .unwrap();
        assert!(matches!(
            Message::decode(&long).unwrap(),
            Message::Error { text } if text.len() == MAX_TEXT
        ));
    }
}
