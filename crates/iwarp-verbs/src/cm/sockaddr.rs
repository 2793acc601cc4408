//! Socket addresses between C and Rust.

use crate::border::guard::{EINVAL, Res};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Reads an address. As librdmacm does, fails with EINVAL if the address family is not IP.
///
/// # Safety
/// `from` is NULL or an address of its family's size.
pub(crate) unsafe fn read(from: *const libc::sockaddr) -> Res<SocketAddr> {
    if from.is_null() {
        return Err(EINVAL);
    }
    match family(from) {
        libc::AF_INET => {
            let a = &*from.cast::<libc::sockaddr_in>();
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Ok((ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 => {
            let a = &*from.cast::<libc::sockaddr_in6>();
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Ok(SocketAddrV6::new(
                ip,
                u16::from_be(a.sin6_port),
                a.sin6_flowinfo,
                a.sin6_scope_id,
            )
            .into())
        }
        _ => Err(EINVAL),
    }
}

unsafe fn family(from: *const libc::sockaddr) -> i32 {
    i32::from((*from).sa_family)
}

/// As [`read`], but NULL means no address.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn read_optional(from: *const libc::sockaddr) -> Res<Option<SocketAddr>> {
    if from.is_null() {
        return Ok(None);
    }
    read(from).map(Some)
}

pub(crate) fn write(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: zero is a valid socket address; the storage is large and aligned enough for both.
    unsafe {
        let mut to: libc::sockaddr_storage = std::mem::zeroed();
        let len = match address {
            SocketAddr::V4(a) => {
                let c = &mut *(&raw mut to).cast::<libc::sockaddr_in>();
                c.sin_family = libc::AF_INET as libc::sa_family_t;
                c.sin_port = a.port().to_be();
                c.sin_addr.s_addr = u32::from(*a.ip()).to_be();
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(a) => {
                let c = &mut *(&raw mut to).cast::<libc::sockaddr_in6>();
                c.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                c.sin6_port = a.port().to_be();
                c.sin6_flowinfo = a.flowinfo();
                c.sin6_addr.s6_addr = a.ip().octets();
                c.sin6_scope_id = a.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        (to, len as libc::socklen_t)
    }
}

/// Returns an address as a GID: IPv4 in mapped form, zero for `None`.
pub(crate) fn gid_of(address: Option<SocketAddr>) -> [u64; 2] {
    let octets = match address.map(|a| a.ip()) {
        Some(std::net::IpAddr::V4(ip)) => ip.to_ipv6_mapped().octets(),
        Some(std::net::IpAddr::V6(ip)) => ip.octets(),
        None => [0; 16],
    };
    // SAFETY: any 16 bytes are two valid integers.
    unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(octets) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_conversion() {
        for text in ["127.0.0.1:7174", "[::1]:80", "[fe80::1%3]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            let (c, _) = write(address);
            // SAFETY: `write` filled in this address.
            assert_eq!(unsafe { read((&raw const c).cast()) }, Ok(address));
        }
        // SAFETY: NULL is allowed, and so is an address without a family.
        unsafe {
            assert_eq!(read(std::ptr::null()), Err(EINVAL));
            let none: libc::sockaddr_storage = std::mem::zeroed();
            assert_eq!(read((&raw const none).cast()), Err(EINVAL));
            assert_eq!(read_optional((&raw const none).cast()), Err(EINVAL));
            assert_eq!(read_optional(std::ptr::null()), Ok(None));
        }
    }
}
