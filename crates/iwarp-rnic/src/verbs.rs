//! The types of the verbs: access rights, scatter/gather elements, work requests and work
//! completions, as in the RDMA verbs and `ibv_post_send(3)`.

use crate::memory::ListedPages;
use bitflags::bitflags;
use iwarp_proto::ddp::Stag;

bitflags! {
    /// Access rights of a memory region or window. Values as in `ibv_reg_mr(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local RNIC may write: for receives, and as the sink of Reads and atomics.
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
    /// All rights of a peer.
    pub(crate) const REMOTE: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);

    /// All rights that allow writing.
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
        /// Raise a solicited event at the peer.
        const SOLICITED = 1 << 2;
        /// The data are copied when the request is posted; local keys are ignored.
        const INLINE = 1 << 3;
    }
}

/// One scatter/gather element: `len` octets at `addr` in the region `lkey`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// First address in the region's address space (its `iova`).
    pub addr: u64,
    /// Length in bytes; may be zero.
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
// Operations of one kind are adjacent, so that one comparison recognizes the kind.
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
    /// RDMA Read into one local element. When the response is complete, the STag of the element is
    /// invalidated, then the request completes (RDMA Read with Invalidate Local STag, a local
    /// matter; `IB_WR_RDMA_READ_WITH_INV` of the kernel).
    ReadInv {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Completes when everything posted before is visible in the peer's memory (`ibv_wr_flush`).
    /// Takes no elements.
    ///
    /// iWARP has no such operation. It is sent as an RDMA Read of zero octets, whose response
    /// implies the placement of all earlier Writes and Sends (RFC 5040 section 5.5). The target
    /// does not validate the STag of a zero-length Read.
    Flush {
        /// Tagged offset at the peer.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Adds to eight octets at the peer; the old value is placed in the local elements, in host
    /// order.
    FetchAdd {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
        /// The value to add.
        add: u64,
        /// Each set bit marks the top bit of a field (RFC 7306 section 5.1.1); zero for a single
        /// 64-bit field.
        mask: u64,
    },
    /// Compares eight octets at the peer and swaps them if equal; the old value is placed in the
    /// local elements.
    CmpSwap {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
        /// Value compared with the peer's memory under `compare_mask`.
        compare: u64,
        /// Value written under `swap_mask`.
        swap: u64,
        /// Bits to compare.
        compare_mask: u64,
        /// Bits to swap.
        swap_mask: u64,
    },
    /// RDMA Write of eight octets that the target stores atomically (`IBV_WR_ATOMIC_WRITE`). It
    /// completes when the octets are placed. After the first Atomic Write, all requests of the
    /// queue pair complete when placed
    /// ([`complete_when_placed`](crate::qp::QueuePair::complete_when_placed)).
    ///
    /// It is sent as an RDMA Write in one segment. A target that uses this crate stores eight
    /// aligned octets by one instruction; other targets do not guarantee that.
    AtomicWrite {
        /// Tagged offset at the peer, a multiple of 8.
        remote_addr: u64,
        /// The peer's STag.
        rkey: u32,
    },
    /// Makes a local region or window unusable, for the peer and for local requests, until it is
    /// bound or registered again.
    LocalInvalidate {
        /// STag to invalidate.
        stag: Stag,
    },
    /// Binds a memory window to a part of a region.
    Bind(Bind),
    /// Gives a fast-registration region its range, rights and key.
    FastRegister(FastRegister),
}

/// A send queue has a slot for each request, so requests must be small.
const _: () = assert!(size_of::<SendOp>() <= 48);

impl SendOp {
    /// Returns `true` if the request carries local data as payload.
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

    /// Returns `true` if the message consumes a receive at the peer.
    pub const fn takes_receive(&self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendImm(_) | Self::SendInv(_) | Self::WriteImm { .. }
        )
    }

    /// Returns `true` if the peer sends a response (RDMA Read, flush and atomics).
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

    /// Returns `true` if the request completes only after a response of the peer: its own, or that
    /// to a later Read.
    pub(crate) const fn completes_by_response(&self) -> bool {
        self.has_response() || matches!(self, Self::AtomicWrite { .. })
    }

    /// Returns `true` if the request sends nothing: binds, fast registrations and local
    /// invalidations.
    pub const fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Bind(_) | Self::FastRegister(_) | Self::LocalInvalidate { .. }
        )
    }

    /// Returns the operation for the completion.
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
    /// Any present or earlier STag of the window: only its index is used.
    pub mw_stag: Stag,
    /// The STag after the bind: the same index, with the consumer's key.
    pub new_stag: Stag,
    /// STag of the region to bind to; it needs `MW_BIND`.
    pub mr_stag: Stag,
    /// First address in the region.
    pub addr: u64,
    /// Length in octets; zero unbinds a type 1 window.
    pub len: u64,
    /// Rights of the peer through the window (remote rights and `ZERO_BASED`).
    pub access: Access,
}

/// Parameters of a fast registration by work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastRegister {
    /// STag of a fast-registration region, with the consumer's key.
    pub new_stag: Stag,
    /// Offset of the first byte: in the region's reserved range or, if it has a page list, in the
    /// first page.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Tagged offset of the first byte.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// The page list, if the region has one (see [`Pages::listed`](crate::memory::Pages::listed));
    /// always `None` in user space.
    pub pages: Option<ListedPages>,
}

/// A send work request. The elements are copied when posting.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// The program's identifier, returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Options.
    pub flags: SendFlags,
    /// Local data: source of Sends and Writes, sink of Reads and atomics.
    pub sges: &'a [Sge],
    /// Inline data, used when [`SendFlags::INLINE`] is set; pieces are joined.
    pub inline: &'a [&'a [u8]],
}

impl<'a> SendWr<'a> {
    /// Returns a request of any kind with local elements.
    pub const fn new(wr_id: u64, op: SendOp, sges: &'a [Sge]) -> Self {
        Self {
            wr_id,
            op,
            flags: SendFlags::empty(),
            sges,
            inline: &[],
        }
    }

    /// Returns a Send of local elements.
    pub const fn send(wr_id: u64, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Send, sges)
    }

    /// Returns a Send with inline data.
    pub const fn inline(wr_id: u64, octets: &'a [&'a [u8]]) -> Self {
        Self {
            wr_id,
            op: SendOp::Send,
            flags: SendFlags::INLINE,
            sges: &[],
            inline: octets,
        }
    }

    /// Returns an RDMA Write to `remote_addr` in the peer's region `rkey`.
    pub const fn write(wr_id: u64, remote_addr: u64, rkey: u32, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Write { remote_addr, rkey }, sges)
    }

    /// Returns an RDMA Read from `remote_addr` in the peer's region `rkey`.
    pub const fn read(wr_id: u64, remote_addr: u64, rkey: u32, sges: &'a [Sge]) -> Self {
        Self::new(wr_id, SendOp::Read { remote_addr, rkey }, sges)
    }

    /// Returns an atomic addition. The old value is placed in the local elements, 8 octets in
    /// total.
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

    /// Requests a completion.
    #[must_use]
    pub const fn signaled(self) -> Self {
        self.with_flags(SendFlags::SIGNALED)
    }

    /// Requests a solicited event at the peer.
    #[must_use]
    pub const fn solicited(self) -> Self {
        self.with_flags(SendFlags::SOLICITED)
    }

    /// Makes the request wait until earlier RDMA Reads and atomics are complete.
    #[must_use]
    pub const fn fenced(self) -> Self {
        self.with_flags(SendFlags::FENCE)
    }
}

/// A receive work request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// The program's identifier, returned in the completion.
    pub wr_id: u64,
    /// Buffers that the message fills in order.
    pub sges: &'a [Sge],
}

/// Why a work request ended, as in `ibv_poll_cq(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WcStatus {
    /// The request was successful.
    #[default]
    Success,
    /// The message did not fit into the receive, or a local length is wrong.
    LocalLength,
    /// The queue pair could not execute the request.
    LocalQpOperation,
    /// A local key, range or right does not allow the request.
    LocalProtection,
    /// The request was not executed, because the queue pair is in the error state.
    Flushed,
    /// The bind was not allowed.
    MwBind,
    /// The peer's response does not match the request.
    BadResponse,
    /// A receive's region does not allow the access.
    LocalAccess,
    /// The peer reports that the request was invalid.
    RemoteInvalidRequest,
    /// The peer reports that key, range or right do not allow the request.
    RemoteAccess,
    /// The peer reports that it could not execute the request.
    RemoteOperation,
    /// The peer does not respond.
    TransportRetryExceeded,
    /// The peer has no receive posted for the message.
    ReceiverNotReady,
    /// The connection ended for another fatal reason.
    Fatal,
    /// The peer did not respond in time.
    ResponseTimeout,
    /// Any other error.
    General,
    /// A tagged buffer is no longer in the list (`IBV_WC_TM_ERR`).
    TagMatching,
}

/// The operation of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "most names are self-explanatory")]
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
    /// A receive that was filled by a Send.
    Recv,
    /// A receive that was consumed by the immediate data of an RDMA Write.
    RecvWriteImm,
    /// A tagged buffer was posted.
    TagAdd,
    /// A tagged buffer was removed.
    TagRemove,
    /// The tag list was synchronized.
    TagSync,
    /// A tagged message arrived: in the buffer that it matched or, without a match, in a receive.
    TagRecv,
    /// A receive that was filled by an untagged message, on a queue that matches tags.
    TagNone,
    /// A flush of the peer's memory.
    Flush,
}

bitflags! {
    /// Additional properties of a completion.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct WcFlags: u32 {
        /// A datagram: its receive begins with a global routing header, and [`Cqe::src_qp`] returns
        /// its sender.
        const GRH = 1;
        /// `imm_or_stag` holds immediate data, in host order.
        const WITH_IMM = 1 << 1;
        /// `imm_or_stag` holds the STag that the peer invalidated.
        const WITH_INV = 1 << 3;
        /// The program has not yet seen all messages that matched no tag. Until it synchronizes,
        /// newly posted buffers are not matched.
        const TAG_SYNC = 1 << 4;
        /// The message has matched a tagged buffer; [`Cqe::tag`] returns its tag.
        const TAG_MATCH = 1 << 5;
        /// The payload is in the tagged buffer.
        const TAG_DATA = 1 << 6;
        /// The peer asked for a solicited event.
        const SOLICITED = 1 << 8;
        /// A datagram that arrived over IPv4: the last 20 octets of the routing header are an IPv4
        /// header. Without this flag, the routing header is an IPv6 header.
        const IPV4 = 1 << 9;
    }
}

/// A work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cqe {
    /// The `wr_id` of the work request.
    pub wr_id: u64,
    /// The outcome. Unless it is `Success`, only `wr_id`, `status`, `qp_num` and `vendor_err` are
    /// valid.
    pub status: WcStatus,
    /// Operation.
    pub opcode: WcOpcode,
    /// Octets received or read.
    pub byte_len: u32,
    /// Queue pair number.
    pub qp_num: u32,
    /// Additional properties.
    pub flags: WcFlags,
    /// Immediate data or invalidated STag, see `flags`.
    pub imm_or_stag: u32,
    /// For a remote error: layer, type and code of the peer's Terminate, as `0x00LTCC`. For a
    /// datagram: see [`src_qp`](Self::src_qp).
    pub vendor_err: u32,
    /// For the owner of the completion queue to store its position; a queue pair sets it to zero.
    pub account: u32,
    /// For a send request: how many requests of its send queue have completed, including this one.
    /// When this completion has been polled, the slots of all these requests can be freed
    /// ([`QpConfig::hold_slots`](crate::qp::QpConfig::hold_slots)). Wraps.
    pub position: u32,
    /// Time of the completion, in nanoseconds of the caller's clock. On a completion queue without
    /// a clock it holds the tag of a matched message (see [`tag`](Self::tag)), or zero.
    pub timestamp_ns: u64,
}

impl Cqe {
    /// Returns the number of the queue pair that sent a datagram; 0 for other completions.
    pub const fn src_qp(&self) -> u32 {
        match self.flags.contains(WcFlags::GRH) {
            true => self.vendor_err,
            false => 0,
        }
    }

    /// Returns the tag of a message that has matched a buffer, and the sender's application
    /// context. Completion queues with a clock cannot report tags, which share the timestamp's
    /// field.
    pub const fn tag(&self) -> Option<(u64, u32)> {
        match self.flags.contains(WcFlags::TAG_MATCH) {
            true => Some((self.timestamp_ns, self.vendor_err)),
            false => None,
        }
    }
}

/// Why a work request was rejected. Nothing was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The queue is full (ENOMEM).
    QueueFull,
    /// The request has more elements than the queue was created for (EINVAL).
    TooManySges,
    /// The request has more inline data than the queue pair was created for (EINVAL).
    InlineTooLong,
    /// The message would exceed 2^31 octets (EINVAL).
    MessageTooLong,
    /// The operation does not fit the queue pair, or its parameters contradict each other (EINVAL).
    InvalidRequest,
    /// The queue pair does not accept such requests in its state (EINVAL).
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
            Self::MessageTooLong => "the message is longer than 2^31 bytes",
            Self::InvalidRequest => "the operation or its parameters do not fit this queue pair",
            Self::InvalidState => "the queue pair accepts no such request in its present state",
            Self::UsesSharedReceiveQueue => {
                "this queue pair receives through a shared receive queue: post there"
            }
        })
    }
}

impl core::error::Error for PostError {}

#[cfg(test)]
mod tests;
