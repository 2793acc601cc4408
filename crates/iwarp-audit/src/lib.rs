//! `LD_AUDIT=libiwarp_audit.so`: a program gets iwarp's libraries however it asks for `libibverbs`
//! or `librdmacm`.
//!
//! `LD_LIBRARY_PATH` serves most programs, but `DT_RPATH` and absolute paths take precedence over
//! it, and it does not help a program that asks for another name: `libibverbs.so` without a
//! version, or the renamed copies in Python wheels. An audit library is asked about every name
//! before glibc's loader looks for it (`rtld-audit(7)`). Ours answers with the path of iwarp's
//! library for the names of these two libraries, and leaves all others alone. It is not called when
//! functions are called.
//!
//! `build.rs` compiles the shared library; [`LIBRARY`] has its octets.

/// The shared library. It has no dependencies, so it can be written to any file that the loader can
/// read.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libiwarp_audit.so"));

/// The file name of the library. The library looks for this name in `LD_AUDIT`.
pub const FILE_NAME: &str = "libiwarp_audit.so";

/// The variable that names the file to load, if it is not `libibverbs.so.1` in the library's
/// folder.
pub const TARGET_VARIABLE: &str = "IWARP_AUDIT";

/// The variable with the path of the library that is preloaded into iproute2's `rdma`.
pub const PRELOAD_VARIABLE: &str = "IWARP_NETLINK_PRELOAD";

#[cfg(test)]
#[expect(dead_code, reason = "the tests of `iwarp` run it")]
mod preload;
#[cfg(test)]
mod redirect;

#[cfg(test)]
mod redirect_tests;
