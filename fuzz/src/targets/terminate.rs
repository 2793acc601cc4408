//! A Terminate message with its optional headers. RFC 5040 section 4.8.

use iwarp_proto::rdmap::Terminate;

use super::print;

/// The input is the payload after the DDP header.
pub fn terminate(data: &[u8]) {
    let (message, layout) = match Terminate::parse(data) {
        Ok(parsed) => parsed,
        Err(error) => return print(&error),
    };
    print(&message);
    print(&layout);
    print(&message.code.description());
    let mut out = [0xa5; Terminate::MAX_LEN];
    let written = message.emit(&mut out);
    assert_eq!(written, message.wire_len());
    assert!(
        written > 0,
        "the message does not fit into `MAX_LEN` octets"
    );
    // The error code may be parsed in the other layout this time, so compare only the headers.
    let (again, _) = Terminate::parse(&out[..written]).expect("an encoded message can be parsed");
    assert_eq!(again.ddp_header, message.ddp_header);
    assert_eq!(again.read_request, message.read_request);
}
