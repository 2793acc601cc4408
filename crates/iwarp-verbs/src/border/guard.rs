//! The border to C: stops panics, disables thread cancellation, and converts every failure to the
//! errno that the manual pages name.
//!
//! There are four kinds of C functions: those that return 0 or a positive errno ([`code`]), -1 and
//! set `errno` ([`minus_one`]), or NULL and set `errno` ([`pointer`]), and all others ([`value`]).

use iwarp::runtime::PostFailed;
use iwarp_rsocket::cancel::Uncancelled;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) type Res<T> = Result<T, Errno>;

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

impl From<std::io::Error> for Errno {
    fn from(e: std::io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(libc::EIO))
    }
}

pub(crate) const EINVAL: Errno = Errno(libc::EINVAL);
pub(crate) const EBUSY: Errno = Errno(libc::EBUSY);
pub(crate) const ENOMEM: Errno = Errno(libc::ENOMEM);
pub(crate) const UNSUPPORTED: Errno = Errno(libc::EOPNOTSUPP);

pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() = errno.0 };
}

fn catch_panics<T>(f: impl FnOnce() -> Res<T>) -> Res<T> {
    let _uncancelled = Uncancelled::new();
    catch_unwind(AssertUnwindSafe(f)).unwrap_or(Err(Errno(libc::EIO)))
}

/// Returns 0 or a positive errno. Sets `errno` too, because some programs read it.
#[inline]
pub(crate) fn code(f: impl FnOnce() -> Res<()>) -> c_int {
    match catch_panics(f) {
        Ok(()) => 0,
        Err(e) => {
            set_errno(e);
            e.0
        }
    }
}

pub(crate) fn minus_one(f: impl FnOnce() -> Res<c_int>) -> c_int {
    catch_panics(f).unwrap_or_else(|e| {
        set_errno(e);
        -1
    })
}

pub(crate) fn pointer<T>(f: impl FnOnce() -> Res<*mut T>) -> *mut T {
    catch_panics(f).unwrap_or_else(|e| {
        set_errno(e);
        std::ptr::null_mut()
    })
}

/// Returns a value, or `fallback` if the function panics.
pub(crate) fn value<T>(fallback: T, f: impl FnOnce() -> T) -> T {
    let _uncancelled = Uncancelled::new();
    catch_unwind(AssertUnwindSafe(f)).unwrap_or(fallback)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let got = code(|| panic!("inside"));
        let pointer = pointer::<u8>(|| panic!("inside"));
        let errno = std::io::Error::last_os_error().raw_os_error();
        std::panic::set_hook(hook);
        assert_eq!(got, libc::EIO);
        assert!(pointer.is_null());
        assert_eq!(errno, Some(libc::EIO));
    }
}
