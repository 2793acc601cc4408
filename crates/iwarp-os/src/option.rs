//! Socket options that the crate `socket2` does not offer.

use socket2::Socket;
use std::io;
use std::os::fd::AsRawFd;

/// Sets an option whose value is a plain number, or a structure of numbers that the kernel defines
/// (`setsockopt(2)`).
pub(super) fn set<T: Copy>(socket: &Socket, level: i32, name: i32, value: T) -> io::Result<()> {
    if cfg!(miri) {
        return Ok(());
    }
    // SAFETY: the kernel reads the bytes of `value`, whose size is passed.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Disables Nagle's algorithm. Miri knows the option only for connected sockets, and does not delay
/// anything.
pub(crate) fn set_no_delay(socket: &Socket) -> io::Result<()> {
    if cfg!(miri) {
        return Ok(());
    }
    socket.set_tcp_nodelay(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn options_take_effect_or_fail() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        for on in [true, false] {
            set(&socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, i32::from(on)).unwrap();
            assert_eq!(socket.keepalive().unwrap(), on);
        }
        let unknown = set(&socket, libc::IPPROTO_TCP, i32::MAX, 1i32).unwrap_err();
        assert_eq!(unknown.raw_os_error(), Some(libc::ENOPROTOOPT));
    }
}
