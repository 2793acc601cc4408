//! Tests of the message that a stream posts.

use super::*;
use crate::connection::Options;
use crate::connection::testing::{channels, done, until};
use iwarp_rnic::Access;

/// It is done when it is posted. Before that it says the same as a message of the channel.
#[test]
fn a_piece_of_a_stream_says_how_far_it_is() {
    let (a, b) = channels(&Options::new().send_depth(4).receives(6));
    let (one, other) = (a.connection(), b.connection());
    let posting = || {
        let payload = Payload::from(b"x");
        Posting(Sending::new(&a.shared, payload, Tickets::default()))
    };
    let stands = |posting: &Posting<'_>| (posting.is_likely(), posting.step());
    let there = other.share::<u64>(1, Access::REMOTE_READ).unwrap();
    // Three of four places are not for data.
    let place = one.get(&there.remote()).started();
    let mut waits = posting();
    assert_eq!(stands(&waits), (false, 0));
    assert!(waits.look().is_pending());
    assert_eq!(stands(&waits), (false, 1), "it has credit");
    drop(place);
    done(&mut waits, &[one]);
    assert_eq!(waits.step(), 2, "and is posted");
    until("its end", &[one], || waits.is_likely());
    drop(waits);
    done(&mut posting(), &[one]);
    // There was credit for two. Without it a message is worth a look.
    let mut waits = posting();
    assert!(waits.look().is_pending());
    assert_eq!(stands(&waits), (false, 0));
    done(&mut b.send("y"), &[other]);
    until("a message", &[one], || waits.is_likely());
}
