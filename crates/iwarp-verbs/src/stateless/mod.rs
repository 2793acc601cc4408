//! Exported functions that use no object: `misc` has names, rates and files, `providers` the
//! imports of provider libraries, `unsupported` the failures. This room uses `border` and `abi`.
//! Only `exports` uses it.

pub(crate) mod misc;
pub(crate) mod providers;
pub(crate) mod unsupported;
