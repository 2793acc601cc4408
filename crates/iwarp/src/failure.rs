//! Errors of requests on a connection: which request failed, which side is at fault, and what to
//! do.

use iwarp_rnic::qp::{Blame, Fault};
use iwarp_rnic::{Access, PostError, WcStatus};
use std::fmt;
use std::net::SocketAddr;

/// The kind of a request on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestKind {
    /// A Send, with or without immediate data or invalidation.
    Send,
    /// An RDMA Write, with or without immediate data.
    Write,
    /// An RDMA Read.
    Read,
    /// An atomic addition.
    FetchAdd,
    /// An atomic compare and swap.
    CompareSwap,
    /// The bind of a memory window.
    Bind,
    /// An invalidation of a local memory window.
    Invalidate,
    /// A batch of requests with one completion.
    Batch,
    /// A posted receive.
    Receive,
}

impl RequestKind {
    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "Send",
            Self::Write => "RDMA Write",
            Self::Read => "RDMA Read",
            Self::FetchAdd => "FetchAdd",
            Self::CompareSwap => "CompareSwap",
            Self::Bind => "bind of a memory window",
            Self::Invalidate => "invalidation of a memory window",
            Self::Batch => "batch",
            Self::Receive => "receive",
        }
    }
}

impl fmt::Display for RequestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a request was not posted. The connection is unaffected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The destination is shorter than the source.
    TooLong {
        /// Bytes to transfer.
        octets: u64,
        /// Bytes that fit into the destination.
        room: u64,
    },
    /// The program's data is too long to be copied; put it into a region.
    TooLongToCopy {
        /// Bytes to send.
        octets: usize,
        /// Maximum length to copy: [`Options::message_size`](crate::Options::message_size).
        most: usize,
    },
    /// The peer has not granted the required right.
    NotGranted {
        /// The right that the request requires.
        needs: Access,
        /// The rights of the remote region.
        granted: Access,
    },
    /// The range is not inside the region.
    OutOfRange {
        /// Index of the element after the range.
        end: u64,
        /// Elements of the region.
        len: u64,
    },
    /// The region belongs to a different endpoint than the connection.
    ForeignRegion,
    /// An atomic operation needs one 8-byte word at a multiple of 8.
    NotOneWord,
    /// The batch is larger than the send queue.
    BatchTooLong {
        /// Requests of the batch.
        requests: usize,
        /// Size of the send queue: [`Options::send_depth`](crate::Options::send_depth).
        room: usize,
    },
    /// Not a token of a remote region with these elements; the text gives the reason.
    BadToken(&'static str),
    /// The queue pair rejected the request.
    Post(PostError),
    /// The connection was created by the parent of this forked process.
    Forked,
    /// The memory would be written while a [`View`](crate::connection::View) of it exists.
    Viewed,
    /// A request, or a window, may write the memory, so it cannot be viewed.
    BeingWritten,
    /// The memory can never be viewed: peers or other processes may write it at any time.
    NeverViewed,
    /// The bytes are not a whole number of aligned elements.
    NotElements {
        /// Length of the bytes.
        octets: usize,
        /// Size of an element in bytes.
        element: usize,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { octets, room } => {
                write!(f, "{octets} octets do not fit into {room}: use a slice")
            }
            Self::TooLongToCopy { octets, most } => write!(
                f,
                "{octets} octets are not copied (at most {most}): \
                 put them into a region, or set a larger `message_size`"
            ),
            Self::NotGranted { needs, granted } => write!(
                f,
                "the peer has granted only {granted:?} for this region, not {needs:?}: \
                 it has to share it with more rights"
            ),
            Self::OutOfRange { end, len } => {
                write!(
                    f,
                    "the range ends at element {end}, and the region has {len}"
                )
            }
            Self::ForeignRegion => f.write_str(
                "the region belongs to another endpoint: \
                 allocate it by this connection, or by its endpoint",
            ),
            Self::NotOneWord => f.write_str(
                "an atomic operation needs one word at a multiple of 8: use a slice of length 1",
            ),
            Self::BatchTooLong { requests, room } => write!(
                f,
                "a batch of {requests} requests does not fit into a send queue of {room}: \
                 set a larger `send_depth`, or split it"
            ),
            Self::BadToken(what) => write!(f, "not a token of a remote region: {what}"),
            Self::Post(e) => write!(f, "request not taken: {e}"),
            Self::Forked => f.write_str(
                "the connection belongs to the parent of this process: connect after the fork",
            ),
            Self::Viewed => f.write_str("the memory is being viewed: drop its views first"),
            Self::BeingWritten => {
                f.write_str("requests or windows may write the memory: await and drop those first")
            }
            Self::NeverViewed => f.write_str(
                "peers or other processes may write the memory at any time: copy the elements, \
                 or grant rights by a window",
            ),
            Self::NotElements { octets, element } => write!(
                f,
                "{octets} octets are not a whole number of aligned elements of {element}: \
                 copy them, or use an element without alignment"
            ),
        }
    }
}

impl std::error::Error for Refusal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Post(e) => Some(e),
            _ => None,
        }
    }
}

/// Why memory could not be mapped, or cannot be accessed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapError {
    /// The range is not inside the file.
    OutsideFile {
        /// Offset of the byte after the range.
        end: u64,
        /// Length of the file in bytes.
        len: u64,
    },
    /// The range of the file is not a whole number of elements.
    PartialElement {
        /// Length of the range in bytes.
        octets: u64,
        /// Size of an element in bytes.
        element: usize,
    },
    /// The file is not open for reading, or is to be writable and not open for writing, too.
    NotOpened {
        /// The mapping was to be writable.
        writable: bool,
    },
    /// The region is mapped read-only.
    ReadOnly,
    /// A page of the file does not exist any more.
    NoPage,
    /// The device does not catch faults, so a truncated file would end the process.
    Unguarded,
    /// Not enough huge pages are reserved, or a control group limits them.
    NoHugePages {
        /// Number of pages that the region needs.
        pages: usize,
        /// Size of a page in bytes.
        size: usize,
    },
    /// The kernel or the processor has no huge pages of this size.
    NoSuchHugePage {
        /// Size of a page in bytes.
        size: usize,
    },
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutsideFile { end, len } => write!(
                f,
                "the range ends at octet {end}, and the file has {len}: \
                 extend the file first, or map less"
            ),
            Self::PartialElement { octets, element } => write!(
                f,
                "{octets} octets are not a whole number of elements of {element}: \
                 map a shorter range"
            ),
            Self::NotOpened { writable: false } => f.write_str("open the file for reading"),
            Self::NotOpened { writable: true } => {
                f.write_str("open the file for reading and writing, or map it read-only")
            }
            Self::ReadOnly => f.write_str("the region is mapped read-only: use `map_file_mut`"),
            Self::NoPage => f.write_str(
                "the mapped file was truncated, or its storage is full or has failed: map it again",
            ),
            Self::Unguarded => f.write_str(
                "files are mapped only if faults are caught: set `IWARP_MEMORY_GUARD=on`, \
                 on x86-64 or ARM64",
            ),
            Self::NoHugePages { pages, size } => write!(
                f,
                "too few free huge pages of {size} octets, {pages} are needed: as root, add them \
                 to /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages, \
                 or use `HugePages::Transparent`",
                size >> 10
            ),
            Self::NoSuchHugePage { size } => write!(
                f,
                "no huge pages of {size} octets here: /sys/kernel/mm/hugepages lists the sizes"
            ),
        }
    }
}

impl std::error::Error for MapError {}

/// How a connection ended; see [`Connection::closed`](crate::Connection::closed).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum End {
    /// This end closed it.
    Closed,
    /// The peer closed it.
    ClosedByPeer,
    /// The peer sent a Terminate message: this end broke the protocol, or accessed memory that it
    /// has no right to. The [code](Fault::code) contains the layer, the type and the code of the
    /// error (RFC 5040 section 4.8).
    TerminatedByPeer(Fault),
    /// This end sent a Terminate message, or would have: the peer broke the protocol or accessed
    /// memory that it has no right to, or a local request failed ([`Fault::blame`]).
    Terminated(Fault),
    /// The TCP connection was reset, or it ended within a message.
    Reset,
    /// The peer stopped answering ([`Config::peer_timeout`](crate::Config::peer_timeout)).
    Vanished,
    /// The operating system reported this error.
    Failed(i32),
}

impl End {
    pub(crate) const fn new(
        fault: Option<Fault>,
        errno: i32,
        vanished: bool,
        closed_here: bool,
    ) -> Self {
        match fault {
            _ if vanished => Self::Vanished,
            Some(fault) => match fault.blame {
                Blame::Transport => Self::Reset,
                Blame::PeerTerminated => Self::TerminatedByPeer(fault),
                Blame::Peer | Blame::Local => Self::Terminated(fault),
            },
            None if errno == libc::ECONNRESET => Self::Reset,
            None if errno != 0 => Self::Failed(errno),
            None if closed_here => Self::Closed,
            None => Self::ClosedByPeer,
        }
    }

    /// Returns `true` if one of the ends closed the connection, and `false` if it failed.
    pub const fn is_graceful(self) -> bool {
        matches!(self, Self::Closed | Self::ClosedByPeer)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by this end"),
            Self::ClosedByPeer => f.write_str("closed by the peer"),
            Self::TerminatedByPeer(fault) | Self::Terminated(fault) => fault.fmt(f),
            Self::Reset => f.write_str("the TCP connection was reset or cut"),
            Self::Vanished => f.write_str("the peer stopped answering"),
            Self::Failed(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}

/// A request that was posted and failed. The connection has ended, and all other requests fail,
/// too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationError {
    pub(crate) request: RequestKind,
    pub(crate) octets: u64,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) status: WcStatus,
    pub(crate) fault: Option<Fault>,
}

impl OperationError {
    /// Returns the kind of the failed request.
    pub const fn request(&self) -> RequestKind {
        self.request
    }

    /// Returns the length of the request in bytes.
    pub const fn octets(&self) -> u64 {
        self.octets
    }

    /// Returns the peer's address.
    pub const fn peer_addr(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Returns the status of its completion. [`WcStatus::Flushed`] means that the request was not
    /// executed, because the connection ended for another reason; see [`fault`](Self::fault).
    pub const fn status(&self) -> WcStatus {
        self.status
    }

    /// Returns why the connection ended, or `None` if it was closed gracefully.
    pub const fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Returns which side is at fault, or `None` if the connection was closed gracefully.
    pub const fn blame(&self) -> Option<Blame> {
        match self.fault {
            Some(fault) => Some(fault.blame),
            None => None,
        }
    }

    /// Returns one sentence of advice for the program.
    pub const fn advice(&self) -> &'static str {
        match (self.status, self.blame()) {
            (WcStatus::LocalProtection | WcStatus::LocalAccess, _) => {
                "keep the region until the request has completed, and do not truncate mapped files"
            }
            (WcStatus::LocalLength, _) => {
                "the receive is shorter than the message: set a larger `message_size` at this end"
            }
            (WcStatus::MwBind, _) => "bind a part of a region of this endpoint",
            (WcStatus::RemoteAccess, _) => {
                "ask the peer for a token of a region that it still shares, with this right"
            }
            (WcStatus::RemoteInvalidRequest | WcStatus::RemoteOperation, _) => {
                "the peer cannot carry it out: compare what both ends expect"
            }
            (WcStatus::ReceiverNotReady | WcStatus::TransportRetryExceeded, _) => {
                "the peer has to post receives in time"
            }
            (_, Some(Blame::Transport)) => "connect again",
            (_, Some(Blame::PeerTerminated)) => "the peer's log says what it refused",
            (_, Some(Blame::Peer)) => "the peer's program or RNIC is at fault",
            (_, Some(Blame::Local)) => "look for the first request that has failed",
            (_, None) => "the connection was closed before it was done: wait for requests first",
        }
    }
}

const fn describe(status: WcStatus) -> &'static str {
    match status {
        WcStatus::Success => "it succeeded",
        WcStatus::LocalLength => "a length does not fit",
        WcStatus::LocalQpOperation => "the queue pair cannot carry it out",
        WcStatus::LocalProtection | WcStatus::LocalAccess => "local memory does not allow it",
        WcStatus::Flushed => "it was not carried out, because the connection has ended",
        WcStatus::MwBind => "the bind is not allowed",
        WcStatus::BadResponse => "the peer's answer does not fit",
        WcStatus::RemoteInvalidRequest => "the peer says that it is invalid",
        WcStatus::RemoteAccess => "the peer's memory does not allow it",
        WcStatus::RemoteOperation => "the peer cannot carry it out",
        WcStatus::TransportRetryExceeded => "the peer has not answered",
        WcStatus::ReceiverNotReady => "the peer has posted no receive for it",
        WcStatus::ResponseTimeout => "the peer did not answer in time",
        WcStatus::TagMatching => "the tagged buffer is not in the list any more",
        WcStatus::Fatal | WcStatus::General => "the connection has failed",
    }
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} octets", self.request, self.octets)?;
        if let Some(peer) = self.peer {
            write!(f, " ({peer})")?;
        }
        write!(f, ": {}", describe(self.status))?;
        if let Some(fault) = self.fault {
            write!(f, "; {fault}")?;
        }
        write!(f, "; {}", self.advice())
    }
}

impl std::error::Error for OperationError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_follows_from_cause() {
        let fault = |blame| Fault {
            blame,
            code: iwarp_proto::rdmap::TerminateCode::MPA_CONNECTION_LOST,
        };
        let [peer, by_peer, local, transport] = [
            Blame::Peer,
            Blame::PeerTerminated,
            Blame::Local,
            Blame::Transport,
        ]
        .map(fault);
        for (cause, end, text) in [
            ((None, 0, false, true), End::Closed, "closed by this end"),
            (
                (None, 0, false, false),
                End::ClosedByPeer,
                "closed by the peer",
            ),
            (
                (Some(peer), 0, false, true),
                End::Terminated(peer),
                "broke the protocol",
            ),
            (
                (Some(local), 0, false, false),
                End::Terminated(local),
                "local work request",
            ),
            (
                (Some(by_peer), 0, false, true),
                End::TerminatedByPeer(by_peer),
                "terminated by the peer",
            ),
            (
                (Some(transport), 104, false, false),
                End::Reset,
                "reset or cut",
            ),
            ((None, 104, false, true), End::Reset, "reset or cut"),
            (
                (Some(transport), 104, true, false),
                End::Vanished,
                "stopped answering",
            ),
            (
                (None, libc::ENETDOWN, false, false),
                End::Failed(libc::ENETDOWN),
                "down",
            ),
        ] {
            let (fault, errno, vanished, closed_here) = cause;
            assert_eq!(End::new(fault, errno, vanished, closed_here), end);
            assert!(end.to_string().contains(text), "{end}");
            assert_eq!(end.is_graceful(), fault.is_none() && errno == 0);
        }
    }

    #[test]
    fn operation_error_has_blame_and_advice() {
        let fault = Fault {
            blame: Blame::PeerTerminated,
            code: iwarp_proto::rdmap::TerminateCode::MPA_CONNECTION_LOST,
        };
        let error = OperationError {
            request: RequestKind::Write,
            octets: 64,
            peer: Some(([192, 0, 2, 7], 7171).into()),
            status: WcStatus::RemoteAccess,
            fault: Some(fault),
        };
        let text = error.to_string();
        for part in [
            "RDMA Write of 64 octets (192.0.2.7:7171)",
            "the peer's memory does not allow it",
            "terminated by the peer",
            "still shares",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.blame(), Some(Blame::PeerTerminated));
    }

    #[test]
    fn refusal_has_its_source() {
        let error = Refusal::Post(PostError::QueueFull);
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn mapping_errors_name_the_remedy() {
        for (error, remedy) in [
            (MapError::NotOpened { writable: false }, "for reading"),
            (
                MapError::NotOpened { writable: true },
                "reading and writing",
            ),
            (
                MapError::NoHugePages {
                    pages: 3,
                    size: 2 << 20,
                },
                "hugepages-2048kB",
            ),
        ] {
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }
}
