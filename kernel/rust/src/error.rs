//! The kernel's error numbers that C gets.

use core::ffi::c_int;

use iwarp_rnic::PostError;
use iwarp_rnic::memory::MemoryError;
use iwarp_rnic::qp::CreateError;

/// More bytes are needed.
pub const EAGAIN: c_int = -11;
/// No memory, or a full queue.
pub const ENOMEM: c_int = -12;
/// A plan names memory that is no longer registered.
pub const EFAULT: c_int = -14;
/// The region is in use.
pub const EBUSY: c_int = -16;
/// An argument is not valid, or the object is in a state that does not allow the call.
pub const EINVAL: c_int = -22;
/// The peer has ended the connection.
pub const ECONNRESET: c_int = -104;
/// A step took too long.
pub const ETIMEDOUT: c_int = -110;
/// The peer's program has refused a connection.
pub const ECONNREFUSED: c_int = -111;
/// The stream has failed.
pub const EPROTO: c_int = -71;

/// Returns 0 or the error number.
pub(crate) fn code<T, E: Number>(result: Result<T, E>) -> c_int {
    result.map_or_else(|error| error.number(), |_| 0)
}

/// An error that corresponds to an error number.
pub(crate) trait Number {
    fn number(&self) -> c_int;
}

impl Number for PostError {
    fn number(&self) -> c_int {
        match self {
            Self::QueueFull => ENOMEM,
            _ => EINVAL,
        }
    }
}

impl Number for CreateError {
    fn number(&self) -> c_int {
        match self {
            Self::OutOfMemory => ENOMEM,
            Self::Invalid => EINVAL,
        }
    }
}

impl Number for MemoryError {
    fn number(&self) -> c_int {
        match self {
            Self::TableFull | Self::OutOfMemory => ENOMEM,
            Self::Busy | Self::InUse => EBUSY,
            _ => EINVAL,
        }
    }
}
