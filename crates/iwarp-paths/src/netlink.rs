//! Netlink sockets of the family RDMA, for iproute2's `rdma`.
//!
//! The kernel provides such sockets only if its RDMA modules are loaded, and does not know our
//! devices. A program that opens such a socket gets one end of a pair of Unix sockets instead. A
//! process of the command `iwarp`, whose path is in the variable `IWARP_NETLINK`, serves the other
//! end. The program sends, receives and polls as usual; only calls with netlink addresses are
//! replaced. Children that inherit the socket can use it as well.
//!
//! The sockets are recognised by their inodes. As long as the process has no such socket, an
//! interposed call only costs one additional load.

use super::{next, not_implemented};
use libc::{c_char, c_int, c_void, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

const NETLINK_RDMA: c_int = 20;
/// The variable with the path of the command that serves the sockets.
const VARIABLE: &CStr = c"IWARP_NETLINK";
/// Maximum number of such sockets that a process creates. `rdma` creates one.
const SOCKETS_MAX: usize = 16;
/// Size of the buffer for replies that have not been read.
static BUFFER_BYTES: c_int = 1 << 20;

/// The inodes of our sockets. (All sockets of the system have the same device number.)
static INODES: [AtomicU64; SOCKETS_MAX] = [const { AtomicU64::new(0) }; SOCKETS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns the C library's function with this name and type.
macro_rules! original {
    ($name:literal, $type:ty, $failed:expr) => {{
        static CACHE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
        let function = next(&CACHE, $name);
        if function.is_null() {
            return not_implemented($failed);
        }
        // SAFETY: the function has the type of its manual page (invariant of the crate).
        unsafe { std::mem::transmute::<*mut c_void, $type>(function) }
    }};
}

/// Returns the inode of a socket, or 0.
fn inode(socket: c_int) -> u64 {
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: `status` is a local variable, and all zeros are a valid value.
    unsafe {
        if libc::fstat(socket, status.as_mut_ptr()) != 0 {
            return 0;
        }
        let status = status.assume_init();
        match status.st_mode & libc::S_IFMT {
            libc::S_IFSOCK => status.st_ino,
            _ => 0,
        }
    }
}

fn is_ours(socket: c_int) -> bool {
    let count = COUNT.load(Ordering::Acquire).min(SOCKETS_MAX);
    if count == 0 {
        return false;
    }
    let inode = inode(socket);
    inode != 0
        && INODES[..count]
            .iter()
            .any(|ours| ours.load(Ordering::Acquire) == inode)
}

/// Creates a socket whose other end is served by a new process of the command. Returns `None` if
/// `IWARP_NETLINK` is not set, if there are too many sockets, or if a system call fails.
fn create_socket(flags: c_int) -> Option<c_int> {
    // SAFETY: the name is a C string, and so is a value of the environment.
    let command = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    // SAFETY: as above.
    if command.is_null() || unsafe { *command } == 0 {
        return None;
    }
    let index = COUNT.fetch_add(1, Ordering::AcqRel);
    if index >= SOCKETS_MAX {
        COUNT.store(SOCKETS_MAX, Ordering::Release);
        return None;
    }
    // The new process must not inherit the program's end: it would never detect the end of file.
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return None;
    }
    for end in ends {
        // A failure is ignored: a smaller buffer works as well.
        // SAFETY: the value is an integer of the given size.
        unsafe {
            libc::setsockopt(
                end,
                libc::SOL_SOCKET,
                libc::SO_SNDBUF,
                (&raw const BUFFER_BYTES).cast(),
                size_of::<c_int>() as socklen_t,
            )
        };
    }
    // SAFETY: the path is a C string.
    let started = unsafe { start_server(command, ends[1]) };
    // SAFETY: the descriptor was created above, and is not used any longer.
    unsafe { libc::close(ends[1]) };
    if !started {
        // SAFETY: as above.
        unsafe { libc::close(ends[0]) };
        return None;
    }
    if flags & libc::SOCK_NONBLOCK != 0 {
        // The other end remains blocking.
        // SAFETY: the call has no requirements.
        unsafe { libc::fcntl(ends[0], libc::F_SETFL, libc::O_NONBLOCK) };
    }
    if flags & libc::SOCK_CLOEXEC == 0 {
        // SAFETY: the call has no requirements.
        unsafe { libc::fcntl(ends[0], libc::F_SETFD, 0) };
    }
    INODES[index].store(inode(ends[0]), Ordering::Release);
    Some(ends[0])
}

/// Starts the command with this socket as its standard input. Returns `false` if that fails.
///
/// # Safety
/// `command` is a C string.
unsafe fn start_server(command: *const c_char, socket: c_int) -> bool {
    let arguments = [
        c"iwarp".as_ptr().cast_mut(),
        c"netlink".as_ptr().cast_mut(),
        null_mut(),
    ];
    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    // SAFETY: the arguments and the environment are lists of C strings that end with a null
    // pointer. The file actions are initialised before they are used.
    unsafe {
        let mut actions = MaybeUninit::<libc::posix_spawn_file_actions_t>::zeroed();
        if libc::posix_spawn_file_actions_init(actions.as_mut_ptr()) != 0 {
            return false;
        }
        let mut process = 0;
        // Do not keep the program's output open: its reader waits until all processes have closed
        // it.
        let redirected = [1, 2].iter().all(|output| {
            let null = c"/dev/null".as_ptr();
            let to = actions.as_mut_ptr();
            libc::posix_spawn_file_actions_addopen(to, *output, null, libc::O_WRONLY, 0) == 0
        });
        let started = redirected
            && libc::posix_spawn_file_actions_adddup2(actions.as_mut_ptr(), socket, 0) == 0
            && libc::posix_spawn(
                &raw mut process,
                command,
                actions.as_ptr(),
                null(),
                arguments.as_ptr(),
                environ.cast(),
            ) == 0;
        libc::posix_spawn_file_actions_destroy(actions.as_mut_ptr());
        started
    }
}

/// Returns the kernel's netlink address, which is the source of all replies.
const fn kernel_address() -> libc::sockaddr_nl {
    // SAFETY: the structure contains only integers, so all zeros are a valid value.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address
}

/// Writes a netlink address as system calls do: if `length` is shorter, the address is truncated.
/// `length` is set to the full length.
///
/// # Safety
/// Each pointer is null, or valid as the manual page of `getsockname` requires.
unsafe fn write_address(address: &libc::sockaddr_nl, to: *mut sockaddr, length: *mut socklen_t) {
    if to.is_null() || length.is_null() {
        return;
    }
    let full = size_of::<libc::sockaddr_nl>();
    // SAFETY: guaranteed by the caller.
    unsafe {
        let room = (*length as usize).min(full);
        std::ptr::copy_nonoverlapping((&raw const *address).cast::<u8>(), to.cast(), room);
        *length = full as socklen_t;
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    type Function = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        let flags = kind & (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        if let Some(socket) = create_socket(flags) {
            return socket;
        }
    }
    let function = original!(c"socket", Function, -1);
    // SAFETY: guaranteed by the caller.
    unsafe { function(domain, kind, protocol) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;
    if is_ours(socket) {
        return 0;
    }
    let function = original!(c"bind", Function, -1);
    // SAFETY: guaranteed by the caller.
    unsafe { function(socket, address, length) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockname(
    socket: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    if is_ours(socket) {
        let mut own = kernel_address();
        // SAFETY: the call has no requirements.
        own.nl_pid = unsafe { libc::getpid() } as u32;
        // SAFETY: guaranteed by the caller.
        unsafe { write_address(&own, address, length) };
        return 0;
    }
    let function = original!(c"getsockname", Function, -1);
    // SAFETY: guaranteed by the caller.
    unsafe { function(socket, address, length) }
}

/// Netlink options, such as extended acknowledgements, are accepted on our sockets, but have no
/// effect.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    type Function = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
    if level == libc::SOL_NETLINK && is_ours(socket) {
        return 0;
    }
    let function = original!(c"setsockopt", Function, -1);
    // SAFETY: guaranteed by the caller.
    unsafe { function(socket, level, name, value, length) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendto(
    socket: c_int,
    octets: *const c_void,
    count: size_t,
    flags: c_int,
    address: *const sockaddr,
    length: socklen_t,
) -> ssize_t {
    type Function = unsafe extern "C" fn(
        c_int,
        *const c_void,
        size_t,
        c_int,
        *const sockaddr,
        socklen_t,
    ) -> ssize_t;
    let function = original!(c"sendto", Function, -1);
    // SAFETY: guaranteed by the caller. Our sockets are connected, so no address is passed.
    unsafe {
        match is_ours(socket) {
            true => function(socket, octets, count, flags | libc::MSG_NOSIGNAL, null(), 0),
            false => function(socket, octets, count, flags, address, length),
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    type Function = unsafe extern "C" fn(c_int, *const msghdr, c_int) -> ssize_t;
    let function = original!(c"sendmsg", Function, -1);
    if message.is_null() || !is_ours(socket) {
        // SAFETY: guaranteed by the caller.
        return unsafe { function(socket, message, flags) };
    }
    // SAFETY: guaranteed by the caller. The structure may be copied.
    let mut own = unsafe { message.read() };
    own.msg_name = null_mut();
    own.msg_namelen = 0;
    own.msg_control = null_mut();
    own.msg_controllen = 0;
    // SAFETY: the copy refers to the caller's memory.
    unsafe { function(socket, &raw const own, flags | libc::MSG_NOSIGNAL) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    type Function = unsafe extern "C" fn(c_int, *mut msghdr, c_int) -> ssize_t;
    let function = original!(c"recvmsg", Function, -1);
    if message.is_null() || !is_ours(socket) {
        // SAFETY: guaranteed by the caller.
        return unsafe { function(socket, message, flags) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (name, room) = ((*message).msg_name, (*message).msg_namelen);
        (*message).msg_namelen = 0;
        (*message).msg_name = null_mut();
        let got = function(socket, message, flags);
        (*message).msg_name = name;
        if got >= 0 && !name.is_null() {
            let mut length = room;
            write_address(&kernel_address(), name.cast(), &raw mut length);
            (*message).msg_namelen = length;
        }
        got
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvfrom(
    socket: c_int,
    octets: *mut c_void,
    count: size_t,
    flags: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    type Function = unsafe extern "C" fn(
        c_int,
        *mut c_void,
        size_t,
        c_int,
        *mut sockaddr,
        *mut socklen_t,
    ) -> ssize_t;
    let function = original!(c"recvfrom", Function, -1);
    if !is_ours(socket) {
        // SAFETY: guaranteed by the caller.
        return unsafe { function(socket, octets, count, flags, address, length) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        let got = function(socket, octets, count, flags, null_mut(), null_mut());
        if got >= 0 {
            write_address(&kernel_address(), address, length);
        }
        got
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_address_is_truncated() {
        let mut to = [0xaau8; 16];
        let mut length: socklen_t = 4;
        // SAFETY: `to` has room for more than `length` octets.
        unsafe { write_address(&kernel_address(), to.as_mut_ptr().cast(), &raw mut length) };
        assert_eq!((length, to[4]), (12, 0xaa));
        assert_eq!(u16::from_ne_bytes([to[0], to[1]]), libc::AF_NETLINK as u16);
        // SAFETY: null pointers are allowed.
        unsafe { write_address(&kernel_address(), null_mut(), null_mut()) };
    }

    #[test]
    fn other_descriptors_are_not_ours() {
        assert!(!is_ours(0) && !is_ours(-1));
        assert_eq!(inode(-1), 0);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(inode(std::os::fd::AsRawFd::as_raw_fd(&file)), 0);
    }
}
