//! Exported functions that touch no object: `misc` has names, rates and files, `providers` what
//! providers' libraries import, `unsupported` what this device does not have. This room uses
//! `border` and `abi`. Only `exports` uses it.

pub(crate) mod misc;
pub(crate) mod providers;
pub(crate) mod unsupported;
