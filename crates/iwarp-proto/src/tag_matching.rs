//! The headers at the beginning of a message that a receiver matches by its tag.
//!
//! No RFC defines them. They are the headers of the verbs (`infiniband/tm_types.h`,
//! `ibv_post_srq_ops(3)`), so that both ends may be programs that were written for hardware. All
//! numbers are in network order.
//!
//! ```text
//!  0  1        4         8           16        24     28     32
//!  │op│ 0 0 0  │ app_ctx │ tag       │ va      │ rkey │ len  │ …
//!  └──────── TMH ────────────────────┴──────── RVH ─────────┘
//! ```
//!
//! In an eager message, the payload follows the first header. A rendezvous request has the second
//! header, which contains the address of the payload in the sender's memory. Data for the
//! receiver's program may follow it.

/// The kind of a message with a [`Tmh`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// The message is not matched (`IBV_TMH_NO_TAG`).
    NoTag,
    /// A request to read the payload from the sender's memory (`IBV_TMH_RNDV`).
    Rendezvous,
    /// The payload of a rendezvous has been read (`IBV_TMH_FIN`).
    Finish,
    /// The payload follows (`IBV_TMH_EAGER`).
    Eager,
    /// An unknown operation.
    Other(u8),
}

impl Operation {
    const fn from_octet(octet: u8) -> Self {
        match octet {
            0 => Self::NoTag,
            1 => Self::Rendezvous,
            2 => Self::Finish,
            3 => Self::Eager,
            other => Self::Other(other),
        }
    }

    const fn octet(self) -> u8 {
        match self {
            Self::NoTag => 0,
            Self::Rendezvous => 1,
            Self::Finish => 2,
            Self::Eager => 3,
            Self::Other(other) => other,
        }
    }
}

/// The tag matching header (`struct ibv_tmh`).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tmh {
    /// The kind of the message.
    pub operation: Operation,
    /// A value that the sender chooses. The receiver returns it when a rendezvous has finished.
    pub app_ctx: u32,
    /// The tag that is compared with the tags of posted buffers.
    pub tag: u64,
}

impl Tmh {
    /// Length on the wire in octets.
    pub const LEN: usize = 16;

    /// Reads the header of a message. Returns `None` if the message is shorter. Ignores reserved
    /// octets.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let header: &[u8; Self::LEN] = message.first_chunk()?;
        let [operation, _, _, _, c0, c1, c2, c3, tag @ ..] = header;
        Some(Self {
            operation: Operation::from_octet(*operation),
            app_ctx: u32::from_be_bytes([*c0, *c1, *c2, *c3]),
            tag: u64::from_be_bytes(*tag),
        })
    }

    /// Returns the header's octets.
    pub fn octets(&self) -> [u8; Self::LEN] {
        let [c0, c1, c2, c3] = self.app_ctx.to_be_bytes();
        let [t0, t1, t2, t3, t4, t5, t6, t7] = self.tag.to_be_bytes();
        let operation = self.operation.octet();
        [
            operation, 0, 0, 0, c0, c1, c2, c3, t0, t1, t2, t3, t4, t5, t6, t7,
        ]
    }
}

/// The rendezvous header (`struct ibv_rvh`): the payload's place in the sender's memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Rvh {
    /// Tagged offset of the payload.
    pub va: u64,
    /// STag of the sender's memory.
    pub rkey: u32,
    /// Length of the payload in octets.
    pub len: u32,
}

impl Rvh {
    /// Length on the wire in octets.
    pub const LEN: usize = 16;

    /// Reads the header after the [`Tmh`] of a message. Returns `None` if the message is shorter.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let header: &[u8; Self::LEN] = message.get(Tmh::LEN..)?.first_chunk()?;
        let [v0, v1, v2, v3, v4, v5, v6, v7, k0, k1, k2, k3, len @ ..] = header;
        Some(Self {
            va: u64::from_be_bytes([*v0, *v1, *v2, *v3, *v4, *v5, *v6, *v7]),
            rkey: u32::from_be_bytes([*k0, *k1, *k2, *k3]),
            len: u32::from_be_bytes(*len),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: [u8; 33] = [
        1, 0, 0, 0, 0xde, 0xad, 0xbe, 0xef, 1, 2, 3, 4, 5, 6, 7, 8, //
        0x7f, 0, 0, 1, 2, 3, 4, 5, 0x11, 0x22, 0x33, 0x44, 0, 0, 4, 0, 0x99,
    ];

    #[test]
    fn both_headers_are_read() {
        let tmh = Tmh::parse(&REQUEST).unwrap();
        assert_eq!(
            (tmh.operation, tmh.app_ctx, tmh.tag),
            (Operation::Rendezvous, 0xdead_beef, 0x0102_0304_0506_0708)
        );
        let rvh = Rvh::parse(&REQUEST).unwrap();
        assert_eq!(
            (rvh.va, rvh.rkey, rvh.len),
            (0x7f00_0001_0203_0405, 0x1122_3344, 1024)
        );
    }

    #[test]
    fn short_messages_have_no_header() {
        for len in 0..REQUEST.len() {
            let message = &REQUEST[..len];
            assert_eq!(Tmh::parse(message).is_some(), len >= 16, "{len}");
            assert_eq!(Rvh::parse(message).is_some(), len >= 32, "{len}");
        }
    }

    #[test]
    fn headers_round_trip() {
        for octet in 0..=255 {
            let tmh = Tmh {
                operation: Operation::from_octet(octet),
                app_ctx: 0x1234_5678,
                tag: u64::MAX - 5,
            };
            let octets = tmh.octets();
            assert_eq!(octets[..4], [octet, 0, 0, 0]);
            assert_eq!(Tmh::parse(&octets), Some(tmh));
        }
    }
}
