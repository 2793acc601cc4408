//! A stream of FPDUs: framing, markers, CRC, and the contained ULPDUs. RFC 5044 section 4.

use iwarp_proto::crc32c::{self, Crc32cFn};
use iwarp_proto::mpa::framing::{FpduOptions, FramingError, MarkerClock, decode_fpdu, encode_fpdu};

use super::print;

const MARKERS: u8 = 1;
const CRC: u8 = 2;
const CRC_ZERO: u8 = 4;

/// Length of the longest ULPDU: the maximum of the length field.
const ULPDU_MAX: usize = u16::MAX as usize;

/// The input: a byte of options (bit 0 markers, bit 1 CRC, bit 2 a CRC function that always returns
/// 0, so that the fuzzer finds valid FPDUs), two bytes for the position in the stream, and the
/// stream.
pub fn fpdu(data: &[u8]) {
    let Some((&[choice, high, low], mut stream)) = data.split_first_chunk() else {
        return;
    };
    let crc: Option<Crc32cFn> = match choice & (CRC | CRC_ZERO) {
        0 => None,
        CRC => Some(crc32c::append),
        _ => Some(|_, _| 0),
    };
    let options = FpduOptions {
        markers: choice & MARKERS != 0,
        crc,
    };
    // FPDUs begin at multiples of four bytes.
    let mut clock = MarkerClock::at(u64::from(u16::from_be_bytes([high, low])) * 4);
    let mut ulpdu = vec![0; ULPDU_MAX];
    loop {
        let before = clock;
        match decode_fpdu(stream, &options, &mut clock, &mut ulpdu) {
            Ok(decoded) => {
                assert!(decoded.consumed > 0 && decoded.consumed <= stream.len());
                let content = &ulpdu[..decoded.ulpdu_len];
                check_reencoding(content, &options, before, decoded.consumed);
                super::ulpdu(content);
                stream = &stream[decoded.consumed..];
            }
            Err(error) => {
                assert_eq!(clock, before, "the clock moved on an error");
                if let FramingError::Incomplete { needed } = error {
                    assert!(needed > stream.len(), "requests fewer octets than it has");
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
fn check_reencoding(ulpdu: &[u8], options: &FpduOptions, mut clock: MarkerClock, length: usize) {
    let mut reader = clock;
    let mut wire = vec![0xa5; length];
    match encode_fpdu(ulpdu, options, &mut clock, &mut wire) {
        Ok(written) => assert_eq!(written, length),
        // With markers, the longest ULPDUs can be decoded, but not encoded.
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
