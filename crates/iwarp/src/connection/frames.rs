//! Several messages in one slot.
//!
//! Each message begins at a multiple of [`ALIGN`] with a header: its length, and four octets that
//! are 0. docs/wire.md describes the format.

/// Alignment of messages in bytes, so that messages of elements can be read in place.
const ALIGN: usize = 8;
/// Length of a message's header in bytes.
pub(super) const FRAME: usize = 8;

/// Returns the length of a message with its header and the padding after it.
pub(super) const fn framed(len: usize) -> usize {
    FRAME + len.next_multiple_of(ALIGN)
}

/// Returns the header of a message.
pub(super) const fn header(len: u32) -> [u8; FRAME] {
    let [a, b, c, d] = len.to_be_bytes();
    [a, b, c, d, 0, 0, 0, 0]
}

/// Returns the length of the first message. Returns `None` if `octets` do not begin with a message.
pub(super) fn first(octets: &[u8]) -> Option<usize> {
    let (&[a, b, c, d, 0, 0, 0, 0], rest) = octets.split_first_chunk()? else {
        return None;
    };
    let len = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    (len.checked_next_multiple_of(ALIGN)? <= rest.len()).then_some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found() {
        let mut octets = Vec::new();
        for message in [&b"one"[..], b"", b"eight888"] {
            octets.extend(header(message.len() as u32));
            octets.extend(message);
            octets.resize(octets.len().next_multiple_of(ALIGN), 0);
        }
        let mut rest = &octets[..];
        for message in [&b"one"[..], b"", b"eight888"] {
            assert_eq!(first(rest), Some(message.len()));
            assert_eq!(rest[FRAME..].get(..message.len()), Some(message));
            rest = &rest[framed(message.len())..];
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn broken_headers_are_refused() {
        let with = |len: u32, more: usize| {
            let mut octets = header(len).to_vec();
            octets.resize(FRAME + more, 0);
            first(&octets)
        };
        assert_eq!(with(8, 8), Some(8));
        assert_eq!(with(8, 7), None);
        assert_eq!(with(5, 5), None, "the padding is missing");
        assert_eq!(with(u32::MAX, 64), None);
        assert_eq!(first(&[0; 7]), None);
        assert_eq!(first(&[0, 0, 0, 0, 1, 0, 0, 0]), None, "reserved octets");
    }
}
