//! The start-up frame: view, header value, and a complete frame borrowed from its octets. RFC 5044
//! §7.1.1, RFC 6581 §6.

use super::{
    EnhancedPrefix, FRAME_HEADER_LEN, MAX_PRIVATE_DATA, REPLY_KEY, REQUEST_KEY, StartupError,
};
use crate::wire::{be16, put};
use core::ops::BitOr;

mod field {
    use core::ops::Range;
    pub(super) const KEY: Range<usize> = 0..16;
    pub(super) const FLAGS: usize = 16;
    pub(super) const REVISION: usize = 17;
    pub(super) const PD_LENGTH: Range<usize> = 18..20;
}

/// The kind of a start-up frame.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

impl FrameKind {
    /// Returns the key that starts a frame of this kind.
    pub const fn key(self) -> &'static [u8; 16] {
        match self {
            Self::Request => &REQUEST_KEY,
            Self::Reply => &REPLY_KEY,
        }
    }

    /// Returns the other kind.
    pub const fn other(self) -> Self {
        match self {
            Self::Request => Self::Reply,
            Self::Reply => Self::Request,
        }
    }
}

/// The flags octet, including reserved bits.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// M: the sender of the frame requires that it receives markers.
    pub const MARKERS: Self = Self(0x80);
    /// C: the sender of the frame requires CRCs in both directions.
    pub const CRC: Self = Self(0x40);
    /// R: the responder rejects the connection. Ignored in a request.
    pub const REJECT: Self = Self(0x20);
    /// S: the private data start with an enhanced prefix. Defined from revision 2 on.
    pub const ENHANCED: Self = Self(0x10);

    /// Returns `true` if all bits of `flag` are set.
    #[inline]
    pub const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 == flag.0
    }

    /// Returns `self` with `flag` added if `on` is set.
    #[inline]
    #[must_use]
    pub const fn with(self, flag: Self, on: bool) -> Self {
        if on { Self(self.0 | flag.0) } else { self }
    }
}

impl BitOr for Flags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A view of a frame: at least 20 octets with any contents.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct FrameView<T>(T);

impl<T: AsRef<[u8]>> FrameView<T> {
    /// Creates a view of the frame at the start of `octets`. Returns `None` if there are fewer than
    /// 20 octets.
    pub fn new(octets: T) -> Option<Self> {
        (octets.as_ref().len() >= FRAME_HEADER_LEN).then_some(Self(octets))
    }

    fn head(&self) -> &[u8; FRAME_HEADER_LEN] {
        self.0
            .as_ref()
            .first_chunk()
            .unwrap_or(&[0; FRAME_HEADER_LEN])
    }

    /// Returns the 16 octets of the key.
    pub fn key(&self) -> &[u8] {
        self.head().get(field::KEY).unwrap_or_default()
    }

    /// Returns the kind of frame that starts with this key.
    pub fn kind(&self) -> Option<FrameKind> {
        [FrameKind::Request, FrameKind::Reply]
            .into_iter()
            .find(|k| k.key() == self.key())
    }

    /// Returns the flags, reserved bits included.
    pub fn flags(&self) -> Flags {
        Flags(self.head()[field::FLAGS])
    }

    /// Returns the revision.
    pub fn revision(&self) -> u8 {
        self.head()[field::REVISION]
    }

    /// Returns PD_Length, the announced length of the private data in octets.
    pub fn pd_length(&self) -> u16 {
        be16(self.head(), field::PD_LENGTH)
    }

    /// Returns the private data including the enhanced prefix; `None` if they are incomplete.
    pub fn private_data(&self) -> Option<&[u8]> {
        self.0
            .as_ref()
            .get(FRAME_HEADER_LEN..)?
            .get(..usize::from(self.pd_length()))
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> FrameView<T> {
    /// Sets the key.
    pub fn set_kind(&mut self, kind: FrameKind) {
        put(self.0.as_mut(), field::KEY, kind.key());
    }

    /// Sets all eight bits of the flags octet.
    pub fn set_flags(&mut self, flags: Flags) {
        put(self.0.as_mut(), field::FLAGS..field::FLAGS + 1, &[flags.0]);
    }

    /// Sets the revision.
    pub fn set_revision(&mut self, revision: u8) {
        put(
            self.0.as_mut(),
            field::REVISION..field::REVISION + 1,
            &[revision],
        );
    }

    /// Sets PD_Length, in octets.
    pub fn set_pd_length(&mut self, len: u16) {
        put(self.0.as_mut(), field::PD_LENGTH, &len.to_be_bytes());
    }
}

/// The first 20 octets of a frame.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct FrameHeader {
    /// Request or Reply.
    pub kind: FrameKind,
    /// The flags octet.
    pub flags: Flags,
    /// The MPA revision.
    pub revision: u8,
    /// Length of the private data in octets, including the enhanced prefix.
    pub pd_length: u16,
}

impl FrameHeader {
    /// Reads the header, with any revision and flags. Fails with [`StartupError::BadKey`] if the
    /// key is invalid or there are fewer than 20 octets, and with
    /// [`StartupError::PeerPrivateDataTooLong`] for more than 512 octets of private data.
    pub fn parse(octets: &[u8]) -> Result<Self, StartupError> {
        let v = octets
            .first_chunk::<FRAME_HEADER_LEN>()
            .and_then(FrameView::new)
            .ok_or(StartupError::BadKey)?;
        let kind = v.kind().ok_or(StartupError::BadKey)?;
        //= rfc5044 section 7.1.1
        //# If the receiver detects that
        //# the PD_Length field does not match the length of the Private Data
        //# field, or if the length of the Private Data field exceeds 512
        //# octets, the receiver MUST close the connection and report an
        //# error locally.
        //= rfc5044 section 7.1.2
        //# MPA implementations MUST validate the PD_Length field.
        let pd_length = v.pd_length();
        if usize::from(pd_length) > MAX_PRIVATE_DATA {
            //= rfc5044 section 7.1.2
            //# If any of the above fails, the startup frame MUST be considered improperly
            //# formatted.
            return Err(StartupError::PeerPrivateDataTooLong { len: pd_length });
        }
        Ok(Self {
            kind,
            flags: v.flags(),
            revision: v.revision(),
            pd_length,
        })
    }

    /// Writes the header. Returns its length, 20. If `out` is too short, writes nothing and returns
    /// 0.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<FRAME_HEADER_LEN>() else {
            return 0;
        };
        let mut v = FrameView(&mut *out);
        v.set_kind(self.kind);
        v.set_flags(self.flags);
        v.set_revision(self.revision);
        v.set_pd_length(self.pd_length);
        FRAME_HEADER_LEN
    }

    /// Returns the length of the complete frame in octets.
    pub const fn frame_len(&self) -> usize {
        FRAME_HEADER_LEN.wrapping_add(self.pd_length as usize)
    }

    /// Returns `true` if the private data start with an enhanced prefix. In revisions 0 and 1 the S
    /// bit is a reserved bit, which is ignored.
    pub const fn is_enhanced(&self) -> bool {
        //= rfc6581 section 6
        //# To use any enhanced
        //# connection establishment feature, this MUST be set to two or
        //# higher.
        self.flags.has(Flags::ENHANCED) && self.revision >= 2
    }
}

/// A complete frame, borrowed from its octets.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame<'a> {
    header: FrameHeader,
    private_data: &'a [u8],
}

/// A [`Frame`] in the initiator's direction.
pub type RequestFrame<'a> = Frame<'a>;
/// A [`Frame`] in the responder's direction.
pub type ReplyFrame<'a> = Frame<'a>;

impl<'a> Frame<'a> {
    /// Reads the frame at the start of `octets`. Returns `Ok(None)` if the frame is incomplete.
    pub fn parse(octets: &'a [u8]) -> Result<Option<Self>, StartupError> {
        if octets.len() < FRAME_HEADER_LEN {
            return Ok(None);
        }
        let header = FrameHeader::parse(octets)?;
        let frame = octets.get(..header.frame_len());
        Ok(frame
            .and_then(|f| f.get(FRAME_HEADER_LEN..))
            .map(|pd| Self {
                header,
                private_data: pd,
            }))
    }

    /// Returns the header.
    pub const fn header(&self) -> &FrameHeader {
        &self.header
    }

    /// Returns all private data, including the enhanced prefix.
    pub const fn private_data(&self) -> &'a [u8] {
        self.private_data
    }

    /// Returns the enhanced prefix, or `Ok(None)` if the frame is not enhanced.
    pub fn prefix(&self) -> Result<Option<EnhancedPrefix>, StartupError> {
        if !self.header.is_enhanced() {
            return Ok(None);
        }
        //= rfc6581 section 6
        //# However, if the 'S' flag is
        //# set, Private Data MUST begin with enhanced RDMA connection
        //# establishment data (see Section 9).
        EnhancedPrefix::parse(self.private_data)
            .map(Some)
            .ok_or(StartupError::MissingEnhancedPrefix)
    }

    /// Returns the ULP's private data, without the enhanced prefix.
    pub fn ulp_private_data(&self) -> &'a [u8] {
        let skip = if self.header.is_enhanced() {
            EnhancedPrefix::LEN
        } else {
            0
        };
        self.private_data.get(skip..).unwrap_or_default()
    }
}
