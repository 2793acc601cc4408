//! Socket addresses between C and Rust.

use crate::errno::{Errno, Result};
use libc::{sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Reads an address. Fails with EINVAL if it is too short, with EAFNOSUPPORT if it is neither IPv4
/// nor IPv6, and with EFAULT if `addr` is null.
///
/// # Safety
/// `addr` is null or points to `len` readable octets.
pub(crate) unsafe fn read(addr: *const sockaddr, len: socklen_t) -> Result<SocketAddr> {
    if addr.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    let len = len as usize;
    if len < size_of::<libc::sa_family_t>() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the length covers the family, which may be misaligned.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    match i32::from(family) {
        libc::AF_INET if len >= size_of::<sockaddr_in>() => {
            // SAFETY: the length covers the type, for which every bit pattern is valid.
            let a = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(a.sin_port)).into())
        }
        // Without the scope, which old programs omit, the structure has 24 bytes.
        libc::AF_INET6 if len >= 24 => {
            let mut a = MaybeUninit::<sockaddr_in6>::zeroed();
            let n = len.min(size_of::<sockaddr_in6>());
            // SAFETY: `n` bytes are in both; every bit pattern is valid for the type.
            let a = unsafe {
                std::ptr::copy_nonoverlapping(addr.cast::<u8>(), a.as_mut_ptr().cast(), n);
                a.assume_init()
            };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            let port = u16::from_be(a.sin6_port);
            Ok(SocketAddrV6::new(ip, port, a.sin6_flowinfo, a.sin6_scope_id).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(Errno::INVAL),
        _ => Err(Errno(libc::EAFNOSUPPORT)),
    }
}

/// Writes as much of an address as fits, and its full length. Ignores null pointers.
///
/// # Safety
/// `len` is null or valid; `addr` is null or points to `*len` writable octets.
pub(crate) unsafe fn write(from: SocketAddr, addr: *mut sockaddr, len: *mut socklen_t) {
    if len.is_null() {
        return;
    }
    // SAFETY: any bit pattern is valid for these types.
    let (mut v4, mut v6): (sockaddr_in, sockaddr_in6) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let (source, size) = match from {
        SocketAddr::V4(a) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = a.port().to_be();
            v4.sin_addr.s_addr = u32::from(*a.ip()).to_be();
            ((&raw const v4).cast::<u8>(), size_of::<sockaddr_in>())
        }
        SocketAddr::V6(a) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = a.port().to_be();
            v6.sin6_flowinfo = a.flowinfo();
            v6.sin6_addr.s6_addr = a.ip().octets();
            v6.sin6_scope_id = a.scope_id();
            ((&raw const v6).cast::<u8>(), size_of::<sockaddr_in6>())
        }
    };
    // SAFETY: guaranteed by the caller; the source has `size` bytes.
    unsafe {
        let capacity = len.read() as usize;
        if !addr.is_null() {
            std::ptr::copy_nonoverlapping(source, addr.cast::<u8>(), capacity.min(size));
        }
        len.write(size as socklen_t);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_conversion() {
        for text in ["1.2.3.4:567", "[::1]:80", "[fe80::1%3]:9"] {
            let a: SocketAddr = text.parse().unwrap();
            // SAFETY: the storage is large enough for every address.
            unsafe {
                let mut storage: libc::sockaddr_storage = std::mem::zeroed();
                let mut len = size_of_val(&storage) as socklen_t;
                let p = (&raw mut storage).cast::<sockaddr>();
                write(a, p, &raw mut len);
                assert_eq!(read(p, len), Ok(a));
                assert_eq!(read(p, 1), Err(Errno::INVAL));
                assert_eq!(read(p, 15), Err(Errno::INVAL));
                // If the buffer is too small, the full size is returned nevertheless.
                let mut short: socklen_t = 4;
                write(a, p, &raw mut short);
                assert_eq!(short, len);
                // Old programs omit the scope.
                if let SocketAddr::V6(mut old) = a {
                    old.set_scope_id(0);
                    assert_eq!(read(p, 24), Ok(old.into()));
                }
                storage.ss_family = libc::AF_UNIX as libc::sa_family_t;
                assert_eq!(read(p, len), Err(Errno(libc::EAFNOSUPPORT)));
            }
        }
    }
}
