//! Functions that provider libraries (libmlx5, libefa) import. They exist only so that these
//! libraries can be loaded.

use crate::border::guard::{UNSUPPORTED, set_errno};
use std::ffi::{c_char, c_int, c_void};

/// Ignores a provider: no device comes from providers.
pub(crate) unsafe extern "C" fn verbs_register_driver(_: *const c_void) {}

pub(crate) unsafe extern "C" fn verbs_log(_: *mut c_void, _level: u32, _format: *const c_char) {}

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

pub(crate) unsafe extern "C" fn minus_one() -> c_int {
    set_errno(UNSUPPORTED);
    -1
}
