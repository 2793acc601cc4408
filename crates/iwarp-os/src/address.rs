//! Socket addresses in one form.

use std::net::{IpAddr, SocketAddr};

/// Returns an IPv4 address in its own form, even if a dual-stack socket shows it mapped into IPv6.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(IpAddr::V4(ip), address.port()),
        // Keeps the scope of a link-local address.
        IpAddr::V6(_) => address,
    }
}
