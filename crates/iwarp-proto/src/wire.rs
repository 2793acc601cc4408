//! Big-endian field access that cannot panic. All multi-octet fields of MPA, DDP and RDMAP are in
//! network order.
//!
//! Offsets are constants and buffers are arrays, so the compiler removes the bounds checks. A field
//! outside the buffer would read as zero, which does not occur with the offsets of this crate.

use core::ops::Range;

/// Declares a newtype over an integer with named values; its `Debug` prints the name, or the number
/// if there is none.
macro_rules! named_values {
    ($(#[$meta:meta])* $vis:vis struct $name:ident($repr:ty) {
        $($(#[$vmeta:meta])* $value:ident = $number:expr;)*
    }) => {
        $(#[$meta])*
        #[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        $vis struct $name(pub $repr);
        impl $name {
            $($(#[$vmeta])* pub const $value: Self = Self($number);)*

            /// Returns the name of this value, if it is one of the defined ones.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($value)),)*
                    _ => None,
                }
            }
        }
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({})"), self.0),
                }
            }
        }
    };
}
pub(crate) use named_values;

#[inline(always)]
fn chunk<const N: usize>(buf: &[u8], at: Range<usize>) -> [u8; N] {
    match buf.get(at).and_then(|s| s.first_chunk()) {
        Some(c) => *c,
        None => [0; N],
    }
}

#[inline(always)]
pub(crate) fn be16(buf: &[u8], at: Range<usize>) -> u16 {
    u16::from_be_bytes(chunk(buf, at))
}

#[inline(always)]
pub(crate) fn be32(buf: &[u8], at: Range<usize>) -> u32 {
    u32::from_be_bytes(chunk(buf, at))
}

#[inline(always)]
pub(crate) fn be64(buf: &[u8], at: Range<usize>) -> u64 {
    u64::from_be_bytes(chunk(buf, at))
}

/// Copies `value` to `at`; does nothing if the range is outside the buffer or of another length.
#[inline(always)]
pub(crate) fn put(buf: &mut [u8], at: Range<usize>, value: &[u8]) {
    if let Some(dst) = buf.get_mut(at)
        && dst.len() == value.len()
    {
        dst.copy_from_slice(value);
    }
}
