//! Input of the UDP ports: datagrams, and the messages that resolve queue pairs.

use iwarp_proto::datagram::{HEADER_LEN, Header};
use iwarp_proto::sidr::{Due, Heard, MESSAGE_LEN, Message, Patience, Requester};

use super::print;

/// Replaces the CRC, which no changed input would match. The targets store it where a CRC belongs.
const fn no_crc(_: u32, _: &[u8]) -> u32 {
    0
}

/// The input is a datagram, and also a message that begins with the same bytes.
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
    // Nothing is accepted before a challenge.
    assert!(!matches!(heard, Heard::Answer(_)));
    print(&requester.due(u64::MAX));
}
