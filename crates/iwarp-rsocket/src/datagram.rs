//! Datagram sockets (`SOCK_DGRAM`): each is a UDP socket of the kernel.
//!
//! rdma-core carries datagrams of rsockets on UD queue pairs and uses a UDP socket to find them.
//! iWARP has no datagrams, and this project's UD queue pairs are UDP sockets with a header. Using
//! UDP directly avoids that header and its limit of 4096 bytes, and the peer may be any UDP socket.
//!
//! The socket's number is the UDP socket's descriptor. Flags (`O_NONBLOCK`, `FD_CLOEXEC`), `poll`
//! and fork therefore work as in the kernel, and only the rsocket-specific options need a lock.

use crate::errno::{Errno, Result};
use crate::options::{self, SOL_RDMA};
use crate::settings::{Settings, Sizes};
use libc::{c_int, c_void, msghdr, sockaddr, socklen_t};
use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown,
    SocketFlags, SocketType, ipproto,
};
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Larger than any option value of the kernel.
const OPTION_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Datagram {
    udp: OwnedFd,
    /// The options of level `SOL_RDMA`, which can be set and read but have no effect.
    sizes: Mutex<Sizes>,
}

impl Datagram {
    /// Creates a socket. `domain` is `AF_INET` or `AF_INET6`, `flags` are `SOCK_NONBLOCK` and
    /// `SOCK_CLOEXEC`. Fails as socket(2).
    pub(crate) fn create(domain: c_int, flags: c_int) -> Result<Self> {
        let family = match domain {
            libc::AF_INET6 => AddressFamily::INET6,
            _ => AddressFamily::INET,
        };
        let flags = SocketFlags::from_bits_truncate(flags.cast_unsigned());
        Ok(Self {
            udp: net::socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?,
            sizes: Mutex::new(Settings::get().sizes),
        })
    }

    pub(crate) fn number(&self) -> RawFd {
        self.udp.as_raw_fd()
    }

    /// Fails as bind(2).
    pub(crate) fn bind(&self, address: SocketAddr) -> Result<()> {
        Ok(net::bind(&self.udp, &address)?)
    }

    /// Sets the default destination, which is then the only accepted sender. Fails as connect(2).
    pub(crate) fn connect(&self, address: SocketAddr) -> Result<()> {
        Ok(net::connect(&self.udp, &address)?)
    }

    /// As [`Self::connect`]. An address of family `AF_UNSPEC` removes the default destination.
    /// Fails as connect(2).
    ///
    /// # Safety
    /// `address` is null or points to `len` readable bytes.
    pub(crate) unsafe fn connect_raw(
        &self,
        address: *const sockaddr,
        len: socklen_t,
    ) -> Result<()> {
        if address.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        // SAFETY: guaranteed by the caller.
        match unsafe { libc::connect(self.number(), address, len) } {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    }

    /// Fails with EINVAL if the direction is unknown, and with ENOTCONN.
    pub(crate) fn shutdown(&self, how: c_int) -> Result<()> {
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            _ => return Err(Errno::INVAL),
        };
        Ok(net::shutdown(&self.udp, how)?)
    }

    /// Receives a datagram, truncated to the buffer. Returns the bytes received (the datagram's
    /// full length with `MSG_TRUNC`) and the sender. Fails as recv(2).
    pub(crate) fn receive(
        &self,
        out: &mut [&mut [u8]],
        flags: c_int,
    ) -> Result<(usize, Option<SocketAddr>)> {
        let mut pieces: Vec<IoSliceMut<'_>> = out.iter_mut().map(|o| IoSliceMut::new(o)).collect();
        let flags = RecvFlags::from_bits_retain(flags.cast_unsigned());
        let mut control = RecvAncillaryBuffer::default();
        let got = net::recvmsg(&self.udp, &mut pieces, &mut control, flags)?;
        let from = got.address.and_then(|a| SocketAddr::try_from(a).ok());
        Ok((got.bytes, from))
    }

    /// Sends a datagram to the address, or to the default destination. Fails as send(2): EMSGSIZE,
    /// EDESTADDRREQ, EAGAIN, ECONNREFUSED and others.
    pub(crate) fn send(
        &self,
        data: &[&[u8]],
        flags: c_int,
        to: Option<SocketAddr>,
    ) -> Result<usize> {
        let pieces: Vec<IoSlice<'_>> = data.iter().map(|d| IoSlice::new(d)).collect();
        let flags = SendFlags::from_bits_retain(flags.cast_unsigned()) | SendFlags::NOSIGNAL;
        let mut control = SendAncillaryBuffer::default();
        Ok(match to {
            None => net::sendmsg(&self.udp, &pieces, &mut control, flags)?,
            Some(to) => net::sendmsg_addr(&self.udp, &to, &pieces, &mut control, flags)?,
        })
    }

    /// Receives a datagram with its control data. Fails as recvmsg(2).
    ///
    /// # Safety
    /// All pointers of the header are valid for their lengths.
    pub(crate) unsafe fn receive_raw(&self, message: &mut msghdr, flags: c_int) -> Result<usize> {
        // SAFETY: guaranteed by the caller.
        let n = unsafe { libc::recvmsg(self.number(), message, flags) };
        usize::try_from(n).map_err(|_| Errno::last())
    }

    /// Sends a datagram with its control data. Fails as sendmsg(2).
    ///
    /// # Safety
    /// As [`Self::receive_raw`].
    pub(crate) unsafe fn send_raw(&self, message: &msghdr, flags: c_int) -> Result<usize> {
        // SAFETY: guaranteed by the caller.
        let n = unsafe { libc::sendmsg(self.number(), message, flags | libc::MSG_NOSIGNAL) };
        usize::try_from(n).map_err(|_| Errno::last())
    }

    /// Fails as getsockname(2).
    pub(crate) fn local_address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::try_from(net::getsockname(&self.udp)?)?)
    }

    /// Fails with ENOTCONN.
    pub(crate) fn peer_address(&self) -> Result<SocketAddr> {
        let peer = net::getpeername(&self.udp)?.ok_or(Errno::NOTCONN)?;
        Ok(SocketAddr::try_from(peer)?)
    }

    /// Fails as setsockopt(2); EOPNOTSUPP if the option is unknown.
    pub(crate) fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Result<()> {
        if level == SOL_RDMA {
            return options::set_sizes(&mut self.sizes.lock(), name, value);
        }
        let len = socklen_t::try_from(value.len()).map_err(|_| Errno::INVAL)?;
        // SAFETY: the pointer and the length are those of `value`.
        match unsafe { libc::setsockopt(self.number(), level, name, value.as_ptr().cast(), len) } {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    }

    /// Fails as getsockopt(2); EOPNOTSUPP if the option is unknown.
    pub(crate) fn get_option(&self, level: c_int, name: c_int) -> Result<Vec<u8>> {
        if level == SOL_RDMA {
            return options::get_sizes(&self.sizes.lock(), name);
        }
        let mut value = vec![0u8; OPTION_MAX];
        let mut len = OPTION_MAX as socklen_t;
        let to = value.as_mut_ptr().cast::<c_void>();
        // SAFETY: the pointer and the length are those of `value`.
        if unsafe { libc::getsockopt(self.number(), level, name, to, &raw mut len) } != 0 {
            return Err(Errno::last());
        }
        value.truncate(len as usize);
        Ok(value)
    }

    /// `F_GETFL`, `F_SETFL`, `F_GETFD`, `F_SETFD` (`fcntl(2)`). Fails with EOPNOTSUPP for other
    /// commands.
    pub(crate) fn control(&self, command: c_int, argument: c_int) -> Result<c_int> {
        match command {
            libc::F_GETFL => Ok(fcntl_getfl(&self.udp)?.bits().cast_signed()),
            libc::F_SETFL => {
                let flags = OFlags::from_bits_retain(argument.cast_unsigned());
                fcntl_setfl(&self.udp, flags)?;
                Ok(0)
            }
            libc::F_GETFD => Ok(fcntl_getfd(&self.udp)?.bits().cast_signed()),
            libc::F_SETFD => {
                let flags = FdFlags::from_bits_truncate(argument.cast_unsigned());
                fcntl_setfd(&self.udp, flags)?;
                Ok(0)
            }
            _ => Err(Errno::NOTSUP),
        }
    }
}
