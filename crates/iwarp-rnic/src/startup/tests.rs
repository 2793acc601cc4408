//! Each state of both sides with each kind of input: octets in portions of all sizes, invalid
//! frames, the peer's close, and deadlines.

use std::vec::Vec;

use core::time::Duration;
use iwarp_proto::mpa::negotiate::{LocalParams, Rtr};
use iwarp_proto::mpa::startup::MAX_PRIVATE_DATA;

use super::*;
use crate::Time;
use crate::qp::StreamTimes;

const LIMITS: Limits = Limits {
    connect: Duration::from_secs(1),
    reply: Duration::from_secs(20),
    request: Duration::from_secs(3),
    first_fpdu: Duration::from_secs(4),
    close: Duration::from_secs(5),
    speak_first: Some(Duration::from_millis(6)),
};
const BEGIN: Time = Time::from_nanos(1_000);
const INITIATOR_DATA: &[u8] = b"data of the initiator!!";
const RESPONDER_DATA: &[u8] = b"data of the responder!!!!!";
/// Octets that follow a frame.
const FPDU: &[u8] = &[0xAA; 40];

const fn plain() -> LocalParams {
    LocalParams {
        revision: 1,
        ..peer_to_peer()
    }
}

const fn client_server() -> LocalParams {
    LocalParams {
        peer_to_peer: false,
        ..peer_to_peer()
    }
}

const fn peer_to_peer() -> LocalParams {
    LocalParams {
        revision: 2,
        crc: true,
        markers_rx: false,
        ird: 16,
        ord: 16,
        max_ird: 128,
        max_ord: 128,
        peer_to_peer: true,
        rtr_offer: iwarp_proto::mpa::negotiate::RtrSet::WRITE_READ,
        ird_ord_negotiate: true,
    }
}

fn at_second(seconds: u64) -> Time {
    BEGIN.after(Duration::from_secs(seconds))
}

fn initiator_awaiting_reply(params: LocalParams) -> Initiator {
    let mut initiator = Initiator::new(params, INITIATOR_DATA, LIMITS).unwrap();
    initiator.connecting(BEGIN);
    initiator.request_sent(BEGIN);
    initiator
}

fn waiting_responder() -> Responder {
    Responder::new(peer_to_peer(), LIMITS, BEGIN)
}

/// Returns a responder that has the request of an initiator with these parameters.
fn responder_with_request(params: LocalParams) -> Responder {
    let mut responder = waiting_responder();
    let request = initiator_awaiting_reply(params).request().to_vec();
    let received = responder.received(&request).unwrap();
    assert_eq!(
        (received.consumed, received.outcome),
        (request.len(), Some(()))
    );
    responder
}

fn reply_to(params: LocalParams) -> Vec<u8> {
    let mut responder = responder_with_request(params);
    responder
        .accept(&peer_to_peer(), RESPONDER_DATA)
        .unwrap()
        .unwrap();
    responder.reply().to_vec()
}

fn rejection_for(params: LocalParams) -> Vec<u8> {
    let mut responder = responder_with_request(params);
    assert!(responder.reject(RESPONDER_DATA));
    responder.reply().to_vec()
}

/// Reads like a driver, never more than [`Reading::wanted`]. Returns the outcome and the unread
/// rest.
fn read<'a, S: Reading>(
    side: &mut S,
    mut stream: &'a [u8],
    max_read: usize,
) -> Result<(Option<S::Outcome>, &'a [u8]), Failure> {
    while side.wanted() > 0 && !stream.is_empty() {
        let n = side.wanted().min(max_read).min(stream.len());
        let received = side.received(&stream[..n])?;
        assert_eq!(received.consumed, n, "no more was read than wanted");
        stream = &stream[n..];
        if let Some(outcome) = received.outcome {
            assert_eq!(side.wanted(), 0);
            return Ok((Some(outcome), stream));
        }
    }
    Ok((None, stream))
}

/// Passes the frame in portions of several sizes, and in two portions split at each octet.
fn pass_in_portions<S: Reading + Clone>(side: &S, frame: &[u8], check: impl Fn(&S, &S::Outcome)) {
    let stream = [frame, FPDU].concat();
    for max_read in [1, 7, 64, stream.len()] {
        let mut side = side.clone();
        let (outcome, rest) = read(&mut side, &stream, max_read).unwrap();
        assert_eq!(rest, FPDU, "portions of {max_read}");
        check(&side, &outcome.unwrap());
    }
    for cut in 0..=frame.len() {
        let mut side = side.clone();
        let (first, second) = stream.split_at(cut);
        let received = side.received(first).unwrap();
        assert_eq!(received.consumed, cut);
        let outcome = match received.outcome {
            Some(outcome) => outcome,
            None => {
                assert!(side.wanted() > 0 && side.wanted() <= frame.len() - cut);
                assert_eq!(side.private_data(), b"");
                let received = side.received(second).unwrap();
                assert_eq!(
                    received.consumed,
                    frame.len() - cut,
                    "the FPDU is not consumed"
                );
                received.outcome.unwrap()
            }
        };
        check(&side, &outcome);
    }
}

#[test]
fn reply_arrives_in_any_portions() {
    for params in [plain(), client_server(), peer_to_peer()] {
        pass_in_portions(
            &initiator_awaiting_reply(params),
            &reply_to(params),
            |side, outcome| {
                let Outcome::Accepted(agreed) = outcome else {
                    panic!("{outcome:?}");
                };
                assert_eq!(side.agreed(), Some(agreed));
                assert_eq!(agreed.peer_to_peer, params == peer_to_peer());
                assert_eq!(
                    (side.private_data(), side.poll_at()),
                    (RESPONDER_DATA, None)
                );
            },
        );
        pass_in_portions(
            &initiator_awaiting_reply(params),
            &rejection_for(params),
            |side, outcome| {
                assert!(matches!(outcome, Outcome::Rejected { .. }));
                assert_eq!((side.private_data(), side.agreed()), (RESPONDER_DATA, None));
                assert_eq!(side.poll_at(), None);
            },
        );
    }
}

#[test]
fn request_arrives_in_any_portions() {
    for params in [plain(), client_server(), peer_to_peer()] {
        let request = initiator_awaiting_reply(params).request().to_vec();
        pass_in_portions(&waiting_responder(), &request, |side, ()| {
            let pending = side.request().unwrap();
            assert_eq!(pending.enhanced(), params.revision == 2);
            assert_eq!(pending.peer_to_peer(), params == peer_to_peer());
            assert_eq!(
                (side.private_data(), side.poll_at()),
                (INITIATOR_DATA, None)
            );
        });
    }
}

/// Passes `frame` octet by octet. Returns the failure and the number of octets before it.
fn failure<S: Reading>(mut side: S, frame: &[u8]) -> (usize, Failure) {
    for (at, octet) in frame.iter().enumerate() {
        match side.received(&[*octet]) {
            Ok(received) => assert!(received.outcome.is_none(), "the frame is accepted"),
            Err(failure) => {
                assert_eq!(side.wanted(), 0, "octets are wanted after {failure}");
                let after = side.received(&[0; 4]).unwrap();
                assert_eq!((after.consumed, after.outcome.is_none()), (0, true));
                return (at + 1, failure);
            }
        }
    }
    panic!("the frame has no error");
}

#[test]
fn wrong_key_fails_at_its_octet() {
    let (reply, request) = (
        reply_to(plain()),
        initiator_awaiting_reply(plain()).request().to_vec(),
    );
    for at in 0..16 {
        let corrupt = |frame: &[u8]| {
            let mut frame = frame.to_vec();
            frame[at] ^= 0x80;
            frame
        };
        let bad = (at + 1, Failure::Frame(StartupError::BadKey));
        assert_eq!(
            failure(initiator_awaiting_reply(plain()), &corrupt(&reply)),
            bad
        );
        assert_eq!(failure(waiting_responder(), &corrupt(&request)), bad);
    }
    // Both keys begin with "MPA ID Re".
    let same_role = (10, Failure::Frame(StartupError::WrongRole));
    assert_eq!(
        failure(initiator_awaiting_reply(plain()), &request),
        same_role
    );
    assert_eq!(failure(waiting_responder(), &reply), same_role);
}

#[test]
fn wrong_length_fails_after_header() {
    for (frame, is_reply) in [
        (reply_to(plain()), true),
        (initiator_awaiting_reply(plain()).request().to_vec(), false),
    ] {
        for len in [MAX_PRIVATE_DATA + 1, 0xffff] {
            let len = u16::try_from(len).unwrap();
            let mut frame = frame.clone();
            frame[18..20].copy_from_slice(&len.to_be_bytes());
            let found = match is_reply {
                true => failure(initiator_awaiting_reply(plain()), &frame),
                false => failure(waiting_responder(), &frame),
            };
            let error = StartupError::PeerPrivateDataTooLong { len };
            assert_eq!(found, (20, Failure::Frame(error)));
            assert_eq!(found.1.ending(), Ending::Reset);
        }
    }
}

#[test]
fn unusable_frames_fail_at_last_octet() {
    // A plain reply to an enhanced request, and an enhanced reply to a plain request.
    let found = failure(initiator_awaiting_reply(peer_to_peer()), &reply_to(plain()));
    assert_eq!(found.1, Failure::Frame(StartupError::NotEnhanced));
    let found = failure(initiator_awaiting_reply(plain()), &reply_to(peer_to_peer()));
    assert_eq!(found.1, Failure::Frame(StartupError::EnhancedUnasked));
    // An enhanced frame without its prefix.
    let mut short = initiator_awaiting_reply(peer_to_peer()).request()[..22].to_vec();
    short[18..20].copy_from_slice(&[0, 2]);
    let error = StartupError::MissingEnhancedPrefix;
    assert_eq!(
        failure(waiting_responder(), &short),
        (22, Failure::Frame(error))
    );
    // A revision that the responder does not support.
    let old = Responder::new(plain(), LIMITS, BEGIN);
    let (_, found) = failure(old, initiator_awaiting_reply(peer_to_peer()).request());
    let error = StartupError::UnsupportedRevision { revision: 2 };
    assert_eq!(found, Failure::Frame(error));
}

#[test]
fn insufficient_ird_ends_with_terminate() {
    let small = LocalParams {
        max_ird: 4,
        ird: 4,
        ..peer_to_peer()
    };
    let mut reply = reply_to(small);
    // The ORD of the reply exceeds that of the initiator.
    reply[23] = 16;
    let (_, found) = failure(initiator_awaiting_reply(small), &reply);
    let error = StartupError::InsufficientIrd { needed: 16, max: 4 };
    assert_eq!(found, Failure::Frame(error));
    let code = TerminateCode::MPA_INSUFFICIENT_IRD;
    assert_eq!(found.ending(), Ending::Terminate(code));
}

#[test]
fn nothing_is_read_before_request() {
    let mut initiator = Initiator::new(peer_to_peer(), INITIATOR_DATA, LIMITS).unwrap();
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    let received = initiator.received(&reply_to(peer_to_peer())).unwrap();
    assert_eq!((received.consumed, received.outcome), (0, None));
    initiator.connecting(BEGIN);
    assert_eq!(
        (initiator.wanted(), initiator.poll_at()),
        (0, Some(at_second(1)))
    );
    initiator.request_sent(BEGIN);
    assert_eq!(initiator.wanted(), 20);
}

#[test]
fn private_data_too_long_is_refused() {
    let long = [0; MAX_PRIVATE_DATA + 1];
    for (params, max) in [(plain(), 512), (peer_to_peer(), 508)] {
        let error = StartupError::PrivateDataTooLong { len: max + 1, max };
        let result = Initiator::new(params, &long[..max + 1], LIMITS);
        assert_eq!(result.err(), Some(error));
        let mut responder = responder_with_request(params);
        let accepted = responder.accept(&peer_to_peer(), &long[..max + 1]);
        assert_eq!(accepted, Err(error));
        assert!(!responder.reject(&long[..max + 1]));
        assert!(responder.reply().is_empty() && responder.request().is_some());
        assert!(responder.accept(&peer_to_peer(), &long[..max]).is_ok());
    }
}

#[test]
fn connect_times_out() {
    let mut initiator = Initiator::new(plain(), INITIATOR_DATA, LIMITS).unwrap();
    assert_eq!(initiator.on_time(Time::NEVER, || false), Ok(()));
    initiator.connecting(BEGIN);
    let at = initiator.poll_at().unwrap();
    let before = Time::from_nanos(at.as_nanos() - 1);
    assert_eq!(initiator.on_time(before, || false), Ok(()));
    let timeout = Failure::TimedOut(Step::Connect);
    assert_eq!(initiator.on_time(at, || true), Err(timeout));
    assert_eq!(
        (timeout.ending(), initiator.poll_at()),
        (Ending::Close, None)
    );
}

#[test]
fn unacknowledged_request_times_out() {
    let mut initiator = initiator_awaiting_reply(plain());
    assert_eq!(initiator.poll_at(), Some(at_second(1)));
    let timeout = Failure::TimedOut(Step::Acknowledgement);
    assert_eq!(
        initiator.clone().on_time(at_second(1), || false),
        Err(timeout)
    );
    // The acknowledgement is checked only once. Then the limit for the reply applies.
    assert_eq!(initiator.on_time(at_second(1), || true), Ok(()));
    assert_eq!(initiator.poll_at(), Some(at_second(20)));
    assert_eq!(initiator.on_time(at_second(19), || false), Ok(()));
    let timeout = Failure::TimedOut(Step::Reply);
    assert_eq!(initiator.on_time(at_second(20), || true), Err(timeout));
    assert_eq!(
        (timeout.ending(), initiator.poll_at()),
        (Ending::Reset, None)
    );
    assert_eq!(initiator.on_time(Time::NEVER, || false), Ok(()));
}

#[test]
fn short_reply_limit_needs_no_acknowledgement() {
    let limits = Limits {
        connect: LIMITS.reply,
        ..LIMITS
    };
    let mut initiator = Initiator::new(plain(), INITIATOR_DATA, limits).unwrap();
    initiator.request_sent(BEGIN);
    assert_eq!(initiator.poll_at(), Some(at_second(20)));
    assert_eq!(initiator.on_time(at_second(19), || false), Ok(()));
    assert!(initiator.on_time(at_second(20), || true).is_err());
}

#[test]
fn octets_do_not_extend_limits() {
    let mut initiator = initiator_awaiting_reply(plain());
    let _ = initiator.on_time(at_second(1), || true);
    initiator.received(&reply_to(plain())[..30]).unwrap();
    assert_eq!(initiator.poll_at(), Some(at_second(20)));
    assert!(initiator.on_time(at_second(20), || true).is_err());
    let mut responder = waiting_responder();
    responder
        .received(&initiator_awaiting_reply(plain()).request()[..30])
        .unwrap();
    assert_eq!(responder.poll_at(), Some(at_second(3)));
    assert_eq!(responder.on_time(at_second(2)), Ok(()));
    let timeout = Failure::TimedOut(Step::Request);
    assert_eq!(responder.on_time(at_second(3)), Err(timeout));
    assert_eq!((responder.wanted(), timeout.ending()), (0, Ending::Reset));
}

/// With a peer of revision 1, an initiator sends the enhanced request twice, then a plain one.
#[test]
fn close_without_reply_repeats_request() {
    let mut initiator = initiator_awaiting_reply(peer_to_peer());
    let enhanced = initiator.request().to_vec();
    assert_eq!(initiator.peer_closed(), Ok(()));
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    assert_eq!(initiator.request(), enhanced);
    initiator.connecting(at_second(2));
    assert_eq!(initiator.poll_at(), Some(at_second(3)));
    initiator.request_sent(at_second(2));
    assert_eq!(initiator.peer_closed(), Ok(()));
    assert_eq!(
        initiator.request(),
        initiator_awaiting_reply(plain()).request()
    );
    initiator.request_sent(at_second(4));
    let reply = reply_to(plain());
    let (outcome, rest) = read(&mut initiator, &reply, 9).unwrap();
    assert!(matches!(outcome, Some(Outcome::Accepted(_))) && rest.is_empty());
}

#[test]
fn close_fails_after_last_attempt() {
    let closed = |begun| Err(Failure::Closed { begun });
    assert_eq!(
        initiator_awaiting_reply(plain()).peer_closed(),
        closed(false)
    );
    // The revision is not the reason if part of the reply has arrived.
    let mut initiator = initiator_awaiting_reply(peer_to_peer());
    initiator.received(&reply_to(peer_to_peer())[..1]).unwrap();
    assert_eq!(initiator.peer_closed(), closed(true));
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    // No request is repeated after the end.
    let mut initiator = initiator_awaiting_reply(peer_to_peer());
    assert!(initiator.on_time(Time::NEVER, || false).is_err());
    assert_eq!(initiator.peer_closed(), closed(false));
    assert_eq!(Failure::Closed { begun: false }.ending(), Ending::Close);
}

#[test]
fn close_ends_each_responder_step() {
    let closed = |begun| Err(Failure::Closed { begun });
    assert_eq!(waiting_responder().peer_closed(), closed(false));
    let mut begun = waiting_responder();
    begun.received(b"MPA").unwrap();
    assert_eq!(begun.peer_closed(), closed(true));
    let mut responder = responder_with_request(peer_to_peer());
    assert_eq!(responder.clone().peer_closed(), closed(true));
    let _ = responder.accept(&peer_to_peer(), RESPONDER_DATA);
    assert_eq!(responder.clone().peer_closed(), closed(true));
    responder.reply_sent(BEGIN);
    assert_eq!(responder.clone().peer_closed(), closed(true));
    responder.fpdu_arrived();
    assert_eq!(responder.peer_closed(), Ok(()));
    assert!(responder.agreed().is_some());
    let mut rejecting = responder_with_request(peer_to_peer());
    assert!(rejecting.reject(RESPONDER_DATA));
    assert_eq!(rejecting.clone().peer_closed(), closed(true));
    rejecting.reply_sent(BEGIN);
    assert_eq!(rejecting.peer_closed(), Ok(()));
    assert_eq!(rejecting.poll_at(), None);
}

#[test]
fn program_may_take_any_time() {
    let mut responder = responder_with_request(peer_to_peer());
    assert_eq!(responder.on_time(Time::NEVER), Ok(()));
    assert!(
        responder
            .accept(&peer_to_peer(), RESPONDER_DATA)
            .unwrap()
            .is_some()
    );
}

#[test]
fn first_fpdu_times_out() {
    let mut responder = responder_with_request(peer_to_peer());
    let agreed = responder
        .accept(&peer_to_peer(), RESPONDER_DATA)
        .unwrap()
        .unwrap();
    assert_eq!((agreed.rtr, responder.poll_at()), (Some(Rtr::Write), None));
    responder.reply_sent(BEGIN);
    assert_eq!(responder.poll_at(), Some(at_second(4)));
    let mut heard = responder.clone();
    heard.fpdu_arrived();
    assert_eq!((heard.poll_at(), heard.agreed()), (None, Some(&agreed)));
    assert_eq!(heard.on_time(Time::NEVER), Ok(()));
    assert_eq!(responder.on_time(at_second(3)), Ok(()));
    let timeout = Failure::TimedOut(Step::FirstFpdu);
    assert_eq!(responder.on_time(at_second(4)), Err(timeout));
    assert_eq!(
        (timeout.ending(), responder.agreed()),
        (Ending::Reset, None)
    );
    responder.fpdu_arrived();
    assert_eq!(responder.agreed(), None, "it is too late");
}

#[test]
fn client_server_needs_no_first_fpdu() {
    for params in [plain(), client_server()] {
        let mut responder = responder_with_request(params);
        let _ = responder.accept(&peer_to_peer(), RESPONDER_DATA);
        responder.reply_sent(BEGIN);
        assert!(responder.agreed().is_some() && responder.poll_at().is_none());
    }
}

#[test]
fn rejected_initiator_has_time_to_close() {
    let mut responder = responder_with_request(peer_to_peer());
    assert!(responder.reject(RESPONDER_DATA));
    assert_eq!(responder.poll_at(), None);
    responder.reply_sent(BEGIN);
    assert_eq!(
        (responder.poll_at(), responder.reply()),
        (Some(at_second(5)), &[][..])
    );
    let timeout = Failure::TimedOut(Step::Close);
    assert_eq!(responder.on_time(at_second(5)), Err(timeout));
    assert_eq!(
        (timeout.ending(), responder.agreed()),
        (Ending::Close, None)
    );
}

#[test]
fn decision_needs_request_and_is_final() {
    let mut responder = waiting_responder();
    assert_eq!(responder.accept(&peer_to_peer(), RESPONDER_DATA), Ok(None));
    assert!(!responder.reject(RESPONDER_DATA) && responder.reply().is_empty());
    responder.reply_sent(BEGIN);
    responder.fpdu_arrived();
    assert_eq!((responder.wanted(), responder.agreed()), (20, None));
    let mut responder = responder_with_request(plain());
    assert!(
        responder
            .accept(&plain(), RESPONDER_DATA)
            .unwrap()
            .is_some()
    );
    assert_eq!(responder.accept(&plain(), RESPONDER_DATA), Ok(None));
    assert!(!responder.reject(RESPONDER_DATA));
}

#[test]
fn stream_times_follow_model() {
    let reminders = StreamTimes::REMINDERS;
    for (params, speak_first, first_fpdu) in [
        (peer_to_peer(), None, Some(LIMITS.first_fpdu)),
        (client_server(), LIMITS.speak_first, None),
    ] {
        let mut responder = responder_with_request(params);
        let agreed = responder
            .accept(&peer_to_peer(), RESPONDER_DATA)
            .unwrap()
            .unwrap();
        let stream = LIMITS.stream(&agreed, false, 1460, reminders);
        let times = StreamTimes {
            reminders,
            maturity: MATURITY,
            speak_first,
            first_fpdu,
        };
        assert_eq!((stream.times, stream.emss), (times, 1460));
        assert_eq!((stream.initiator, stream.rtr), (false, None));
    }
}
