//! The RDMA Read Request header. RFC 5040 §4.4 figure 6.

use crate::ddp::Stag;
use crate::wire::{be32, be64, put};

mod field {
    use core::ops::Range;
    //= rfc5040 section 4.4
    //# The following figure depicts the RDMA Read Request Header that MUST be used
    //# for all RDMA Read Request Messages:
    pub(super) const SINK_STAG: Range<usize> = 0..4;
    pub(super) const SINK_TO: Range<usize> = 4..12;
    pub(super) const SIZE: Range<usize> = 12..16;
    pub(super) const SOURCE_STAG: Range<usize> = 16..20;
    pub(super) const SOURCE_TO: Range<usize> = 20..28;
}

/// A view of a Read Request header.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ReadRequestView<T>(T);

impl<T: AsRef<[u8]>> ReadRequestView<T> {
    /// Creates a view of the header at the start of `octets`, or `None` if there are fewer than 28.
    #[inline]
    pub fn new(octets: T) -> Option<Self> {
        (octets.as_ref().len() >= ReadRequest::LEN).then_some(Self(octets))
    }

    /// Returns the Data Sink STag.
    #[inline]
    pub fn sink_stag(&self) -> Stag {
        Stag(be32(self.0.as_ref(), field::SINK_STAG))
    }

    /// Returns the Data Sink tagged offset.
    #[inline]
    pub fn sink_to(&self) -> u64 {
        be64(self.0.as_ref(), field::SINK_TO)
    }

    /// Returns the RDMA Read message size, in octets.
    #[inline]
    pub fn size(&self) -> u32 {
        be32(self.0.as_ref(), field::SIZE)
    }

    /// Returns the Data Source STag.
    #[inline]
    pub fn source_stag(&self) -> Stag {
        Stag(be32(self.0.as_ref(), field::SOURCE_STAG))
    }

    /// Returns the Data Source tagged offset.
    #[inline]
    pub fn source_to(&self) -> u64 {
        be64(self.0.as_ref(), field::SOURCE_TO)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> ReadRequestView<T> {
    /// Sets the Data Sink STag.
    #[inline]
    pub fn set_sink_stag(&mut self, stag: Stag) {
        put(self.0.as_mut(), field::SINK_STAG, &stag.0.to_be_bytes());
    }

    /// Sets the Data Sink tagged offset.
    #[inline]
    pub fn set_sink_to(&mut self, to: u64) {
        put(self.0.as_mut(), field::SINK_TO, &to.to_be_bytes());
    }

    /// Sets the message size, in octets.
    #[inline]
    pub fn set_size(&mut self, size: u32) {
        put(self.0.as_mut(), field::SIZE, &size.to_be_bytes());
    }

    /// Sets the Data Source STag.
    #[inline]
    pub fn set_source_stag(&mut self, stag: Stag) {
        put(self.0.as_mut(), field::SOURCE_STAG, &stag.0.to_be_bytes());
    }

    /// Sets the Data Source tagged offset.
    #[inline]
    pub fn set_source_to(&mut self, to: u64) {
        put(self.0.as_mut(), field::SOURCE_TO, &to.to_be_bytes());
    }
}

/// A Read Request: transfers `size` octets from the source buffer to the sink buffer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct ReadRequest {
    /// The buffer that receives the data.
    pub sink_stag: Stag,
    /// Offset in the sink buffer, in octets.
    pub sink_to: u64,
    /// Number of octets to read; zero is allowed.
    pub size: u32,
    /// The buffer that contains the data.
    pub source_stag: Stag,
    /// Offset in the source buffer, in octets.
    pub source_to: u64,
}

impl ReadRequest {
    /// Octets on the wire.
    pub const LEN: usize = 28;

    /// Reads the header. Returns `None` if there are fewer than 28 octets. Ignores octets after the
    /// header.
    #[inline]
    pub fn parse(octets: &[u8]) -> Option<Self> {
        let v = ReadRequestView::new(octets.first_chunk::<{ Self::LEN }>()?)?;
        Some(Self {
            sink_stag: v.sink_stag(),
            sink_to: v.sink_to(),
            size: v.size(),
            source_stag: v.source_stag(),
            source_to: v.source_to(),
        })
    }

    /// Writes the header. Returns its length, 28. If `out` is too short, writes nothing and returns
    /// 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<{ Self::LEN }>() else {
            return 0;
        };
        let mut v = ReadRequestView(&mut *out);
        v.set_sink_stag(self.sink_stag);
        v.set_sink_to(self.sink_to);
        v.set_size(self.size);
        v.set_source_stag(self.source_stag);
        v.set_source_to(self.source_to);
        Self::LEN
    }
}
