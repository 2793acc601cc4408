//! Errors of the public API, with the errno that the C libraries report for each.

use crate::failure::{End, MapError, OperationError, Refusal};
use crate::sys::connect::NetError;
use iwarp_rnic::cq::CqSizeError;
use iwarp_rnic::memory::MemoryError;
use iwarp_rnic::qp::CreateError;
use iwarp_rnic::receive_queue::SrqError;
use iwarp_rnic::{AllocError, PostError};
use std::sync::Arc;
use std::{fmt, io};

/// Result type of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of range or contradicts another one; the text says which (EINVAL).
    InvalidArgument(&'static str),
    /// A work request was not accepted.
    Post(PostError),
    /// A registration, bind or invalidation was refused.
    Memory(MemoryError),
    /// The range is not mapped in this process with the required access (EFAULT).
    BadAddress,
    /// No memory for a new object (ENOMEM).
    OutOfMemory,
    /// The object is still used by another one (EBUSY).
    Busy,
    /// The object is in the wrong state for this call (EINVAL); the text says what the call
    /// requires.
    InvalidState(&'static str),
    /// No device has this address or name (ENODEV).
    NoDevice,
    /// The device does not support this (EOPNOTSUPP).
    Unsupported(&'static str),
    /// The peer rejected the connection; contains its private data, which may be empty
    /// (ECONNREFUSED).
    Rejected(Vec<u8>),
    /// The peer did not answer in time (ETIMEDOUT).
    TimedOut(&'static str),
    /// The peer does not speak MPA, or violates it (EPROTO).
    Handshake(String),
    /// The connection or its queue pair has failed; the text says why (ECONNRESET).
    ConnectionLost(String),
    /// A request of a [`connection`](crate::connection) is invalid or does not fit its queue;
    /// nothing was posted (EINVAL).
    Refused(Refusal),
    /// A request of a [`connection`](crate::connection) was posted and failed (EIO).
    Operation(OperationError),
    /// The connection was closed gracefully by either side (ENOTCONN).
    Closed,
    /// A completion queue overflowed. Completions are lost, and its queue pairs are in the error
    /// state (EOVERFLOW).
    CompletionQueueOverflow,
    /// Nothing is ready, and the call does not block (EAGAIN).
    WouldBlock,
    /// Memory of a file or of huge pages cannot be mapped, or cannot be accessed any more.
    Map(MapError),
    /// An error of the operating system.
    Io(Arc<io::Error>),
}

impl Error {
    /// Returns the errno that the verbs and rdma_cm functions report for this error.
    pub fn errno(&self) -> i32 {
        match self {
            Self::InvalidArgument(_) | Self::InvalidState(_) => libc::EINVAL,
            Self::Post(PostError::QueueFull) | Self::OutOfMemory => libc::ENOMEM,
            Self::Post(_) => libc::EINVAL,
            Self::Memory(MemoryError::TableFull | MemoryError::OutOfMemory) => libc::ENOMEM,
            Self::Memory(MemoryError::Busy | MemoryError::InUse) | Self::Busy => libc::EBUSY,
            Self::Memory(_) => libc::EINVAL,
            Self::BadAddress => libc::EFAULT,
            Self::NoDevice => libc::ENODEV,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Rejected(_) => libc::ECONNREFUSED,
            Self::TimedOut(_) => libc::ETIMEDOUT,
            Self::Handshake(_) => libc::EPROTO,
            Self::ConnectionLost(_) => libc::ECONNRESET,
            Self::Refused(_) => libc::EINVAL,
            Self::Operation(_) => libc::EIO,
            Self::Closed => libc::ENOTCONN,
            Self::CompletionQueueOverflow => libc::EOVERFLOW,
            Self::WouldBlock => libc::EAGAIN,
            Self::Map(MapError::NoHugePages { .. }) => libc::ENOMEM,
            Self::Map(MapError::NoPage) => libc::EFAULT,
            Self::Map(MapError::NotOpened { .. } | MapError::ReadOnly) => libc::EACCES,
            Self::Map(MapError::NoSuchHugePage { .. } | MapError::Unguarded) => libc::EOPNOTSUPP,
            Self::Map(_) => libc::EINVAL,
            Self::Io(e) => e.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(what) => write!(f, "invalid argument: {what}"),
            Self::Post(e) => write!(f, "work request not taken: {e}"),
            Self::Memory(e) => write!(f, "memory registration: {e}"),
            Self::BadAddress => {
                f.write_str("the range is not mapped in this process with the access asked for")
            }
            Self::OutOfMemory => {
                f.write_str("out of memory: free objects or ask for smaller queues")
            }
            Self::Busy => f.write_str("still in use: destroy what depends on it first"),
            Self::InvalidState(what) => write!(f, "wrong state: {what}"),
            Self::NoDevice => {
                f.write_str("no device has this address or name: `iwarp devices` lists them")
            }
            Self::Unsupported(what) => write!(f, "not supported: {what}"),
            Self::Rejected(data) if data.is_empty() => {
                f.write_str("the peer refused the connection")
            }
            Self::Rejected(data) => write!(
                f,
                "the peer refused the connection ({} octets of private data)",
                data.len()
            ),
            Self::TimedOut(what) => write!(f, "timed out: {what}"),
            Self::Handshake(what) => write!(f, "connection set-up failed: {what}"),
            Self::ConnectionLost(what) => write!(f, "connection lost: {what}"),
            Self::Refused(e) => e.fmt(f),
            Self::Operation(e) => e.fmt(f),
            Self::Closed => f.write_str("the connection was closed"),
            Self::CompletionQueueOverflow => {
                f.write_str("completion queue overflow: poll faster or create it larger")
            }
            Self::WouldBlock => f.write_str("nothing is ready"),
            Self::Map(e) => e.fmt(f),
            Self::Io(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Post(e) => Some(e),
            Self::Refused(e) => Some(e),
            Self::Operation(e) => Some(e),
            Self::Memory(e) => Some(e),
            Self::Map(e) => Some(e),
            Self::Io(e) => Some(&**e),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(e: io::Error) -> Self {
        Self::Io(Arc::new(e))
    }
}

impl From<NetError> for Error {
    fn from(e: NetError) -> Self {
        Self::from(io::Error::from(e))
    }
}

impl From<PostError> for Error {
    fn from(e: PostError) -> Self {
        Self::Post(e)
    }
}

impl From<MemoryError> for Error {
    fn from(e: MemoryError) -> Self {
        Self::Memory(e)
    }
}

impl From<AllocError> for Error {
    fn from(_: AllocError) -> Self {
        Self::OutOfMemory
    }
}

impl From<CreateError> for Error {
    fn from(e: CreateError) -> Self {
        match e {
            CreateError::Invalid => {
                Self::InvalidArgument("a queue size is above the device's limit")
            }
            CreateError::OutOfMemory => Self::OutOfMemory,
        }
    }
}

impl From<CqSizeError> for Error {
    fn from(e: CqSizeError) -> Self {
        match e {
            CqSizeError::Invalid => Self::InvalidArgument(
                "completion queue size: 1 to 4194304, and not below what it holds",
            ),
            CqSizeError::OutOfMemory => Self::OutOfMemory,
        }
    }
}

impl From<SrqError> for Error {
    fn from(e: SrqError) -> Self {
        match e {
            SrqError::Invalid => {
                Self::InvalidArgument("shared receive queue size or limit out of range")
            }
            SrqError::OutOfMemory => Self::OutOfMemory,
        }
    }
}

impl End {
    /// Returns success if the end was graceful.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`] with the cause.
    pub fn into_result(self) -> Result<()> {
        match self.is_graceful() {
            true => Ok(()),
            false => Err(Error::ConnectionLost(self.to_string())),
        }
    }
}

/// Part of a list of work requests was not accepted. Those before the rejected one were. `?`
/// converts it to an [`Error`].
#[derive(Debug)]
pub struct PostFailed {
    accepted: usize,
    error: Error,
}

impl PostFailed {
    pub(crate) fn new(accepted: usize, error: impl Into<Error>) -> Self {
        Self {
            accepted,
            error: error.into(),
        }
    }

    /// Returns how many requests were accepted, which is also the index of the rejected one.
    pub const fn accepted(&self) -> usize {
        self.accepted
    }

    /// Returns the cause, an [`Error::Post`].
    pub const fn error(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for PostFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { accepted, error } = self;
        write!(f, "work request {accepted} of the list: {error}")
    }
}

impl std::error::Error for PostFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<PostFailed> for Error {
    fn from(failed: PostFailed) -> Self {
        failed.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn errors_have_their_errno() {
        let of_system = |errno| Error::from(io::Error::from_raw_os_error(errno));
        for (error, errno) in [
            (Error::Post(PostError::QueueFull), libc::ENOMEM),
            (Error::Post(PostError::InvalidState), libc::EINVAL),
            (Error::OutOfMemory, libc::ENOMEM),
            (Error::Memory(MemoryError::TableFull), libc::ENOMEM),
            (Error::Memory(MemoryError::Busy), libc::EBUSY),
            (Error::Rejected(Vec::new()), libc::ECONNREFUSED),
            (Error::Map(MapError::NoPage), libc::EFAULT),
            (Error::Map(MapError::ReadOnly), libc::EACCES),
            (Error::Map(MapError::Unguarded), libc::EOPNOTSUPP),
            (of_system(libc::EMFILE), libc::EMFILE),
            (io::Error::other("no number").into(), libc::EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
    }

    #[test]
    fn errors_have_their_source() {
        for error in [
            Error::Post(PostError::QueueFull),
            Error::Refused(Refusal::Post(PostError::QueueFull)),
            Error::Memory(MemoryError::Busy),
            Error::Map(MapError::NoPage),
            io::Error::other("io").into(),
        ] {
            assert!(error.source().is_some(), "{error:?}");
        }
        assert!(Error::Closed.source().is_none());
    }

    #[test]
    fn only_graceful_ends_are_results() {
        for end in [End::Closed, End::ClosedByPeer] {
            assert!(end.into_result().is_ok(), "{end}");
        }
        for end in [End::Reset, End::Vanished, End::Failed(libc::EIO)] {
            let lost = end.into_result();
            assert!(matches!(lost, Err(Error::ConnectionLost(why)) if why == end.to_string()));
        }
    }

    #[test]
    fn failed_post_has_its_position() {
        let failed = PostFailed::new(3, PostError::QueueFull);
        assert_eq!(failed.accepted(), 3);
        assert!(failed.to_string().starts_with("work request 3 "));
        assert!(failed.source().is_some());
        assert_eq!(Error::from(failed).errno(), libc::ENOMEM);
    }
}
