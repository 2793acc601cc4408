//! Terminate Control: layer, error type, error code. RFC 5040 §4.8 figure 9, RFC 5041 §7.2, RFC
//! 5044 §8, RFC 6581 §8.

use crate::ddp::HeaderError;
use crate::wire::named_values;
use core::fmt;

named_values! {
    /// The layer that detected the error: four bits.
    pub struct Layer(u8) {
        /// RDMAP.
        RDMAP = 0;
        /// DDP.
        DDP = 1;
        /// The lower layer protocol, which is MPA.
        LLP = 2;
    }
}

/// Error type: four bits. The meaning depends on the layer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Etype(pub u8);

impl Etype {
    /// RDMAP or DDP: local catastrophic error.
    pub const LOCAL_CATASTROPHIC: Self = Self(0);
    /// RDMAP: remote protection error.
    pub const REMOTE_PROTECTION: Self = Self(1);
    /// RDMAP: remote operation error.
    pub const REMOTE_OPERATION: Self = Self(2);
    /// DDP: tagged buffer error.
    pub const TAGGED_BUFFER: Self = Self(1);
    /// DDP: untagged buffer error.
    pub const UNTAGGED_BUFFER: Self = Self(2);
    /// DDP: reserved for the lower layer.
    pub const DDP_LLP: Self = Self(3);
    /// LLP: an MPA error.
    pub const MPA: Self = Self(0);
}

/// Error code: eight bits. The meaning depends on the layer and the error type.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Code(pub u8);

macro_rules! codes {
    ($(
        $(#[$meta:meta])*
        $name:ident = $layer:ident $etype:ident $code:literal $text:literal;
    )*) => {
        impl Code {
            $(#[doc = concat!("Code of [`TerminateCode::", stringify!($name), "`].")]
            pub const $name: Self = Self($code);)*
        }
        impl TerminateCode {
            $(
                $(#[$meta])*
                pub const $name: Self =
                    Self::new(Layer::$layer, Etype::$etype, Code::$name);
            )*

            /// All codes that the RFCs define.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the meaning of the code in words; `None` for a code that no RFC defines.
            pub fn description(self) -> Option<&'static str> {
                $(if self == Self::$name { return Some($text); })*
                None
            }
        }
    };
}

/// Why a stream is terminated. Any value can be represented. The constants are the codes that the
/// RFCs define.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct TerminateCode {
    /// See [`Layer`]; four bits.
    pub layer: u8,
    /// See [`Etype`]; four bits.
    pub etype: u8,
    /// See [`Code`].
    pub code: u8,
}

//= rfc5041 section 7.2
//# The following error numbers MUST be used when reporting errors to the
//# ULP.
//= rfc5040 section 4.8
//# Figure 9, "Terminate Control Field Values", defines the valid values that
//# MUST be used for this field.
codes! {
    /// RDMAP: local catastrophic error; the code has no meaning.
    RDMAP_LOCAL_CATASTROPHIC = RDMAP LOCAL_CATASTROPHIC 0x00 "RDMAP: local catastrophic error";
    /// RDMAP protection: invalid STag.
    RDMAP_INVALID_STAG = RDMAP REMOTE_PROTECTION 0x00 "RDMAP: invalid STag";
    /// RDMAP protection: base or bounds violation.
    RDMAP_BASE_BOUNDS = RDMAP REMOTE_PROTECTION 0x01 "RDMAP: base or bounds violation";
    /// RDMAP protection: access rights violation.
    RDMAP_ACCESS = RDMAP REMOTE_PROTECTION 0x02 "RDMAP: access rights violation";
    /// RDMAP protection: STag not associated with this RDMAP stream (other protection domain).
    RDMAP_STAG_NOT_ASSOCIATED = RDMAP REMOTE_PROTECTION 0x03
        "RDMAP: STag not associated with the stream";
    /// RDMAP protection: tagged offset wrap.
    RDMAP_TO_WRAP = RDMAP REMOTE_PROTECTION 0x04 "RDMAP: tagged offset wraps";
    /// RDMAP protection: the STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE = RDMAP REMOTE_PROTECTION 0x09 "RDMAP: STag cannot be invalidated";
    /// RDMAP protection: unspecified error.
    RDMAP_PROTECTION_UNSPECIFIED = RDMAP REMOTE_PROTECTION 0xff
        "RDMAP: unspecified protection error";
    /// RDMAP operation: invalid RDMAP version.
    RDMAP_INVALID_VERSION = RDMAP REMOTE_OPERATION 0x05 "RDMAP: invalid RDMAP version";
    /// RDMAP operation: unexpected opcode.
    RDMAP_UNEXPECTED_OPCODE = RDMAP REMOTE_OPERATION 0x06 "RDMAP: unexpected opcode";
    /// RDMAP operation: catastrophic error, localized to the RDMAP stream. RFC 7306 §8.2 uses it
    /// for misaligned atomics.
    RDMAP_CATASTROPHIC_STREAM = RDMAP REMOTE_OPERATION 0x07
        "RDMAP: catastrophic error, localized to the stream";
    /// RDMAP operation: catastrophic error, global.
    RDMAP_CATASTROPHIC_GLOBAL = RDMAP REMOTE_OPERATION 0x08 "RDMAP: catastrophic error, global";
    /// RDMAP operation: the STag cannot be invalidated.
    RDMAP_OPERATION_CANNOT_INVALIDATE = RDMAP REMOTE_OPERATION 0x09
        "RDMAP: STag cannot be invalidated (operation)";
    /// RDMAP operation: unspecified error.
    RDMAP_OPERATION_UNSPECIFIED = RDMAP REMOTE_OPERATION 0xff "RDMAP: unspecified operation error";
    /// DDP: local catastrophic error.
    DDP_LOCAL_CATASTROPHIC = DDP LOCAL_CATASTROPHIC 0x00 "DDP: local catastrophic error";
    /// DDP tagged: invalid STag.
    DDP_TAGGED_INVALID_STAG = DDP TAGGED_BUFFER 0x00 "DDP: tagged buffer, invalid STag";
    /// DDP tagged: base or bounds violation.
    DDP_TAGGED_BASE_BOUNDS = DDP TAGGED_BUFFER 0x01 "DDP: tagged buffer, base or bounds violation";
    /// DDP tagged: STag not associated with the DDP stream.
    DDP_TAGGED_NOT_ASSOCIATED = DDP TAGGED_BUFFER 0x02
        "DDP: tagged buffer, STag not associated with the stream";
    /// DDP tagged: tagged offset wrap.
    DDP_TAGGED_TO_WRAP = DDP TAGGED_BUFFER 0x03 "DDP: tagged buffer, tagged offset wraps";
    /// DDP tagged: invalid DDP version.
    DDP_TAGGED_INVALID_VERSION = DDP TAGGED_BUFFER 0x04 "DDP: tagged buffer, invalid DDP version";
    /// DDP untagged: invalid queue number.
    DDP_UNTAGGED_INVALID_QN = DDP UNTAGGED_BUFFER 0x01 "DDP: untagged buffer, invalid queue number";
    /// DDP untagged: invalid MSN, no buffer available.
    DDP_UNTAGGED_NO_BUFFER = DDP UNTAGGED_BUFFER 0x02 "DDP: untagged buffer, no buffer available";
    /// DDP untagged: invalid MSN, range is not valid.
    DDP_UNTAGGED_INVALID_MSN = DDP UNTAGGED_BUFFER 0x03
        "DDP: untagged buffer, MSN range is not valid";
    /// DDP untagged: invalid message offset.
    DDP_UNTAGGED_INVALID_MO = DDP UNTAGGED_BUFFER 0x04
        "DDP: untagged buffer, invalid message offset";
    /// DDP untagged: message too long for the available buffer.
    DDP_UNTAGGED_TOO_LONG = DDP UNTAGGED_BUFFER 0x05 "DDP: untagged buffer, message too long";
    /// DDP untagged: invalid DDP version.
    DDP_UNTAGGED_INVALID_VERSION = DDP UNTAGGED_BUFFER 0x06
        "DDP: untagged buffer, invalid DDP version";
    /// MPA: TCP connection closed, terminated or lost. Reported locally only.
    MPA_CONNECTION_LOST = LLP MPA 0x01 "MPA: TCP connection lost";
    /// MPA: CRC mismatch.
    MPA_CRC = LLP MPA 0x02 "MPA: CRC mismatch";
    /// MPA: marker and ULPDU length disagree about the start of an FPDU.
    MPA_MARKER = LLP MPA 0x03 "MPA: marker and ULPDU length disagree";
    /// MPA: invalid MPA request or reply frame.
    MPA_INVALID_FRAME = LLP MPA 0x04 "MPA: invalid request or reply frame";
    /// MPA (RFC 6581): local catastrophic error.
    MPA_LOCAL_CATASTROPHIC = LLP MPA 0x05 "MPA: local catastrophic error";
    /// MPA (RFC 6581): insufficient IRD resources.
    MPA_INSUFFICIENT_IRD = LLP MPA 0x06 "MPA: insufficient IRD resources";
    /// MPA (RFC 6581): no matching RTR option.
    MPA_NO_MATCHING_RTR = LLP MPA 0x07 "MPA: no matching RTR option";
}

impl TerminateCode {
    /// Creates a code from its three parts.
    pub const fn new(layer: Layer, etype: Etype, code: Code) -> Self {
        Self {
            layer: layer.0,
            etype: etype.0,
            code: code.0,
        }
    }

    /// Returns the code with layer and error type exchanged, for a sender that writes the nibbles
    /// of the first octet in the wrong order.
    #[inline]
    pub const fn swapped(self) -> Self {
        Self {
            layer: self.etype,
            etype: self.layer,
            code: self.code,
        }
    }

    /// Returns `true` if a Terminate with this code must contain the DDP header and length of the
    /// segment that caused it (RFC 5040 §4.8 figure 10).
    //= rfc5040 section 4.8
    //# See Figure 10 for when this bit SHOULD be set.
    pub const fn wants_ddp_header(self) -> bool {
        match Layer(self.layer) {
            Layer::RDMAP => self.etype != Etype::LOCAL_CATASTROPHIC.0,
            Layer::DDP => true,
            _ => false,
        }
    }

    /// Returns `true` if a Terminate with this code must also contain the Read Request header, if a
    /// Read Request caused it.
    pub const fn wants_read_request(self) -> bool {
        matches!(
            (Layer(self.layer), Etype(self.etype)),
            (Layer::RDMAP, Etype::REMOTE_PROTECTION)
        )
    }
}

impl From<&HeaderError> for TerminateCode {
    fn from(error: &HeaderError) -> Self {
        match error {
            // No RFC defines a code for this. MPA's code 3 means that framing and contents
            // disagree. siw sends it as well.
            HeaderError::TooShort => Self::MPA_MARKER,
            HeaderError::BadDdpVersion { tagged: true } => Self::DDP_TAGGED_INVALID_VERSION,
            HeaderError::BadDdpVersion { tagged: false } => Self::DDP_UNTAGGED_INVALID_VERSION,
            HeaderError::BadRdmapVersion => Self::RDMAP_INVALID_VERSION,
            HeaderError::UnexpectedOpcode(_) => Self::RDMAP_UNEXPECTED_OPCODE,
            HeaderError::InvalidQueue { .. } => Self::DDP_UNTAGGED_INVALID_QN,
        }
    }
}

impl From<HeaderError> for TerminateCode {
    fn from(error: HeaderError) -> Self {
        Self::from(&error)
    }
}

impl fmt::Debug for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}/{:x}/{:#04x}", self.layer, self.etype, self.code)?;
        match self.description() {
            Some(text) => write!(f, " ({text})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.description() {
            Some(text) => f.write_str(text),
            None => write!(
                f,
                "layer {} type {} code {:#04x}",
                self.layer, self.etype, self.code
            ),
        }
    }
}
