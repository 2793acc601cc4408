//! Encoding of the port mapper's messages.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Octets of a message other than a request.
pub(crate) const MESSAGE_LEN: usize = 48;
/// Octets of a request, the longest message.
pub(crate) const REQUEST_LEN: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Accept,
    Ack,
    Reject,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    /// The association handle: the same in all messages of one look-up.
    pub(crate) handle: u64,
    /// The connecting end's address, as its program sees it.
    pub(crate) connecting: SocketAddr,
    /// The listener's address: in requests the program's, in accepts the mapped address.
    pub(crate) accepting: SocketAddr,
}

impl Message {
    /// Encodes the message.
    pub(crate) fn octets(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(REQUEST_LEN);
        let kind = match self.kind {
            Kind::Request => 0,
            Kind::Accept => 1,
            Kind::Ack => 2,
            Kind::Reject => 3,
        };
        let version = if self.accepting.is_ipv4() { 4 } else { 6 };
        let request = self.kind == Kind::Request;
        // Our connecting port is not mapped.
        let mapped = if request { self.connecting.port() } else { 0 };
        out.extend([kind << 4 | version, 0]);
        out.extend(mapped.to_be_bytes());
        out.extend(self.accepting.port().to_be_bytes());
        out.extend(self.connecting.port().to_be_bytes());
        out.extend(self.handle.to_be_bytes());
        out.extend(ip_octets(self.connecting.ip()));
        out.extend(ip_octets(self.accepting.ip()));
        if request {
            out.extend(ip_octets(self.connecting.ip()));
        }
        out
    }

    /// Decodes a message. Returns `None` if it is too short or not of version 0.
    pub(crate) fn parse(octets: &[u8]) -> Option<Self> {
        let octets = octets.get(..MESSAGE_LEN)?;
        let first = *octets.first()?;
        if first >> 6 != 0 {
            return None;
        }
        let kind = match first >> 4 & 3 {
            0 => Kind::Request,
            1 => Kind::Accept,
            2 => Kind::Ack,
            _ => Kind::Reject,
        };
        let port = |offset: usize| {
            Some(u16::from_be_bytes(
                octets.get(offset..offset + 2)?.try_into().ok()?,
            ))
        };
        let ip = |offset: usize| -> Option<IpAddr> {
            let octets: [u8; 16] = octets.get(offset..offset + 16)?.try_into().ok()?;
            match first & 15 {
                4 => {
                    let [a, b, c, d, ..] = octets;
                    Some(Ipv4Addr::new(a, b, c, d).into())
                }
                6 => Some(Ipv6Addr::from(octets).into()),
                _ => None,
            }
        };
        Some(Self {
            kind,
            handle: u64::from_be_bytes(octets.get(8..16)?.try_into().ok()?),
            connecting: SocketAddr::new(ip(16)?, port(6)?),
            accepting: SocketAddr::new(ip(32)?, port(4)?),
        })
    }
}

fn ip_octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}
