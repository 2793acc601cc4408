//! Extended reliable connections (XRC) in MPA start-up. Each message of such a connection names a
//! shared receive queue, which other queue pairs do not understand, and the two ends have different
//! roles. Therefore the private data of the request and the reply starts with a prefix that
//! identifies the sender's end.

use crate::error::{Error, Result};
use iwarp_rnic::qp::XrcEnd;

const MAGIC_LEN: usize = 8;
const INITIATOR: [u8; MAGIC_LEN] = *b"iwarp-xs";
const TARGET: [u8; MAGIC_LEN] = *b"iwarp-xr";

/// Returns the private data to send: the prefix of the sender's end, and the program's private
/// data.
pub(super) fn wrap(end: Option<XrcEnd>, private_data: &[u8]) -> Vec<u8> {
    let mut data = match end {
        None => Vec::new(),
        Some(XrcEnd::Initiator) => INITIATOR.to_vec(),
        Some(XrcEnd::Target) => TARGET.to_vec(),
    };
    data.extend_from_slice(private_data);
    data
}

/// Returns the sender's end, and the program's part of the private data.
pub(super) fn unwrap(data: &[u8]) -> (Option<XrcEnd>, &[u8]) {
    match data.split_first_chunk() {
        Some((&INITIATOR, rest)) => (Some(XrcEnd::Initiator), rest),
        Some((&TARGET, rest)) => (Some(XrcEnd::Target), rest),
        _ => (None, data),
    }
}

/// Checks that the two ends of a connection match.
///
/// # Errors
/// [`Error::InvalidArgument`] if they do not match.
pub(super) fn check(ours: Option<XrcEnd>, peers: Option<XrcEnd>) -> Result<()> {
    match (ours, peers) {
        (None, None)
        | (Some(XrcEnd::Initiator), Some(XrcEnd::Target))
        | (Some(XrcEnd::Target), Some(XrcEnd::Initiator)) => Ok(()),
        _ => Err(Error::InvalidArgument(
            "XRC initiators connect only to XRC targets, other queue pairs only to their own kind",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDS: [Option<XrcEnd>; 3] = [None, Some(XrcEnd::Initiator), Some(XrcEnd::Target)];

    #[test]
    fn unwrap_inverts_wrap() {
        for end in ENDS {
            for data in [&b""[..], b"iwarp-x", b"anything at all"] {
                let wrapped = wrap(end, data);
                assert_eq!(unwrap(&wrapped), (end, data));
            }
        }
        assert_eq!(wrap(Some(XrcEnd::Initiator), b"!"), b"iwarp-xs!");
        assert_eq!(wrap(Some(XrcEnd::Target), b"!"), b"iwarp-xr!");
    }

    #[test]
    fn only_matching_ends_are_connected() {
        let fit = ENDS.map(|ours| ENDS.map(|peers| check(ours, peers).is_ok()));
        let expected = [
            [true, false, false],
            [false, false, true],
            [false, true, false],
        ];
        assert_eq!(fit, expected);
    }
}
