//! Which peers a listener admits, and how many (RFC 5042 sections 5.1 and 6.4.1).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A network in CIDR notation (RFC 4632, RFC 4291 section 2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Network {
    base: IpAddr,
    prefix: u8,
}

impl Network {
    fn contains(self, ip: IpAddr) -> bool {
        // A prefix of zero matches all addresses; the shift by all bits would overflow.
        match (self.base, ip) {
            (IpAddr::V4(base), IpAddr::V4(ip)) => {
                let differ = base.to_bits() ^ ip.to_bits();
                differ.checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(ip)) => {
                let differ = base.to_bits() ^ ip.to_bits();
                differ
                    .checked_shr(128 - u32::from(self.prefix))
                    .unwrap_or(0)
                    == 0
            }
            _ => false,
        }
    }

    /// Returns the address with all bits after the prefix cleared.
    fn first(self) -> IpAddr {
        let host_bits = |all: u32| all - u32::from(self.prefix);
        match self.base {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(host_bits(32)).unwrap_or(0);
                Ipv4Addr::from_bits(ip.to_bits() & mask).into()
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(host_bits(128)).unwrap_or(0);
                Ipv6Addr::from_bits(ip.to_bits() & mask).into()
            }
        }
    }

    /// Converts a network of IPv4-mapped addresses to an IPv4 network, as the addresses of peers
    /// are converted.
    fn canonical(self) -> Self {
        match (self.base.to_canonical(), self.prefix) {
            (base @ IpAddr::V4(_), 96..) if self.base.is_ipv6() => Self {
                base,
                prefix: self.prefix - 96,
            },
            _ => self,
        }
    }
}

impl FromStr for Network {
    type Err = NetworksError;

    fn from_str(text: &str) -> Result<Self, NetworksError> {
        let error = |why| NetworksError {
            text: text.to_owned(),
            why,
        };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let base: IpAddr = address
            .parse()
            .map_err(|_| error("not an address or a network such as 192.0.2.0/24"))?;
        let bits = if base.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            // `u8::from_str` would accept a plus sign.
            Some(digits) if digits.bytes().all(|d| d.is_ascii_digit()) => {
                digits.parse().ok().filter(|prefix| *prefix <= bits)
            }
            Some(_) => None,
            None => Some(bits),
        };
        let prefix = prefix.ok_or_else(|| {
            error("the prefix length must be a number from 0 to 32 (IPv4) or 128 (IPv6)")
        })?;
        let network = Self { base, prefix };
        if network.first() != base {
            return Err(error("the address has bits set after the prefix"));
        }
        Ok(network.canonical())
    }
}

/// The error of an invalid list of networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworksError {
    text: String,
    why: &'static str,
}

impl std::fmt::Display for NetworksError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}': {}", self.text.escape_debug(), self.why)
    }
}

impl std::error::Error for NetworksError {}

/// A set of peers: all peers, or those with addresses in certain networks.
///
/// An address does not prove the peer's identity if others can send packets with that address, or
/// receive its packets (RFC 5042 section 5.1.1).
///
/// ```
/// let peers: iwarp::Networks = "10.0.0.0/8,2001:db8::/32,192.0.2.7".parse()?;
/// assert!(peers.contains("10.1.2.3".parse().unwrap()));
/// assert!(!peers.contains("192.0.2.8".parse().unwrap()));
/// # Ok::<(), iwarp::NetworksError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Networks(Option<Vec<Network>>);

impl Networks {
    /// All peers, which is the default.
    pub const ALL: Self = Self(None);
    /// No peers.
    pub const NONE: Self = Self(Some(Vec::new()));

    /// Returns `true` if a peer with this address is in the set. An IPv4-mapped IPv6 address is
    /// treated as the IPv4 address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.0
            .as_ref()
            .is_none_or(|networks| networks.iter().any(|n| n.contains(ip)))
    }
}

/// Returns the set of peers with this address.
impl From<IpAddr> for Networks {
    fn from(ip: IpAddr) -> Self {
        let base = ip.to_canonical();
        let prefix = if base.is_ipv4() { 32 } else { 128 };
        Self(Some(vec![Network { base, prefix }]))
    }
}

/// Parses networks and addresses, separated by commas: `10.0.0.0/8,2001:db8::/32,192.0.2.7`.
impl FromStr for Networks {
    type Err = NetworksError;

    fn from_str(text: &str) -> Result<Self, NetworksError> {
        let networks: Result<Vec<_>, _> = text.split(',').map(|n| n.trim().parse()).collect();
        networks.map(|networks| Self(Some(networks)))
    }
}

/// Limits of each listener of a device, so that peers cannot exhaust the resources of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Admission {
    /// Peers that are admitted (`IWARP_ALLOW`; default all). Connections of other peers are reset
    /// immediately.
    pub peers: Networks,
    /// Maximum number of connections whose MPA request has not arrived yet (`IWARP_HALF_OPEN`; 1 to
    /// 65,536; default 1024). It is limited to a quarter of the process's file descriptors, but not
    /// to fewer than 16 connections. The time limit of each connection is
    /// [`Config::handshake_timeout`](crate::Config::handshake_timeout). If there are too many, the
    /// oldest is reset, because an honest peer sends its request immediately.
    pub half_open: u32,
    /// Maximum number of such connections from one address (`IWARP_HALF_OPEN_PER_ADDRESS`; default
    /// 256), so that one host cannot cause resets of others. IPv6 addresses with the same first 64
    /// bits count as one address.
    pub half_open_per_address: u32,
    /// Maximum number of connections and unanswered requests (`IWARP_CONNECTIONS`; from 1; default
    /// 65,536). Further requests are rejected with a reason, and the program gets no event.
    pub connections: u32,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            peers: Networks::ALL,
            half_open: 1024,
            half_open_per_address: 256,
            connections: 65_536,
        }
    }
}

/// Returns the address for which connections are counted. A host usually controls all addresses of
/// its IPv6 /64 network, so these count as one address.
pub(crate) fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn networks(text: &str) -> Networks {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ipv6_peers_are_counted_by_64_bits() {
        let same = |a: &str, b: &str| counted(ip(a)) == counted(ip(b));
        assert!(same("2001:db8::1", "2001:db8::ffff:0:0:1"));
        assert!(same("2001:db8::1", "2001:db8:0:0:8000::"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(!same("192.0.2.1", "192.0.2.2"));
        assert!(same("192.0.2.1", "::ffff:192.0.2.1"));
        assert!(!same("::ffff:192.0.2.1", "::ffff:192.0.2.2"));
    }

    #[test]
    fn network_contains_its_addresses() {
        let list = networks("10.0.0.0/8, 192.0.2.64/26,2001:db8:1::/48,198.51.100.7");
        for inside in [
            "10.0.0.0",
            "10.255.255.255",
            "192.0.2.64",
            "192.0.2.127",
            "2001:db8:1:ffff::1",
            "198.51.100.7",
            "::ffff:10.1.2.3",
        ] {
            assert!(list.contains(ip(inside)), "{inside}");
        }
        for outside in [
            "9.255.255.255",
            "11.0.0.0",
            "192.0.2.63",
            "192.0.2.128",
            "2001:db8:2::",
            "198.51.100.6",
            "::10.1.2.3",
            "::",
        ] {
            assert!(!list.contains(ip(outside)), "{outside}");
        }
    }

    #[test]
    fn networks_of_all_none_and_one_family() {
        assert!(Networks::ALL.contains(ip("::")) && Networks::default() == Networks::ALL);
        assert!(!Networks::NONE.contains(ip("127.0.0.1")));
        let v4 = networks("0.0.0.0/0");
        assert!(v4.contains(ip("255.1.2.3")) && !v4.contains(ip("::1")));
        let v6 = networks("::/0");
        assert!(v6.contains(ip("fe80::1")) && !v6.contains(ip("1.2.3.4")));
        let one = Networks::from(ip("::ffff:192.0.2.7"));
        assert_eq!(
            [&one; 2],
            [&networks("192.0.2.7"), &networks("192.0.2.7/32")]
        );
        assert!(one.contains(ip("192.0.2.7")) && !one.contains(ip("192.0.2.6")));
        assert_eq!(networks("::ffff:10.0.0.0/104"), networks("10.0.0.0/8"));
        assert_eq!(networks("::ffff:0.0.0.0/96"), networks("0.0.0.0/0"));
    }

    #[test]
    fn malformed_networks_are_refused() {
        for text in [
            "",
            ",",
            "10.0.0.0/8,",
            "10/8",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0.1/8",
            "10.0.0.0/8 /9",
            "host",
            "fe80::1%eth0",
            "10.0.0.0/-1",
            "10.0.0.0/256",
        ] {
            let e = text.parse::<Networks>().unwrap_err().to_string();
            assert!(e.starts_with('\''), "{text}: {e}");
        }
    }

    proptest! {
        #[test]
        fn prefix_is_compared_bit_by_bit(base: u32, other: u32, prefix in 0u8..=32) {
            let network = Network { base: Ipv4Addr::from_bits(base).into(), prefix };
            let bits = |n: u32| format!("{n:032b}")[..usize::from(prefix)].to_owned();
            let inside = network.contains(Ipv4Addr::from_bits(other).into());
            prop_assert_eq!(inside, bits(base) == bits(other));
            prop_assert!(network.contains(network.first()));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<Networks>();
        }
    }
}
