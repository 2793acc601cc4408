//! Tests of the messages that a stream posts.

use super::*;
use crate::connection::Options;
use crate::connection::testing::{channels, done, until};
use iwarp_rnic::Access;

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

/// It is complete when it is posted. Before that it has the steps of a channel's message.
#[test]
fn stream_write_reports_its_steps() {
    let (a, b) = channels(&Options::new().send_depth(4).receives(6));
    let (one, other) = (a.connection(), b.connection());
    let posting = || {
        let payload = Payload::from(b"x");
        Posting(Sending::new(&a.shared, payload, Tickets::default()))
    };
    let stands = |posting: &Posting<'_>| (posting.is_likely(), posting.step());
    let there = other.share::<u64>(1, Access::REMOTE_READ).unwrap();
    // Three of four places are reserved for messages other than data.
    let place = one.get(&there.remote()).started();
    let mut waits = posting();
    assert_eq!(stands(&waits), (false, 0));
    assert!(waits.poll_now().is_pending());
    assert_eq!(stands(&waits), (false, 1), "it has credit");
    drop(place);
    done(&mut waits, &[one]);
    assert_eq!(waits.step(), 2, "and is posted");
    until("its end", &[one], || waits.is_likely());
    drop(waits);
    done(&mut posting(), &[one]);
    // There was credit for two. Without credit it is likely to be ready.
    let mut waits = posting();
    assert!(waits.poll_now().is_pending());
    assert_eq!(stands(&waits), (false, 0));
    done(&mut b.send("y"), &[other]);
    until("a message", &[one], || waits.is_likely());
}
