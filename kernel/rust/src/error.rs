//! The kernel's error numbers, as the `rk_*` functions return them.

use core::ffi::c_int;

use iwarp_rnic::PostError;
use iwarp_rnic::memory::MemoryError;
use iwarp_rnic::qp::CreateError;

/// More bytes are needed.
pub const EAGAIN: c_int = -11;
/// No memory, or a full queue.
pub const ENOMEM: c_int = -12;
/// A plan refers to memory that is no longer registered.
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
pub(crate) fn errno_or_zero<T, E: ToErrno>(result: Result<T, E>) -> c_int {
    result.map_or_else(|error| error.errno(), |_| 0)
}

/// An error that corresponds to an error number.
pub(crate) trait ToErrno {
    fn errno(&self) -> c_int;
}

impl ToErrno for PostError {
    fn errno(&self) -> c_int {
        match self {
            Self::QueueFull => ENOMEM,
            _ => EINVAL,
        }
    }
}

impl ToErrno for CreateError {
    fn errno(&self) -> c_int {
        match self {
            Self::OutOfMemory => ENOMEM,
            Self::Invalid => EINVAL,
        }
    }
}

impl ToErrno for MemoryError {
    fn errno(&self) -> c_int {
        match self {
            Self::TableFull | Self::OutOfMemory => ENOMEM,
            Self::Busy | Self::InUse => EBUSY,
            _ => EINVAL,
        }
    }
}
