//! Netlink sockets of the family RDMA, for iproute2's `rdma`.
//!
//! The kernel provides such sockets only with its RDMA modules, and does not know our devices. A
//! program that opens one gets a pair of Unix sockets instead, whose other end is served by a
//! process of the command `iwarp`, which the variable `IWARP_NETLINK` names. The program sends,
//! receives and polls as usual; only calls with netlink addresses are replaced. Children that
//! inherit the socket can use it, too.
//!
//! Sockets are recognised by the inode of the program's end. Before the first such socket exists, a
//! call costs one load from memory.

use super::{next, unknown};
use libc::{c_char, c_int, c_void, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

const NETLINK_RDMA: c_int = 20;
/// The variable with the path of the serving command.
const VARIABLE: &CStr = c"IWARP_NETLINK";
/// Largest number of sockets of a process. `rdma` has one.
const SOCKETS_MAX: usize = 16;
/// Buffer for answers that have not been read.
static BUFFER_BYTES: c_int = 1 << 20;

/// The inodes of our sockets. Their device is that of all sockets.
static INODES: [AtomicU64; SOCKETS_MAX] = [const { AtomicU64::new(0) }; SOCKETS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns the C library's function with this name and type.
macro_rules! original {
    ($name:literal, $type:ty, $failed:expr) => {{
        static CACHE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
        let function = next(&CACHE, $name);
        if function.is_null() {
            return unknown($failed);
        }
        // SAFETY: the crate's invariant: the function has the type of its manual page.
        unsafe { std::mem::transmute::<*mut c_void, $type>(function) }
    }};
}

/// Returns the inode of a socket, or 0.
fn inode(socket: c_int) -> u64 {
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: there is room for the answer, and zeros are valid values of its fields.
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

/// Creates a socket whose other end is a new process of the command. Returns `None` if there is no
/// such command or no room.
fn make(flags: c_int) -> Option<c_int> {
    // SAFETY: the name is a C string, and so is a value of the environment.
    let command = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    // SAFETY: as above.
    if command.is_null() || unsafe { *command } == 0 {
        return None;
    }
    let at = COUNT.fetch_add(1, Ordering::AcqRel);
    if at >= SOCKETS_MAX {
        COUNT.store(SOCKETS_MAX, Ordering::Release);
        return None;
    }
    // The new process must not inherit the program's end, or it would never see the end of file.
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    let mut ends = [-1; 2];
    // SAFETY: there is room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return None;
    }
    for end in ends {
        // SAFETY: the value is an integer, and its size is right. A smaller buffer works, too.
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
    let started = unsafe { start(command, ends[1]) };
    // SAFETY: the descriptors are ours, and nothing else uses the second.
    unsafe { libc::close(ends[1]) };
    if !started {
        // SAFETY: as above.
        unsafe { libc::close(ends[0]) };
        return None;
    }
    if flags & libc::SOCK_NONBLOCK != 0 {
        // SAFETY: the call has no conditions. The other end stays blocking.
        unsafe { libc::fcntl(ends[0], libc::F_SETFL, libc::O_NONBLOCK) };
    }
    if flags & libc::SOCK_CLOEXEC == 0 {
        // SAFETY: the call has no conditions.
        unsafe { libc::fcntl(ends[0], libc::F_SETFD, 0) };
    }
    INODES[at].store(inode(ends[0]), Ordering::Release);
    Some(ends[0])
}

/// Starts the command with this socket as its standard input.
///
/// # Safety
/// `command` is a C string.
unsafe fn start(command: *const c_char, socket: c_int) -> bool {
    let arguments = [
        c"iwarp".as_ptr().cast_mut(),
        c"netlink".as_ptr().cast_mut(),
        null_mut(),
    ];
    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    // SAFETY: the arguments and the environment are lists of C strings that end with null. The file
    // actions are initialised before they are used.
    unsafe {
        let mut actions = MaybeUninit::<libc::posix_spawn_file_actions_t>::zeroed();
        if libc::posix_spawn_file_actions_init(actions.as_mut_ptr()) != 0 {
            return false;
        }
        let mut process = 0;
        // A reader of the program's output waits until no process has it open.
        let silent = [1, 2].iter().all(|output| {
            let null = c"/dev/null".as_ptr();
            let to = actions.as_mut_ptr();
            libc::posix_spawn_file_actions_addopen(to, *output, null, libc::O_WRONLY, 0) == 0
        });
        let made = silent
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
        made
    }
}

/// The kernel's address, from which all answers come.
const fn kernel() -> libc::sockaddr_nl {
    // SAFETY: the structure consists of integers.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address
}

/// Writes a netlink address as the system calls do: truncated, with the full length.
///
/// # Safety
/// Both pointers are null, or valid as in the calls' manual pages.
unsafe fn give(address: &libc::sockaddr_nl, to: *mut sockaddr, length: *mut socklen_t) {
    if to.is_null() || length.is_null() {
        return;
    }
    let whole = size_of::<libc::sockaddr_nl>();
    // SAFETY: the caller's promise.
    unsafe {
        let room = (*length as usize).min(whole);
        std::ptr::copy_nonoverlapping((&raw const *address).cast::<u8>(), to.cast(), room);
        *length = whole as socklen_t;
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    type Function = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        let flags = kind & (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        if let Some(made) = make(flags) {
            return made;
        }
    }
    let function = original!(c"socket", Function, -1);
    // SAFETY: the caller's promise.
    unsafe { function(domain, kind, protocol) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;
    if is_ours(socket) {
        return 0;
    }
    let function = original!(c"bind", Function, -1);
    // SAFETY: the caller's promise.
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
        let mut own = kernel();
        // SAFETY: the call has no conditions.
        own.nl_pid = unsafe { libc::getpid() } as u32;
        // SAFETY: the caller's promise.
        unsafe { give(&own, address, length) };
        return 0;
    }
    let function = original!(c"getsockname", Function, -1);
    // SAFETY: the caller's promise.
    unsafe { function(socket, address, length) }
}

/// Options of netlink, such as extended acknowledgements, are accepted and have no effect.
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
    // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise. Our socket is connected and takes no address.
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
        // SAFETY: the caller's promise.
        return unsafe { function(socket, message, flags) };
    }
    // SAFETY: the caller's promise; the structure may be copied.
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
        // SAFETY: the caller's promise.
        return unsafe { function(socket, message, flags) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        let (name, room) = ((*message).msg_name, (*message).msg_namelen);
        (*message).msg_namelen = 0;
        (*message).msg_name = null_mut();
        let got = function(socket, message, flags);
        (*message).msg_name = name;
        if got >= 0 && !name.is_null() {
            let mut length = room;
            give(&kernel(), name.cast(), &raw mut length);
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
        // SAFETY: the caller's promise.
        return unsafe { function(socket, octets, count, flags, address, length) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        let got = function(socket, octets, count, flags, null_mut(), null_mut());
        if got >= 0 {
            give(&kernel(), address, length);
        }
        got
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_cut_to_their_room() {
        let mut to = [0xaau8; 16];
        let mut length: socklen_t = 4;
        // SAFETY: there is room for more than `length` octets.
        unsafe { give(&kernel(), to.as_mut_ptr().cast(), &raw mut length) };
        assert_eq!((length, to[4]), (12, 0xaa));
        assert_eq!(u16::from_ne_bytes([to[0], to[1]]), libc::AF_NETLINK as u16);
        // SAFETY: null pointers are allowed.
        unsafe { give(&kernel(), null_mut(), null_mut()) };
    }

    #[test]
    fn other_descriptors_are_not_ours() {
        assert!(!is_ours(0) && !is_ours(-1));
        assert_eq!(inode(-1), 0);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(inode(std::os::fd::AsRawFd::as_raw_fd(&file)), 0);
    }
}
