//! Service ID resolution (SIDR): how the connection manager finds the datagram queue pair that
//! serves a UDP port.
//!
//! InfiniBand has two messages for this, a request and a reply (InfiniBand Architecture
//! Specification, volume 1, section 12.11). No RFC defines them for iWARP. This framing is the
//! project's own, and docs/wire.md describes it for other implementations. A listener stores
//! nothing about a requester until the requester has returned a cookie, which proves that it
//! receives packets at its address.
//!
//! ```text
//!  0      4 5 6 7 8      16       24    28     32             212    252   256
//!  │ iWSR │v│t│s│n│ id    │ cookie │ qpn │ qkey │ private data │ 0 …  │ CRC │
//! ```
//! Every message has [`MESSAGE_LEN`] octets, so a listener never sends more than it has received.
//!
//! [`Requester`] decides when to retransmit a request, and interprets received messages. It does no
//! I/O and reads no clock.

use crate::crc32c::Crc32cFn;
use crate::wire::{be32, be64, put};

/// Length of a message in octets, as in InfiniBand's management datagrams.
pub const MESSAGE_LEN: usize = 256;
/// The version of this framing.
pub const VERSION: u8 = 1;
/// The longest private data of a request in octets: as many as `rdma_connect(3)` sends on
/// InfiniBand.
pub const REQUEST_DATA_MAX: usize = 180;
/// The longest private data of a reply in octets: as many as `rdma_accept(3)` and `rdma_reject(3)`
/// send on InfiniBand.
pub const REPLY_DATA_MAX: usize = 136;
/// The Q_Key of datagram queue pairs that the connection manager creates, unless a program chooses
/// another one (`RDMA_UDP_QKEY`).
pub const DEFAULT_QKEY: u32 = 0x0123_4567;

const MAGIC: [u8; 4] = *b"iWSR";
const TYPE_REQUEST: u8 = 1;
const TYPE_CHALLENGE: u8 = 2;
const TYPE_REPLY: u8 = 3;
/// The largest queue pair number (24 bits).
const QP_MAX: u32 = 0x00ff_ffff;

/// The offsets of the fields.
mod field {
    use core::ops::Range;

    pub(super) const MAGIC: Range<usize> = 0..4;
    /// Version, type, status, length of the private data.
    pub(super) const HEAD: Range<usize> = 4..8;
    pub(super) const ID: Range<usize> = 8..16;
    pub(super) const COOKIE: Range<usize> = 16..24;
    pub(super) const QP: Range<usize> = 24..28;
    pub(super) const QKEY: Range<usize> = 28..32;
    pub(super) const DATA: Range<usize> = 32..212;
    pub(super) const CRC: Range<usize> = 252..256;
}

const _: () = assert!(
    field::CRC.end == MESSAGE_LEN
        && field::DATA.end == field::DATA.start + REQUEST_DATA_MAX
        && REPLY_DATA_MAX <= REQUEST_DATA_MAX
);

/// Why a listener does not return a queue pair. The numbers are those of InfiniBand's SIDR reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal(u8);

impl Refusal {
    /// No queue pair serves the port.
    pub const UNSUPPORTED: Self = Self(1);
    /// The listener's program has rejected the request.
    pub const REJECTED: Self = Self(2);

    /// Returns the number, which is not zero.
    pub const fn code(self) -> u8 {
        self.0
    }
}

/// The contents of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The queue pair that serves the port.
    QueuePair {
        /// Number of the queue pair, 24 bits.
        num: u32,
        /// The Q_Key that datagrams for it must have.
        qkey: u32,
    },
    /// The listener returns no queue pair.
    Refused(Refusal),
}

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Requests the queue pair of the port that the message is sent to.
    Request,
    /// Makes the requester retransmit its request with this message's cookie.
    Challenge,
    /// Answers a request.
    Reply(Answer),
}

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// The kind of the message.
    pub kind: Kind,
    /// A random number of the requester, which all messages about one request contain.
    pub id: u64,
    /// In a challenge, a number that is hard to guess. In a request, the cookie of the last
    /// challenge, or zero. In a reply, the cookie of the request.
    pub cookie: u64,
    /// The program's private data; empty in a challenge.
    pub private_data: &'a [u8],
}

/// Why a message is invalid. The receiver drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// The length is wrong, or the message does not start with `iWSR`.
    Foreign,
    /// The version is not supported.
    Version(u8),
    /// The CRC is wrong.
    Crc,
    /// The type is unknown, a field has a value that the type does not allow, or an unused octet is
    /// not zero.
    Field,
}

/// The private data are too long for the kind of message, or a queue pair number has more than 24
/// bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsendable;

impl<'a> Message<'a> {
    /// Returns the octets of the message.
    ///
    /// # Errors
    /// [`Unsendable`] if the private data or the queue pair number are too long.
    pub fn seal(&self, crc: Crc32cFn) -> Result<[u8; MESSAGE_LEN], Unsendable> {
        let (kind, status, qp, qkey) = match self.kind {
            Kind::Request => (TYPE_REQUEST, 0, 0, 0),
            Kind::Challenge => (TYPE_CHALLENGE, 0, 0, 0),
            Kind::Reply(Answer::QueuePair { num, qkey }) => (TYPE_REPLY, 0, num, qkey),
            Kind::Reply(Answer::Refused(Refusal(code))) => (TYPE_REPLY, code, 0, 0),
        };
        let length = self.private_data.len();
        if length > data_max(kind) || qp > QP_MAX {
            return Err(Unsendable);
        }
        let mut to = [0; MESSAGE_LEN];
        put(&mut to, field::MAGIC, &MAGIC);
        put(&mut to, field::HEAD, &[VERSION, kind, status, length as u8]);
        put(&mut to, field::ID, &self.id.to_be_bytes());
        put(&mut to, field::COOKIE, &self.cookie.to_be_bytes());
        put(&mut to, field::QP, &qp.to_be_bytes());
        put(&mut to, field::QKEY, &qkey.to_be_bytes());
        let room = to.get_mut(field::DATA).unwrap_or_default();
        for (to, from) in room.iter_mut().zip(self.private_data) {
            *to = *from;
        }
        let crc = compute_crc(crc, &to);
        put(&mut to, field::CRC, &crc.to_be_bytes());
        Ok(to)
    }

    /// Reads a message and checks every octet.
    ///
    /// # Errors
    /// [`Malformed`] if the message must be dropped.
    pub fn open(crc: Crc32cFn, octets: &'a [u8]) -> Result<Self, Malformed> {
        let octets: &[u8; MESSAGE_LEN] = octets.try_into().map_err(|_| Malformed::Foreign)?;
        if octets.get(field::MAGIC) != Some(&MAGIC) {
            return Err(Malformed::Foreign);
        }
        let [version, kind, status, length] = be32(octets, field::HEAD).to_be_bytes();
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        if be32(octets, field::CRC) != compute_crc(crc, octets) {
            return Err(Malformed::Crc);
        }
        let num = be32(octets, field::QP);
        let qkey = be32(octets, field::QKEY);
        let is_empty = (status, num, qkey) == (0, 0, 0);
        let parsed_kind = match kind {
            TYPE_REQUEST if is_empty => Kind::Request,
            TYPE_CHALLENGE if is_empty => Kind::Challenge,
            TYPE_REPLY if status == 0 && num <= QP_MAX => {
                Kind::Reply(Answer::QueuePair { num, qkey })
            }
            TYPE_REPLY if num == 0 && qkey == 0 => Kind::Reply(Answer::Refused(Refusal(status))),
            _ => return Err(Malformed::Field),
        };
        let length = usize::from(length);
        let data = octets.get(field::DATA.start..field::CRC.start);
        let (private_data, unused) = data
            .and_then(|data| data.split_at_checked(length))
            .ok_or(Malformed::Field)?;
        if length > data_max(kind) || unused.iter().any(|octet| *octet != 0) {
            return Err(Malformed::Field);
        }
        Ok(Self {
            kind: parsed_kind,
            id: be64(octets, field::ID),
            cookie: be64(octets, field::COOKIE),
            private_data,
        })
    }
}

/// Returns the maximum length of the private data in a message of this type.
const fn data_max(kind: u8) -> usize {
    match kind {
        TYPE_REQUEST => REQUEST_DATA_MAX,
        TYPE_REPLY => REPLY_DATA_MAX,
        _ => 0,
    }
}

fn compute_crc(crc: Crc32cFn, message: &[u8; MESSAGE_LEN]) -> u32 {
    crc(0, message.get(..field::CRC.start).unwrap_or_default())
}

/// The first retransmission delay in nanoseconds. Each delay is twice as long as the previous one.
const FIRST_PAUSE_NS: u64 = 200_000_000;
/// The longest delay: 4 s, as in the kernel's connection manager.
const LAST_PAUSE_NS: u64 = 4_000_000_000;
/// Maximum number of challenges after which the request is sent immediately. A listener needs one
/// challenge, or two if it changes its cookies meanwhile. After more challenges, the request waits
/// for its retransmission, so that a listener cannot make the requester send continuously.
const CHALLENGES_MAX: u32 = 4;

/// Time limits of a requester, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Limit for the first message from the listener.
    pub silence_ns: u64,
    /// Limit for the reply, if there was a challenge. The listener's program may need longer.
    pub answer_ns: u64,
}

/// What the requester must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Send the request, and call [`Requester::due`] again at this time.
    Send(u64),
    /// Call [`Requester::due`] again at this time.
    Wait(u64),
    /// Give up, because the time limit has expired.
    TimedOut,
}

/// The meaning of a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// The message is ignored.
    Nothing,
    /// Send the request now. It contains the new cookie.
    Challenge,
    /// The reply. The exchange is complete.
    Answer(Answer),
}

/// The requester's side of an exchange. Times are nanoseconds of a clock that does not go
/// backwards.
#[derive(Debug, Clone)]
pub struct Requester {
    id: u64,
    cookie: u64,
    patience: Patience,
    began: u64,
    next: u64,
    pause: u64,
    challenges: u32,
}

impl Requester {
    /// Starts an exchange at the time `now`. `id` must be random.
    pub const fn new(id: u64, patience: Patience, now: u64) -> Self {
        Self {
            id,
            cookie: 0,
            patience,
            began: now,
            next: now,
            pause: FIRST_PAUSE_NS,
            challenges: 0,
        }
    }

    /// Returns the request to send now.
    ///
    /// # Errors
    /// [`Unsendable`] if the private data are too long.
    pub fn request(
        &self,
        crc: Crc32cFn,
        private_data: &[u8],
    ) -> Result<[u8; MESSAGE_LEN], Unsendable> {
        let request = Message {
            kind: Kind::Request,
            id: self.id,
            cookie: self.cookie,
            private_data,
        };
        request.seal(crc)
    }

    /// Returns what to do at the time `now`.
    pub fn due(&mut self, now: u64) -> Due {
        let limit = match self.challenges {
            0 => self.patience.silence_ns,
            _ => self.patience.answer_ns,
        };
        let end = self.began.saturating_add(limit);
        if now >= end {
            return Due::TimedOut;
        }
        if now < self.next {
            return Due::Wait(self.next.min(end));
        }
        self.next = now.saturating_add(self.pause);
        self.pause = self.pause.saturating_mul(2).min(LAST_PAUSE_NS);
        Due::Send(self.next.min(end))
    }

    /// Processes a message from the listener's address.
    pub fn hear(&mut self, message: &Message<'_>) -> Heard {
        if message.id != self.id {
            return Heard::Nothing;
        }
        match message.kind {
            Kind::Challenge if message.cookie != self.cookie => {
                self.cookie = message.cookie;
                self.challenges = self.challenges.saturating_add(1);
                match self.challenges <= CHALLENGES_MAX {
                    true => Heard::Challenge,
                    false => Heard::Nothing,
                }
            }
            // A forged reply, and a reply to another requester, have another cookie.
            Kind::Reply(answer) if message.cookie == self.cookie && self.challenges > 0 => {
                Heard::Answer(answer)
            }
            _ => Heard::Nothing,
        }
    }
}

#[cfg(test)]
#[path = "sidr_tests.rs"]
mod tests;
