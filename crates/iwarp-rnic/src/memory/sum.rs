//! The CRC functions for private and for registered memory.
//!
//! Invariant: as promised by its creator, a function for registered memory reads it in a way that
//! is opaque to the compiler.
#![allow(unsafe_code)]

use iwarp_proto::crc32c::Crc32cFn;

/// Continues a CRC32C over `len` bytes at `from`, like [`Crc32cFn`]. Others may change the bytes
/// meanwhile.
///
/// The function reads the bytes by instructions that are opaque to the compiler, so that no access
/// is a data race (see `memory`). Each byte contributes a value that it had during the call. The
/// result is `None` if some bytes could not be read, which never happens for memory that stays
/// mapped.
///
/// # Safety
/// `len` bytes at `from` are readable until it returns, unless the creator of the function allows
/// unreadable bytes.
pub type SharedCrc32cFn = unsafe fn(crc: u32, from: *const u8, len: usize) -> Option<u32>;

/// Like [`SharedCrc32cFn`], and copies the bytes from `from` to `to`. Returns the CRC of the copy.
///
/// # Safety
/// Like [`SharedCrc32cFn`]; `len` bytes at `to` are writable, and the two do not overlap.
pub type CopyingCrc32cFn =
    unsafe fn(crc: u32, from: *const u8, to: *mut u8, len: usize) -> Option<u32>;

/// The functions that compute CRC32C (RFC 5044 section 4.4).
#[derive(Debug, Clone, Copy)]
pub struct Crc32c {
    octets: Crc32cFn,
    shared: Option<SharedCrc32cFn>,
    copying_crc: Option<CopyingCrc32cFn>,
}

impl Crc32c {
    /// Creates the set from a function for memory that nobody else changes. To compute its CRC,
    /// registered memory is copied first.
    #[inline]
    pub const fn new(octets: Crc32cFn) -> Self {
        Self {
            octets,
            shared: None,
            copying_crc: None,
        }
    }

    /// Adds a function that computes the CRC of registered memory in place.
    ///
    /// # Safety
    /// The function computes the same CRC, and reads only the given bytes, as [`SharedCrc32cFn`]
    /// requires.
    #[inline]
    #[must_use]
    pub const unsafe fn with_shared(self, shared: SharedCrc32cFn) -> Self {
        Self {
            shared: Some(shared),
            ..self
        }
    }

    /// Adds a function that copies registered memory and computes its CRC in one pass.
    ///
    /// # Safety
    /// The function computes the same CRC, over the bytes that it has written. It reads and writes
    /// only the given bytes, each once, and reads as [`SharedCrc32cFn`] requires.
    #[inline]
    #[must_use]
    pub const unsafe fn with_copying(self, copying_crc: CopyingCrc32cFn) -> Self {
        Self {
            copying_crc: Some(copying_crc),
            ..self
        }
    }

    /// Returns the function for memory that nobody else changes.
    #[inline]
    pub const fn octets(&self) -> Crc32cFn {
        self.octets
    }

    /// Continues a CRC over memory that nobody else changes.
    #[inline(always)]
    pub fn append(&self, crc: u32, octets: &[u8]) -> u32 {
        (self.octets)(crc, octets)
    }

    #[inline]
    pub(crate) const fn shared(&self) -> Option<SharedCrc32cFn> {
        self.shared
    }

    #[inline]
    pub(crate) const fn copying_crc(&self) -> Option<CopyingCrc32cFn> {
        self.copying_crc
    }
}
