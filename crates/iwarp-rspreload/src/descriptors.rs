//! Functions on descriptors: closing, duplicating, flags.

use crate::api::{bypassed, on_rsocket, rdma, real};
use crate::transfer::readable_bytes;
use crate::{connecting, fail, fork, sets, table};
use libc::{c_int, c_long, c_void};

/// Removes the placeholder `fd`. Closes the rsocket if it was the last placeholder.
fn release(fd: c_int) -> c_int {
    connecting::forget(fd);
    if let Some((socket, true)) = table::remove(fd)
        && let Some(rdma) = bypassed(rdma)
    {
        // SAFETY: the rsocket has no placeholder any more.
        return bypassed(|| unsafe { (rdma.close)(socket) });
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    let ours = table::find(fd).is_some();
    let result = if ours { release(fd) } else { 0 };
    connecting::forget(fd);
    sets::close_companion(fd);
    fork::forget(fd);
    // SAFETY: the contract of the C function. The descriptor is closed last, so that another thread
    // cannot get its number while it is still a placeholder.
    let closed = unsafe { real::close(fd) };
    if ours { result } else { closed }
}

/// If `from` is a placeholder, makes its copy `to` a placeholder for the same rsocket. Returns
/// `to`.
fn share_placeholder(from: c_int, to: c_int) -> c_int {
    if to >= 0 {
        fork::copy_state(from, to);
    }
    if to >= 0
        && let Some(socket) = table::find(from)
        && !table::insert(to, socket)
    {
        // SAFETY: the descriptor was just created, and the program does not know it.
        unsafe { real::close(to) };
        return fail(libc::EMFILE);
    }
    to
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: the contract of the C function.
    share_placeholder(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    if from == to {
        // SAFETY: the contract of the C function.
        return unsafe { real::dup2(from, to) };
    }
    // SAFETY: the contract of the C function.
    unsafe { replace(from, to, || real::dup2(from, to)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { replace(from, to, || real::dup3(from, to, flags)) }
}

/// Runs `f`, which is a `dup2` or `dup3` of `from` to `to`. Releases the previous rsocket of `to`.
unsafe fn replace(from: c_int, to: c_int, f: impl FnOnce() -> c_int) -> c_int {
    let new = f();
    if new >= 0 {
        release(to);
        sets::close_companion(to);
    }
    share_placeholder(from, new)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    match command {
        libc::F_GETFL | libc::F_SETFL => {
            // SAFETY: no pointers.
            if let Some(result) = on_rsocket(fd, |r, s| unsafe { (r.fcntl)(s, command, argument) })
            {
                return result;
            }
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: no pointers.
            return share_placeholder(fd, unsafe { real::fcntl(fd, command, argument) });
        }
        _ => {}
    }
    // SAFETY: the contract of the C function. `FD_CLOEXEC` is a flag of the placeholder itself.
    unsafe { real::fcntl(fd, command, argument) }
}

/// Replaces the file type in a mode by a socket's.
const fn socket_mode(mode: libc::mode_t) -> libc::mode_t {
    mode & !libc::S_IFMT | libc::S_IFSOCK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat(fd: c_int, to: *mut libc::stat) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe {
        let result = real::fstat(fd, to);
        if result == 0 && table::find(fd).is_some() {
            (*to).st_mode = socket_mode((*to).st_mode);
        }
        result
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat64(fd: c_int, to: *mut libc::stat64) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe {
        let result = real::fstat64(fd, to);
        if result == 0 && table::find(fd).is_some() {
            (*to).st_mode = socket_mode((*to).st_mode);
        }
        result
    }
}

/// `fstat` in programs built with the C library's headers before version 2.33.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __fxstat(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
    // SAFETY: the contract of the C function. On 64-bit machines the structure has one version.
    unsafe { fstat(fd, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __fxstat64(_version: c_int, fd: c_int, to: *mut libc::stat64) -> c_int {
    // SAFETY: as in `__fxstat`.
    unsafe { fstat64(fd, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { fcntl(fd, command, argument) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: libc::Ioctl, argument: *mut c_void) -> c_int {
    if table::find(fd).is_none() {
        // SAFETY: the contract of the C function.
        return unsafe { real::ioctl(fd, request, argument) };
    }
    match request {
        libc::FIONBIO => {
            // SAFETY: the contract of the C function: an integer.
            let on = unsafe { argument.cast::<c_int>().read() } != 0;
            // SAFETY: no pointers.
            unsafe {
                fcntl(
                    fd,
                    libc::F_SETFL,
                    if on { libc::O_NONBLOCK.into() } else { 0 },
                )
            }
        }
        libc::FIONREAD => match readable_bytes(fd) {
            n @ 0.. => {
                // SAFETY: the contract of the C function: an integer.
                unsafe { argument.cast::<c_int>().write(n) };
                0
            }
            failed => failed,
        },
        _ => fail(libc::ENOTTY),
    }
}
