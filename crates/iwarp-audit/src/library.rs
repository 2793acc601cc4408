//! The root of the shared library, which `build.rs` compiles: the functions that the dynamic loader
//! calls.
//!
//! The loader calls them with its lock held, from `main`'s thread or from a thread in `dlopen`. The
//! audit namespace contains neither a standard library nor a C library, so the functions must not
//! allocate, panic or call other libraries. See `rtld-audit(7)`.
#![no_std]
// The compiler must not replace loops by calls of the C library's `memcpy` and `strlen`.
#![no_builtins]

mod preload;
mod redirect;

use core::ffi::{c_char, c_int, c_long, c_uint};
use redirect::{LinkMap, State, Variables};

static STATE: State = State::new();

/// The constructor of this library. glibc passes the arguments of `main` to constructors. Without
/// the C library, there is no other way to get the environment.
unsafe extern "C" fn start(
    _count: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    // SAFETY: the loader passes the process's environment, which ends with a null pointer. Nothing
    // else uses `STATE` before the loader calls `la_version`.
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

/// Records in which namespaces the target is loaded. Returns 0, so that no symbol bindings are
/// audited.
///
/// # Safety
/// As in the manual page: the loader passes the object that it has just mapped.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objopen(map: *const LinkMap, space: c_long, cookie: *mut usize) -> c_uint {
    // SAFETY: guaranteed by the caller.
    unsafe { STATE.opened(map, space, cookie) };
    0
}

/// Records that an object is about to be unloaded.
///
/// # Safety
/// As in the manual page: `cookie` is the cookie of an opened object.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objclose(cookie: *mut usize) -> c_uint {
    // SAFETY: guaranteed by the caller.
    unsafe { STATE.closed(cookie) };
    0
}

/// Returns the name for which the loader continues its search.
///
/// # Safety
/// As in the manual page: `name` is a C string, and `cookie` is the cookie of the requesting
/// object.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    cookie: *mut usize,
    flag: c_uint,
) -> *const c_char {
    // SAFETY: guaranteed by the caller.
    unsafe { STATE.search(name, cookie, flag) }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
