//! Typed tokens of a peer's memory. They carry length and rights, which are checked before anything
//! is posted.

use super::payload::{Checked, refused};
use super::region::{REMOTE, resolve};
use super::request::Target;
use crate::error::{Error, Result};
use crate::failure::Refusal;
use bytemuck::Pod;
use iwarp_rnic::Access;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

/// Layout of a token. All numbers are big-endian.
mod token {
    pub(super) const VERSION: u8 = 1;
    /// Offsets: tagged offset (8), length in bytes (8), STag (4), size of an element (4), version
    /// (1), rights (1), zeros (2).
    pub(super) const ADDR: usize = 0;
    pub(super) const OCTETS: usize = 8;
    pub(super) const RKEY: usize = 16;
    pub(super) const ELEMENT: usize = 20;
    pub(super) const VERSION_AT: usize = 24;
    pub(super) const RIGHTS: usize = 25;
    pub(super) const RESERVED: usize = 26;
    pub(super) const LEN: usize = 28;
}

/// Elements `T` in a peer's memory: the target of Writes, Reads and atomics. A token that the peer
/// created by [`Region::remote`](super::Region::remote) and sent, for example as private data.
///
/// The peer enforces the actual rights. The token's length and rights serve to find mistakes before
/// posting, because a request that the peer refuses ends the connection.
pub struct RemoteRegion<T> {
    addr: u64,
    octets: u64,
    rkey: u32,
    rights: Access,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for RemoteRegion<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RemoteRegion<T> {}

impl<T> PartialEq for RemoteRegion<T> {
    fn eq(&self, other: &Self) -> bool {
        let parts = |r: &Self| (r.addr, r.octets, r.rkey, r.rights);
        parts(self) == parts(other)
    }
}

impl<T> Eq for RemoteRegion<T> {}

impl<T> fmt::Debug for RemoteRegion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRegion")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("octets", &self.octets)
            .field("rkey", &format_args!("{:#x}", self.rkey))
            .field("rights", &self.rights)
            .finish()
    }
}

impl<T: Pod> RemoteRegion<T> {
    /// Length of [`to_bytes`](Self::to_bytes) in bytes.
    pub const ENCODED_LEN: usize = token::LEN;

    pub(super) const fn from_parts(addr: u64, octets: u64, rkey: u32, rights: Access) -> Self {
        Self {
            addr,
            octets,
            rkey,
            rights,
            elements: PhantomData,
        }
    }

    /// Encodes the token. The result fits into private data.
    pub fn to_bytes(&self) -> [u8; token::LEN] {
        let mut out = [0; token::LEN];
        out[token::ADDR..token::OCTETS].copy_from_slice(&self.addr.to_be_bytes());
        out[token::OCTETS..token::RKEY].copy_from_slice(&self.octets.to_be_bytes());
        out[token::RKEY..token::ELEMENT].copy_from_slice(&self.rkey.to_be_bytes());
        // No region has elements of 4 GiB or more.
        let element = u32::try_from(size_of::<T>()).unwrap_or(u32::MAX);
        out[token::ELEMENT..token::VERSION_AT].copy_from_slice(&element.to_be_bytes());
        out[token::VERSION_AT] = token::VERSION;
        // The remote rights are in the lowest eight bits.
        out[token::RIGHTS] = self.rights.bits().to_le_bytes()[0];
        out
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes); ignores further bytes.
    ///
    /// # Errors
    /// [`Refusal::BadToken`]: too short, of an unknown version, of elements of another size, or
    /// inconsistent.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |what| Error::Refused(Refusal::BadToken(what));
        let bytes: &[u8; token::LEN] = bytes.first_chunk().ok_or(bad("too few octets"))?;
        let word = |at: usize| {
            let octets: [u8; 8] = std::array::from_fn(|i| bytes[at + i]);
            u64::from_be_bytes(octets)
        };
        let half = |at: usize| {
            let octets: [u8; 4] = std::array::from_fn(|i| bytes[at + i]);
            u32::from_be_bytes(octets)
        };
        if bytes[token::VERSION_AT] != token::VERSION {
            return Err(bad("unknown version of tokens"));
        }
        let rights = Access::from_bits(u32::from(bytes[token::RIGHTS]));
        let rights = rights.filter(|r| REMOTE.contains(*r));
        let rights = rights.ok_or(bad("unknown rights"))?;
        if bytes[token::RESERVED..] != [0; 2] {
            return Err(bad("reserved octets are not zero"));
        }
        let size = size_of::<T>() as u64;
        if size == 0 || u64::from(half(token::ELEMENT)) != size {
            return Err(bad("its elements have another size"));
        }
        let (addr, octets) = (word(token::ADDR), word(token::OCTETS));
        if !octets.is_multiple_of(size) || addr.checked_add(octets).is_none() {
            return Err(bad("its length is invalid"));
        }
        Ok(Self::from_parts(addr, octets, half(token::RKEY), rights))
    }

    /// Returns the number of elements, or 0 if it exceeds `usize`.
    pub fn len(&self) -> usize {
        usize::try_from(self.octets / size_of::<T>() as u64).unwrap_or(0)
    }

    /// Returns `true` if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the length in bytes.
    pub const fn octets(&self) -> u64 {
        self.octets
    }

    /// Returns the rights that the peer has granted.
    pub const fn rights(&self) -> Access {
        self.rights
    }

    /// Returns a range of its elements.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, len) = resolve(range, self.len())?;
        let size = size_of::<T>() as u64;
        Ok(Self {
            addr: self.addr + start as u64 * size,
            octets: len as u64 * size,
            ..*self
        })
    }

    /// Returns the element at `index`, as a region of one element.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn at(&self, index: usize) -> Result<Self> {
        self.slice(index..=index)
    }

    /// Returns the same memory as bytes.
    pub const fn bytes(&self) -> RemoteRegion<u8> {
        RemoteRegion {
            addr: self.addr,
            octets: self.octets,
            rkey: self.rkey,
            rights: self.rights,
            elements: PhantomData,
        }
    }

    /// Checks a request that needs these rights and moves `octets` bytes.
    #[inline]
    pub(super) fn check(&self, needs: Access, octets: u64) -> Checked {
        if !self.rights.contains(needs) {
            let granted = self.rights;
            return refused(Refusal::NotGranted { needs, granted });
        }
        if octets > self.octets {
            let room = self.octets;
            return refused(Refusal::TooLong { octets, room });
        }
        Ok(())
    }

    /// Returns the target of a request that was [checked](Self::check).
    #[inline]
    pub(super) const fn target(&self) -> Target {
        Target {
            addr: self.addr,
            rkey: self.rkey,
        }
    }

    pub(super) const fn address(&self) -> u64 {
        self.addr
    }

    pub(super) const fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl RemoteRegion<u64> {
    pub(super) fn check_word(&self) -> Checked {
        self.check(Access::REMOTE_ATOMIC, 8)?;
        match self.octets == 8 && self.addr.is_multiple_of(8) {
            true => Ok(()),
            false => refused(Refusal::NotOneWord),
        }
    }
}

/// Serializes as the bytes of [`to_bytes`](RemoteRegion::to_bytes).
#[cfg(feature = "serde")]
impl<T: Pod> serde::Serialize for RemoteRegion<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.to_bytes())
    }
}

#[cfg(feature = "serde")]
impl<'de, T: Pod> serde::Deserialize<'de> for RemoteRegion<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(Octets(PhantomData))
    }
}

/// Accepts bytes, or a sequence of numbers from formats without bytes.
#[cfg(feature = "serde")]
struct Octets<T>(PhantomData<fn() -> T>);

#[cfg(feature = "serde")]
impl<'de, T: Pod> serde::de::Visitor<'de> for Octets<T> {
    type Value = RemoteRegion<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} octets of a remote region", token::LEN)
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
        RemoteRegion::from_bytes(bytes).map_err(E::custom)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut octets = [0; token::LEN];
        for (i, octet) in octets.iter_mut().enumerate() {
            let next = seq.next_element()?;
            *octet = next.ok_or_else(|| serde::de::Error::invalid_length(i, &self))?;
        }
        RemoteRegion::from_bytes(&octets).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_round_trip() {
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = RemoteRegion::<u64>::from_parts(0x0102_0304, 16, 0x0a0b_0c0d, rights);
        let bytes = region.to_bytes();
        let expected = [
            0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 16, 10, 11, 12, 13, 0, 0, 0, 8, 1, 6, 0, 0,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(RemoteRegion::from_bytes(&bytes).unwrap(), region);
        let json = serde_json::to_string(&region).unwrap();
        let back: RemoteRegion<u64> = serde_json::from_str(&json).unwrap();
        assert_eq!(back, region);
        for wrong in ["[1,2]", "7"] {
            let error = serde_json::from_str::<RemoteRegion<u64>>(wrong).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("the 28 octets of a remote region"), "{text}");
        }
    }

    #[test]
    fn invalid_tokens_are_refused() {
        let good = RemoteRegion::<u64>::from_parts(8, 16, 1, Access::REMOTE_READ).to_bytes();
        assert!(RemoteRegion::<u64>::from_bytes(&good[..27]).is_err());
        assert!(RemoteRegion::<u32>::from_bytes(&good).is_err());
        let changed = [
            (24, 2),
            (25, 1),
            (25, 0x80),
            (26, 1),
            (27, 1),
            (15, 3),
            (23, 16),
        ];
        for (at, value) in changed {
            let mut bad = good;
            bad[at] = value;
            assert!(
                matches!(
                    RemoteRegion::<u64>::from_bytes(&bad),
                    Err(Error::Refused(Refusal::BadToken(_)))
                ),
                "{at}"
            );
        }
        let mut wraps = good;
        wraps[..8].fill(0xff);
        assert!(RemoteRegion::<u64>::from_bytes(&wraps).is_err());
    }

    #[test]
    fn parts_and_rights_are_checked() {
        let region = RemoteRegion::<u64>::from_parts(64, 32, 1, Access::REMOTE_READ);
        let part = region.slice(1..3).unwrap();
        part.check(Access::REMOTE_READ, 16).unwrap();
        let Target { addr, rkey } = part.target();
        assert_eq!((addr, rkey), (72, 1), "elements, not octets");
        assert!(region.slice(3..5).is_err() && region.at(4).is_err());
        #[allow(clippy::reversed_empty_ranges, reason = "it has to be refused")]
        let reversed = region.slice(3..1);
        assert!(reversed.is_err());
        assert!(part.check(Access::REMOTE_READ, 17).is_err());
        assert!(part.check(Access::REMOTE_WRITE, 1).is_err());
        let atomic = RemoteRegion::<u64>::from_parts(64, 32, 1, Access::REMOTE_ATOMIC);
        assert!(atomic.check_word().is_err() && atomic.at(1).unwrap().check_word().is_ok());
        let odd = RemoteRegion::<u64>::from_parts(65, 8, 1, Access::REMOTE_ATOMIC);
        assert!(odd.check_word().is_err());
    }
}
