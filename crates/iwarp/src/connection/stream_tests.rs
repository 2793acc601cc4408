//! Tests of the messages that a stream posts.

use super::*;
use crate::connection::Options;
use crate::connection::testing::{channels, done, until};
use crate::connection::wait::Wait;

#[test]
fn dropped_half_leaves_waiter_lists() {
    let (a, _b) = channels(&Options::new().send_depth(4).receives(6));
    let stands = || {
        let state = a.shared.state.lock();
        (state.readers.is_empty(), state.writers.is_empty())
    };
    let (mut read, mut write) = Stream::from(a.clone()).into_split();
    until("all credit is used", &[a.connection()], || {
        write.poll_write(b"x", Waker::noop()).is_pending() && credits_of(&a) == 0
    });
    assert!(read.poll_fill(Waker::noop()).is_pending());
    assert_eq!(stands(), (false, false));
    drop(write);
    assert_eq!(stands(), (false, true));
    drop(read);
    assert_eq!(stands(), (true, true));
}

fn credits_of(channel: &Channel) -> u32 {
    channel.shared.state.lock().credits
}

/// It is complete when it has started, which takes a credit.
#[test]
fn stream_write_waits_for_credit() {
    let (a, b) = channels(&Options::new().send_depth(1).receives(6));
    let (one, other) = (a.connection(), b.connection());
    let posting = || {
        let payload = Payload::from(b"x");
        Sending::new(&a.shared, payload, Kind::Bytes, Tickets::default())
    };
    let stands = |posting: &Sending<'_>| (posting.is_likely_ready(), posting.has_begun());
    let mut first = posting();
    assert_eq!(stands(&first), (false, false));
    assert!(first.poll_now().is_ready());
    assert_eq!(stands(&first), (false, true));
    // There is credit for two. The send queue is full, so the second one is queued.
    let mut second = posting();
    assert!(second.poll_now().is_ready());
    assert!(second.has_begun());
    drop((first, second));
    // Without credit it is likely to be ready when a message has arrived.
    let mut third = posting();
    assert!(third.poll_now().is_pending());
    assert_eq!(stands(&third), (false, false));
    done(&mut b.send("y"), &[other]);
    until("a message", &[one], || third.is_likely_ready());
}
