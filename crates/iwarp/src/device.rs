//! Devices: one software RNIC for each usable interface address.

use crate::complain;
use crate::error::{Error, Result};
use crate::sys::connect::canonical;
use crate::sys::interfaces::{self, InterfaceAddress};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

/// The limits of a device. They are the same for all devices of this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Work requests per queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements per work request.
    pub max_sge: u32,
    /// Octets of inline data.
    pub max_inline: u32,
    /// Completions per completion queue.
    pub max_cqe: u32,
    /// Memory regions and windows.
    pub max_mr: u32,
    /// Octets of one message.
    pub max_message: u32,
    /// Inbound RDMA Reads and atomics of one queue pair.
    pub max_ird: u16,
    /// Outbound RDMA Reads and atomics of one queue pair.
    pub max_ord: u16,
}

/// The limits of every device.
pub const LIMITS: Limits = Limits {
    max_qp_wr: iwarp_rnic::limits::MAX_QP_WR,
    max_sge: iwarp_rnic::limits::MAX_SGE,
    max_inline: iwarp_rnic::limits::MAX_INLINE,
    max_cqe: iwarp_rnic::limits::MAX_CQE,
    max_mr: iwarp_rnic::limits::MAX_MR,
    max_message: iwarp_rnic::limits::MAX_MESSAGE,
    max_ird: iwarp_rnic::limits::MAX_IRD,
    max_ord: iwarp_rnic::limits::MAX_ORD,
};

/// A software RNIC on one address of this host.
///
/// Devices need no privileges and no set-up: they are derived from the interfaces that are up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// `iwarp0`, `iwarp1` …, in the order of the interfaces, link-local addresses last; `IWARP_DEVICE_NAME` replaces the
    /// stem. In one process an address keeps its name, and gets a new one if it appears later than others.
    pub name: String,
    /// The number in its name.
    pub index: u32,
    /// Its address.
    pub ip: IpAddr,
    /// Scope number of a link-local IPv6 address; zero for all other addresses.
    pub scope_id: u32,
    /// Name of the network interface.
    pub interface: String,
    /// MTU of the interface, in octets.
    pub mtu: u32,
    /// Is it on a loopback interface?
    pub loopback: bool,
    /// EUI-64 made from the interface's MAC, or from its name if it has none.
    pub guid: u64,
}

impl Device {
    /// Lists all devices, in a stable order. `IWARP_BIND` (addresses or interface names, separated by commas) restricts the
    /// list; an entry that is neither is reported as by [`Config::from_env`](crate::Config::from_env).
    ///
    /// # Errors
    /// The operating system's error if it cannot list interfaces.
    pub fn list() -> Result<Vec<Self>> {
        let value = |name| {
            let value = std::env::var_os(name).unwrap_or_default();
            value.to_string_lossy().into_owned()
        };
        Self::list_as(&value("IWARP_DEVICE_NAME"), &value("IWARP_BIND"))
    }

    /// Lists devices as [`list`](Self::list) does, with these values instead of those of `IWARP_DEVICE_NAME` and `IWARP_BIND`.
    /// An empty value means the default.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn list_as(stem: &str, bind: &str) -> Result<Vec<Self>> {
        let wanted = wanted(bind);
        let stem = if stem.is_empty() || Self::is_stem(stem) {
            stem
        } else {
            complain::once(format!(
                "IWARP_DEVICE_NAME={stem}: not a name for devices ({STEM_RULE}); it is {STEM}"
            ));
            ""
        };
        let stem = if stem.is_empty() { STEM } else { stem };
        let mut addresses = interfaces::addresses()?;
        for unknown in wanted
            .iter()
            .filter(|w| !addresses.iter().any(|a| w.matches(a)))
        {
            complain::once(format!(
                "IWARP_BIND={bind}: '{}' is neither an address of this host nor an interface that is up and has one",
                unknown.text
            ));
        }
        addresses.retain(|a| wanted.is_empty() || wanted.iter().any(|w| w.matches(a)));
        // Link-local addresses appear a second or two after their interface. At the end they renumber no other device.
        addresses.sort_by_key(|a| a.scope_id() != 0);
        let mut known = NUMBERS.lock();
        let known = known.get_or_insert_with(HashMap::new);
        let known = known.entry(bind.to_owned()).or_default();
        let mut list = Vec::new();
        for a in addresses {
            let index = number(known, &a);
            list.push(Self {
                name: format!("{stem}{index}"),
                index,
                ip: a.ip,
                scope_id: a.scope_id(),
                guid: guid(a.mac, &a.name, a.ip),
                interface: a.name,
                mtu: a.mtu,
                loopback: a.loopback,
            });
        }
        list.sort_by_key(|device| device.index);
        Ok(list)
    }

    /// Returns `true` if device names can begin with this text. A number follows it, and C programs have room for 63 octets.
    pub fn is_stem(text: &str) -> bool {
        let usual = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
        (1..=STEM_MAX).contains(&text.len()) && text.bytes().all(usual)
    }

    /// Finds the device called `name`.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn by_name(name: &str) -> Result<Self> {
        Self::list()?
            .into_iter()
            .find(|d| d.name == name)
            .ok_or(Error::NoDevice)
    }

    /// Finds the device with this address. For another address of a loopback network (127.0.0.2) it is the loopback device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if it is not an address of this host.
    pub fn by_address(ip: IpAddr) -> Result<Self> {
        let ip = ip.to_canonical();
        let list = Self::list()?;
        let exact = list.iter().position(|d| d.ip == ip);
        let at = exact.or_else(|| {
            list.iter()
                .position(|d| ip.is_loopback() && d.loopback && d.ip.is_ipv4() == ip.is_ipv4())
        });
        at.and_then(|i| list.into_iter().nth(i))
            .ok_or(Error::NoDevice)
    }

    /// Finds the device that the host would use to reach `peer`.
    ///
    /// # Errors
    /// The operating system's error if there is no route, [`Error::NoDevice`] if the source address has no device.
    pub fn route_to(peer: SocketAddr) -> Result<Self> {
        Self::by_address(source_address(peer)?)
    }

    /// Returns the socket address of the device with this port.
    pub fn socket_addr(&self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, port)),
            IpAddr::V6(ip) => std::net::SocketAddrV6::new(ip, port, 0, self.scope_id).into(),
        }
    }

    /// Returns the index of its interface; 0 if that is gone.
    pub(crate) fn interface_index(&self) -> u32 {
        interfaces::index_of(&self.interface).unwrap_or(0)
    }

    /// Returns the device's GID: its IPv6 address, or its IPv4 address mapped into IPv6.
    pub const fn gid(&self) -> [u8; 16] {
        match self.ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        }
    }
}

/// The stem of device names if none is chosen.
const STEM: &str = "iwarp";
const STEM_MAX: usize = 48;
/// [`Device::is_stem`] in words.
const STEM_RULE: &str = "letters, digits, '_', '-' and '.', at most 48";

/// An entry of `IWARP_BIND`.
struct Wanted<'a> {
    text: &'a str,
    /// One address may be written in many ways.
    ip: Option<IpAddr>,
}

impl Wanted<'_> {
    fn matches(&self, a: &InterfaceAddress) -> bool {
        self.ip == Some(a.ip) || self.text == a.name
    }
}

fn wanted(bind: &str) -> Vec<Wanted<'_>> {
    let entries = bind.split(',').map(str::trim).filter(|s| !s.is_empty());
    entries
        .map(|text| Wanted {
            text,
            ip: text.parse().ok(),
        })
        .collect()
}

/// An address of an interface. Each has a number of its own.
type Key = (IpAddr, String);

/// The addresses that have a number, for each value of `IWARP_BIND`; the number is the position in the list.
static NUMBERS: Mutex<Option<HashMap<String, Vec<Key>>>> = Mutex::new(None);

/// Returns the number of an address, and gives a new address the next number.
fn number(known: &mut Vec<Key>, a: &InterfaceAddress) -> u32 {
    let at = known
        .iter()
        .position(|(ip, name)| *ip == a.ip && *name == a.name);
    at.unwrap_or_else(|| {
        known.push((a.ip, a.name.clone()));
        known.len() - 1
    }) as u32
}

/// Returns the source address that the kernel chooses for a peer. Sends nothing.
pub(crate) fn source_address(peer: SocketAddr) -> Result<IpAddr> {
    let peer = canonical(peer);
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let probe = std::net::UdpSocket::bind(any)?;
    // Connecting a datagram socket only looks up the route. Port 0 cannot be connected to.
    let port = if peer.port() == 0 { 9 } else { peer.port() };
    let mut target = peer;
    target.set_port(port);
    probe.connect(target)?;
    Ok(probe.local_addr()?.ip())
}

fn guid(mac: Option<[u8; 6]>, name: &str, ip: IpAddr) -> u64 {
    if let Some([a, b, c, d, e, f]) = mac
        && [a, b, c, d, e, f] != [0; 6]
    {
        return u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    }
    // Locally administered, and the same every time: FNV-1a over name and address.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in name.bytes().chain(ip.to_string().bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash & 0x00ff_ffff_ffff_ffff | 0x0200_0000_0000_0000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_number_when_others_come_and_go() {
        let address = |ip: &str, name: &str| InterfaceAddress {
            name: name.into(),
            ip: ip.parse().unwrap(),
            index: 1,
            prefix_len: 8,
            up: true,
            running: true,
            mtu: 1500,
            mac: None,
            loopback: false,
        };
        let (lo, eth) = (address("127.0.0.1", "lo"), address("10.0.0.1", "eth0"));
        let late = address("fe80::1", "br0");
        let mut known = Vec::new();
        assert_eq!([&lo, &eth].map(|a| number(&mut known, a)), [0, 1]);
        assert_eq!([&late, &lo, &eth].map(|a| number(&mut known, a)), [2, 0, 1]);
        assert_eq!([&eth, &late].map(|a| number(&mut known, a)), [1, 2]);
    }

    #[test]
    fn an_address_may_be_written_in_any_way() {
        let a = InterfaceAddress {
            name: "eth0".into(),
            ip: "2001:db8::1".parse().unwrap(),
            index: 1,
            prefix_len: 64,
            up: true,
            running: true,
            mtu: 1500,
            mac: None,
            loopback: false,
        };
        let found = |bind: &str| wanted(bind).iter().any(|w| w.matches(&a));
        for bind in ["eth0", "lo, eth0", "2001:db8::1", "2001:DB8:0:0::0001,,"] {
            assert!(found(bind), "{bind}");
        }
        for bind in ["", "eth", "2001:db8::2", "eth0:1"] {
            assert!(!found(bind), "{bind}");
        }
    }

    #[test]
    fn names_that_programs_cannot_use_are_not_made() {
        for bad in ["a/b", "../x", "my dev", "é", &"a".repeat(49), ""] {
            assert!(!Device::is_stem(bad), "{bad}");
        }
        assert!(Device::is_stem("siw_0-x.y") && Device::is_stem(&"a".repeat(48)));
        let names = |stem| -> Vec<_> {
            let list = Device::list_as(stem, "").unwrap();
            list.into_iter().map(|d| d.name).collect()
        };
        assert_eq!(names("a/b"), names(""));
    }

    #[test]
    fn loopback_has_a_device_with_a_stable_name() {
        let list = Device::list().unwrap();
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        assert!(lo.loopback && lo.guid != 0);
        assert_eq!(Device::by_name(&lo.name).unwrap(), lo);
        assert_eq!(list[lo.index as usize], lo);
        assert_eq!(
            Device::by_address("127.9.9.9".parse().unwrap()).unwrap(),
            lo
        );
        assert_eq!(
            Device::route_to("127.0.0.1:7".parse().unwrap()).unwrap(),
            lo
        );
        assert!(matches!(
            Device::by_address("192.0.2.1".parse().unwrap()),
            Err(Error::NoDevice)
        ));
        assert_eq!(lo.gid()[10..], [0xff, 0xff, 127, 0, 0, 1]);
    }
}
