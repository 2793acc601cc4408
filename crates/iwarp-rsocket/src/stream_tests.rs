//! Tests of a stream without a connection: credits, and the end of each direction.

use super::*;
use crate::settings::Settings;

fn stream() -> Stream {
    let device = iwarp::Device::by_address([127, 0, 0, 1].into()).unwrap();
    let ctx = Context::open(&device, iwarp::Config::default()).unwrap();
    let mut stream = Stream::new(&ctx, Settings::get().sizes).unwrap();
    let peer = stream.hello();
    stream.set_peer(&peer);
    stream
}

/// The peer counts each data message, even an empty one.
#[test]
fn empty_message_returns_credit() {
    let mut stream = stream();
    let before = stream.consumed;
    stream.on_data_message(0);
    assert_eq!(stream.consumed, before.wrapping_add(1));
}

/// A kernel RNIC terminates a connection that runs out of receives, so some are reserved for
/// control messages.
#[test]
fn data_leaves_credits_for_control_messages() {
    let mut stream = stream();
    stream.sent = 0;
    stream.allowed = CONTROL_CREDITS + 1;
    assert!(stream.is_writable());
    stream.allowed = CONTROL_CREDITS;
    assert!(!stream.is_writable());
}

/// The last message of a stream waits until a work request is free.
#[test]
fn farewell_waits_for_free_request() {
    for (read, last) in [(true, Message::Disconnect), (false, Message::Shutdown)] {
        let mut stream = stream();
        // All requests are in flight, as with a peer that accepts nothing for a while.
        let all = std::mem::take(&mut stream.sq_free);
        stream.shut_down(read, true);
        stream.send_due();
        assert_eq!(stream.farewell, Some(last));
        assert!(!stream.is_drained());
        stream.sq_free = all;
        stream.send_due();
        assert_eq!(stream.farewell, None);
    }
}

/// A peer that stops writing may still read. The stream is over if neither end writes, or if the
/// peer disconnects.
#[test]
fn peers_end_may_end_stream() {
    for (own, message, over) in [
        (false, Message::Shutdown, false),
        (true, Message::Shutdown, true),
        (false, Message::Disconnect, true),
    ] {
        let mut stream = stream();
        assert!(!stream.is_at_end() && !stream.is_readable());
        stream.writing = !own;
        stream.message(message);
        let found = (stream.is_at_end(), stream.is_over());
        assert_eq!(found, (true, over), "{own} {message:?}");
        assert_eq!(stream.receive(&mut [0], None), Ok(0));
    }
}

/// The last message also ends the other direction if nothing will be read there.
#[test]
fn last_message_depends_on_reading() {
    let last = |reads: bool, peer_done: bool| {
        let mut stream = stream();
        // No request is free, so the message stays here.
        stream.sq_free = 0;
        stream.peer_done = peer_done;
        if !reads {
            stream.shut_down(true, false);
            assert_eq!(stream.farewell, None, "the peer may still send");
        }
        stream.shut_down(false, true);
        stream.farewell
    };
    assert_eq!(last(true, false), Some(Message::Shutdown));
    assert_eq!(last(false, false), Some(Message::Disconnect));
    assert_eq!(last(true, true), Some(Message::Disconnect));
}

/// A repeated shutdown sends no second message.
#[test]
fn second_shutdown_sends_nothing() {
    let mut stream = stream();
    let all = std::mem::take(&mut stream.sq_free);
    stream.shut_down(false, true);
    stream.farewell = None;
    stream.shut_down(false, true);
    assert_eq!(stream.farewell, None);
    stream.sq_free = all;
    stream.farewell_sent = true;
    stream.shut_down(true, true);
    assert_eq!((stream.farewell, stream.sq_free), (None, all));
}

/// After the end of one direction, nothing is sent that concerns only this direction.
#[test]
fn no_offers_follow_an_end() {
    let ends: [fn(&mut Stream); 3] = [
        |stream| stream.peer_done = true,
        |stream| stream.farewell_sent = true,
        |stream| stream.over = true,
    ];
    for end in ends {
        let mut stream = stream();
        let free = stream.sq_free;
        end(&mut stream);
        assert!(stream.freed >= stream.half());
        stream.send_due();
        assert_eq!(stream.sq_free, free);
    }
}

/// An error is reported once, then the end.
#[test]
fn violation_is_reported_once() {
    let mut stream = stream();
    stream.fail(Errno::PROTO);
    // The first error counts.
    stream.fail(Errno::IO);
    stream.lost();
    assert!(stream.is_over() && stream.is_at_end());
    assert_eq!(stream.receive(&mut [0], None), Err(Errno::PROTO));
    assert_eq!(stream.receive(&mut [0], None), Ok(0));
}

/// Requests in flight are drained when they complete, or if the connection is lost.
#[test]
fn unsent_requests_are_not_drained() {
    let mut stream = stream();
    assert!(stream.is_drained());
    stream.sq_free -= 1;
    assert!(!stream.is_drained());
    stream.over = true;
    assert!(stream.is_drained(), "nothing can be sent any more");
    stream.farewell_sent = true;
    assert!(!stream.is_drained(), "the farewell is in flight");
    stream.qp.modify(State::Error).unwrap();
    assert!(stream.is_drained());
}
