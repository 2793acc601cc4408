//! `LD_AUDIT=libiwarp_audit.so`: a program that requests `libibverbs` or `librdmacm` gets iwarp's
//! libraries.
//!
//! `LD_LIBRARY_PATH` is sufficient for most programs. But `DT_RPATH` and absolute paths take
//! precedence over it, and it has no effect if a program requests another name: `libibverbs.so`
//! without a version, or a renamed copy in a Python wheel. glibc's loader passes every name to an
//! audit library before it searches for it (`rtld-audit(7)`). This library returns the path of
//! iwarp's library for the names of the two libraries, and all other names unchanged. It costs
//! nothing when functions are called.
//!
//! `build.rs` compiles the shared library; [`LIBRARY`] contains its octets.

/// The octets of the shared library. It has no dependencies, so it can be written to any file that
/// the loader can read.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libiwarp_audit.so"));

/// The file name of the library, by which the library finds its own path in `LD_AUDIT`.
pub const FILE_NAME: &str = "libiwarp_audit.so";

/// The variable with the path of the library to load instead. The default is `libibverbs.so.1` in
/// the directory of the audit library.
pub const TARGET_VARIABLE: &str = "IWARP_AUDIT";

/// The variable with the path of the library that is preloaded into iproute2's `rdma`.
pub const PRELOAD_VARIABLE: &str = "IWARP_NETLINK_PRELOAD";

#[cfg(test)]
#[expect(dead_code, reason = "only the tests of `iwarp-cli` execute it")]
mod preload;
#[cfg(test)]
mod redirect;

#[cfg(test)]
mod redirect_tests;
