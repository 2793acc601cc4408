//! Canonical socket addresses.

use std::net::{IpAddr, SocketAddr};

/// Converts an IPv4-mapped IPv6 address, as dual-stack sockets report it, to an IPv4 address.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(IpAddr::V4(ip), address.port()),
        // Keep the scope of a link-local address.
        IpAddr::V6(_) => address,
    }
}
