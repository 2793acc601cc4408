//! The vocabulary of the verbs: access rights, scatter/gather elements, work
//! requests and work completions, as in the RDMA verbs and `ibv_post_send(3)`.

use crate::memory::ListedPages;
use bitflags::bitflags;
use iwarp_proto::ddp::Stag;

bitflags! {
    /// What may be done to a memory region or window. Values as in `ibv_reg_mr(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local RNIC may write: receives, read sinks.
        const LOCAL_WRITE = 1;
        /// The peer may write. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 1 << 1;
        /// The peer may read.
        const REMOTE_READ = 1 << 2;
        /// The peer may do atomics. Needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Tagged offsets start at zero instead of at the address.
        const ZERO_BASED = 1 << 5;
    }
}

impl Access {
    /// What gives a peer access.
    pub(crate) const REMOTE: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);

    /// What changes memory.
    pub(crate) const WRITING: Self = Self::LOCAL_WRITE
        .union(Self::REMOTE_WRITE)
        .union(Self::REMOTE_ATOMIC);
}

bitflags! {
    /// Options of one send work request. Values as in `ibv_post_send(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u32 {
        /// Wait until all earlier RDMA Reads and atomics of this queue pair are complete.
        const FENCE = 1;
        /// Write a completion when done. A failed request always writes one.
        const SIGNALED = 1 << 1;
        /// Ask the peer for a solicited event.
        const SOLICITED = 1 << 2;
        /// The data are copied when the request is posted; local keys are not looked at.
        const INLINE = 1 << 3;
    }
}

/// One scatter/gather element: `len` octets at `addr` in the region `lkey`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// First address, in the region's own address space (its `iova`).
    pub addr: u64,
    /// Length in octets; zero is allowed.
    pub len: u32,
    /// Local key: the STag of a region.
    pub lkey: u32,
}

impl Sge {
    /// Returns the local key as an STag.
    #[inline]
    pub const fn stag(&self) -> Stag {
        Stag(self.lkey)
    }
}

/// The operation of a send work request.
// Operations of a kind stand together, so that the kind is recognized by one comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// Send to the peer's next receive.
    Send,
    /// Send, with four octets of immediate data (host order).
    SendImm(u32),
    /// Send, and invalidate this STag of the peer (RFC 5040 section 5.3).
    SendInv(u32),
    //= rfc5040 section 5.1
    //# * If the Local Peer wishes to write to multiple Tagged Buffers on the Remote
    //# Peer, the Local Peer MUST use multiple RDMA Write Messages.
    //= rfc5041 section 5.2
    //# The ULP at the Data Source MUST specify the STag and the initial TO when the
    //# ULP Message is handed to DDP.
    /// RDMA Write.
    Write {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// RDMA Write, then Immediate Data (RFC 7306 section 6).
    WriteImm {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
        /// Immediate data in host order.
        imm: u32,
    },
    //= rfc5040 section 5.2.1
    //# * If the Local Peer wishes to read from multiple Tagged Buffers on the
    //# Remote Peer, the Local Peer MUST use multiple RDMA Read Request Messages.
    //= rfc5040 section 5.2.1
    //# That is, a single RDMA Read Request Message MUST only read from one remote
    //# Tagged Buffer.
    /// RDMA Read into the local elements.
    Read {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// RDMA Read into one local element. When the answer is whole, the STag of the element is invalidated, before the request completes: RDMA
    /// Read with Invalidate Local STag, which is a matter of the local side alone (the RDMA verbs, `IB_WR_RDMA_READ_WITH_INV` of the kernel).
    ReadInv {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Complete when everything that was posted before is visible in the peer's memory
    /// (`ibv_wr_flush`). It has no elements.
    ///
    /// iWARP has no such operation. On the wire it is an RDMA Read of zero octets, whose response follows
    /// the placement of all earlier Writes and Sends (RFC 5040 section 5.5). The target does not validate
    /// the STag of such a Read.
    Flush {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Add to eight octets at the peer; the old value lands in the local elements, in host order.
    FetchAdd {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
        /// What is added.
        add: u64,
        /// Top bit of each field (RFC 7306 section 5.1.1); zero for one 64-bit field.
        mask: u64,
    },
    /// Compare eight octets at the peer and swap if equal; the old value lands in the local elements.
    CmpSwap {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
        /// Compared with the peer's memory, under `compare_mask`.
        compare: u64,
        /// Written under `swap_mask`.
        swap: u64,
        /// Bits that are compared.
        compare_mask: u64,
        /// Bits that are swapped.
        swap_mask: u64,
    },
    /// RDMA Write of eight octets that the target stores at once (`IBV_WR_ATOMIC_WRITE`). It completes when they are placed: from its start on,
    /// that holds for all requests of the queue pair ([`complete_when_placed`](crate::qp::QueuePair::complete_when_placed)).
    ///
    /// On the wire it is an RDMA Write in one segment. A target of this crate stores eight octets by one instruction wherever they are
    /// aligned in its memory; other targets give no promise.
    AtomicWrite {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Make a local region or window unusable for the peer and for local requests until it is bound again.
    LocalInvalidate {
        /// STag to invalidate.
        stag: Stag,
    },
    /// Bind a memory window to a part of a region.
    Bind(Bind),
    /// Give a fast-registration region its range, rights and key.
    FastRegister(FastRegister),
}

/// A send queue has a slot for each request, so they are kept small.
const _: () = assert!(size_of::<SendOp>() <= 48);

impl SendOp {
    /// Returns `true` if it carries local data as its payload.
    pub const fn has_payload(&self) -> bool {
        matches!(
            self,
            Self::Send
                | Self::SendImm(_)
                | Self::SendInv(_)
                | Self::Write { .. }
                | Self::WriteImm { .. }
                | Self::AtomicWrite { .. }
        )
    }

    /// Returns `true` if its message takes a receive at the peer.
    pub const fn takes_receive(&self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendImm(_) | Self::SendInv(_) | Self::WriteImm { .. }
        )
    }

    /// Returns `true` if the peer answers it (RDMA Read, flush and atomics).
    pub const fn has_response(&self) -> bool {
        matches!(
            self,
            Self::Read { .. }
                | Self::ReadInv { .. }
                | Self::FetchAdd { .. }
                | Self::CmpSwap { .. }
                | Self::Flush { .. }
        )
    }

    /// Returns `true` if it is complete only when the peer has answered it, or a Read behind it.
    pub(crate) const fn needs_answer(&self) -> bool {
        self.has_response() || matches!(self, Self::AtomicWrite { .. })
    }

    /// Returns `true` if it sends nothing: binds, fast registrations and local invalidations.
    pub const fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Bind(_) | Self::FastRegister(_) | Self::LocalInvalidate { .. }
        )
    }

    /// Returns the operation that its completion names.
    pub const fn wc_opcode(&self) -> WcOpcode {
        match self {
            Self::Send | Self::SendImm(_) | Self::SendInv(_) => WcOpcode::Send,
            Self::Write { .. } | Self::WriteImm { .. } => WcOpcode::Write,
            Self::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            Self::Read { .. } | Self::ReadInv { .. } => WcOpcode::Read,
            Self::Flush { .. } => WcOpcode::Flush,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::CmpSwap { .. } => WcOpcode::CmpSwap,
            Self::LocalInvalidate { .. } => WcOpcode::LocalInvalidate,
            Self::Bind(_) => WcOpcode::Bind,
            Self::FastRegister(_) => WcOpcode::FastRegister,
        }
    }
}

/// Parameters of a window bind, as in `ibv_bind_mw(3)` and `IBV_WR_BIND_MW`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The window, named by any STag that it has or had: only the index counts.
    pub mw_stag: Stag,
    /// Its STag afterwards: the same index, the consumer's key.
    pub new_stag: Stag,
    /// STag of the region to bind to; it needs `MW_BIND`.
    pub mr_stag: Stag,
    /// First address in the region.
    pub addr: u64,
    /// Length in octets; zero unbinds a type 1 window.
    pub len: u64,
    /// What the peer may do through the window (remote rights and `ZERO_BASED`).
    pub access: Access,
}

/// Parameters of a fast registration by work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastRegister {
    /// STag of a fast-registration region, with the consumer's key.
    pub new_stag: Stag,
    /// Offset of the first octet in the region's reserved range, or in the first of its pages.
    pub offset: u64,
    /// Length in octets.
    pub len: u64,
    /// Tagged offset of the first octet.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// The pages, if the region has a list of them: see [`Pages::listed`](crate::memory::Pages::listed). Regions of a process have none.
    pub pages: Option<ListedPages>,
}

/// A send work request. The elements are copied when posting.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// A number of the program's, which comes back in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Options.
    pub flags: SendFlags,
    /// Local data: source of sends and writes, sink of reads and atomics.
    pub sges: &'a [Sge],
    /// Inline data, used when [`SendFlags::INLINE`] is set; pieces are joined.
    pub inline: &'a [&'a [u8]],
}

impl<'a> SendWr<'a> {
    /// Makes a request of any kind with local elements.
    pub const fn new(wr_id: u64, op: SendOp, sges: &'a [Sge]) -> Self {
        Self {
            wr_id,
            op,
            flags: SendFlags::empty(),
            sges,
            inline: &[],
        }
    }

    /// Makes a Send of local elements.
    pub const fn send(wr_id: u64, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Send, sges)
    }

    /// Makes a Send of octets that are copied when it is posted.
    pub const fn inline(wr_id: u64, octets: &'a [&'a [u8]]) -> Self {
        Self {
            wr_id,
            op: SendOp::Send,
            flags: SendFlags::INLINE,
            sges: &[],
            inline: octets,
        }
    }

    /// Makes an RDMA Write to `remote_addr` in the peer's region `rkey`.
    pub const fn write(wr_id: u64, remote_addr: u64, rkey: u32, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Write { remote_addr, rkey }, sges)
    }

    /// Makes an RDMA Read from `remote_addr` in the peer's region `rkey`.
    pub const fn read(wr_id: u64, remote_addr: u64, rkey: u32, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Read { remote_addr, rkey }, sges)
    }

    /// Makes an atomic addition. The old value lands in the local elements, which have 8 octets.
    pub const fn fetch_add(
        wr_id: u64,
        remote_addr: u64,
        rkey: u32,
        add: u64,
        sges: &'a [Sge],
    ) -> Self {
        Self::new(
            wr_id,
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add,
                mask: 0,
            },
            sges,
        )
    }

    /// Adds options.
    #[must_use]
    pub const fn with_flags(mut self, flags: SendFlags) -> Self {
        self.flags = self.flags.union(flags);
        self
    }

    /// Asks for a completion.
    #[must_use]
    pub const fn signaled(self) -> Self {
        self.with_flags(SendFlags::SIGNALED)
    }

    /// Asks for a solicited event at the peer.
    #[must_use]
    pub const fn solicited(self) -> Self {
        self.with_flags(SendFlags::SOLICITED)
    }

    /// Makes it wait until earlier RDMA Reads and atomics are complete.
    #[must_use]
    pub const fn fenced(self) -> Self {
        self.with_flags(SendFlags::FENCE)
    }
}

/// A receive work request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// A number of the program's, which comes back in the completion.
    pub wr_id: u64,
    /// Where the message lands, in order.
    pub sges: &'a [Sge],
}

/// Why a work request ended, as in `ibv_poll_cq(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WcStatus {
    /// Done.
    #[default]
    Success,
    /// The message did not fit the receive, or the local length is wrong.
    LocalLength,
    /// The queue pair could not carry it out.
    LocalQpOperation,
    /// A local key, range or right does not allow it.
    LocalProtection,
    /// Not carried out, because the queue pair is in the error state.
    Flushed,
    /// A bind was not allowed.
    MwBind,
    /// The peer's answer does not fit the request.
    BadResponse,
    /// A receive's region does not allow the access.
    LocalAccess,
    /// The peer says that the request was invalid.
    RemoteInvalidRequest,
    /// The peer says that the key, range or right does not allow it.
    RemoteAccess,
    /// The peer could not carry it out.
    RemoteOperation,
    /// The peer has not answered.
    TransportRetryExceeded,
    /// The peer has posted no receive for it.
    ReceiverNotReady,
    /// The connection ended for another reason that is fatal.
    Fatal,
    /// The peer did not answer in time.
    ResponseTimeout,
    /// Something else.
    General,
    /// A tagged buffer is not in the list any more (`IBV_WC_TM_ERR`).
    TagMatching,
}

/// The operation that a completion is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[allow(missing_docs)]
pub enum WcOpcode {
    #[default]
    Send,
    Write,
    Read,
    CmpSwap,
    FetchAdd,
    Bind,
    LocalInvalidate,
    FastRegister,
    AtomicWrite,
    /// A receive that took a Send.
    Recv,
    /// A receive that took the immediate data of an RDMA Write.
    RecvWriteImm,
    /// A tagged buffer was posted, was taken away, the list was synchronized.
    TagAdd,
    TagRemove,
    TagSync,
    /// A message with a tag: in the buffer that it matched, or in a receive because it matched none.
    TagRecv,
    /// A receive that took a message without a tag, on a queue that matches tags.
    TagNone,
    /// A flush of the peer's memory.
    Flush,
}

bitflags! {
    /// Further facts about a completion.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct WcFlags: u32 {
        /// A datagram: its receive begins with a global routing header, and the completion names its sender ([`Cqe::src_qp`]).
        const GRH = 1;
        /// `imm_or_stag` holds immediate data, in host order.
        const WITH_IMM = 1 << 1;
        /// `imm_or_stag` holds the STag that the peer invalidated.
        const WITH_INV = 1 << 3;
        /// The program does not know all messages that matched no tag, so that buffers that it posts are not matched.
        const TAG_SYNC = 1 << 4;
        /// The message has matched a tagged buffer, and the completion has its tag ([`Cqe::tag`]).
        const TAG_MATCH = 1 << 5;
        /// The payload is in the tagged buffer.
        const TAG_DATA = 1 << 6;
        /// The peer asked for a solicited event.
        const SOLICITED = 1 << 8;
        /// A datagram that came over IPv4: the routing header is an IPv4 header in its last 20 octets. Without it, it is an IPv6 header.
        const IPV4 = 1 << 9;
    }
}

/// A work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cqe {
    /// The `wr_id` of the work request.
    pub wr_id: u64,
    /// Outcome. If it is not `Success`, only `wr_id`, `status`, `qp_num` and `vendor_err` have a meaning.
    pub status: WcStatus,
    /// Operation.
    pub opcode: WcOpcode,
    /// Octets received or read.
    pub byte_len: u32,
    /// Queue pair number.
    pub qp_num: u32,
    /// Further facts.
    pub flags: WcFlags,
    /// Immediate data or invalidated STag, see `flags`.
    pub imm_or_stag: u32,
    /// For a remote error: layer, type and code of the peer's Terminate, as `0x00LTCC`. For a datagram: see [`src_qp`](Self::src_qp).
    pub vendor_err: u32,
    /// Where the owner of the completion queue notes the position; a queue pair leaves it zero.
    pub account: u32,
    /// For a request of a send queue: how many requests of that queue had completed with it. When it has been polled, the slots
    /// of all of them can be free ([`QpConfig::hold_slots`](crate::qp::QpConfig::hold_slots)). Wraps.
    pub position: u32,
    /// Time at which it was written, in nanoseconds of the caller's clock; zero if the caller has none. On a queue without a clock a
    /// matched message has its tag here: see [`tag`](Self::tag).
    pub timestamp_ns: u64,
}

impl Cqe {
    /// Returns the number of the queue pair that sent a datagram; 0 if the completion is not that of a datagram's receive.
    pub const fn src_qp(&self) -> u32 {
        match self.flags.contains(WcFlags::GRH) {
            true => self.vendor_err,
            false => 0,
        }
    }

    /// Returns the tag of a message that has matched a buffer, and what its sender has written beside it. They are there on queues without
    /// a clock, so that completions need no more room.
    pub const fn tag(&self) -> Option<(u64, u32)> {
        match self.flags.contains(WcFlags::TAG_MATCH) {
            true => Some((self.timestamp_ns, self.vendor_err)),
            false => None,
        }
    }
}

/// Why a work request was not accepted. Nothing was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The queue is full (ENOMEM).
    QueueFull,
    /// More elements than the queue was created for (EINVAL).
    TooManySges,
    /// More inline data than the queue pair was created for (EINVAL).
    InlineTooLong,
    /// The message would exceed 2^31 octets (EINVAL).
    MessageTooLong,
    /// The operation does not fit the queue pair, or its parameters contradict each other (EINVAL).
    InvalidRequest,
    /// The queue pair is in a state that takes no such request (EINVAL).
    InvalidState,
    /// The queue pair receives through a shared receive queue: post there (EINVAL).
    UsesSharedReceiveQueue,
}

impl core::fmt::Display for PostError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::QueueFull => "the queue is full: poll completions before posting more",
            Self::TooManySges => "more scatter/gather elements than the queue was created for",
            Self::InlineTooLong => "more inline data than the queue pair was created for",
            Self::MessageTooLong => "a message has at most 2^31 octets",
            Self::InvalidRequest => "the operation or its parameters do not fit this queue pair",
            Self::InvalidState => "the queue pair is in a state that takes no such request",
            Self::UsesSharedReceiveQueue => {
                "this queue pair receives through a shared receive queue: post there"
            }
        })
    }
}

impl core::error::Error for PostError {}

#[cfg(test)]
mod tests;
