//! Local identifiers (LIDs), for programs that exchange LIDs and queue pair numbers instead of GIDs, as on InfiniBand.
//!
//! On InfiniBand a subnet manager gives each port a LID, and a LID has a meaning within the subnet only. Here nobody gives them:
//! a LID is the low half of the device's IPv4 address, and the high half takes the place of the subnet. So a peer that names its LID
//! can be reached if the high halves of both addresses are the same, and no table is needed.
//!
//! LID 0 means no LID, and many programs for Ethernet exchange it without looking. It stands for the device itself, so that
//! they reach each other on one host.

use crate::device::Device;
use std::net::{IpAddr, Ipv4Addr};

impl Device {
    /// Returns the LID of the device's port: the low 16 bits of its IPv4 address. A device with an IPv6 address has none (0).
    pub const fn lid(&self) -> u16 {
        match self.ip {
            IpAddr::V4(ip) => {
                let [_, _, high, low] = ip.octets();
                u16::from_be_bytes([high, low])
            }
            IpAddr::V6(_) => 0,
        }
    }

    /// Returns the GID of the port with this LID: that of the IPv4 address with the high half of ours and this low half. LID 0 is this
    /// device. `None` if this device has no LIDs. Whether there is such a port is not known.
    pub const fn gid_of_lid(&self, lid: u16) -> Option<[u8; 16]> {
        match (self.ip, lid) {
            (_, 0) => Some(self.gid()),
            (IpAddr::V4(ip), _) => {
                let [a, b, ..] = ip.octets();
                let [c, d] = lid.to_be_bytes();
                Some(Ipv4Addr::new(a, b, c, d).to_ipv6_mapped().octets())
            }
            (IpAddr::V6(_), _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ip: &str) -> Device {
        let ip = ip.parse().unwrap();
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        Device { ip, ..lo }
    }

    #[test]
    fn ports_of_one_network_find_each_other_by_lid() {
        let (a, b) = (device("10.1.2.3"), device("10.1.200.4"));
        assert_eq!((a.lid(), b.lid()), (0x0203, 0xc804));
        assert_eq!(a.gid_of_lid(b.lid()), Some(b.gid()));
        assert_eq!(b.gid_of_lid(a.lid()), Some(a.gid()));
        assert_eq!(a.gid_of_lid(a.lid()), Some(a.gid()));
    }

    #[test]
    fn lid_0_is_the_device_itself() {
        for ip in ["127.0.0.1", "10.1.2.3", "2001:db8::1"] {
            let device = device(ip);
            assert_eq!(device.gid_of_lid(0), Some(device.gid()), "{ip}");
        }
    }

    #[test]
    fn a_device_without_ipv4_has_no_lid() {
        let device = device("2001:db8::1");
        assert_eq!((device.lid(), device.gid_of_lid(7)), (0, None));
    }
}
