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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_keeps_port_and_scope() {
        for (address, expected) in [
            ("[::ffff:192.0.2.1]:7", "192.0.2.1:7"),
            ("192.0.2.1:7", "192.0.2.1:7"),
            ("[fe80::1%3]:7", "[fe80::1%3]:7"),
            ("[2001:db8::1]:7", "[2001:db8::1]:7"),
        ] {
            let [address, expected] = [address, expected].map(|text| text.parse().unwrap());
            assert_eq!(canonical(address), expected);
        }
    }
}
