//! The shared library, as `build.rs` compiles it: the functions that the dynamic loader looks for.
//!
//! The loader calls them with its lock held, from `main`'s thread or from a thread in `dlopen`.
//! There is neither a standard library nor a C library in this process's audit namespace, so
//! nothing here may allocate, panic or call out. See `rtld-audit(7)`.
#![no_std]
// Otherwise the compiler replaces loops by calls of the C library's `memcpy` and `strlen`.
#![no_builtins]

mod preload;
mod redirect;

use core::ffi::{c_char, c_int, c_long, c_uint};
use redirect::{LinkMap, State, Variables};

static STATE: State = State::new();

/// Runs when the loader has loaded this library. glibc passes the arguments of `main` to
/// constructors, which is the only way to the environment without the C library.
unsafe extern "C" fn start(
    _count: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    // SAFETY: the loader passes the process's environment, which ends with a null pointer. Nothing
    // else uses the state before the loader calls `la_version`.
    unsafe {
        preload::execute_again(arguments, environment);
        STATE.start(Variables::new(environment));
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// Returns the interface version to use, or 0 if the loader must ignore this library.
#[unsafe(no_mangle)]
extern "C" fn la_version(version: c_uint) -> c_uint {
    STATE.version(version)
}

/// Records in which namespaces the target is loaded. Returns 0: no bindings are audited.
///
/// # Safety
/// As in the manual page: the loader passes the object that it has just mapped.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objopen(map: *const LinkMap, space: c_long, cookie: *mut usize) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { STATE.opened(map, space, cookie) };
    0
}

/// Records that an object is about to be unloaded.
///
/// # Safety
/// As in the manual page: `cookie` is that of an object that was opened.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objclose(cookie: *mut usize) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { STATE.closed(cookie) };
    0
}

/// Returns the name by which the loader goes on.
///
/// # Safety
/// As in the manual page: `name` is a C string, and `cookie` is that of the object that asks.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    cookie: *mut usize,
    flag: c_uint,
) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { STATE.search(name, cookie, flag) }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
