//! Exported functions that use no object: names, rates and files (`misc`), the imports of provider
//! libraries (`providers`), and functions that always fail (`unsupported`). This room uses `border`
//! and `abi`. Only `exports` uses it.

pub(crate) mod misc;
pub(crate) mod providers;
pub(crate) mod unsupported;
