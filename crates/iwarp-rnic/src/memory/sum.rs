//! How CRCs are computed over the RNIC's own octets, and over registered memory.
//!
//! Invariant: a function for registered memory reads it by instructions of the machine, as its giver has promised.
#![allow(unsafe_code)]

use iwarp_proto::crc32c::Crc32cFn;

/// A CRC32C over memory that others may change meanwhile: `len` octets at `from`, in the append convention of [`Crc32cFn`].
///
/// It reads them by instructions into which the compiler does not look, so that no access is a data race to the compiler
/// (`memory` says more). What it returns is the CRC of octets that were stored there at some time; `None` if some of them could
/// not be read, which functions for memory that stays mapped never return.
///
/// # Safety
/// `len` octets at `from` are readable until it returns, unless the giver of the function has promised less.
pub type SharedCrc32cFn = unsafe fn(crc: u32, from: *const u8, len: usize) -> Option<u32>;

/// As [`SharedCrc32cFn`], and copies the octets from `from` to `to` as it goes. The CRC is that of the copy.
///
/// # Safety
/// As [`SharedCrc32cFn`]; `len` octets at `to` are writable, and the two do not overlap.
pub type CopyingCrc32cFn =
    unsafe fn(crc: u32, from: *const u8, to: *mut u8, len: usize) -> Option<u32>;

/// The functions that compute CRC32C (RFC 5044 section 4.4).
#[derive(Debug, Clone, Copy)]
pub struct Crc32c {
    octets: Crc32cFn,
    shared: Option<SharedCrc32cFn>,
    copying: Option<CopyingCrc32cFn>,
}

impl Crc32c {
    /// Takes a function for octets that nobody else changes. Octets of registered memory are copied to be summed.
    #[inline]
    pub const fn new(octets: Crc32cFn) -> Self {
        Self {
            octets,
            shared: None,
            copying: None,
        }
    }

    /// Adds a function for octets of registered memory, which sums them where they lie.
    ///
    /// # Safety
    /// It computes the same CRC, reads nothing but the octets it is given, and reads those as [`SharedCrc32cFn`] says.
    #[inline]
    #[must_use]
    pub const unsafe fn with_shared(self, shared: SharedCrc32cFn) -> Self {
        Self {
            shared: Some(shared),
            ..self
        }
    }

    /// Adds a function that copies octets of registered memory and sums them at the same time. Without it they are copied first.
    ///
    /// # Safety
    /// It computes the same CRC of what it has written, reads and writes nothing but the octets it is given, each once, and reads those as
    /// [`SharedCrc32cFn`] says.
    #[inline]
    #[must_use]
    pub const unsafe fn with_copying(self, copying: CopyingCrc32cFn) -> Self {
        Self {
            copying: Some(copying),
            ..self
        }
    }

    /// Returns the function for octets that nobody else changes.
    #[inline]
    pub const fn octets(&self) -> Crc32cFn {
        self.octets
    }

    /// Continues a CRC over octets that nobody else changes.
    #[inline(always)]
    pub fn append(&self, crc: u32, octets: &[u8]) -> u32 {
        (self.octets)(crc, octets)
    }

    /// Returns the function for registered memory, if there is one.
    #[inline]
    pub(crate) const fn shared(&self) -> Option<SharedCrc32cFn> {
        self.shared
    }

    /// Returns the function that copies registered memory as it sums, if there is one.
    #[inline]
    pub(crate) const fn copying(&self) -> Option<CopyingCrc32cFn> {
        self.copying
    }
}
