//! The addresses of this host's network interfaces, for which devices are created.
//!
//! Invariant: the list that `getifaddrs` returns is only read, and `List` frees it once, after the
//! last use of its pointers. An address structure is read unaligned, after its family has been
//! checked.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr;

/// A usable address of a network interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// Interface index; never 0.
    pub index: u32,
    /// The address.
    pub ip: IpAddr,
    /// Length of the network prefix in bits.
    pub prefix_len: u8,
    /// Largest IP packet in bytes; 0 if unknown.
    pub mtu: u32,
    /// Ethernet address, if the interface has one.
    pub mac: Option<[u8; 6]>,
    /// An interface with a lower index has the same Ethernet address, as a VLAN's parent has.
    pub shares_mac: bool,
    /// The interface is administratively up (always true in this list).
    pub up: bool,
    /// The interface has a carrier.
    pub running: bool,
    /// The interface is a loopback interface.
    pub loopback: bool,
}

impl InterfaceAddress {
    /// Returns the scope of a link-local address, which is the interface index. Returns 0 for other
    /// addresses.
    pub fn scope_id(&self) -> u32 {
        match self.ip {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => self.index,
            _ => 0,
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        (self.index, self.ip, &self.name).cmp(&(other.index, other.ip, &other.name))
    }
}

/// Returns all addresses of interfaces that are up. They are sorted by interface index, then IPv4
/// before IPv6, then by value.
///
/// IPv6 addresses whose duplicate address detection is running or has failed are omitted: they
/// cannot be bound.
///
/// # Errors
/// The kernel's error; `EMFILE` if no descriptor is left.
pub fn addresses() -> io::Result<Vec<InterfaceAddress>> {
    let list = List::get()?;
    let unusable = unusable_v6();
    let mut macs: HashMap<String, (i32, [u8; 6])> = HashMap::new();
    let mut mtus: HashMap<String, u32> = HashMap::new();
    let mut found = Vec::new();
    for entry in list.entries() {
        let name = entry.name();
        if let Some(mac) = entry.mac() {
            macs.insert(name.clone(), mac);
        }
        let flags = entry.flags();
        let Some(ip) = entry.ip().filter(|_| flags & libc::IFF_UP as u32 != 0) else {
            continue;
        };
        if let IpAddr::V6(v6) = ip
            && unusable.contains(&(v6, name.clone()))
        {
            continue;
        }
        let device = device_of(&name).to_owned();
        let Some(index) = index_of(&device) else {
            // The interface was removed after the list was fetched.
            continue;
        };
        found.push(InterfaceAddress {
            index,
            ip,
            prefix_len: entry.prefix_len(ip),
            mtu: 0,
            mac: None,
            shares_mac: false,
            up: true,
            running: flags & libc::IFF_RUNNING as u32 != 0,
            loopback: flags & libc::IFF_LOOPBACK as u32 != 0,
            name: device,
        });
    }
    for address in &mut found {
        // The loopback interface has a MAC address of zeros. Treat it as none.
        if let Some((index, mac)) = macs.get(&address.name).filter(|m| m.1 != [0; 6]) {
            address.mac = Some(*mac);
            address.shares_mac = macs.values().any(|(i, m)| m == mac && i < index);
        }
        address.mtu = match mtus.get(&address.name) {
            Some(mtu) => *mtu,
            None => {
                let mtu = mtu_of(&address.name)?;
                mtus.insert(address.name.clone(), mtu);
                mtu
            }
        };
    }
    found.sort_by(InterfaceAddress::order);
    found.dedup_by(|a, b| a.index == b.index && a.ip == b.ip);
    Ok(found)
}

/// State of the loopback interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loopback {
    /// It is up, so 127.0.0.1 can be reached.
    Up,
    /// The interface of this name is down, as in a new network namespace.
    Down(String),
    /// There is no loopback interface.
    Absent,
}

/// Returns the state of the loopback interface.
///
/// # Errors
/// The kernel's error; `EMFILE` if no descriptor is left.
pub fn loopback_state() -> io::Result<Loopback> {
    let list = List::get()?;
    let is_loopback = |entry: &Entry<'_>| entry.flags() & libc::IFF_LOOPBACK as u32 != 0;
    let up = |entry: &Entry<'_>| entry.flags() & libc::IFF_UP as u32 != 0;
    let all: Vec<_> = list.entries().filter(is_loopback).collect();
    Ok(match all.first() {
        None => Loopback::Absent,
        Some(_) if all.iter().any(up) => Loopback::Up,
        Some(first) => Loopback::Down(first.name()),
    })
}

struct List {
    first: *mut libc::ifaddrs,
}

impl List {
    fn get() -> io::Result<Self> {
        let mut first = ptr::null_mut();
        // SAFETY: `first` is valid for writing a pointer.
        if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { first })
    }

    fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let mut next = self.first;
        std::iter::from_fn(move || {
            // SAFETY: `next` is null, or points to an entry of the list, which `self` owns.
            let raw = unsafe { next.as_ref() }?;
            next = raw.ifa_next;
            Some(Entry { raw })
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `getifaddrs` returned the list, and nothing else frees it.
        unsafe { libc::freeifaddrs(self.first) };
    }
}

#[derive(Clone, Copy)]
struct Entry<'a> {
    raw: &'a libc::ifaddrs,
}

impl Entry<'_> {
    fn name(&self) -> String {
        if self.raw.ifa_name.is_null() {
            return String::new();
        }
        // SAFETY: the name is a C string of the list.
        unsafe { CStr::from_ptr(self.raw.ifa_name) }
            .to_string_lossy()
            .into_owned()
    }

    fn flags(&self) -> u32 {
        self.raw.ifa_flags
    }

    fn ip(&self) -> Option<IpAddr> {
        // SAFETY: the pointer is null or a socket address of the list.
        unsafe { read_ip(self.raw.ifa_addr) }
    }

    fn prefix_len(&self, ip: IpAddr) -> u8 {
        // SAFETY: as in `ip`.
        match unsafe { read_ip(self.raw.ifa_netmask) } {
            Some(IpAddr::V4(mask)) => u32::from(mask).leading_ones() as u8,
            Some(IpAddr::V6(mask)) => u128::from(mask).leading_ones() as u8,
            None if ip.is_ipv4() => 32,
            None => 128,
        }
    }

    fn mac(&self) -> Option<(i32, [u8; 6])> {
        let address = self.raw.ifa_addr;
        // SAFETY: the pointer is null or a socket address of the list, which starts with its
        // family.
        if address.is_null() || i32::from(unsafe { (*address).sa_family }) != libc::AF_PACKET {
            return None;
        }
        // SAFETY: a socket address of this family is a `sockaddr_ll`.
        let link = unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() };
        if link.sll_halen != 6 {
            return None;
        }
        let [a, b, c, d, e, f, ..] = link.sll_addr;
        Some((link.sll_ifindex, [a, b, c, d, e, f]))
    }
}

/// Returns the IP address in a socket address, if it contains one.
///
/// # Safety
/// `address` is null or points to a complete socket address.
unsafe fn read_ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, and every socket address starts with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: a socket address of this family is a `sockaddr_in`.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: a socket address of this family is a `sockaddr_in6`.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

/// Returns the name of the interface that an IPv4 alias belongs to: `eth0` for `eth0:1`.
fn device_of(name: &str) -> &str {
    name.split(':').next().unwrap_or_default()
}

/// Returns the index of the interface with this name, if there is one.
pub fn index_of(name: &str) -> Option<u32> {
    let request = std::ffi::CString::new(name).ok()?;
    // SAFETY: the argument is a C string.
    match unsafe { libc::if_nametoindex(request.as_ptr()) } {
        0 => None,
        index => Some(index),
    }
}

#[cfg(miri)]
use crate::miri::mtu_of;

/// Returns the MTU of an interface, or 0 if the interface no longer exists.
#[cfg(not(miri))]
fn mtu_of(name: &str) -> io::Result<u32> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)?;
    // SAFETY: all zeros are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the kernel reads the name in `request`, and stores an `int` in its union.
    let status = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCGIFMTU as libc::Ioctl,
            &raw mut request,
        )
    };
    if status < 0 {
        return Ok(0);
    }
    // SAFETY: the successful call has filled in this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Returns IPv6 addresses whose duplicate address detection is running or has failed. `getifaddrs`
/// does not report that.
fn unusable_v6() -> Vec<(Ipv6Addr, String)> {
    // The file does not exist without IPv6 or /proc. Then treat all addresses as usable.
    std::fs::read_to_string("/proc/net/if_inet6")
        .map(|text| parse_if_inet6(&text))
        .unwrap_or_default()
}

fn parse_if_inet6(text: &str) -> Vec<(Ipv6Addr, String)> {
    const DAD_FAILED: u32 = 0x08;
    const TENTATIVE: u32 = 0x40;
    const OPTIMISTIC: u32 = 0x04;
    text.lines()
        .filter_map(|line| {
            // address, index, prefix length, scope, flags (all hexadecimal), name
            let mut fields = line.split_whitespace();
            let address = u128::from_str_radix(fields.next()?, 16).ok()?;
            let flags = u32::from_str_radix(fields.nth(3)?, 16).ok()?;
            let name = fields.next()?;
            let tentative = flags & TENTATIVE != 0 && flags & OPTIMISTIC == 0;
            (tentative || flags & DAD_FAILED != 0)
                .then(|| (Ipv6Addr::from(address), name.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{SocketAddr, SocketAddrV6};

    #[test]
    fn addresses_include_loopback() {
        let all = addresses().expect("interfaces");
        let lo = all
            .iter()
            .find(|address| address.ip == IpAddr::V4(Ipv4Addr::LOCALHOST))
            .expect("127.0.0.1");
        assert!(lo.loopback && lo.up);
        assert_eq!(lo.prefix_len, 8);
        assert!(lo.index > 0);
        assert!(lo.mtu >= 1280, "{}", lo.mtu);
        assert_eq!(lo.mac, None);
        assert_eq!(lo.scope_id(), 0);
    }

    #[test]
    fn addresses_are_sorted_and_bindable() {
        let all = addresses().expect("interfaces");
        assert!(
            all.is_sorted_by(|a, b| (a.index, a.ip) < (b.index, b.ip)),
            "{all:?}"
        );
        assert_eq!(all, addresses().expect("again"));
        for address in &all {
            let socket = match address.ip {
                IpAddr::V4(ip) => SocketAddr::from((ip, 0)),
                IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, address.scope_id()).into(),
            };
            std::net::TcpListener::bind(socket)
                .unwrap_or_else(|error| panic!("{address:?}: {error}"));
        }
    }

    #[test]
    fn interfaces_agree_with_sysfs() {
        for address in addresses().expect("interfaces") {
            let read = |file: &str| {
                std::fs::read_to_string(format!("/sys/class/net/{}/{file}", address.name))
            };
            let (Ok(mtu), Ok(mac), Ok(index)) = (read("mtu"), read("address"), read("ifindex"))
            else {
                println!("skipped: no /sys for {}", address.name);
                continue;
            };
            assert_eq!(mtu.trim().parse(), Ok(address.mtu));
            assert_eq!(index.trim().parse(), Ok(address.index));
            if let Some(own) = address.mac {
                let text: Vec<String> = own.iter().map(|octet| format!("{octet:02x}")).collect();
                assert_eq!(mac.trim(), text.join(":"));
            }
        }
    }

    #[test]
    fn tentative_ipv6_addresses_are_unusable() {
        let text = "\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000002 02 40 20 c0     eth0
fe800000000000000000000000000003 03 40 20 88     eth1
fe800000000000000000000000000004 04 40 20 44     eth2
garbage
";
        let bad = parse_if_inet6(text);
        assert_eq!(
            bad,
            [
                ("fe80::2".parse().expect("ip"), "eth0".to_owned()),
                ("fe80::3".parse().expect("ip"), "eth1".to_owned()),
            ]
        );
    }

    #[test]
    fn link_local_addresses_have_scope() {
        let mut address = InterfaceAddress {
            name: "eth0".to_owned(),
            index: 7,
            ip: "fe80::1".parse().expect("ip"),
            prefix_len: 64,
            mtu: 1500,
            mac: None,
            shares_mac: false,
            up: true,
            running: true,
            loopback: false,
        };
        assert_eq!(address.scope_id(), 7);
        address.ip = "2001:db8::1".parse().expect("ip");
        assert_eq!(address.scope_id(), 0);
    }

    #[test]
    fn alias_belongs_to_its_interface() {
        assert_eq!(["eth0:1", "eth0"].map(device_of), ["eth0"; 2]);
    }
}
