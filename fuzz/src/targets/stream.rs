//! The pretty printer for one direction of a connection: start-up frame, FPDUs and their messages,
//! including invalid ones.

use iwarp_proto::crc32c;
use iwarp_proto::mpa::framing::FpduOptions;
use iwarp_proto::mpa::pretty::Stream;

/// The input: a byte of options (bit 0 markers, bit 1 CRC), and the stream.
pub fn stream(data: &[u8]) {
    let Some((&choice, octets)) = data.split_first() else {
        return;
    };
    let options = FpduOptions {
        markers: choice & 1 != 0,
        crc: (choice & 2 != 0).then_some(crc32c::append),
    };
    let text = Stream::new(octets, options).to_string();
    // The shortest FPDU has 8 bytes, which limits the number of lines.
    assert!(
        text.lines().count() <= octets.len() / 8 + 2,
        "more lines than FPDUs"
    );
    assert!(
        octets.is_empty() || text.ends_with('\n'),
        "the last line is not complete"
    );
}
