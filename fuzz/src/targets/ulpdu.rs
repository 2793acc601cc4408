//! A ULPDU: the DDP and RDMAP headers, and the payload, parsed as every kind of message. RFC 5041
//! section 4, RFC 5040 section 4, RFC 7306 sections 5 and 6.

use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{AtomicRequest, AtomicResponse, Immediate, ReadRequest};

use super::print;

/// The input is the ULPDU.
pub fn ulpdu(data: &[u8]) {
    match Header::parse(data) {
        Ok(header) => assert_eq!(
            Header::decode(data),
            Some(header),
            "parse and decode differ"
        ),
        Err(error) => print(&error),
    }
    let Some(header) = Header::decode(data) else {
        return;
    };
    print(&header);
    print(&header.opcode());
    print(&(
        header.last(),
        header.opcode().queue_number(),
        header.opcode().is_tagged(),
    ));
    check_reencoding(
        data,
        &header,
        header.len(),
        |out| header.emit(out),
        Header::decode,
    );

    let payload = data
        .get(header.len()..)
        .expect("the header is inside the ULPDU");
    messages(payload);
    super::terminate(payload);
}

/// Parses the payload as each kind of message, because peers may combine any payload with any
/// opcode.
fn messages(payload: &[u8]) {
    if let Some(request) = ReadRequest::parse(payload) {
        print(&request);
        check_reencoding(
            payload,
            &request,
            ReadRequest::LEN,
            |out| request.emit(out),
            ReadRequest::parse,
        );
    }
    if let Some(request) = AtomicRequest::parse(payload) {
        print(&request);
        check_reencoding(
            payload,
            &request,
            payload.len(),
            |out| request.emit(out),
            AtomicRequest::parse,
        );
    }
    if let Some(response) = AtomicResponse::parse(payload) {
        print(&response);
        check_reencoding(
            payload,
            &response,
            payload.len(),
            |out| response.emit(out),
            AtomicResponse::parse,
        );
    }
    if let Some(immediate) = Immediate::parse(payload) {
        print(&immediate);
        check_reencoding(
            payload,
            &immediate,
            payload.len(),
            |out| immediate.emit(out),
            Immediate::parse,
        );
    }
}

/// Checks that a parsed value can be encoded into `room` bytes, the length from which it was
/// parsed, and that parsing it again returns the same value.
fn check_reencoding<T: PartialEq + std::fmt::Debug>(
    input: &[u8],
    value: &T,
    room: usize,
    emit: impl Fn(&mut [u8]) -> usize,
    parse: impl Fn(&[u8]) -> Option<T>,
) {
    assert!(room <= input.len());
    let mut out = vec![0xa5; room];
    let written = emit(&mut out);
    assert!(
        written > 0 && written <= room,
        "the encoding of {value:?} is longer than its original encoding"
    );
    assert_eq!(parse(&out[..written]).as_ref(), Some(value));
}
