//! Tests of service ID resolution: encoding, invalid messages, and the requester.

use super::*;
use crate::crc32c::append;
use proptest::prelude::*;

extern crate std;
use std::vec;
use std::vec::Vec;

const SECOND: u64 = 1_000_000_000;
const ACCEPTED: Kind = Kind::Reply(Answer::QueuePair {
    num: 0xab_cdef,
    qkey: DEFAULT_QKEY,
});

fn message(kind: Kind, private_data: &[u8]) -> Message<'_> {
    Message {
        kind,
        id: 0x0102_0304_0506_0708,
        cookie: 0x1112_1314_1516_1718,
        private_data,
    }
}

fn update_crc(octets: &mut [u8]) {
    let crc = append(0, &octets[..252]);
    octets[252..256].copy_from_slice(&crc.to_be_bytes());
}

#[test]
fn encoding_matches_document() {
    let octets = message(ACCEPTED, b"hello").seal(append).unwrap();
    let head = [
        b'i', b'W', b'S', b'R', 1, 3, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15,
        0x16, 0x17, 0x18, 0, 0xab, 0xcd, 0xef, 0x01, 0x23, 0x45, 0x67,
    ];
    assert_eq!(octets[..32], head);
    assert_eq!(octets[32..37], *b"hello");
    assert_eq!(octets[37..252], [0; 215]);
    assert_eq!(octets[252..], append(0, &octets[..252]).to_be_bytes());
    assert_eq!(
        Message::open(append, &octets),
        Ok(message(ACCEPTED, b"hello"))
    );
    let refused = Kind::Reply(Answer::Refused(Refusal::REJECTED));
    let octets = message(refused, b"").seal(append).unwrap();
    assert_eq!(octets[4..8], [1, 3, 2, 0]);
    assert_eq!(octets[24..32], [0; 8]);
    let codes = [Refusal::UNSUPPORTED, Refusal::REJECTED].map(Refusal::code);
    assert_eq!(codes, [1, 2], "as in InfiniBand's SIDR reply");
    for (kind, number) in [(Kind::Request, 1), (Kind::Challenge, 2)] {
        let octets = message(kind, b"").seal(append).unwrap();
        assert_eq!(octets[4..8], [1, number, 0, 0]);
        assert_eq!(octets[24..252], [0; 228]);
    }
}

#[test]
fn malformed_messages_are_refused() {
    let refused = |kind, change: &dyn Fn(&mut Vec<u8>)| {
        let mut octets = message(kind, b"").seal(append).unwrap().to_vec();
        change(&mut octets);
        if octets.len() == MESSAGE_LEN {
            update_crc(&mut octets);
        }
        Message::open(append, &octets).map(|_| ()).unwrap_err()
    };
    use Malformed::{Field, Foreign, Version};
    let rejected = Kind::Reply(Answer::Refused(Refusal::REJECTED));
    assert_eq!(refused(Kind::Request, &|m| m.push(0)), Foreign);
    assert_eq!(refused(Kind::Request, &|m| m.truncate(255)), Foreign);
    assert_eq!(refused(Kind::Request, &|m| m[3] = b'D'), Foreign);
    assert_eq!(refused(Kind::Request, &|m| m[4] = 2), Version(2));
    assert_eq!(refused(Kind::Request, &|m| m[5] = 4), Field, "type");
    assert_eq!(refused(Kind::Request, &|m| m[6] = 1), Field, "status");
    assert_eq!(refused(Kind::Request, &|m| m[7] = 181), Field, "length");
    assert_eq!(refused(Kind::Request, &|m| m[27] = 1), Field, "number");
    assert_eq!(refused(Kind::Challenge, &|m| m[31] = 1), Field, "key");
    assert_eq!(refused(Kind::Challenge, &|m| m[7] = 1), Field, "length");
    assert_eq!(refused(Kind::Request, &|m| m[32] = 1), Field, "not data");
    assert_eq!(refused(Kind::Request, &|m| m[251] = 1), Field, "not zero");
    assert_eq!(refused(ACCEPTED, &|m| m[24] = 1), Field, "25 bits");
    assert_eq!(refused(ACCEPTED, &|m| m[7] = 137), Field, "length");
    assert_eq!(refused(rejected, &|m| m[27] = 1), Field, "number");
    assert_eq!(refused(rejected, &|m| m[31] = 1), Field, "key");
}

#[test]
fn unsendable_messages_are_refused() {
    let seals = |kind, length: usize| message(kind, &vec![1; length]).seal(append).is_ok();
    for (kind, max) in [
        (Kind::Request, REQUEST_DATA_MAX),
        (Kind::Challenge, 0),
        (ACCEPTED, REPLY_DATA_MAX),
    ] {
        assert!(seals(kind, max) && !seals(kind, max + 1));
    }
    let wide = Kind::Reply(Answer::QueuePair {
        num: 1 << 24,
        qkey: 0,
    });
    assert!(!seals(wide, 0));
    let last = Kind::Reply(Answer::QueuePair {
        num: QP_MAX,
        qkey: 0,
    });
    assert!(seals(last, 0));
}

const PATIENCE: Patience = Patience {
    silence_ns: 15 * SECOND,
    answer_ns: 60 * SECOND,
};

/// Runs a requester from the time `now` until it gives up. Returns the times when it sent, and when
/// it gave up.
fn run(requester: &mut Requester, mut now: u64) -> (Vec<u64>, u64) {
    let mut sent = vec![];
    loop {
        now = match requester.due(now) {
            Due::Send(next) => {
                sent.push(now);
                next
            }
            Due::Wait(next) => next,
            Due::TimedOut => return (sent, now),
        };
    }
}

#[test]
fn retransmissions_back_off() {
    let began = 7 * SECOND;
    let mut requester = Requester::new(1, PATIENCE, began);
    let (sent, end) = run(&mut requester, began);
    let pauses: Vec<u64> = sent
        .windows(2)
        .map(|w| (w[1] - w[0]) / 100_000_000)
        .collect();
    assert_eq!(pauses, [2, 4, 8, 16, 32, 40, 40]);
    assert_eq!(end - began, PATIENCE.silence_ns);
    assert_eq!(requester.due(u64::MAX), Due::TimedOut);
}

#[test]
fn challenge_extends_time_limit() {
    let mut requester = Requester::new(1, PATIENCE, 0);
    let challenge = Message {
        id: 1,
        ..message(Kind::Challenge, b"")
    };
    assert_eq!(requester.hear(&challenge), Heard::Challenge);
    assert_eq!(requester.hear(&challenge), Heard::Nothing, "a copy");
    let request = requester.request(append, b"data").unwrap();
    let request = Message::open(append, &request).unwrap();
    assert_eq!((request.id, request.cookie), (1, challenge.cookie));
    assert_eq!(request.private_data, b"data");
    assert_eq!(run(&mut requester, 0).1, PATIENCE.answer_ns);
}

#[test]
fn reply_with_wrong_cookie_is_ignored() {
    let mut requester = Requester::new(message(ACCEPTED, b"").id, PATIENCE, 0);
    let reply = message(ACCEPTED, b"");
    let early = Message { cookie: 0, ..reply };
    assert_eq!(requester.hear(&early), Heard::Nothing, "no cookie yet");
    requester.hear(&message(Kind::Challenge, b""));
    for wrong in [
        Message { id: 9, ..reply },
        Message { cookie: 9, ..reply },
        message(Kind::Request, b""),
    ] {
        assert_eq!(requester.hear(&wrong), Heard::Nothing);
    }
    let answer = Answer::QueuePair {
        num: 0xab_cdef,
        qkey: DEFAULT_QKEY,
    };
    assert_eq!(requester.hear(&reply), Heard::Answer(answer));
}

/// Any host may send messages about other requests, and a listener may reply late to an earlier
/// request.
#[test]
fn messages_for_other_requests_are_ignored() {
    let refused = Kind::Reply(Answer::Refused(Refusal::REJECTED));
    for challenged in [false, true] {
        for kind in [Kind::Request, Kind::Challenge, ACCEPTED, refused] {
            let new = || {
                let mut requester = Requester::new(message(ACCEPTED, b"").id, PATIENCE, 0);
                if challenged {
                    requester.hear(&message(Kind::Challenge, b""));
                }
                requester
            };
            let (mut requester, mut other) = (new(), new());
            let foreign = Message {
                id: 9,
                cookie: 77,
                ..message(kind, b"")
            };
            assert_eq!(requester.hear(&foreign), Heard::Nothing);
            assert_eq!(
                requester.request(append, b"data"),
                other.request(append, b"data")
            );
            assert_eq!(run(&mut requester, 0), run(&mut other, 0));
            let reply = message(ACCEPTED, b"");
            assert_eq!(requester.hear(&reply), other.hear(&reply));
        }
    }
}

#[test]
fn challenges_are_limited() {
    let mut requester = Requester::new(1, PATIENCE, 0);
    let mut sent_immediately = 0;
    for cookie in 1..1000 {
        let challenge = Message {
            id: 1,
            cookie,
            ..message(Kind::Challenge, b"")
        };
        sent_immediately += usize::from(requester.hear(&challenge) == Heard::Challenge);
    }
    assert_eq!(sent_immediately, CHALLENGES_MAX as usize);
    // The next retransmission contains the last cookie.
    let request = requester.request(append, b"").unwrap();
    assert_eq!(Message::open(append, &request).unwrap().cookie, 999);
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Request),
        Just(Kind::Challenge),
        (0..=QP_MAX, any::<u32>())
            .prop_map(|(num, qkey)| Kind::Reply(Answer::QueuePair { num, qkey })),
        (1u8..).prop_map(|code| Kind::Reply(Answer::Refused(Refusal(code)))),
    ]
}

proptest! {
    #[test]
    fn sealed_messages_open(
        (kind, id, cookie) in (kinds(), any::<u64>(), any::<u64>()),
        private_data in proptest::collection::vec(any::<u8>(), 0..=REPLY_DATA_MAX),
    ) {
        let private_data = match kind {
            Kind::Challenge => &[],
            _ => &private_data[..],
        };
        let message = Message { kind, id, cookie, private_data };
        let octets = message.seal(append).unwrap();
        prop_assert_eq!(Message::open(append, &octets), Ok(message));
    }

    #[test]
    fn changed_octets_are_detected(kind in kinds(), index in 0..MESSAGE_LEN, change in 1u8..) {
        let mut octets = message(kind, b"").seal(append).unwrap();
        octets[index] ^= change;
        prop_assert!(Message::open(append, &octets).is_err());
    }

    #[test]
    fn arbitrary_input_is_handled(
        octets in proptest::collection::vec(any::<u8>(), MESSAGE_LEN),
        length in 0..=MESSAGE_LEN,
    ) {
        let mut octets = octets;
        octets[..5].copy_from_slice(b"iWSR\x01");
        octets[5] %= 4;
        update_crc(&mut octets);
        let _ = Message::open(append, &octets);
        octets.truncate(length);
        let _ = Message::open(append, &octets);
    }
}
