//! Checks whether the next hop towards a peer answers ARP or neighbour discovery, according to the
//! kernel's tables (`rtnetlink(7)`).
//!
//! A netlink message consists of a header (length, type, flags, sequence number, port; 16 bytes), a
//! body of fixed length, and attributes (length, type, value), all in the host's byte order and
//! aligned to 4 bytes. The kernel replies to a request before the sending call returns, so no
//! function of this file blocks.

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const HEADER_LEN: usize = 16;
const FLAG_REQUEST: u16 = 1;
/// The type of a reply that contains an error number.
const ERROR: u16 = 2;
const ATTRIBUTE_DESTINATION: u16 = 1;
const ATTRIBUTE_SOURCE: u16 = 2;
const ATTRIBUTE_INTERFACE: u16 = 4;
const ATTRIBUTE_GATEWAY: u16 = 5;
/// A gateway, possibly of the other address family.
const ATTRIBUTE_VIA: u16 = 18;
/// States in which the kernel knows the link address.
const KNOWN: u16 = libc::NUD_PERMANENT
    | libc::NUD_NOARP
    | libc::NUD_REACHABLE
    | libc::NUD_PROBE
    | libc::NUD_STALE
    | libc::NUD_DELAY;
/// The discard port (RFC 863); no service is expected.
const DISCARD_PORT: u16 = 9;

enum Neighbour {
    /// The kernel knows the link address.
    Resolved,
    /// The kernel has asked for the link address, and waits for the reply.
    Incomplete,
    /// The kernel does not know the link address. It asks for it when a packet is sent.
    Unresolved,
}

/// The neighbour that packets for a peer are sent to: the peer itself or a gateway. The object
/// contains its sockets, so that a thread in another network namespace can use it.
#[derive(Debug)]
pub struct NextHop {
    netlink: Socket,
    interface: u32,
    address: IpAddr,
    datagrams: Socket,
    to: SockAddr,
}

impl NextHop {
    /// Finds the next hop from a local address to a peer, and makes the kernel ask for its link
    /// address. Returns `None` if the link address is known, not needed (the peer is on this host,
    /// or the link has no addresses), or not reported by the kernel.
    pub fn unanswered(source: IpAddr, peer: SocketAddr) -> Option<Self> {
        Self::find(source, peer, netlink)
    }

    /// Does what [`unanswered`](Self::unanswered) does. Calls `netlink` only if the kernel has to
    /// be asked, because a connection within this host should not cost further system calls.
    fn find(
        source: IpAddr,
        peer: SocketAddr,
        netlink: impl FnOnce() -> io::Result<Socket>,
    ) -> Option<Self> {
        let ip = peer.ip();
        let is_local = ip.is_loopback() || ip.is_unspecified() || ip == source;
        if is_local || source.is_ipv4() != peer.is_ipv4() {
            return None;
        }
        let netlink = netlink().ok()?;
        let (interface, address) = route(&netlink, source, peer)?;
        if !resolves_addresses(&netlink, interface)
            || matches!(
                lookup(&netlink, interface, address),
                None | Some(Neighbour::Resolved)
            )
        {
            return None;
        }
        let mut to = peer;
        to.set_port(DISCARD_PORT);
        let hop = Self {
            netlink,
            interface,
            address,
            datagrams: datagrams(source, to).ok()?,
            to: to.into(),
        };
        hop.is_open().then_some(hop)
    }

    /// Returns `true` if the neighbour has not answered, and makes the kernel continue to ask.
    /// Returns `false` if the state is unknown; TCP then detects whether the peer answers.
    pub fn is_open(&self) -> bool {
        match lookup(&self.netlink, self.interface, self.address) {
            None | Some(Neighbour::Resolved) => false,
            Some(Neighbour::Incomplete) => true,
            // Send an empty datagram, so that the kernel asks. The send fails if a packet filter
            // drops it, which does not show whether the filter accepts TCP.
            Some(Neighbour::Unresolved) => self.datagrams.send_to(&[], &self.to).is_ok(),
        }
    }
}

fn netlink() -> io::Result<Socket> {
    let routes = Protocol::from(libc::NETLINK_ROUTE);
    Socket::new(
        Domain::from(libc::AF_NETLINK),
        Type::DGRAM.nonblocking(),
        Some(routes),
    )
}

/// Creates a datagram socket whose packets no router forwards.
fn datagrams(source: IpAddr, to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::DGRAM.nonblocking(), None)?;
    match to {
        SocketAddr::V4(_) => socket.set_ttl_v4(1)?,
        SocketAddr::V6(_) => socket.set_unicast_hops_v6(1)?,
    }
    let mut from = to;
    from.set_ip(source);
    from.set_port(0);
    socket.bind(&SockAddr::from(from))?;
    Ok(socket)
}

/// Looks up a neighbour. Returns `None` if the kernel does not report it, as before 5.0.
fn lookup(netlink: &Socket, interface: u32, address: IpAddr) -> Option<Neighbour> {
    let mut body = vec![family(address), 0, 0, 0];
    body.extend(interface.to_ne_bytes());
    body.extend([0; 4]);
    append_attribute(&mut body, ATTRIBUTE_DESTINATION, &octets(address));
    match request(netlink, libc::RTM_GETNEIGH, &body) {
        Ok(entry) => {
            let state = entry.get(8..10)?.try_into().ok()?;
            Some(match u16::from_ne_bytes(state) {
                state if state & KNOWN != 0 => Neighbour::Resolved,
                libc::NUD_INCOMPLETE => Neighbour::Incomplete,
                _ => Neighbour::Unresolved,
            })
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Some(Neighbour::Unresolved),
        Err(_) => None,
    }
}

/// Returns the interface and the next hop of the kernel's route to a peer, unless the peer is on
/// this host.
fn route(netlink: &Socket, source: IpAddr, peer: SocketAddr) -> Option<(u32, IpAddr)> {
    let bits = if peer.is_ipv4() { 32 } else { 128 };
    let mut body = vec![family(peer.ip()), bits, bits, 0, 0, 0, 0, 0];
    body.extend([0; 4]);
    append_attribute(&mut body, ATTRIBUTE_DESTINATION, &octets(peer.ip()));
    append_attribute(&mut body, ATTRIBUTE_SOURCE, &octets(source));
    if let SocketAddr::V6(peer) = peer
        && peer.scope_id() != 0
    {
        append_attribute(
            &mut body,
            ATTRIBUTE_INTERFACE,
            &peer.scope_id().to_ne_bytes(),
        );
    }
    let found = request(netlink, libc::RTM_GETROUTE, &body).ok()?;
    if found.get(7) != Some(&libc::RTN_UNICAST) {
        return None;
    }
    let (mut interface, mut hop) = (None, peer.ip());
    for (kind, value) in attributes(found.get(12..)?) {
        match kind {
            ATTRIBUTE_INTERFACE => interface = value.try_into().ok().map(u32::from_ne_bytes),
            ATTRIBUTE_GATEWAY => hop = ip(value)?,
            ATTRIBUTE_VIA => hop = ip(value.get(2..)?)?,
            _ => {}
        }
    }
    Some((interface?, hop))
}

/// Returns `true` if neighbours on the interface have link addresses that must be resolved.
fn resolves_addresses(netlink: &Socket, interface: u32) -> bool {
    let mut body = vec![0; 4];
    body.extend(interface.to_ne_bytes());
    body.extend([0; 8]);
    let Ok(link) = request(netlink, libc::RTM_GETLINK, &body) else {
        return false;
    };
    let flags = link.get(8..12).and_then(|f| f.try_into().ok());
    let flags = flags.map_or(0, u32::from_ne_bytes);
    flags & (libc::IFF_LOOPBACK | libc::IFF_NOARP) as u32 == 0
}

/// Sends a request. Returns the body of the reply.
fn request(netlink: &Socket, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
    let mut message = Vec::with_capacity(HEADER_LEN + body.len());
    message.extend(((HEADER_LEN + body.len()) as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(FLAG_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    netlink.send(&message)?;
    // A longer reply is truncated. Only its beginning is used.
    let mut reply = [0u8; 4096];
    let len = { netlink }.read(&mut reply)?;
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let reply = reply.get(..len).ok_or_else(invalid)?;
    let (header, body) = reply.split_at_checked(HEADER_LEN).ok_or_else(invalid)?;
    if header[4..6] != ERROR.to_ne_bytes() {
        return Ok(body.to_vec());
    }
    let number = body.first_chunk().ok_or_else(invalid)?;
    Err(io::Error::from_raw_os_error(
        i32::from_ne_bytes(*number).wrapping_neg(),
    ))
}

/// Appends an attribute whose value needs no padding.
fn append_attribute(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    to.extend((value.len() as u16 + 4).to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend(value);
}

/// Iterates over attributes up to the first truncated one.
fn attributes(mut octets: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (len, kind) = (octets.get(..2)?, octets.get(2..4)?);
        let len = usize::from(u16::from_ne_bytes(len.try_into().ok()?));
        let kind = u16::from_ne_bytes(kind.try_into().ok()?);
        let value = octets.get(4..len)?;
        octets = octets.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

const fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn ip(octets: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(octets) {
        return Some(Ipv4Addr::from(v4).into());
    }
    let v6 = <[u8; 16]>::try_from(octets).ok()?;
    Some(Ipv6Addr::from(v6).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_asked_about_others_only() {
        for (source, peer, is_asked) in [
            ("127.0.0.1", "127.0.0.1:9", false),
            ("127.0.0.1", "127.9.9.9:9", false),
            ("::1", "[::1]:9", false),
            ("::1", "127.0.0.1:9", false),
            ("192.0.2.1", "192.0.2.1:9", false),
            ("192.0.2.1", "0.0.0.0:9", false),
            ("2001:db8::1", "[::]:9", false),
            ("2001:db8::1", "192.0.2.2:9", false),
            ("192.0.2.1", "192.0.2.2:9", true),
            ("2001:db8::1", "[2001:db8::2]:9", true),
        ] {
            let mut asked = false;
            let hop = NextHop::find(source.parse().unwrap(), peer.parse().unwrap(), || {
                asked = true;
                Err(io::ErrorKind::Unsupported.into())
            });
            assert!(hop.is_none(), "without an answer of the kernel");
            assert_eq!(asked, is_asked, "{source} {peer}");
        }
    }

    #[test]
    fn truncated_attribute_ends_list() {
        let mut list = Vec::new();
        append_attribute(&mut list, 5, &[10, 0, 0, 1]);
        append_attribute(&mut list, 4, &7u32.to_ne_bytes());
        let kinds = |octets: &[u8]| attributes(octets).map(|a| a.0).collect::<Vec<_>>();
        assert_eq!(kinds(&list), [5, 4]);
        for cut in 0..list.len() {
            assert_eq!(kinds(&list[..cut]).len(), cut / 8, "{cut}");
        }
        assert_eq!(
            kinds(&[0; 16]),
            [] as [u16; 0],
            "a length shorter than the attribute's header"
        );
    }

    #[test]
    fn kernel_reports_routes_and_links() {
        let netlink = netlink().unwrap();
        let own: IpAddr = Ipv4Addr::LOCALHOST.into();
        assert_eq!(route(&netlink, own, (own, 9).into()), None, "a local peer");
        assert!(!resolves_addresses(&netlink, 1), "the loopback interface");
        assert!(!resolves_addresses(&netlink, u32::MAX >> 1), "no interface");
    }
}
