//! Tests of the channel protocol, and of counting credits.

use super::channel_state::{Arrival, MOST_CREDITS, State, header, kind};
use super::request::HEADER;
use super::testing::{LIMIT, channels, done, pair, until};
use super::wait::Wait;
use super::{Channel, Connection, Message, Options};
use std::task::Waker;

/// Builds messages with given bytes.
struct Post(Connection, Connection);

impl Post {
    fn new() -> Self {
        let (a, b) = pair();
        Self(a, b)
    }

    fn message(&self, octets: &[u8]) -> Message {
        self.0.send(octets).wait().unwrap();
        self.1.recv().wait_for(LIMIT).unwrap()
    }
}

fn hello(version: u8, window: u32, size: u32) -> Vec<u8> {
    let mut octets = header(kind::HELLO, version, window).to_vec();
    octets.extend(size.to_be_bytes());
    octets
}

fn hello_with_slots(len: u32) -> Vec<u8> {
    let mut octets = hello(1, 60, 4096);
    octets.extend(len.to_be_bytes());
    octets
}

#[test]
fn header_encoding() {
    assert_eq!(HEADER, 8);
    assert_eq!(header(3, 2, 0x0405_0607), [3, 2, 0, 0, 4, 5, 6, 7]);
}

#[test]
fn hello_announces_credits_and_size() {
    let post = Post::new();
    // Expected credits, and message length less the header; `None` if the hello is refused.
    let rows = [
        (hello(1, 1, 9), Some((1, 1))),
        (hello(1, 60, 4096), Some((60, 4088))),
        (hello(1, 65_536, u32::MAX), Some((65_536, 0xffff_fff7))),
        (hello_with_slots(1 << 24), Some((60, 4088))),
        (hello_with_slots((1 << 24) + 1), None),
        (hello(1, 65_537, 4096), None),
        (hello(1, 0, 4096), None),
        (hello(1, 60, 8), None),
        (hello(1, 60, 0), None),
        (hello(0, 60, 4096), None),
        (hello(2, 60, 4096), None),
        (hello(1, 60, 4096)[..11].to_vec(), None),
    ];
    assert_eq!(MOST_CREDITS, 65_536);
    for (octets, expected) in rows {
        let mut state = State::default();
        assert!(state.take(post.message(&octets)).is_some(), "{octets:?}");
        let (credits, most) = expected.unwrap_or_default();
        assert_eq!(
            (state.window, state.credits, state.most),
            (credits, credits, most),
            "{octets:?}"
        );
        assert_eq!(state.broken.is_none(), expected.is_some(), "{octets:?}");
    }
}

/// For each kind of message: its effect on credits, on what the peer may send, on the inbox, and on
/// the end of the peer's messages.
#[test]
fn messages_follow_protocol() {
    type Stand = (u32, u32, usize, bool);
    let [data, finish] = [kind::DATA, kind::FINISH].map(|kind| header(kind, 0, 0));
    let credit = |number| header(kind::CREDIT, 0, number);
    let greeting = header(kind::HELLO, 1, 4);
    let rows: [(Stand, [u8; HEADER], Option<Stand>); 18] = [
        ((4, 2, 0, false), data, Some((4, 1, 1, false))),
        ((0, 1, 0, false), data, Some((0, 0, 1, false))),
        ((4, 0, 0, false), data, None),
        ((4, 2, 0, true), data, None),
        ((1, 2, 0, false), credit(3), Some((4, 2, 0, false))),
        ((1, 2, 0, false), credit(2), Some((3, 2, 0, false))),
        ((1, 2, 0, false), credit(4), None),
        ((0, 2, 0, false), credit(4), Some((4, 2, 0, false))),
        ((0, 2, 0, false), credit(5), None),
        ((4, 2, 0, false), credit(0), Some((4, 2, 0, false))),
        ((4, 2, 0, false), credit(1), None),
        // A finished peer still receives messages.
        ((1, 2, 0, true), credit(3), Some((4, 2, 0, true))),
        ((4, 2, 0, false), finish, Some((4, 2, 0, true))),
        ((4, 2, 0, true), finish, Some((4, 2, 0, true))),
        ((4, 2, 0, false), greeting, None),
        ((4, 2, 0, false), header(0, 0, 0), None),
        // It wants slots, which this end has not offered.
        ((4, 2, 0, false), header(kind::WANT, 0, 0), None),
        ((4, 2, 0, false), header(6, 0, 0), None),
    ];
    let post = Post::new();
    for ((credits, allowed, _, peer_finished), octets, expected) in rows {
        let mut state = State {
            allowed,
            ..State::default()
        };
        let what = format!("{credits} credits, {allowed} allowed, {octets:?}");
        assert!(state.take(post.message(&hello(1, 4, 100))).is_some());
        (state.credits, state.peer_finished) = (credits, peer_finished);
        let kept = state.take(post.message(&octets)).is_none();
        let stand = (
            state.credits,
            state.allowed,
            state.inbox.len(),
            state.peer_finished,
        );
        assert_eq!(state.broken.is_none(), expected.is_some(), "{what}");
        assert_eq!(
            stand,
            expected.unwrap_or((credits, allowed, 0, peer_finished)),
            "{what}"
        );
        assert_eq!(kept, stand.2 == 1, "{what}");
    }
    // Only a hello is valid before the hello.
    for octets in [data, finish, credit(0), credit(1)] {
        let mut state = State {
            allowed: 4,
            ..State::default()
        };
        assert!(state.take(post.message(&octets)).is_some());
        assert!(state.broken.is_some() && !state.peer_finished, "{octets:?}");
    }
}

#[test]
fn waiters_wake_on_credit_or_message() {
    let post = Post::new();
    for (credits, messages, peer_finished) in [
        (0, 0, false),
        (1, 0, false),
        (0, 1, false),
        (0, 0, true),
        (2, 1, true),
    ] {
        let mut state = State::default();
        for list in [&mut state.writers, &mut state.readers] {
            list.wait(&mut None, Waker::noop().clone());
        }
        (state.credits, state.peer_finished) = (credits, peer_finished);
        for _ in 0..messages {
            state.inbox.push_back(Arrival::Small(post.message(b"x")));
        }
        let woken = (state.next_writer().is_some(), state.next_reader().is_some());
        let expected = (credits > 0, messages > 0 || peer_finished);
        assert_eq!(woken, expected, "{credits} {messages} {peer_finished}");
    }
}

#[test]
fn channel_message_goes_to_first_waiter() {
    let (a, b) = channels(&Options::new());
    let ends = [a.connection(), b.connection()];
    let mut waiting = [(); 4].map(|()| b.recv());
    for one in &mut waiting {
        one.register(Waker::noop());
    }
    done(&mut a.send("x"), &ends);
    until("a message", &ends, || {
        b.connection().recv().is_likely_ready()
    });
    assert!(b.recv().poll_now().is_pending());
    let [first, ..] = &mut waiting;
    assert_eq!(*done(first, &[]).unwrap(), *b"x");
}

fn credits(channel: &Channel) -> u32 {
    channel.shared.state.lock().credits
}

#[test]
fn posted_message_takes_a_credit() {
    let (a, _b) = channels(&Options::new().send_depth(4).receives(8));
    let one = a.connection();
    assert_eq!(credits(&a), 4);
    let long = vec![0; a.max_len() + 1];
    assert!(a.send(&long).poll_now().is_ready());
    assert_eq!(credits(&a), 4, "it is refused");
    done(&mut a.send("x"), &[one]);
    assert_eq!(credits(&a), 3);
    assert!(!a.is_finished());
    done(&mut a.finish(), &[one]);
    assert!(a.is_finished());
    assert!(a.send("x").poll_now().is_ready());
    assert_eq!(credits(&a), 3, "it has finished");
}

/// A message whose future is dropped after it took a credit is still sent.
#[test]
fn message_with_credit_is_sent() {
    let (a, b) = channels(&Options::new().send_depth(1).receives(6));
    let mut first = a.send("x");
    let mut second = a.send("y");
    assert!(first.poll_now().is_pending() || credits(&a) == 1);
    let _ = second.poll_now();
    assert_eq!(credits(&a), 0);
    drop((first, second));
    for expected in ["x", "y"] {
        let message = done(&mut b.recv(), &[a.connection(), b.connection()]);
        assert_eq!(*message.unwrap(), *expected.as_bytes());
    }
}

/// Credits are returned in halves of the window.
#[test]
fn credits_are_given_back_by_halves() {
    let (a, b) = channels(&Options::new().send_depth(4).receives(8));
    let (one, other) = (a.connection(), b.connection());
    let stand = || {
        let state = b.shared.state.lock();
        (state.owed, state.allowed)
    };
    let send = |count| {
        for _ in 0..count {
            done(&mut a.send("x"), &[one, other]);
        }
        let message = |_| done(&mut b.recv(), &[one, other]).unwrap();
        (0..count).map(message).collect::<Vec<_>>()
    };
    let mut kept = send(4);
    assert_eq!(stand(), (0, 0));
    kept.pop();
    assert_eq!(stand(), (1, 0), "less than half");
    kept.pop();
    assert_eq!(stand(), (0, 2), "half of it is given back");
    kept.extend(send(2));
    for owed in 1..=4 {
        kept.pop();
        let expected = if owed % 2 == 0 {
            (0, owed)
        } else {
            (1, owed - 1)
        };
        assert_eq!(stand(), expected);
    }
    until("the credits", &[one], || {
        assert!(a.recv().poll_now().is_pending());
        credits(&a) == 4
    });
    // A finished peer needs no credits.
    let last = send(2);
    done(&mut a.finish(), &[one]);
    until("the end", &[other], || b.recv().poll_now().is_ready());
    drop(last);
    assert_eq!(stand(), (2, 2));
}
