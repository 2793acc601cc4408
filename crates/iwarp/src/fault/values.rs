//! Values of a rule's options, and their parsers.

use std::net::{IpAddr, SocketAddr};

/// A number, or a range from which the seed chooses a number for each queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

impl Span {
    /// Returns the number of the range that `random` selects.
    pub(crate) const fn choose(self, random: u64) -> u64 {
        match (self.most - self.least).checked_add(1) {
            Some(width) => self.least + random % width,
            None => random,
        }
    }

    /// Parses `N` or `N..M`. `parse` parses the numbers.
    pub(super) fn read(text: &str, parse: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let (least, most) = match text.split_once("..") {
            Some((least, most)) => (parse(least)?, parse(most)?),
            None => (parse(text)?, parse(text)?),
        };
        (least <= most).then_some(Self { least, most })
    }
}

/// A probability, in units of 2^-53.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chance(u64);

impl Chance {
    const BITS: u32 = 53;

    /// Returns `true` with this probability.
    pub(crate) const fn matches(self, random: u64) -> bool {
        random >> (64 - Self::BITS) < self.0
    }

    /// Parses a decimal fraction or a percentage.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (number, scale) = match text.strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let p = number.parse::<f64>().ok().filter(|_| plain)? / scale;
        (0.0..=1.0)
            .contains(&p)
            .then_some(Self((p * (1u64 << Self::BITS) as f64) as u64))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QpFilter {
    /// By order of creation in the process, from 1.
    Ordinal(u32),
    Number(u32),
}

impl QpFilter {
    pub(super) fn read(text: &str) -> Option<Self> {
        match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok().map(Self::Number),
            None => text.parse().ok().filter(|n| *n > 0).map(Self::Ordinal),
        }
    }

    pub(crate) fn is(self, ordinal: u32, number: u32) -> bool {
        match self {
            Self::Ordinal(n) => n == ordinal,
            Self::Number(n) => n == number,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerFilter {
    ip: IpAddr,
    /// Length of the prefix in bits.
    prefix: u8,
    port: Option<u16>,
}

impl PeerFilter {
    /// Parses `ADDR`, `ADDR/BITS`, or `ADDR:PORT` with an IPv6 address in brackets.
    pub(super) fn read(text: &str) -> Option<Self> {
        if let Ok(SocketAddr::V4(_) | SocketAddr::V6(_)) = text.parse::<SocketAddr>() {
            let address: SocketAddr = text.parse().ok()?;
            return Some(Self {
                ip: address.ip().to_canonical(),
                prefix: width(address.ip().to_canonical()),
                port: Some(address.port()),
            });
        }
        let (ip, prefix) = match text.split_once('/') {
            Some((ip, bits)) => (ip, Some(bits.parse::<u8>().ok()?)),
            None => (text, None),
        };
        let ip: IpAddr = ip.parse().ok()?;
        let prefix = prefix.unwrap_or(width(ip));
        (prefix <= width(ip)).then_some(Self {
            ip,
            prefix,
            port: None,
        })
    }

    pub(crate) fn matches(&self, peer: SocketAddr) -> bool {
        let ip = peer.ip().to_canonical();
        let same =
            width(ip) == width(self.ip) && bits(ip, self.prefix) == bits(self.ip, self.prefix);
        same && self.port.is_none_or(|port| port == peer.port())
    }
}

const fn width(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn bits(ip: IpAddr, count: u8) -> u128 {
    let all = match ip {
        IpAddr::V4(ip) => u128::from(u32::from(ip)),
        IpAddr::V6(ip) => u128::from(ip),
    };
    all.checked_shr(u32::from(width(ip) - count)).unwrap_or(0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ops(u8);

impl Ops {
    pub(crate) const SEND: Self = Self(1);
    pub(crate) const WRITE: Self = Self(1 << 1);
    pub(crate) const READ: Self = Self(1 << 2);
    pub(crate) const ATOMIC: Self = Self(1 << 3);
    /// Binds, fast registrations and local invalidations.
    pub(crate) const LOCAL: Self = Self(1 << 4);
    pub(crate) const RECV: Self = Self(1 << 5);

    const NAMES: [(Self, &'static str); 6] = [
        (Self::SEND, "send"),
        (Self::WRITE, "write"),
        (Self::READ, "read"),
        (Self::ATOMIC, "atomic"),
        (Self::LOCAL, "local"),
        (Self::RECV, "recv"),
    ];

    pub(crate) const fn has(self, op: Self) -> bool {
        self.0 & op.0 != 0
    }

    /// Returns the name of a single operation.
    pub(crate) fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(op, _)| *op == self);
        found.map_or("-", |(_, name)| name)
    }

    /// Parses names joined by `+`.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut all = Self(0);
        for word in text.split('+') {
            let (op, _) = Self::NAMES.iter().find(|(_, name)| *name == word)?;
            all.0 |= op.0;
        }
        Some(all)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Directions {
    pub(crate) out: bool,
    pub(crate) into: bool,
}

impl Directions {
    pub(crate) const OUT: Self = Self {
        out: true,
        into: false,
    };
    pub(crate) const IN: Self = Self {
        out: false,
        into: true,
    };
    pub(crate) const BOTH: Self = Self {
        out: true,
        into: true,
    };

    pub(super) fn read(text: &str) -> Option<Self> {
        match text {
            "out" => Some(Self::OUT),
            "in" => Some(Self::IN),
            "both" => Some(Self::BOTH),
            _ => None,
        }
    }
}

/// Parses a whole number.
pub(super) fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Parses a positive whole number.
pub(super) fn count(text: &str) -> Option<u64> {
    number(text).filter(|n| *n > 0)
}

/// Parses a number of octets: `1500`, `64K`, `10M`, `1G`.
pub(super) fn size(text: &str) -> Option<u64> {
    let (digits, scale) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    number(digits)?.checked_mul(scale).filter(|n| *n > 0)
}

/// Parses a time with its unit, `250us`, `20ms` or `3s`. Returns nanoseconds.
pub(super) fn time(text: &str) -> Option<u64> {
    let units = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let (digits, scale) = units
        .iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))?;
    number(digits)?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_positive() {
        let sizes = ["1", "64K", "10M", "1G", "0", "0K", "+1", "K"].map(size);
        let none = [None; 4];
        let some = [1, 64 << 10, 10 << 20, 1 << 30].map(Some);
        assert_eq!(sizes, [some, none].concat()[..]);
    }

    #[test]
    fn mapped_peer_is_an_ipv4_peer() {
        let filter = PeerFilter::read("[::ffff:10.0.0.1]:7").expect("a peer");
        let peers = ["10.0.0.1:7", "10.0.0.1:8", "10.0.0.2:7"];
        let matches = peers.map(|peer| filter.matches(peer.parse().expect("an address")));
        assert_eq!(matches, [true, false, false]);
    }
}
