//! Address handles, the mapping of GIDs to IP addresses and multicast groups, and the global
//! routing header (GRH) before a received datagram.
//!
//! As on RoCE v2, a GID is an IPv6 address, or an IPv4 address mapped into IPv6, and the routing
//! header is the IP header of the packet.

use crate::device::gid_of;
use crate::error::{Error, Result};
use crate::sys::datagram::Route;
use iwarp_proto::datagram::HEADER_LEN;
use iwarp_rnic::WcFlags;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Length of the routing header before each received datagram.
pub(super) const GRH_LEN: usize = 40;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const UDP_PROTOCOL: u8 = 17;

/// An address handle: the destination of datagrams, and how they are sent (`ibv_create_ah(3)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdAddress {
    /// The source address, one of the device's addresses.
    pub(super) source: IpAddr,
    pub(super) ip: IpAddr,
    pub(super) route: Route,
}

impl UdAddress {
    /// Creates an address handle for datagrams from the device's GID `source` to `gid`.
    /// `traffic_class` and `hop_limit` are fields of the IP header; 0 selects the system's default.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: datagrams cannot be sent to `gid`, or not from `source`.
    pub fn new(source: [u8; 16], gid: [u8; 16], traffic_class: u8, hop_limit: u8) -> Result<Self> {
        let (source, ip) = (ip_of(source), ip_of(gid));
        if source.is_ipv6() != ip.is_ipv6() {
            return Err(Error::InvalidArgument(
                "both GIDs must be IPv4 addresses, or both IPv6 addresses",
            ));
        }
        if ip.is_unspecified() || ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return Err(Error::InvalidArgument(
                "the destination must be the GID of a device or of a multicast group",
            ));
        }
        let route = Route {
            traffic_class,
            hop_limit,
        };
        Ok(Self { source, ip, route })
    }

    /// Returns the IP address of the destination.
    pub const fn ip(&self) -> IpAddr {
        self.ip
    }
}

/// Returns the IP address of a GID. An IPv4 multicast group has three possible GIDs: the mapped
/// address, one that starts with ff0e as on RoCE v1, and the form of IP over InfiniBand (RFC 4391
/// section 4).
pub(super) fn ip_of(gid: [u8; 16]) -> IpAddr {
    let ip = Ipv6Addr::from(gid).to_canonical();
    let IpAddr::V6(v6) = ip else { return ip };
    if !v6.is_multicast() {
        return ip;
    }
    let mut mapped = gid;
    mapped[..2].fill(0);
    if let (0xff0e, IpAddr::V4(group)) = (v6.segments()[0], Ipv6Addr::from(mapped).to_canonical())
        && group.is_multicast()
    {
        return group.into();
    }
    if v6.segments()[1] == 0x401b {
        let [.., a, b, c, d] = gid;
        return Ipv4Addr::new(0xe0 | a & 0xf, b, c, d).into();
    }
    ip
}

/// Writes the routing header of a datagram with `payload` octets. An IPv4 header is in the last 20
/// octets, after zeros. Returns the completion flags of the header.
pub(super) fn write_grh(
    to: &mut [u8; GRH_LEN],
    from: IpAddr,
    destination: IpAddr,
    route: Route,
    payload: usize,
) -> WcFlags {
    let len_after_ip = (UDP_LEN + HEADER_LEN + payload) as u16;
    to.fill(0);
    if let (IpAddr::V4(from), IpAddr::V4(destination)) = (from, destination) {
        let (_, header) = to.split_at_mut(GRH_LEN - IPV4_LEN);
        // Version 4, and a length of five words.
        header[0] = 0x45;
        header[1] = route.traffic_class;
        header[2..4].copy_from_slice(&(len_after_ip + IPV4_LEN as u16).to_be_bytes());
        header[8] = route.hop_limit;
        header[9] = UDP_PROTOCOL;
        header[12..16].copy_from_slice(&from.octets());
        header[16..20].copy_from_slice(&destination.octets());
        let sum = internet_checksum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        return WcFlags::GRH | WcFlags::IPV4;
    }
    to[..4].copy_from_slice(&(6 << 28 | u32::from(route.traffic_class) << 20).to_be_bytes());
    to[4..6].copy_from_slice(&len_after_ip.to_be_bytes());
    to[6] = UDP_PROTOCOL;
    to[7] = route.hop_limit;
    to[8..24].copy_from_slice(&gid_of(from));
    to[24..].copy_from_slice(&gid_of(destination));
    WcFlags::GRH
}

/// Computes the checksum of RFC 1071.
fn internet_checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_map_to_addresses() {
        let ip = |text: &str| ip_of(text.parse::<Ipv6Addr>().unwrap().octets()).to_string();
        assert_eq!(ip("::ffff:10.1.2.3"), "10.1.2.3");
        assert_eq!(ip("2001:db8::1"), "2001:db8::1");
        // IPv4 groups, in the three forms.
        assert_eq!(ip("::ffff:239.1.2.3"), "239.1.2.3");
        assert_eq!(ip("ff0e::ffff:239.1.2.3"), "239.1.2.3");
        assert_eq!(ip("ff12:401b:ffff::f01:203"), "239.1.2.3");
        assert_eq!(ip("ff12:401b:ffff::f501:203"), "229.1.2.3");
        assert_eq!(ip("ff12:401b:ffff::1:203"), "224.1.2.3");
        assert_eq!(
            ip("ff0e::ffff:10.1.2.3"),
            "ff0e::ffff:a01:203",
            "not a group"
        );
        assert_eq!(ip("ff05::77"), "ff05::77");
    }

    #[test]
    fn invalid_destinations_are_refused() {
        let gid = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
        let made = |text: &str| UdAddress::new(gid("fe80::2"), gid(text), 0, 1);
        let of_v4 = UdAddress::new(gid("::ffff:10.0.0.1"), gid("::ffff:255.255.255.255"), 0, 1);
        assert!(of_v4.is_err());
        assert!(made("::").is_err());
        assert!(made("::ffff:0.0.0.0").is_err());
        assert!(made("::ffff:10.0.0.2").is_err(), "the other address family");
        assert!(made("fe80::1").is_ok());
    }

    #[test]
    fn routing_header_is_an_ip_header() {
        let mut grh = [0xa5; GRH_LEN];
        let route = Route {
            traffic_class: 0x48,
            hop_limit: 64,
        };
        let v4 = |last| IpAddr::V4(Ipv4Addr::new(192, 0, 2, last));
        let flags = write_grh(&mut grh, v4(1), v4(2), route, 100);
        assert_eq!(flags, WcFlags::GRH | WcFlags::IPV4);
        assert_eq!(grh[..20], [0; 20]);
        let total = [0, 20 + 8 + 32 + 100];
        assert_eq!(grh[20..22], [0x45, 0x48]);
        assert_eq!(grh[22..24], total);
        assert_eq!((grh[28], grh[29]), (64, 17));
        assert_eq!(grh[32..], [192, 0, 2, 1, 192, 0, 2, 2]);
        assert_eq!(grh[30..32], [0xf6, 0x01], "the checksum");
        assert_eq!(internet_checksum(&grh[20..]), 0, "a router's verification");
        let v6 = |last| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
        let flags = write_grh(&mut grh, v6(1), v6(2), route, 0);
        assert_eq!(flags, WcFlags::GRH);
        assert_eq!(grh[..8], [0x64, 0x80, 0, 0, 0, 40, 17, 64]);
        assert_eq!(grh[8..24], gid_of(v6(1)));
        assert_eq!(grh[24..], gid_of(v6(2)));
    }

    /// The checksum is the inverted sum of the 16-bit words, to which the carries are added.
    #[test]
    fn checksum_matches_rfc_1071() {
        let rows: [(&[u8], u16); 5] = [
            (&[0, 0], 0xffff),
            (&[0x12, 0x34], 0xedcb),
            // The example of section 3.
            (&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7], 0x220d),
            // Adding the carry causes another carry.
            (&[0xff, 0xff, 0xff, 0xff, 0, 1], 0xfffe),
            (&[0xff, 0xff, 0, 1], 0xfffe),
        ];
        for (octets, sum) in rows {
            assert_eq!(internet_checksum(octets), sum, "{octets:x?}");
        }
    }
}
