//! Loads a library into iproute2's `rdma` that no program asks for: the preload library that
//! answers netlink requests about our devices.
//!
//! A library in `LD_PRELOAD` of every process would keep programs with AddressSanitizer from
//! starting, whose runtime has to be the first library. Only `rdma` needs this one, but scripts
//! start it by any path and in any environment. So if the program's name is `rdma`, the process
//! executes its own file again, with the library in `LD_PRELOAD`. That happens before any code of
//! the program has run.
//!
//! Invariant of the `unsafe` code: it runs once, in the constructor of the audit library, while the
//! process has one thread; arguments and environment are lists of C strings that end with null.

use crate::redirect::{Variables, is, octets, split, without};
use core::cell::UnsafeCell;
use core::ffi::c_char;
use core::ptr;

/// The program that needs the library.
const PROGRAM: &[u8] = b"rdma";
/// The variable with the path of the library.
const LIBRARY_VARIABLE: &[u8] = b"IWARP_NETLINK_PRELOAD";
/// The loader's variable with the libraries to load, separated by colons or spaces.
const LIST_VARIABLE: &[u8] = b"LD_PRELOAD";
/// The most variables that are passed on. In a larger environment nothing is done.
const VARIABLES_MAX: usize = 2048;
/// Room for the new value of `LD_PRELOAD`.
const TEXT_MAX: usize = 16384;

struct Room {
    text: UnsafeCell<[u8; TEXT_MAX]>,
    list: UnsafeCell<[*const c_char; VARIABLES_MAX]>,
}

// SAFETY: the file's invariant.
unsafe impl Sync for Room {}

static ROOM: Room = Room {
    text: UnsafeCell::new([0; TEXT_MAX]),
    list: UnsafeCell::new([ptr::null(); VARIABLES_MAX]),
};

/// Executes the program again if it needs the library and does not have it. Returns in all other
/// cases, and if the kernel refuses.
///
/// # Safety
/// The file's invariant.
pub(crate) unsafe fn execute_again(
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    // SAFETY: the file's invariant.
    unsafe {
        if arguments.is_null() || environment.is_null() || (*arguments).is_null() {
            return;
        }
        if !is(split(octets(*arguments)).1, PROGRAM) {
            return;
        }
        let variables = Variables::new(environment);
        let library = variables.value(LIBRARY_VARIABLE);
        let others = variables.value(LIST_VARIABLE);
        // The library comes first, which also ends the repetition.
        if library.is_empty() || without(others, library).is_some() {
            return;
        }
        let parts: [&[u8]; 5] = [LIST_VARIABLE, b"=", library, b":", others];
        let used = if others.is_empty() { 3 } else { 5 };
        let text = &mut *ROOM.text.get();
        let list = &mut *ROOM.list.get();
        if write(text, &parts, used) && copy(list, environment, text.as_ptr().cast()) {
            execute(c"/proc/self/exe".as_ptr(), arguments, list.as_ptr());
        }
    }
}

/// Concatenates parts to a C string. Returns `false` if there is no room.
fn write(text: &mut [u8; TEXT_MAX], parts: &[&[u8]; 5], used: usize) -> bool {
    let mut len = 0;
    for (at, part) in parts.iter().enumerate() {
        if at >= used {
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

/// Copies the environment with `first` in place of the old `LD_PRELOAD`. Returns `false` if there
/// is no room.
///
/// # Safety
/// `environment` is a list of C strings that ends with null.
unsafe fn copy(
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
            // SAFETY: the caller's promise. The loop ends after the null pointer.
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
/// `path` is a C string, and the others are lists of C strings that end with null.
#[cfg(target_arch = "x86_64")]
unsafe fn execute(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    const EXECVE: usize = 59;
    // SAFETY: the kernel reads what the arguments point to. It changes these three registers alone.
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
/// `path` is a C string, and the others are lists of C strings that end with null.
#[cfg(target_arch = "aarch64")]
unsafe fn execute(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    const EXECVE: usize = 221;
    // SAFETY: the kernel reads what the arguments point to, and changes no register but the first.
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

/// On other processors `rdma` shows the kernel's devices.
///
/// # Safety
/// None is needed.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn execute(_: *const c_char, _: *const *const c_char, _: *const *const c_char) {}
