//! Devices: one software RNIC per network interface with an address.

mod guid;
mod known;

use crate::complain;
use crate::config::Face;
use crate::error::{Error, Result};
use crate::sys::address::canonical;
use crate::sys::interfaces::{self, InterfaceAddress};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Limits of a device. All devices of this crate have the same limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Work requests per queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements per work request.
    pub max_sge: u32,
    /// Bytes of inline data per work request.
    pub max_inline: u32,
    /// Completions per completion queue.
    pub max_cqe: u32,
    /// Memory regions and windows.
    pub max_mr: u32,
    /// Bytes per message.
    pub max_message: u32,
    /// Inbound RDMA Reads and atomics per queue pair.
    pub max_ird: u16,
    /// Outbound RDMA Reads and atomics per queue pair.
    pub max_ord: u16,
}

/// Limits of every device.
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

/// An address of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Scope ID of a link-local IPv6 address; zero for other addresses.
    pub scope_id: u32,
    /// Position among the addresses with GIDs; it does not change within a process. `None` if all
    /// [`MAX_GID_ADDRESSES`] positions are in use: the address is usable, but has no GID.
    pub place: Option<u32>,
}

impl DeviceAddress {
    /// Returns the GID: the IPv6 address, or the IPv4 address mapped into IPv6.
    pub const fn gid(&self) -> [u8; 16] {
        gid_of(self.ip)
    }
}

/// Returns the GID of an address: the IPv6 address, or the IPv4 address mapped into IPv6.
pub(crate) const fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// A software RNIC on one network interface of this host.
///
/// Devices need no privileges and no configuration: each interface that is up and has an address is
/// a device. A `Device` is a snapshot of the interface; [`current`](Self::current) returns a new
/// one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// `iwarp0`, `iwarp1` …, in the order of the interfaces. Interfaces with only link-local
    /// addresses come last. `IWARP_DEVICE_NAME` replaces the stem `iwarp`. Names do not change
    /// within a process; an interface that appears later gets the next number.
    pub name: String,
    /// The number in the name.
    pub index: u32,
    /// Addresses of the interface, at least one: IPv4 before IPv6, link-local last.
    pub addresses: Vec<DeviceAddress>,
    /// Name of the network interface.
    pub interface: String,
    /// MTU of the interface in octets.
    pub mtu: u32,
    /// `true` if the interface is a loopback interface.
    pub loopback: bool,
    /// EUI-64 of the interface's MAC address. If the interface has no MAC address, or shares it
    /// with another interface as VLANs do, a hash of names.
    pub guid: u64,
}

impl Device {
    /// Lists all devices in a stable order. `IWARP_BIND` (addresses or interface names, separated
    /// by commas) restricts their addresses. An unknown entry is reported as
    /// [`Config::from_env`](crate::Config::from_env) reports errors.
    ///
    /// # Errors
    /// [`Error::Io`] if the interfaces cannot be listed.
    pub fn list() -> Result<Vec<Self>> {
        let value = |name| {
            let value = std::env::var_os(name).unwrap_or_default();
            value.to_string_lossy().into_owned()
        };
        Self::list_as(&value("IWARP_DEVICE_NAME"), &value("IWARP_BIND"))
    }

    /// Lists devices as [`list`](Self::list) does, with `stem` and `bind` in place of
    /// `IWARP_DEVICE_NAME` and `IWARP_BIND`. Empty strings select the defaults.
    ///
    /// # Errors
    /// See [`list`](Self::list).
    pub fn list_as(stem: &str, bind: &str) -> Result<Vec<Self>> {
        let stem = usable_stem(stem);
        let wanted = parse_bind(bind);
        let mut addresses = interfaces::addresses()?;
        if addresses.is_empty() {
            explain_loopback("there is no RDMA device");
        }
        for unknown in wanted
            .iter()
            .filter(|w| !addresses.iter().any(|a| w.matches(a)))
        {
            complain::once(format!(
                "IWARP_BIND={bind}: '{}' is neither an address of this host \
                     nor an interface that is up and has one",
                unknown.text
            ));
        }
        addresses.retain(|a| wanted.is_empty() || wanted.iter().any(|w| w.matches(a)));
        Ok(known::devices(stem, bind, &addresses))
    }

    /// Returns `true` if `text` is a valid stem of device names. The length is limited, because a
    /// number follows the stem, and device names have at most 63 bytes in the C API.
    pub fn is_stem(text: &str) -> bool {
        let usual = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
        (1..=STEM_MAX).contains(&text.len()) && text.bytes().all(usual)
    }

    /// Returns the device with this name.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device; [`Error::Io`] if the interfaces cannot be
    /// listed.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::list()?
            .into_iter()
            .find(|d| d.name == name)
            .ok_or(Error::NoDevice)
    }

    /// Returns the device with this address. For another address of the loopback network, such as
    /// 127.0.0.2, returns the loopback device, or the first device if `IWARP_BIND` excludes
    /// loopback.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if no device has the address; [`Error::Io`] if the interfaces cannot be
    /// listed.
    pub fn by_address(ip: IpAddr) -> Result<Self> {
        let ip = ip.to_canonical();
        let list = Self::list()?;
        let exact = list.iter().position(|d| d.address(ip).is_some());
        let of_kind = |d: &Self| {
            d.addresses
                .iter()
                .any(|a| a.ip.is_ipv4() == ip.is_ipv4() && a.ip.is_loopback())
        };
        let index = exact.or_else(|| {
            list.iter()
                .position(|d| ip.is_loopback() && d.loopback && of_kind(d))
        });
        let index = index.or_else(|| (ip.is_loopback() && !list.is_empty()).then_some(0));
        index
            .and_then(|i| list.into_iter().nth(i))
            .ok_or(Error::NoDevice)
    }

    /// Returns the device whose address the host's routes select as the source for `peer`.
    ///
    /// # Errors
    /// [`Error::Io`] if there is no route; [`Error::NoDevice`] if the source address has no device.
    pub fn route_to(peer: SocketAddr) -> Result<Self> {
        Self::by_address(source_address(peer)?)
    }

    /// Returns a new snapshot of the interface, or `None` if it is down or has no address.
    ///
    /// # Errors
    /// See [`list`](Self::list).
    pub fn current(&self) -> Result<Option<Self>> {
        let all = Self::list()?;
        Ok(all.into_iter().find(|d| d.interface == self.interface))
    }

    /// Returns the first address.
    pub fn ip(&self) -> IpAddr {
        let first = self.addresses.first();
        first.map_or(Ipv6Addr::UNSPECIFIED.into(), |a| a.ip)
    }

    /// Returns the entry of an address of the device.
    pub fn address(&self, ip: IpAddr) -> Option<&DeviceAddress> {
        self.addresses.iter().find(|a| a.ip == ip)
    }

    /// Returns the socket address of `ip` and `port`. A link-local address gets the scope of this
    /// device's interface.
    pub fn socket_addr(&self, ip: IpAddr, port: u16) -> SocketAddr {
        match ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(v6) => {
                let known = self.address(ip).map_or(0, |a| a.scope_id);
                SocketAddrV6::new(v6, port, 0, known).into()
            }
        }
    }

    /// Returns the index of the interface, or 0 if it no longer exists.
    pub fn interface_index(&self) -> u32 {
        interfaces::index_of(&self.interface).unwrap_or(0)
    }

    /// Returns the device's source address for a connection to `peer`. Only addresses of the peer's
    /// kind are considered: the same family, loopback or not, link-local or not. If there are
    /// several, returns the one that the kernel would choose, or else the first. Returns `None` if
    /// there is none.
    pub fn source_for(&self, peer: SocketAddr) -> Option<IpAddr> {
        let kind = |ip: IpAddr| (ip.is_ipv4(), ip.is_loopback(), is_link_local(ip));
        let wanted = kind(peer.ip().to_canonical());
        let mut fitting = self.addresses.iter().map(|a| a.ip);
        let mut fitting = fitting.by_ref().filter(|ip| kind(*ip) == wanted);
        let first = fitting.next()?;
        let rest: Vec<IpAddr> = fitting.collect();
        if rest.is_empty() {
            return Some(first);
        }
        let chosen = source_address(peer).ok();
        Some(chosen.filter(|ip| rest.contains(ip)).unwrap_or(first))
    }

    /// Returns the non-empty entries of the GID table. An RNIC has one entry per address; a RoCE
    /// NIC has two, for RoCE v1 and RoCE v2.
    pub fn gids(&self, face: Face) -> Vec<GidEntry> {
        let of_address = |a: &DeviceAddress| {
            let place = a.place?;
            let kinds = face.gid_kinds();
            let (first, gid) = (place * kinds.len() as u32, a.gid());
            Some(
                kinds
                    .iter()
                    .zip(first..)
                    .map(move |(&kind, index)| GidEntry { index, gid, kind }),
            )
        };
        let mut table: Vec<GidEntry> = self
            .addresses
            .iter()
            .filter_map(of_address)
            .flatten()
            .collect();
        table.sort_by_key(|entry| entry.index);
        table
    }
}

/// Maximum number of addresses with GIDs per device.
pub const MAX_GID_ADDRESSES: u32 = 32;

/// An entry of a GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// Index in the table.
    pub index: u32,
    /// The address; IPv4 addresses are mapped into IPv6.
    pub gid: [u8; 16],
    /// Type of the entry.
    pub kind: GidKind,
}

/// Type of a GID. On a RoCE NIC it selects the encapsulation; here all connections are iWARP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand; the kernel reports this type for iWARP NICs, too.
    Ib,
    /// RoCE v1: Ethernet frames.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
}

impl Face {
    /// Returns the types of the GIDs of each address.
    const fn gid_kinds(self) -> &'static [GidKind] {
        match self {
            Self::Rnic => &[GidKind::Ib],
            Self::Roce => &[GidKind::RoceV1, GidKind::RoceV2],
        }
    }

    /// Returns the length of the GID table, empty entries included.
    pub const fn gid_table_len(self) -> u32 {
        MAX_GID_ADDRESSES * self.gid_kinds().len() as u32
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn usable_stem(stem: &str) -> &str {
    if Device::is_stem(stem) {
        return stem;
    }
    if !stem.is_empty() {
        complain::once(format!(
            "IWARP_DEVICE_NAME={stem}: not a valid device name ({STEM_RULE}); using {STEM}"
        ));
    }
    STEM
}

/// Default stem of device names.
const STEM: &str = "iwarp";
const STEM_MAX: usize = 48;
/// The rule of [`Device::is_stem`], for messages.
const STEM_RULE: &str = "letters, digits, '_', '-' and '.', at most 48";

struct BindEntry<'a> {
    text: &'a str,
    /// Parsed, because an address can be written in several ways.
    ip: Option<IpAddr>,
}

impl BindEntry<'_> {
    fn matches(&self, a: &InterfaceAddress) -> bool {
        self.ip == Some(a.ip) || self.text == a.name
    }
}

fn parse_bind(bind: &str) -> Vec<BindEntry<'_>> {
    let entries = bind.split(',').map(str::trim).filter(|s| !s.is_empty());
    entries
        .map(|text| BindEntry {
            text,
            ip: text.parse().ok(),
        })
        .collect()
}

/// Returns the source address that the kernel selects for a peer. Sends nothing.
pub(crate) fn source_address(peer: SocketAddr) -> Result<IpAddr> {
    let peer = canonical(peer);
    if cfg!(miri) {
        return Ok(peer.ip());
    }
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let probe = std::net::UdpSocket::bind(any)?;
    // Connecting a UDP socket only looks up the route. A connect to port 0 fails, so use port 9.
    let port = if peer.port() == 0 { 9 } else { peer.port() };
    let mut target = peer;
    target.set_port(port);
    if let Err(error) = probe.connect(target) {
        if target.ip().to_canonical().is_loopback() {
            explain_loopback(&format!("{} cannot be reached", target.ip()));
        }
        return Err(error.into());
    }
    Ok(probe.local_addr()?.ip())
}

/// If the loopback interface is down, as in a new network namespace, reports that with what does
/// not work therefore.
fn explain_loopback(effect: &str) {
    if let Ok(interfaces::Loopback::Down(name)) = interfaces::loopback_state() {
        complain::once(format!(
            "{effect}: the loopback interface {name} is down; `ip link set {name} up` as root of \
             the network namespace enables it"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_spelling_of_address_matches() {
        let a = InterfaceAddress {
            name: "eth0".into(),
            ip: "2001:db8::1".parse().unwrap(),
            index: 1,
            prefix_len: 64,
            up: true,
            running: true,
            mtu: 1500,
            mac: None,
            shares_mac: false,
            loopback: false,
        };
        let found = |bind: &str| parse_bind(bind).iter().any(|w| w.matches(&a));
        for bind in ["eth0", "lo, eth0", "2001:db8::1", "2001:DB8:0:0::0001,,"] {
            assert!(found(bind), "{bind}");
        }
        for bind in ["", "eth", "2001:db8::2", "eth0:1"] {
            assert!(!found(bind), "{bind}");
        }
    }

    #[test]
    fn unusable_stems_are_replaced() {
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
    fn loopback_device_name_is_stable() {
        let list = Device::list().unwrap();
        let ip = "127.0.0.1".parse().unwrap();
        let lo = Device::by_address(ip).unwrap();
        assert!(lo.loopback && lo.guid != 0);
        assert_eq!(Device::by_name(&lo.name).unwrap(), lo);
        assert_eq!(lo.current().unwrap().as_ref(), Some(&lo));
        assert_eq!(list[lo.index as usize], lo);
        for other in ["127.9.9.9", "::ffff:127.0.0.1"] {
            assert_eq!(Device::by_address(other.parse().unwrap()).unwrap(), lo);
        }
        if list
            .iter()
            .any(|d| d.address("::1".parse().unwrap()).is_some())
        {
            assert_eq!(Device::by_address("::1".parse().unwrap()).unwrap(), lo);
        }
        assert_eq!(
            Device::route_to("127.0.0.1:7".parse().unwrap()).unwrap(),
            lo
        );
        assert!(matches!(
            Device::by_address("192.0.2.1".parse().unwrap()),
            Err(Error::NoDevice)
        ));
        assert_eq!(
            lo.address(ip).unwrap().gid()[10..],
            [0xff, 0xff, 127, 0, 0, 1]
        );
    }

    #[test]
    fn interfaces_have_unique_guids() {
        let list = Device::list().unwrap();
        for (index, device) in list.iter().enumerate() {
            for other in &list[..index] {
                assert_ne!(other.interface, device.interface);
                assert_ne!(other.guid, device.guid, "{other:?} {device:?}");
            }
        }
        let all = interfaces::addresses().unwrap();
        let count: usize = list.iter().map(|d| d.addresses.len()).sum();
        assert_eq!(count, all.len());
    }

    /// Returns a device with these addresses, on an interface with index 7.
    fn device_with(addresses: &[&str]) -> Device {
        let address = |(index, text): (usize, &&str)| {
            let ip = text.parse().unwrap();
            DeviceAddress {
                ip,
                scope_id: if is_link_local(ip) { 7 } else { 0 },
                place: Some(index as u32),
            }
        };
        Device {
            name: "iwarp0".into(),
            index: 0,
            addresses: addresses.iter().enumerate().map(address).collect(),
            interface: "eth0".into(),
            mtu: 1500,
            loopback: false,
            guid: 1,
        }
    }

    #[test]
    fn source_has_family_of_peer() {
        let device = device_with(&["192.0.2.1", "2001:db8::1", "fe80::1"]);
        for (peer, source) in [
            ("192.0.2.9:1", Some("192.0.2.1")),
            ("[::ffff:192.0.2.9]:1", Some("192.0.2.1")),
            ("[2001:db8::9]:1", Some("2001:db8::1")),
            ("[fe80::9%7]:1", Some("fe80::1")),
            ("127.0.0.1:1", None),
            ("[::1]:1", None),
        ] {
            let source: Option<IpAddr> = source.map(|ip| ip.parse().unwrap());
            assert_eq!(device.source_for(peer.parse().unwrap()), source, "{peer}");
        }
        let local = device.socket_addr("fe80::1".parse().unwrap(), 9);
        assert_eq!(local, "[fe80::1%7]:9".parse().unwrap());
        // The kernel would choose neither address, so the first is returned.
        let device = device_with(&["198.51.100.1", "198.51.100.2"]);
        let source = device.source_for("198.51.100.9:1".parse().unwrap());
        assert_eq!(source, Some("198.51.100.1".parse().unwrap()));
        // The kernel chooses 127.0.0.1, which is no address of this device.
        let device = device_with(&["127.0.0.2", "127.0.0.3"]);
        let source = device.source_for("127.0.0.9:1".parse().unwrap());
        assert_eq!(source, Some("127.0.0.2".parse().unwrap()));
    }

    #[test]
    fn roce_lists_each_address_twice() {
        let mut device = device_with(&["192.0.2.1", "2001:db8::1"]);
        let table = |device: &Device, face| -> Vec<(u32, GidKind, [u8; 16])> {
            let table = device.gids(face).into_iter();
            table.map(|e| (e.index, e.kind, e.gid)).collect()
        };
        let [v4, v6] = [0, 1].map(|i: usize| device.addresses[i].gid());
        let (v1, v2) = (GidKind::RoceV1, GidKind::RoceV2);
        let ib = GidKind::Ib;
        assert_eq!(table(&device, Face::Rnic), [(0, ib, v4), (1, ib, v6)]);
        let twice = [(0, v1, v4), (1, v2, v4), (2, v1, v6), (3, v2, v6)];
        assert_eq!(table(&device, Face::Roce), twice);
        device.addresses[0].place = None;
        assert_eq!(table(&device, Face::Roce), twice[2..]);
        // An address that was added late may be listed first.
        device.addresses[0].place = Some(2);
        assert_eq!(table(&device, Face::Rnic), [(1, ib, v6), (2, ib, v4)]);
        assert_eq!([Face::Rnic, Face::Roce].map(Face::gid_table_len), [32, 64]);
    }
}
