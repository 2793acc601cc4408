//! Each state of both sides with each kind of input: octets in portions of all sizes, wrong frames,
//! the peer's close, and time.

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
const OCTETS: &[u8] = b"data of the initiator!!";
const ANSWER: &[u8] = b"data of the responder!!!!!";
/// Octets after a frame, unlike those of any frame.
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

fn later(seconds: u64) -> Time {
    BEGIN.after(Duration::from_secs(seconds))
}

fn asking(params: LocalParams) -> Initiator {
    let mut initiator = Initiator::new(params, OCTETS, LIMITS).unwrap();
    initiator.connecting(BEGIN);
    initiator.request_sent(BEGIN);
    initiator
}

fn waiting() -> Responder {
    Responder::new(peer_to_peer(), LIMITS, BEGIN)
}

/// Returns a responder that has the request of an initiator with these parameters.
fn requested(params: LocalParams) -> Responder {
    let mut responder = waiting();
    let request = asking(params).request().to_vec();
    let received = responder.received(&request).unwrap();
    assert_eq!(
        (received.consumed, received.outcome),
        (request.len(), Some(()))
    );
    responder
}

fn reply_to(params: LocalParams) -> Vec<u8> {
    let mut responder = requested(params);
    responder.accept(&peer_to_peer(), ANSWER).unwrap().unwrap();
    responder.reply().to_vec()
}

fn refusal_of(params: LocalParams) -> Vec<u8> {
    let mut responder = requested(params);
    assert!(responder.reject(ANSWER));
    responder.reply().to_vec()
}

/// Reads like a driver, never more than is wanted. Returns the outcome and the rest.
fn read<'a, S: Reading>(
    side: &mut S,
    mut stream: &'a [u8],
    most: usize,
) -> Result<(Option<S::Outcome>, &'a [u8]), Failure> {
    while side.wanted() > 0 && !stream.is_empty() {
        let n = side.wanted().min(most).min(stream.len());
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

/// Passes the frame in portions of several sizes, and cut in two at each octet.
fn in_portions<S: Reading + Clone>(side: &S, frame: &[u8], check: impl Fn(&S, &S::Outcome)) {
    let stream = [frame, FPDU].concat();
    for most in [1, 7, 64, stream.len()] {
        let mut side = side.clone();
        let (outcome, rest) = read(&mut side, &stream, most).unwrap();
        assert_eq!(rest, FPDU, "portions of {most}");
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
                assert_eq!(received.consumed, frame.len() - cut, "the FPDU stays");
                received.outcome.unwrap()
            }
        };
        check(&side, &outcome);
    }
}

#[test]
fn reply_arrives_in_any_portions() {
    for params in [plain(), client_server(), peer_to_peer()] {
        in_portions(&asking(params), &reply_to(params), |side, outcome| {
            let Outcome::Accepted(agreed) = outcome else {
                panic!("{outcome:?}");
            };
            assert_eq!(side.agreed(), Some(agreed));
            assert_eq!(agreed.peer_to_peer, params == peer_to_peer());
            assert_eq!((side.private_data(), side.poll_at()), (ANSWER, None));
        });
        in_portions(&asking(params), &refusal_of(params), |side, outcome| {
            assert!(matches!(outcome, Outcome::Rejected { .. }));
            assert_eq!((side.private_data(), side.agreed()), (ANSWER, None));
            assert_eq!(side.poll_at(), None);
        });
    }
}

#[test]
fn request_arrives_in_any_portions() {
    for params in [plain(), client_server(), peer_to_peer()] {
        let request = asking(params).request().to_vec();
        in_portions(&waiting(), &request, |side, ()| {
            let pending = side.request().unwrap();
            assert_eq!(pending.enhanced(), params.revision == 2);
            assert_eq!(pending.peer_to_peer(), params == peer_to_peer());
            assert_eq!((side.private_data(), side.poll_at()), (OCTETS, None));
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
fn wrong_key_ends_at_its_octet() {
    let (reply, request) = (reply_to(plain()), asking(plain()).request().to_vec());
    for at in 0..16 {
        let spoilt = |frame: &[u8]| {
            let mut frame = frame.to_vec();
            frame[at] ^= 0x80;
            frame
        };
        let bad = (at + 1, Failure::Frame(StartupError::BadKey));
        assert_eq!(failure(asking(plain()), &spoilt(&reply)), bad);
        assert_eq!(failure(waiting(), &spoilt(&request)), bad);
    }
    // Both keys begin with "MPA ID Re".
    let same_role = (10, Failure::Frame(StartupError::WrongRole));
    assert_eq!(failure(asking(plain()), &request), same_role);
    assert_eq!(failure(waiting(), &reply), same_role);
}

#[test]
fn wrong_length_ends_with_the_header() {
    for (frame, is_reply) in [
        (reply_to(plain()), true),
        (asking(plain()).request().to_vec(), false),
    ] {
        for len in [MAX_PRIVATE_DATA + 1, 0xffff] {
            let len = u16::try_from(len).unwrap();
            let mut frame = frame.clone();
            frame[18..20].copy_from_slice(&len.to_be_bytes());
            let found = match is_reply {
                true => failure(asking(plain()), &frame),
                false => failure(waiting(), &frame),
            };
            let error = StartupError::PeerPrivateDataTooLong { len };
            assert_eq!(found, (20, Failure::Frame(error)));
            assert_eq!(found.1.ending(), Ending::Reset);
        }
    }
}

#[test]
fn unusable_frames_fail_at_last_octet() {
    // A plain reply to an enhanced request, and an enhanced one to a plain request.
    let found = failure(asking(peer_to_peer()), &reply_to(plain()));
    assert_eq!(found.1, Failure::Frame(StartupError::NotEnhanced));
    let found = failure(asking(plain()), &reply_to(peer_to_peer()));
    assert_eq!(found.1, Failure::Frame(StartupError::EnhancedUnasked));
    // An enhanced frame without its prefix.
    let mut short = asking(peer_to_peer()).request()[..22].to_vec();
    short[18..20].copy_from_slice(&[0, 2]);
    let error = StartupError::MissingEnhancedPrefix;
    assert_eq!(failure(waiting(), &short), (22, Failure::Frame(error)));
    // A revision that the responder does not support.
    let old = Responder::new(plain(), LIMITS, BEGIN);
    let (_, found) = failure(old, asking(peer_to_peer()).request());
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
    let (_, found) = failure(asking(small), &reply);
    let error = StartupError::InsufficientIrd { needed: 16, max: 4 };
    assert_eq!(found, Failure::Frame(error));
    let code = TerminateCode::MPA_INSUFFICIENT_IRD;
    assert_eq!(found.ending(), Ending::Terminate(code));
}

#[test]
fn nothing_is_read_before_request() {
    let mut initiator = Initiator::new(peer_to_peer(), OCTETS, LIMITS).unwrap();
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    let received = initiator.received(&reply_to(peer_to_peer())).unwrap();
    assert_eq!((received.consumed, received.outcome), (0, None));
    initiator.connecting(BEGIN);
    assert_eq!(
        (initiator.wanted(), initiator.poll_at()),
        (0, Some(later(1)))
    );
    initiator.request_sent(BEGIN);
    assert_eq!(initiator.wanted(), 20);
}

#[test]
fn private_data_too_long_is_refused() {
    let long = [0; MAX_PRIVATE_DATA + 1];
    for (params, max) in [(plain(), 512), (peer_to_peer(), 508)] {
        let error = StartupError::PrivateDataTooLong { len: max + 1, max };
        let made = Initiator::new(params, &long[..max + 1], LIMITS);
        assert_eq!(made.err(), Some(error));
        let mut responder = requested(params);
        let accepted = responder.accept(&peer_to_peer(), &long[..max + 1]);
        assert_eq!(accepted, Err(error));
        assert!(!responder.reject(&long[..max + 1]));
        assert!(responder.reply().is_empty() && responder.request().is_some());
        assert!(responder.accept(&peer_to_peer(), &long[..max]).is_ok());
    }
}

#[test]
fn connect_times_out() {
    let mut initiator = Initiator::new(plain(), OCTETS, LIMITS).unwrap();
    assert_eq!(initiator.on_time(Time::NEVER, || false), Ok(()));
    initiator.connecting(BEGIN);
    let at = initiator.poll_at().unwrap();
    let before = Time::from_nanos(at.as_nanos() - 1);
    assert_eq!(initiator.on_time(before, || false), Ok(()));
    let late = Failure::TimedOut(Step::Connect);
    assert_eq!(initiator.on_time(at, || true), Err(late));
    assert_eq!((late.ending(), initiator.poll_at()), (Ending::Close, None));
}

#[test]
fn unacknowledged_request_times_out() {
    let mut initiator = asking(plain());
    assert_eq!(initiator.poll_at(), Some(later(1)));
    let late = Failure::TimedOut(Step::Acknowledgement);
    assert_eq!(initiator.clone().on_time(later(1), || false), Err(late));
    // Acknowledgement is checked once: the reply has the rest of its time.
    assert_eq!(initiator.on_time(later(1), || true), Ok(()));
    assert_eq!(initiator.poll_at(), Some(later(20)));
    assert_eq!(initiator.on_time(later(19), || false), Ok(()));
    let late = Failure::TimedOut(Step::Reply);
    assert_eq!(initiator.on_time(later(20), || true), Err(late));
    assert_eq!((late.ending(), initiator.poll_at()), (Ending::Reset, None));
    assert_eq!(initiator.on_time(Time::NEVER, || false), Ok(()));
}

#[test]
fn short_reply_limit_needs_no_acknowledgement() {
    let limits = Limits {
        connect: LIMITS.reply,
        ..LIMITS
    };
    let mut initiator = Initiator::new(plain(), OCTETS, limits).unwrap();
    initiator.request_sent(BEGIN);
    assert_eq!(initiator.poll_at(), Some(later(20)));
    assert_eq!(initiator.on_time(later(19), || false), Ok(()));
    assert!(initiator.on_time(later(20), || true).is_err());
}

/// Single octets do not extend the limit.
#[test]
fn octets_do_not_prolong_a_limit() {
    let mut initiator = asking(plain());
    let _ = initiator.on_time(later(1), || true);
    initiator.received(&reply_to(plain())[..30]).unwrap();
    assert_eq!(initiator.poll_at(), Some(later(20)));
    assert!(initiator.on_time(later(20), || true).is_err());
    let mut responder = waiting();
    responder
        .received(&asking(plain()).request()[..30])
        .unwrap();
    assert_eq!(responder.poll_at(), Some(later(3)));
    assert_eq!(responder.on_time(later(2)), Ok(()));
    let late = Failure::TimedOut(Step::Request);
    assert_eq!(responder.on_time(later(3)), Err(late));
    assert_eq!((responder.wanted(), late.ending()), (0, Ending::Reset));
}

/// With a peer of revision 1, an initiator sends the enhanced request twice, then a plain one.
#[test]
fn unanswered_close_asks_again() {
    let mut initiator = asking(peer_to_peer());
    let enhanced = initiator.request().to_vec();
    assert_eq!(initiator.peer_closed(), Ok(()));
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    assert_eq!(initiator.request(), enhanced);
    initiator.connecting(later(2));
    assert_eq!(initiator.poll_at(), Some(later(3)));
    initiator.request_sent(later(2));
    assert_eq!(initiator.peer_closed(), Ok(()));
    assert_eq!(initiator.request(), asking(plain()).request());
    initiator.request_sent(later(4));
    let reply = reply_to(plain());
    let (outcome, rest) = read(&mut initiator, &reply, 9).unwrap();
    assert!(matches!(outcome, Some(Outcome::Accepted(_))) && rest.is_empty());
}

#[test]
fn close_fails_after_last_attempt() {
    let closed = |begun| Err(Failure::Closed { begun });
    assert_eq!(asking(plain()).peer_closed(), closed(false));
    // The revision is not the reason if part of the reply has arrived.
    let mut initiator = asking(peer_to_peer());
    initiator.received(&reply_to(peer_to_peer())[..1]).unwrap();
    assert_eq!(initiator.peer_closed(), closed(true));
    assert_eq!((initiator.wanted(), initiator.poll_at()), (0, None));
    // No request is repeated after the end.
    let mut initiator = asking(peer_to_peer());
    assert!(initiator.on_time(Time::NEVER, || false).is_err());
    assert_eq!(initiator.peer_closed(), closed(false));
    assert_eq!(Failure::Closed { begun: false }.ending(), Ending::Close);
}

#[test]
fn close_ends_each_responder_step() {
    let closed = |begun| Err(Failure::Closed { begun });
    assert_eq!(waiting().peer_closed(), closed(false));
    let mut begun = waiting();
    begun.received(b"MPA").unwrap();
    assert_eq!(begun.peer_closed(), closed(true));
    let mut responder = requested(peer_to_peer());
    assert_eq!(responder.clone().peer_closed(), closed(true));
    let _ = responder.accept(&peer_to_peer(), ANSWER);
    assert_eq!(responder.clone().peer_closed(), closed(true));
    responder.reply_sent(BEGIN);
    assert_eq!(responder.clone().peer_closed(), closed(true));
    responder.fpdu_arrived();
    assert_eq!(responder.peer_closed(), Ok(()));
    assert!(responder.agreed().is_some());
    let mut rejecting = requested(peer_to_peer());
    assert!(rejecting.reject(ANSWER));
    assert_eq!(rejecting.clone().peer_closed(), closed(true));
    rejecting.reply_sent(BEGIN);
    assert_eq!(rejecting.peer_closed(), Ok(()));
    assert_eq!(rejecting.poll_at(), None);
}

#[test]
fn program_may_take_any_time() {
    let mut responder = requested(peer_to_peer());
    assert_eq!(responder.on_time(Time::NEVER), Ok(()));
    assert!(responder.accept(&peer_to_peer(), ANSWER).unwrap().is_some());
}

#[test]
fn first_fpdu_times_out() {
    let mut responder = requested(peer_to_peer());
    let agreed = responder.accept(&peer_to_peer(), ANSWER).unwrap().unwrap();
    assert_eq!((agreed.rtr, responder.poll_at()), (Some(Rtr::Write), None));
    responder.reply_sent(BEGIN);
    assert_eq!(responder.poll_at(), Some(later(4)));
    let mut heard = responder.clone();
    heard.fpdu_arrived();
    assert_eq!((heard.poll_at(), heard.agreed()), (None, Some(&agreed)));
    assert_eq!(heard.on_time(Time::NEVER), Ok(()));
    assert_eq!(responder.on_time(later(3)), Ok(()));
    let late = Failure::TimedOut(Step::FirstFpdu);
    assert_eq!(responder.on_time(later(4)), Err(late));
    assert_eq!((late.ending(), responder.agreed()), (Ending::Reset, None));
    responder.fpdu_arrived();
    assert_eq!(responder.agreed(), None, "it is too late");
}

#[test]
fn client_server_needs_no_first_fpdu() {
    for params in [plain(), client_server()] {
        let mut responder = requested(params);
        let _ = responder.accept(&peer_to_peer(), ANSWER);
        responder.reply_sent(BEGIN);
        assert!(responder.agreed().is_some() && responder.poll_at().is_none());
    }
}

#[test]
fn rejected_initiator_has_time_to_close() {
    let mut responder = requested(peer_to_peer());
    assert!(responder.reject(ANSWER));
    assert_eq!(responder.poll_at(), None);
    responder.reply_sent(BEGIN);
    assert_eq!(
        (responder.poll_at(), responder.reply()),
        (Some(later(5)), &[][..])
    );
    let late = Failure::TimedOut(Step::Close);
    assert_eq!(responder.on_time(later(5)), Err(late));
    assert_eq!((late.ending(), responder.agreed()), (Ending::Close, None));
}

#[test]
fn decision_needs_request_and_is_final() {
    let mut responder = waiting();
    assert_eq!(responder.accept(&peer_to_peer(), ANSWER), Ok(None));
    assert!(!responder.reject(ANSWER) && responder.reply().is_empty());
    responder.reply_sent(BEGIN);
    responder.fpdu_arrived();
    assert_eq!((responder.wanted(), responder.agreed()), (20, None));
    let mut responder = requested(plain());
    assert!(responder.accept(&plain(), ANSWER).unwrap().is_some());
    assert_eq!(responder.accept(&plain(), ANSWER), Ok(None));
    assert!(!responder.reject(ANSWER));
}

#[test]
fn stream_times_follow_model() {
    let reminders = StreamTimes::REMINDERS;
    for (params, speak_first, first_fpdu) in [
        (peer_to_peer(), None, Some(LIMITS.first_fpdu)),
        (client_server(), LIMITS.speak_first, None),
    ] {
        let mut responder = requested(params);
        let agreed = responder.accept(&peer_to_peer(), ANSWER).unwrap().unwrap();
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
