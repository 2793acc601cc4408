//! Packets that UDP sockets receive: datagrams, and messages that resolve queue pairs.

use iwarp_proto::datagram::{HEADER_LEN, Header};
use iwarp_proto::sidr::{Due, Heard, MESSAGE_LEN, Message, Patience, Requester};

use super::print;

/// Stands in for CRC32C and always returns 0, because the fuzzer could not find valid CRCs. The
/// targets write 0 into the CRC field.
const fn no_crc(_: u32, _: &[u8]) -> u32 {
    0
}

/// The input is used twice: as a datagram, and as the first bytes of a message.
pub fn datagrams(data: &[u8]) {
    let mut octets = data.to_vec();
    if let Some(crc) = octets.get_mut(HEADER_LEN - 4..HEADER_LEN) {
        crc.fill(0);
    }
    datagram(&octets);
    let mut octets = [0; MESSAGE_LEN];
    for (to, from) in octets[..MESSAGE_LEN - 4].iter_mut().zip(data) {
        *to = *from;
    }
    message(&octets);
}

fn datagram(octets: &[u8]) {
    match Header::open(no_crc, octets) {
        Ok((header, payload)) => {
            print(&header);
            let mut again = vec![0xa5; HEADER_LEN];
            again.extend_from_slice(payload);
            header
                .seal(no_crc, &mut again)
                .expect("what was read can be written");
            assert_eq!(again, octets);
        }
        Err(error) => print(&error),
    }
}

fn message(octets: &[u8; MESSAGE_LEN]) {
    let message = match Message::open(no_crc, octets) {
        Ok(message) => message,
        Err(error) => return print(&error),
    };
    print(&message);
    let again = message.seal(no_crc).expect("what was read can be written");
    assert_eq!(again, *octets);
    let patience = Patience {
        silence_ns: 1,
        answer_ns: u64::MAX,
    };
    let mut requester = Requester::new(message.id, patience, 0);
    assert!(matches!(requester.due(0), Due::Send(_)));
    let heard = requester.hear(&message);
    // The requester accepts no answer before a challenge.
    assert!(!matches!(heard, Heard::Answer(_)));
    print(&requester.due(u64::MAX));
}
