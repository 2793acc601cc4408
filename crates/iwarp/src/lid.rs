//! Local identifiers (LIDs), for programs that exchange LIDs and queue pair numbers instead of
//! GIDs, as on InfiniBand.
//!
//! On InfiniBand a subnet manager assigns LIDs, which are valid within the subnet. Here a LID is
//! the low half of the device's first IPv4 address, and the high half corresponds to the subnet. A
//! peer can be reached by its LID if the high halves of both addresses are equal.
//!
//! LID 0 means "no LID", but many programs for Ethernet exchange it without a check. Here it refers
//! to the device itself, so that such programs can connect on one host.

use crate::config::Face;
use crate::device::{Device, gid_of};
use std::net::{IpAddr, Ipv4Addr};

impl Device {
    /// Returns the LID of the device's port: the low 16 bits of its first IPv4 address. Returns 0
    /// if there is no IPv4 address, and for a RoCE NIC.
    pub fn lid(&self, face: Face) -> u16 {
        match (face, self.first_v4()) {
            (Face::Rnic, Some(ip)) => {
                let [_, _, high, low] = ip.octets();
                u16::from_be_bytes([high, low])
            }
            _ => 0,
        }
    }

    /// Returns the GIDs of this device and of the port with this LID. The port's IPv4 address
    /// consists of the high half of this device's address and `lid`; LID 0 is this device. Returns
    /// `None` if this device has no IPv4 address. Does not check whether the port exists.
    pub fn path_to_lid(&self, lid: u16) -> Option<([u8; 16], [u8; 16])> {
        if lid == 0 {
            return Some((gid_of(self.ip()), gid_of(self.ip())));
        }
        let own = self.first_v4()?;
        let [a, b, ..] = own.octets();
        let [c, d] = lid.to_be_bytes();
        let peer = Ipv4Addr::new(a, b, c, d);
        Some((gid_of(own.into()), gid_of(peer.into())))
    }

    fn first_v4(&self) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|a| match a.ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ips: &[&str]) -> Device {
        let mut lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        let like = lo.addresses[0].clone();
        let address = |ip: &&str| {
            let mut address = like.clone();
            address.ip = ip.parse().unwrap();
            address
        };
        lo.addresses = ips.iter().map(address).collect();
        lo
    }

    fn gid(ip: &str) -> [u8; 16] {
        gid_of(ip.parse().unwrap())
    }

    #[test]
    fn ports_of_one_network_have_paths() {
        let (a, b) = (device(&["10.1.2.3", "10.9.9.9"]), device(&["10.1.200.4"]));
        assert_eq!((a.lid(Face::Rnic), b.lid(Face::Rnic)), (0x0203, 0xc804));
        let (one, other) = (gid("10.1.2.3"), gid("10.1.200.4"));
        assert_eq!(a.path_to_lid(0xc804), Some((one, other)));
        assert_eq!(b.path_to_lid(0x0203), Some((other, one)));
        assert_eq!(a.path_to_lid(0x0203), Some((one, one)));
    }

    #[test]
    fn lid_0_is_the_device_itself() {
        for ips in [&["127.0.0.1", "::1"][..], &["10.1.2.3"], &["2001:db8::1"]] {
            let own = gid(ips[0]);
            assert_eq!(device(ips).path_to_lid(0), Some((own, own)), "{ips:?}");
        }
    }

    #[test]
    fn no_lid_without_ipv4() {
        let device = device(&["2001:db8::1"]);
        assert_eq!((device.lid(Face::Rnic), device.path_to_lid(7)), (0, None));
    }

    #[test]
    fn a_roce_nic_has_no_lid() {
        assert_eq!(device(&["10.1.2.3"]).lid(Face::Roce), 0);
    }
}
