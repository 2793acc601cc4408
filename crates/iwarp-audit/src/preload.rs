//! Loads the preload library that answers netlink requests about our devices into iproute2's
//! `rdma`.
//!
//! If the library were in `LD_PRELOAD` of every process, programs with AddressSanitizer would not
//! start, because its runtime must be the first library. Only `rdma` needs the library, but scripts
//! start `rdma` by various paths and in various environments. So if the program's name is `rdma`,
//! the process executes its own file again, with the library in `LD_PRELOAD`, before any code of
//! the program has run.
//!
//! Invariant of the `unsafe` code: it runs once, in the constructor of the audit library, while the
//! process has only one thread. The arguments and the environment are lists of C strings that end
//! with a null pointer.

use crate::redirect::{Variables, equals, octets, split_path, without};
use core::cell::UnsafeCell;
use core::ffi::c_char;
use core::ptr;

const PROGRAM: &[u8] = b"rdma";
const LIBRARY_VARIABLE: &[u8] = b"IWARP_NETLINK_PRELOAD";
/// The loader's variable with the libraries to load, separated by colons or spaces.
const LIST_VARIABLE: &[u8] = b"LD_PRELOAD";
/// The maximum number of variables. In a larger environment, the program is not executed again.
const VARIABLES_MAX: usize = 2048;
/// The maximum length of the new `LD_PRELOAD` entry, with the final zero.
const TEXT_MAX: usize = 16384;

struct Buffers {
    text: UnsafeCell<[u8; TEXT_MAX]>,
    list: UnsafeCell<[*const c_char; VARIABLES_MAX]>,
}

// SAFETY: only one thread uses the buffers (invariant at the head of the file).
unsafe impl Sync for Buffers {}

static BUFFERS: Buffers = Buffers {
    text: UnsafeCell::new([0; TEXT_MAX]),
    list: UnsafeCell::new([ptr::null(); VARIABLES_MAX]),
};

/// Executes the program again if it is `rdma` and the library is not preloaded. Returns if it is
/// another program, if the library is already preloaded, or if the program cannot be executed.
///
/// # Safety
/// The invariant at the head of the file holds.
pub(crate) unsafe fn execute_again(
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if arguments.is_null() || environment.is_null() || (*arguments).is_null() {
            return;
        }
        if !equals(split_path(octets(*arguments)).1, PROGRAM) {
            return;
        }
        let variables = Variables::new(environment);
        let library = variables.value(LIBRARY_VARIABLE);
        let others = variables.value(LIST_VARIABLE);
        // If the library is the first entry, the program was already executed again.
        if library.is_empty() || without(others, library).is_some() {
            return;
        }
        let parts: [&[u8]; 5] = [LIST_VARIABLE, b"=", library, b":", others];
        let used = if others.is_empty() { 3 } else { 5 };
        let text = &mut *BUFFERS.text.get();
        let list = &mut *BUFFERS.list.get();
        if concatenate(text, &parts, used)
            && copy_environment(list, environment, text.as_ptr().cast())
        {
            execute(c"/proc/self/exe".as_ptr(), arguments, list.as_ptr());
        }
    }
}

/// Concatenates the first `used` parts to a C string. Returns `false` if it is too long.
fn concatenate(text: &mut [u8; TEXT_MAX], parts: &[&[u8]; 5], used: usize) -> bool {
    let mut len = 0;
    for (i, part) in parts.iter().enumerate() {
        if i >= used {
            break;
        }
        for octet in *part {
            let Some(place) = text.get_mut(len) else {
                return false;
            };
            *place = *octet;
            len += 1;
        }
    }
    let Some(end) = text.get_mut(len) else {
        return false;
    };
    *end = 0;
    true
}

/// Copies the environment, with the entry `first` instead of the old `LD_PRELOAD`. Returns `false`
/// if there are too many variables.
///
/// # Safety
/// `environment` is a list of C strings that ends with a null pointer.
unsafe fn copy_environment(
    list: &mut [*const c_char; VARIABLES_MAX],
    mut environment: *const *const c_char,
    first: *const c_char,
) -> bool {
    let mut len = 0;
    let mut entry = first;
    loop {
        let Some(place) = list.get_mut(len) else {
            return false;
        };
        *place = entry;
        if entry.is_null() {
            return true;
        }
        len += 1;
        loop {
            // SAFETY: guaranteed by the caller. The loop ends after the null pointer.
            unsafe {
                entry = *environment;
                environment = environment.add(1);
                if entry.is_null()
                    || !matches!(without(octets(entry), LIST_VARIABLE), Some([b'=', ..]))
                {
                    break;
                }
            }
        }
    }
}

/// Calls the kernel's `execve`. Returns if it fails.
///
/// # Safety
/// `path` is a C string. The others are lists of C strings that end with a null pointer.
#[cfg(target_arch = "x86_64")]
unsafe fn execute(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    const EXECVE: usize = 59;
    // SAFETY: the kernel only reads the memory that the arguments point to. It changes no registers
    // except `rax`, `rcx` and `r11`.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") EXECVE => _,
            in("rdi") path,
            in("rsi") arguments,
            in("rdx") environment,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
}

/// Calls the kernel's `execve`. Returns if it fails.
///
/// # Safety
/// `path` is a C string. The others are lists of C strings that end with a null pointer.
#[cfg(target_arch = "aarch64")]
unsafe fn execute(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    const EXECVE: usize = 221;
    // SAFETY: the kernel only reads the memory that the arguments point to. It changes no register
    // except `x0`.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") EXECVE,
            inlateout("x0") path => _,
            in("x1") arguments,
            in("x2") environment,
            options(nostack),
        );
    }
}

/// Does nothing: on other processors, `rdma` only shows the kernel's devices.
///
/// # Safety
/// There are no requirements.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn execute(_: *const c_char, _: *const *const c_char, _: *const *const c_char) {}
