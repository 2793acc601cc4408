//! Tests of a stream without a connection: credits, and the end of each direction.

use super::*;
use crate::settings::Settings;
use crate::wire::WINDOW_LEN;

fn stream() -> Stream {
    with_sizes(Settings::get().sizes)
}

fn with_sizes(sizes: Sizes) -> Stream {
    let device = iwarp::Device::by_address([127, 0, 0, 1].into()).unwrap();
    let ctx = Context::open(&device, iwarp::Config::default()).unwrap();
    let mut stream = Stream::new(&ctx, sizes).unwrap();
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

/// Sends `len` bytes. Returns how many were accepted.
fn send(stream: &mut Stream, len: usize) -> usize {
    let data = vec![7; len];
    stream.send(&mut Gather::new(&[&data])).unwrap_or(0)
}

/// Returns a stream that has no control messages to send. Its sizes do not depend on the settings
/// of this machine.
fn idle() -> Stream {
    let mut stream = with_sizes(Sizes {
        send_queue: 384,
        receive_queue: 384,
        inline: 64,
        receive_buffer: 4 << 20,
        send_buffer: 4 << 20,
        mappings: 0,
    });
    stream.freed = 0;
    stream
}

/// Makes all sent data complete, as with a peer that accepts data but has read none. Without a
/// connection, posting has failed.
fn complete_sent(stream: &mut Stream) {
    (stream.over, stream.peer_done, stream.error) = (false, false, None);
    let (requests, bytes) = match &stream.tail {
        Some(tail) => (2, tail.len()),
        None => (0, 0),
    };
    stream.sq_free = u32::from(stream.sizes.send_queue) - requests;
    stream.in_use = bytes;
}

/// Offers a half of the peer's buffer, as the peer does when it has read a half.
fn offer(stream: &mut Stream) {
    let peer = stream.peer.unwrap();
    let at = stream.expect_entry as usize * WINDOW_LEN;
    stream
        .directory
        .write_at(at, &peer.buffer.to_native())
        .unwrap();
    stream.message(Message::Credit(stream.sent.wrapping_add(peer.credits)));
}

/// Small writes are messages of their own until half of the credits are used, and later ones are
/// gathered until the peer returns credits.
#[test]
fn tail_waits_for_credits() {
    let mut stream = idle();
    let half = stream.peer.unwrap().credits.div_ceil(2);
    for _ in 0..half {
        assert_eq!(send(&mut stream, 1), 1);
        assert!(!stream.has_tail());
        complete_sent(&mut stream);
    }
    let sent = stream.sent;
    for _ in 0..1000 {
        assert_eq!(send(&mut stream, 1), 1);
        assert!(stream.has_tail());
    }
    assert_eq!(stream.sent, sent.wrapping_add(1), "one message");
    // The credit of the tail cannot be returned before it is sent.
    stream.allowed = stream.allowed.wrapping_add(1);
    stream.send_due_tail();
    assert!(!stream.has_tail());
    assert_eq!(stream.in_flight, u64::from(half) + 1000);
    assert_eq!(stream.sent, sent.wrapping_add(1));
}

/// Data is gathered while a half of the peer's buffer is full of unread data. A half that the peer
/// offers for the first time was not read.
#[test]
fn tail_waits_for_full_half() {
    let mut stream = idle();
    offer(&mut stream);
    let half = stream.half();
    let step = 1 << 18;
    for _ in 0..half / step {
        assert_eq!(send(&mut stream, step as usize), step as usize);
        assert!(!stream.has_tail());
        complete_sent(&mut stream);
    }
    assert_eq!(send(&mut stream, 1000), 1000);
    assert!(stream.has_tail());
    offer(&mut stream);
    stream.send_due_tail();
    assert!(!stream.has_tail());
    assert_eq!(stream.in_flight, 1000);
}

/// The tail is sent when it is long, and has its place in the peer's buffer before.
#[test]
fn tail_fits_into_offer() {
    let mut stream = idle();
    stream.in_flight = u64::from(stream.half());
    let max = TRANSFER_MAX as usize;
    assert_eq!(send(&mut stream, max - 1), max - 1);
    assert!(stream.has_tail());
    assert_eq!(send(&mut stream, 1), 1);
    assert!(!stream.has_tail(), "it is long enough");
    complete_sent(&mut stream);
    stream.offers.truncate(1);
    stream.offers[0].len = 10;
    assert_eq!(send(&mut stream, 11), 10);
    assert!(!stream.has_tail() && stream.offers.is_empty());
}

/// A program may write and close, or write into mapped memory, while its peer is busy.
#[test]
fn tail_precedes_other_requests() {
    let ends: [fn(&mut Stream); 3] = [
        |stream| stream.shut_down(false, true),
        |stream| stream.shut_down(true, true),
        |stream| {
            let _ = stream.write_mapped(&mut Gather::new(&[b"x"]), &mut 0);
        },
    ];
    for end in ends {
        let mut stream = idle();
        stream.in_flight = u64::from(stream.half());
        assert_eq!(send(&mut stream, 5), 5);
        assert!(stream.has_tail() && !stream.is_drained());
        end(&mut stream);
        assert!(!stream.has_tail());
    }
}

/// A stream becomes writable when it accepts a third of its buffers, so that a waiting program does
/// not write little at a time.
#[test]
fn little_room_is_not_writable() {
    let mut stream = idle();
    let third = stream.half() / 3;
    stream.offers[0].len = third;
    assert!(stream.is_writable());
    stream.offers[0].len -= 1;
    assert!(!stream.is_writable() && stream.can_send());
    stream.offers[0].len += 1;
    stream.in_use = stream.sizes.send_buffer - third;
    assert!(stream.is_writable());
    stream.in_use += 1;
    assert!(!stream.is_writable());
}

/// A peer that only peeks returns nothing. Its tail is sent at the second check.
#[test]
fn old_tail_is_sent() {
    let mut stream = idle();
    stream.in_flight = u64::from(stream.half());
    stream.is_tail_timed = true;
    assert_eq!(send(&mut stream, 5), 5);
    assert!(stream.check_tail() && stream.has_tail());
    assert!(stream.check_tail() && !stream.has_tail());
    complete_sent(&mut stream);
    let more = (0..1000).take_while(|_| stream.check_tail()).count();
    assert!((1..1000).contains(&more), "{more}");
    assert!(!stream.is_tail_timed);
}
