//! Functions that providers' libraries (libmlx5, libefa) import. With these they load, and find no device of theirs.

use crate::border::guard::{UNSUPPORTED, set_errno};
use std::ffi::{c_char, c_int, c_void};

/// Registers a provider. Nothing here asks providers for devices.
pub(crate) unsafe extern "C" fn verbs_register_driver(_: *const c_void) {}

/// Prints messages of providers, of which none is active.
pub(crate) unsafe extern "C" fn verbs_log(_: *mut c_void, _level: u32, _format: *const c_char) {}

/// Sends a command to the kernel's driver: there is none.
pub(crate) unsafe extern "C" fn command() -> c_int {
    set_errno(UNSUPPORTED);
    libc::EOPNOTSUPP
}

pub(crate) unsafe extern "C" fn pointer() -> *mut c_void {
    set_errno(UNSUPPORTED);
    std::ptr::null_mut()
}

pub(crate) unsafe extern "C" fn nothing() {}

pub(crate) unsafe extern "C" fn zero() -> c_int {
    0
}

/// Reads from a provider's device in sysfs, of which there is none.
pub(crate) unsafe extern "C" fn minus_one() -> c_int {
    set_errno(UNSUPPORTED);
    -1
}
