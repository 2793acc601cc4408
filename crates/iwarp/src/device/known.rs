//! The interfaces and addresses that this process has listed so far. Interfaces keep their numbers,
//! and addresses keep their GID positions, because programs remember device names and GID indices.
//! A change of one address does not affect others.

use super::guid::guid;
use super::{Device, DeviceAddress, MAX_GID_ADDRESSES};
use crate::sys::interfaces::InterfaceAddress;
use crate::sys::process_lock::ProcessLock;
use std::collections::HashMap;
use std::net::IpAddr;

/// An interface that was listed before. Its number is its index in the list.
struct Known {
    interface: String,
    /// Addresses with GIDs; the index is the position.
    places: Vec<IpAddr>,
}

static KNOWN: ProcessLock<Option<HashMap<String, Vec<Known>>>> =
    ProcessLock::new("device::known::KNOWN", None);

pub(super) fn devices(stem: &str, bind: &str, addresses: &[InterfaceAddress]) -> Vec<Device> {
    let mut known = KNOWN.lock();
    let known = known.get_or_insert_with(HashMap::new);
    group_by_interface(known.entry(bind.to_owned()).or_default(), stem, addresses)
}

fn group_by_interface(
    known: &mut Vec<Known>,
    stem: &str,
    addresses: &[InterfaceAddress],
) -> Vec<Device> {
    let mut list: Vec<Device> = Vec::new();
    // Link-local addresses appear a second or two after their interface. They are listed last, so
    // that they do not renumber other devices.
    let mut addresses: Vec<_> = addresses.iter().collect();
    addresses.sort_by_key(|a| a.scope_id() != 0);
    for a in &addresses {
        let index = number(known, &a.name);
        if list.iter().any(|d| d.index == index) {
            continue;
        }
        let own = addresses.iter().copied().filter(|o| o.name == a.name);
        let own: Vec<_> = own.collect();
        let known = &mut known[index as usize];
        list.push(Device {
            name: format!("{stem}{index}"),
            index,
            addresses: with_places(&mut known.places, &own),
            guid: guid(a),
            interface: a.name.clone(),
            mtu: a.mtu,
            loopback: a.loopback,
        });
    }
    list.sort_by_key(|device| device.index);
    list
}

/// Returns the number of an interface; a new one gets the next number.
fn number(known: &mut Vec<Known>, interface: &str) -> u32 {
    let index = known.iter().position(|k| k.interface == interface);
    index.unwrap_or_else(|| {
        known.push(Known {
            interface: interface.to_owned(),
            places: Vec::new(),
        });
        known.len() - 1
    }) as u32
}

fn with_places(places: &mut Vec<IpAddr>, own: &[&InterfaceAddress]) -> Vec<DeviceAddress> {
    let exists = |ip: IpAddr| own.iter().any(|a| a.ip == ip);
    let mut place = |ip: IpAddr| {
        if let Some(index) = places.iter().position(|p| *p == ip) {
            return Some(index as u32);
        }
        if places.len() < MAX_GID_ADDRESSES as usize {
            places.push(ip);
            return Some(places.len() as u32 - 1);
        }
        // If all positions are taken, reuse one whose address no longer exists.
        let index = places.iter().position(|p| !exists(*p))?;
        places[index] = ip;
        Some(index as u32)
    };
    let address = |a: &&InterfaceAddress| DeviceAddress {
        ip: a.ip,
        scope_id: a.scope_id(),
        place: place(a.ip),
    };
    own.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ip: &str, name: &str) -> InterfaceAddress {
        InterfaceAddress {
            name: name.into(),
            ip: ip.parse().unwrap(),
            index: 1,
            prefix_len: 8,
            up: true,
            running: true,
            mtu: 1500,
            mac: None,
            shares_mac: false,
            loopback: false,
        }
    }

    /// Returns the names of the devices and the positions of their addresses.
    fn listed(known: &mut Vec<Known>, addresses: &[&InterfaceAddress]) -> Vec<(String, Vec<u32>)> {
        let addresses: Vec<_> = addresses.iter().map(|a| (*a).clone()).collect();
        let places = |d: &Device| d.addresses.iter().map(|a| a.place.unwrap()).collect();
        let list = group_by_interface(known, "x", &addresses);
        list.iter().map(|d| (d.name.clone(), places(d))).collect()
    }

    #[test]
    fn names_and_places_are_stable() {
        let lo = address("127.0.0.1", "lo");
        let (v4, v6) = (address("10.0.0.1", "eth0"), address("2001:db8::1", "eth0"));
        let late = address("10.0.0.2", "eth0");
        let bridge = address("fe80::1", "br0");
        let mut known = Vec::new();
        let mut list = |addresses: &[&InterfaceAddress]| listed(&mut known, addresses);
        let device = |name: &str, places: &[u32]| (name.to_owned(), places.to_vec());
        assert_eq!(
            list(&[&lo, &v4, &v6]),
            [device("x0", &[0]), device("x1", &[0, 1])]
        );
        assert_eq!(
            list(&[&bridge, &late, &v6]),
            [device("x1", &[2, 1]), device("x2", &[0])]
        );
        assert_eq!(
            list(&[&v4, &bridge]),
            [device("x1", &[0]), device("x2", &[0])]
        );
    }

    #[test]
    fn link_local_addresses_come_last() {
        let (bridge, lo) = (address("fe80::1", "br0"), address("127.0.0.1", "lo"));
        let both = ["2001:db8::1", "fe80::2"].map(|ip| address(ip, "eth0"));
        let mut known = Vec::new();
        let list = listed(&mut known, &[&bridge, &both[1], &lo, &both[0]]);
        let interfaces: Vec<_> = known.iter().map(|k| &k.interface[..]).collect();
        assert_eq!(interfaces, ["lo", "eth0", "br0"]);
        assert_eq!(list[1], ("x1".to_owned(), vec![0, 1]));
        assert_eq!(known[1].places, both.map(|a| a.ip));
    }

    #[test]
    fn free_places_are_reused_last() {
        let all: Vec<_> = (0..=MAX_GID_ADDRESSES)
            .map(|n| address(&format!("10.0.0.{n}"), "eth0"))
            .collect();
        let mut places = Vec::new();
        let all: Vec<&InterfaceAddress> = all.iter().collect();
        let mut with_places = |own: &[&InterfaceAddress]| -> Vec<Option<u32>> {
            with_places(&mut places, own)
                .iter()
                .map(|a| a.place)
                .collect()
        };
        let first = with_places(&all);
        assert_eq!(first[0], Some(0));
        assert_eq!(first[MAX_GID_ADDRESSES as usize], None);
        let without_first = with_places(&all[1..]);
        assert_eq!(without_first[0], Some(1));
        assert_eq!(without_first.last(), Some(&Some(0)));
    }
}
