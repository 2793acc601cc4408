//! A stream of FPDUs: framing, markers, CRC, and the ULPDUs inside. RFC 5044 section 4.

use iwarp_proto::crc32c::{self, Crc32cFn};
use iwarp_proto::mpa::framing::{FpduOptions, FramingError, MarkerClock, decode_fpdu, encode_fpdu};

use super::print;

const MARKERS: u8 = 1;
const CRC: u8 = 2;
const CRC_BROKEN: u8 = 4;

/// The longest ULPDU that the length field can announce.
const ULPDU_MAX: usize = u16::MAX as usize;

/// The first byte of the input selects the options: bit 0 markers, bit 1 CRC, bit 2 a CRC function
/// that always returns 0, with which the fuzzer finds FPDUs that pass the check. The next two bytes
/// are the position in the stream. The rest is the stream.
pub fn fpdu(data: &[u8]) {
    let Some((&[choice, high, low], mut stream)) = data.split_first_chunk() else {
        return;
    };
    let crc: Option<Crc32cFn> = match choice & (CRC | CRC_BROKEN) {
        0 => None,
        CRC => Some(crc32c::append),
        _ => Some(|_, _| 0),
    };
    let options = FpduOptions {
        markers: choice & MARKERS != 0,
        crc,
    };
    // An FPDU begins at a multiple of four bytes.
    let mut clock = MarkerClock::at(u64::from(u16::from_be_bytes([high, low])) * 4);
    let mut ulpdu = vec![0; ULPDU_MAX];
    loop {
        let before = clock;
        match decode_fpdu(stream, &options, &mut clock, &mut ulpdu) {
            Ok(decoded) => {
                assert!(decoded.consumed > 0 && decoded.consumed <= stream.len());
                let content = &ulpdu[..decoded.ulpdu_len];
                again(content, &options, before, decoded.consumed);
                super::ulpdu(content);
                stream = &stream[decoded.consumed..];
            }
            Err(error) => {
                assert_eq!(clock, before, "the clock moved on an error");
                if let FramingError::Incomplete { needed } = error {
                    assert!(needed > stream.len(), "asks for octets that it already has");
                }
                print(&error);
                let _ = error.to_string();
                print(&error.terminate());
                return;
            }
        }
    }
}

/// Checks that a decoded ULPDU can be encoded at the same position of the stream, to the same
/// length, and decoded again.
fn again(ulpdu: &[u8], options: &FpduOptions, mut clock: MarkerClock, length: usize) {
    let mut reader = clock;
    let mut wire = vec![0xa5; length];
    match encode_fpdu(ulpdu, options, &mut clock, &mut wire) {
        Ok(written) => assert_eq!(written, length),
        // With markers, the longest ULPDUs can be received, but not sent.
        Err(error) => {
            assert_eq!(error, FramingError::UlpduTooLong);
            return;
        }
    }
    let mut out = vec![0x5a; ulpdu.len()];
    let decoded = decode_fpdu(&wire, options, &mut reader, &mut out);
    assert_eq!(
        decoded.map(|decoded| (decoded.consumed, decoded.ulpdu_len)),
        Ok((length, ulpdu.len()))
    );
    assert_eq!(out, ulpdu);
    assert_eq!(reader, clock);
}
