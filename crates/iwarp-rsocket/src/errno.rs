//! Errors as the `errno` values that the socket manual pages document.

use iwarp::runtime::PostFailed;
use std::ffi::c_int;
use std::fmt;
use std::io;

/// An `errno`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub c_int);

/// Result of this crate's functions.
pub type Result<T, E = Errno> = std::result::Result<T, E>;

#[allow(missing_docs)]
impl Errno {
    pub const AGAIN: Self = Self(libc::EAGAIN);
    pub const ALREADY: Self = Self(libc::EALREADY);
    pub const BADF: Self = Self(libc::EBADF);
    pub const CONNREFUSED: Self = Self(libc::ECONNREFUSED);
    pub const CONNRESET: Self = Self(libc::ECONNRESET);
    pub const INPROGRESS: Self = Self(libc::EINPROGRESS);
    pub const INTR: Self = Self(libc::EINTR);
    pub const INVAL: Self = Self(libc::EINVAL);
    pub const IO: Self = Self(libc::EIO);
    pub const ISCONN: Self = Self(libc::EISCONN);
    pub const NOMEM: Self = Self(libc::ENOMEM);
    pub const NOPROTOOPT: Self = Self(libc::ENOPROTOOPT);
    pub const NOTCONN: Self = Self(libc::ENOTCONN);
    pub const NOTSUP: Self = Self(libc::EOPNOTSUPP);
    pub const PIPE: Self = Self(libc::EPIPE);
    pub const PROTO: Self = Self(libc::EPROTO);
    pub const TIMEDOUT: Self = Self(libc::ETIMEDOUT);
}

impl Errno {
    pub(crate) fn set(self) {
        // SAFETY: the C library returns a valid address for each thread.
        unsafe { *libc::__errno_location() = self.0 };
    }

    pub(crate) fn last() -> Self {
        Self::from(io::Error::last_os_error())
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<iwarp::Error> for Errno {
    fn from(e: iwarp::Error) -> Self {
        Self(e.errno())
    }
}

impl From<PostFailed> for Errno {
    fn from(failed: PostFailed) -> Self {
        Self(failed.error().errno())
    }
}

impl From<io::Error> for Errno {
    fn from(e: io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(e: rustix::io::Errno) -> Self {
        Self(e.raw_os_error())
    }
}

impl From<Errno> for io::Error {
    fn from(e: Errno) -> Self {
        Self::from_raw_os_error(e.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_keep_the_number() {
        let system = io::Error::from_raw_os_error(libc::EMFILE);
        assert_eq!(Errno::from(system), Errno(libc::EMFILE));
        assert_eq!(Errno::from(io::Error::other("none")), Errno::IO);
        assert_eq!(Errno::from(iwarp::Error::NoDevice), Errno(libc::ENODEV));
        assert_eq!(Errno::from(rustix::io::Errno::PIPE), Errno::PIPE);
        let back = io::Error::from(Errno::PIPE);
        assert_eq!(back.raw_os_error(), Some(libc::EPIPE));
        Errno::PROTO.set();
        assert_eq!(Errno::last(), Errno::PROTO);
    }
}
