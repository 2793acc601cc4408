//! Extended reliable connections in MPA start-up. Their two ends are not alike, and an ordinary queue pair at the other end would understand no
//! note about shared receive queues. So request and reply say in front of the program's private data which end their sender is.

use crate::error::{Error, Result};
use iwarp_rnic::qp::XrcEnd;

const MAGIC_LEN: usize = 8;
const INITIATOR: [u8; MAGIC_LEN] = *b"iwarp-xs";
const TARGET: [u8; MAGIC_LEN] = *b"iwarp-xr";

/// Returns the private data to send: the program's, behind what says which end the sender is.
pub(super) fn wrap(end: Option<XrcEnd>, private_data: &[u8]) -> Vec<u8> {
    let mut data = match end {
        None => Vec::new(),
        Some(XrcEnd::Initiator) => INITIATOR.to_vec(),
        Some(XrcEnd::Target) => TARGET.to_vec(),
    };
    data.extend_from_slice(private_data);
    data
}

/// Returns which end the sender of private data is, and the program's part of them.
pub(super) fn unwrap(data: &[u8]) -> (Option<XrcEnd>, &[u8]) {
    match data.split_first_chunk() {
        Some((&INITIATOR, rest)) => (Some(XrcEnd::Initiator), rest),
        Some((&TARGET, rest)) => (Some(XrcEnd::Target), rest),
        _ => (None, data),
    }
}

/// Checks that the two ends of a connection fit together.
///
/// # Errors
/// [`Error::InvalidArgument`]: they do not.
pub(super) fn check(ours: Option<XrcEnd>, peers: Option<XrcEnd>) -> Result<()> {
    match (ours, peers) {
        (None, None)
        | (Some(XrcEnd::Initiator), Some(XrcEnd::Target))
        | (Some(XrcEnd::Target), Some(XrcEnd::Initiator)) => Ok(()),
        _ => Err(Error::InvalidArgument(
            "the initiator of an extended reliable connection is connected to a target, and other queue pairs to their like",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDS: [Option<XrcEnd>; 3] = [None, Some(XrcEnd::Initiator), Some(XrcEnd::Target)];

    #[test]
    fn what_is_wrapped_is_unwrapped() {
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
    fn only_ends_that_fit_are_connected() {
        let fit = ENDS.map(|ours| ENDS.map(|peers| check(ours, peers).is_ok()));
        let expected = [
            [true, false, false],
            [false, false, true],
            [false, true, false],
        ];
        assert_eq!(fit, expected);
    }
}
