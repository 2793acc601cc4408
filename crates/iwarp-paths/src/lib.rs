//! `LD_PRELOAD=libiwarp_paths.so`: a program finds our RDMA devices below `/sys/class` and `/dev`,
//! although the kernel has none.
//!
//! The library interposes the C library's functions that have a path argument. Paths below
//! `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and `/dev/infiniband` are redirected to
//! the directory in the environment variable `IWARP_PATHS`, which `iwarp run` fills. Other paths
//! are passed on unchanged. Netlink sockets of the family RDMA are served by a process of the
//! command `iwarp` (`netlink.rs`). `iwarp run` prefers mounts if it may use them, because these
//! also apply to statically linked programs and direct system calls.
//!
//! Invariant of the `unsafe` code: paths are C strings, as the functions' manual pages require. The
//! pointer that `dlsym` returns for a name is the function of that name, with the type in its
//! manual page. No function allocates memory, because an allocator may open files when it starts.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contracts are those of the C library's functions"
)]
#![allow(
    missing_docs,
    reason = "the manual pages of the C library describe these functions"
)]

mod netlink;

pub use netlink::{bind, getsockname, recvfrom, recvmsg, sendmsg, sendto, setsockopt, socket};

use libc::{c_char, c_int, c_uint, c_void, mode_t, size_t, ssize_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The directories that are redirected.
const DIRECTORIES: [&[u8]; 3] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/dev/infiniband",
];
/// The variable with the path of the directory that contains the redirected files.
const VARIABLE: &CStr = c"IWARP_PATHS";

struct PathBuffer([u8; libc::PATH_MAX as usize]);

impl PathBuffer {
    const fn new() -> Self {
        Self([0; libc::PATH_MAX as usize])
    }

    /// Returns the path to use instead of `path`, which is below one of [`DIRECTORIES`].
    ///
    /// # Safety
    /// `path` is a C string.
    unsafe fn redirected(&mut self, path: *const c_char) -> *const c_char {
        // SAFETY: guaranteed by the caller.
        let octets = unsafe { CStr::from_ptr(path) }.to_bytes();
        // SAFETY: the name is a C string.
        let root = unsafe { libc::getenv(VARIABLE.as_ptr()) };
        if root.is_null() {
            return path;
        }
        // SAFETY: a value of the environment is a C string.
        let root = unsafe { CStr::from_ptr(root) }.to_bytes();
        match self.joined(root, octets) {
            Some(joined) => joined.as_ptr(),
            None => path,
        }
    }

    /// Writes the redirected path. Returns `None` if `root` is empty, or if the path is too long.
    fn joined(&mut self, root: &[u8], path: &[u8]) -> Option<&CStr> {
        let len = root.len() + path.len();
        if root.is_empty() || len >= self.0.len() {
            return None;
        }
        self.0[..root.len()].copy_from_slice(root);
        self.0[root.len()..len].copy_from_slice(path);
        self.0[len] = 0;
        CStr::from_bytes_with_nul(&self.0[..=len]).ok()
    }
}

/// Returns `true` if a path is redirected.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn is_redirected(path: *const c_char) -> bool {
    // SAFETY: guaranteed by the caller.
    !path.is_null() && is_ours(unsafe { CStr::from_ptr(path) }.to_bytes())
}

/// Returns `true` for the redirected directories and their contents.
fn is_ours(path: &[u8]) -> bool {
    DIRECTORIES.iter().any(|directory| {
        let rest = path.strip_prefix(*directory);
        rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    })
}

/// Returns the C library's function with this name, or null. Stores it in `cache` for later calls.
fn next(cache: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = cache.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is valid. RTLD_NEXT searches the libraries after this one.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    cache.store(found, Ordering::Release);
    found
}

/// Sets `errno` to `ENOSYS`, and returns `failed`.
fn not_implemented<T>(failed: T) -> T {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    failed
}

/// Defines interposed functions of the C library. For each: the name, the arguments before the path
/// and after it, and the result in case of failure.
macro_rules! functions {
    ($($name:ident, $text:literal,
       ($($first:ident: $f:ty),*) path ($($arg:ident: $t:ty),*) -> $r:ty, $failed:expr;)*) => { $(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($first: $f,)* path: *const c_char $(, $arg: $t)*) -> $r {
            static CACHE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let function = next(&CACHE, $text);
            if function.is_null() {
                return not_implemented($failed);
            }
            type Function = unsafe extern "C" fn($($f,)* *const c_char $(, $t)*) -> $r;
            // SAFETY: the function has this type (invariant at the head of the file).
            let function = unsafe { std::mem::transmute::<*mut c_void, Function>(function) };
            // SAFETY: guaranteed by the caller.
            if unsafe { !is_redirected(path) } {
                // SAFETY: guaranteed by the caller.
                return unsafe { function($($first,)* path $(, $arg)*) };
            }
            let mut buffer = PathBuffer::new();
            // SAFETY: guaranteed by the caller.
            unsafe { function($($first,)* buffer.redirected(path) $(, $arg)*) }
        }
    )* };
}

// In C, the mode of `open` is a variadic argument, which is passed in the same register.
functions! {
    access, c"access", () path (mode: c_int) -> c_int, -1;
    euidaccess, c"euidaccess", () path (mode: c_int) -> c_int, -1;
    eaccess, c"eaccess", () path (mode: c_int) -> c_int, -1;
    faccessat, c"faccessat", (dir: c_int) path (mode: c_int, flags: c_int) -> c_int, -1;
    open, c"open", () path (flags: c_int, mode: mode_t) -> c_int, -1;
    open64, c"open64", () path (flags: c_int, mode: mode_t) -> c_int, -1;
    __open_2, c"__open_2", () path (flags: c_int) -> c_int, -1;
    __open64_2, c"__open64_2", () path (flags: c_int) -> c_int, -1;
    openat, c"openat", (dir: c_int) path (flags: c_int, mode: mode_t) -> c_int, -1;
    openat64, c"openat64", (dir: c_int) path (flags: c_int, mode: mode_t) -> c_int, -1;
    __openat_2, c"__openat_2", (dir: c_int) path (flags: c_int) -> c_int, -1;
    __openat64_2, c"__openat64_2", (dir: c_int) path (flags: c_int) -> c_int, -1;
    fopen, c"fopen", () path (mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    fopen64, c"fopen64", () path (mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    opendir, c"opendir", () path () -> *mut c_void, std::ptr::null_mut();
    scandir, c"scandir", ()
        path (list: *mut c_void, filter: *mut c_void, compare: *mut c_void) -> c_int, -1;
    scandir64, c"scandir64", ()
        path (list: *mut c_void, filter: *mut c_void, compare: *mut c_void) -> c_int, -1;
    stat, c"stat", () path (to: *mut c_void) -> c_int, -1;
    stat64, c"stat64", () path (to: *mut c_void) -> c_int, -1;
    lstat, c"lstat", () path (to: *mut c_void) -> c_int, -1;
    lstat64, c"lstat64", () path (to: *mut c_void) -> c_int, -1;
    fstatat, c"fstatat", (dir: c_int) path (to: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64, c"fstatat64", (dir: c_int) path (to: *mut c_void, flags: c_int) -> c_int, -1;
    statx, c"statx", (dir: c_int) path (flags: c_int, mask: c_uint, to: *mut c_void) -> c_int, -1;
    __xstat, c"__xstat", (version: c_int) path (to: *mut c_void) -> c_int, -1;
    __xstat64, c"__xstat64", (version: c_int) path (to: *mut c_void) -> c_int, -1;
    __lxstat, c"__lxstat", (version: c_int) path (to: *mut c_void) -> c_int, -1;
    __lxstat64, c"__lxstat64", (version: c_int) path (to: *mut c_void) -> c_int, -1;
    readlink, c"readlink", () path (to: *mut c_char, room: size_t) -> ssize_t, -1;
    readlinkat, c"readlinkat", (dir: c_int) path (to: *mut c_char, room: size_t) -> ssize_t, -1;
    realpath, c"realpath", () path (to: *mut c_char) -> *mut c_char, std::ptr::null_mut();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_device_directories_are_redirected() {
        for ours in [
            "/sys/class/infiniband",
            "/sys/class/infiniband/",
            "/sys/class/infiniband/iwarp0/node_type",
            "/sys/class/infiniband_verbs/uverbs0",
            "/dev/infiniband/rdma_cm",
        ] {
            assert!(is_ours(ours.as_bytes()), "{ours}");
        }
        for other in [
            "",
            "/",
            "/dev",
            "/dev/infiniband2",
            "/sys/class/infiniband_mad",
            "dev/infiniband",
        ] {
            assert!(!is_ours(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn too_long_path_is_not_joined() {
        let mut buffer = PathBuffer::new();
        let joined = buffer.joined(b"/tmp/x", b"/dev/infiniband");
        assert_eq!(joined, Some(c"/tmp/x/dev/infiniband"));
        assert_eq!(buffer.joined(b"", b"/dev/infiniband"), None);
        let long = vec![b'x'; libc::PATH_MAX as usize - 15];
        assert_eq!(buffer.joined(&long, b"/dev/infiniband"), None);
        assert!(buffer.joined(&long[1..], b"/dev/infiniband").is_some());
    }
}
