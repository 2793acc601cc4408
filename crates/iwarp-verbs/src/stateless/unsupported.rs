//! Functions that this library does not support: they fail with EOPNOTSUPP.

use crate::border::guard::{UNSUPPORTED, code, minus_one, set_errno};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

pub(crate) unsafe extern "C" fn unsupported_pointer() -> *mut c_void {
    set_errno(UNSUPPORTED);
    null_mut()
}

pub(crate) unsafe extern "C" fn unsupported_code() -> c_int {
    code(|| Err(UNSUPPORTED))
}

pub(crate) unsafe extern "C" fn unsupported_minus_one() -> c_int {
    minus_one(|| Err(UNSUPPORTED))
}
