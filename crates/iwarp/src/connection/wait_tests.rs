//! Tests of waits: the reported steps, and when wakers are registered.

use super::*;
use crate::connection::testing::{Calls, channels, done, pair, pair_with, until};
use crate::connection::{Channel, Options};
use iwarp_rnic::Access;

/// Returns whether it is likely to be ready, and whether its request has started.
fn stands(what: &impl Wait) -> (bool, bool) {
    (what.is_likely_ready(), what.has_begun())
}

#[test]
fn request_reports_its_steps() {
    let (a, b) = pair();
    let there = b.share::<u64>(1, Access::REMOTE_READ).unwrap();
    let token = there.remote();
    let mut get = a.get(&token);
    assert_eq!(stands(&get), (false, false));
    assert!(get.poll_now().is_pending());
    assert_eq!(stands(&get), (false, true), "its completion is not routed");
    until("the answer", &[&a], || get.is_likely_ready());
    assert_eq!(stands(&get), (true, true));
    assert_eq!(done(&mut get, &[]), 0);
    assert!(!get.is_likely_ready());

    let mut batch = a.batch();
    batch.send("x").unwrap();
    let mut submit = batch.submit();
    assert_eq!(stands(&submit), (false, false));
    assert!(submit.poll_now().is_pending());
    assert_eq!(stands(&submit), (false, true));
    until("the batch", &[&a], || submit.is_likely_ready());
    assert_eq!(stands(&submit), (true, true));
    done(&mut submit, &[]);
    assert!(!submit.is_likely_ready());
    assert!(matches!(
        submit.poll_now(),
        Poll::Ready(Err(Error::InvalidState(_)))
    ));
}

/// These have no steps.
#[test]
fn waits_for_peer_are_likely_on_arrival() {
    let (a, b) = pair();
    let (recv, closed) = (b.recv(), b.closed());
    let (mut first, second) = (Channel::open(a.clone()), Channel::open(b.clone()));
    assert_eq!([stands(&recv), stands(&closed)], [(false, false); 2]);
    assert_eq!(stands(&second), (false, false));
    // The first end sends a hello.
    assert!(first.poll_now().is_pending());
    until("a message", &[&b], || recv.is_likely_ready());
    assert_eq!([stands(&recv), stands(&second)], [(true, false); 2]);
    a.close().unwrap();
    until("the end", &[&b], || closed.is_likely_ready());
    assert_eq!(stands(&closed), (true, false));
    drop((recv, first, second));
    // The end of the connection counts, too.
    until("the greeting", &[&b], || b.recv().poll_now().is_ready());
    assert!(b.recv().is_likely_ready());
}

#[test]
fn channel_message_reports_its_steps() {
    let (a, b) = channels(&Options::new().send_depth(4).receives(6));
    let (one, other) = (a.connection(), b.connection());
    let recv = b.recv();
    assert_eq!(stands(&recv), (false, false));
    let mut first = a.send("first");
    assert_eq!(stands(&first), (false, false));
    assert!(first.poll_now().is_pending());
    assert_eq!(
        stands(&first),
        (false, true),
        "it has credit, and is posted"
    );
    until("its end", &[one], || first.is_likely_ready());
    assert_eq!(stands(&first), (true, true));
    done(&mut first, &[]);
    until("a message", &[other], || recv.is_likely_ready());
    assert_eq!(stands(&recv), (true, false));

    done(&mut a.send("second"), &[one]);

    // There was credit for two. Without credit it is likely to be ready.
    let mut third = a.send("third");
    assert!(third.poll_now().is_pending());
    assert_eq!(stands(&third), (false, false));
    done(&mut b.send("y"), &[other]);
    until("a message", &[one], || a.recv().is_likely_ready());
    assert_eq!(stands(&third), (true, false));
}

/// An operation that is posted at a given poll and never completes; counts its calls.
struct Script<'a> {
    router: &'a Router,
    posted_at: usize,
    polls: usize,
    registered: usize,
}

impl Wait for Script<'_> {
    type Output = ();

    fn poll_now(&mut self) -> Poll<Result<()>> {
        self.polls += 1;
        Poll::Pending
    }

    fn is_likely_ready(&self) -> bool {
        false
    }

    fn register(&mut self, _waker: &Waker) {
        self.registered += 1;
        assert!(self.registered < 10, "it registers forever");
    }

    fn has_begun(&self) -> bool {
        self.polls >= self.posted_at
    }

    fn router(&self) -> &Router {
        self.router
    }
}

/// An operation posted by the first poll lets others go first. If a later poll posts it, the waker
/// is registered again.
#[test]
fn waker_is_registered_after_start() {
    // When it is posted; calls and registrations of the waker after the first poll, and after the
    // second.
    for (posted_at, first, second) in [
        (0, (0, 1), (0, 2)),
        (1, (1, 0), (1, 1)),
        (3, (0, 2), (0, 3)),
        (9, (0, 1), (0, 2)),
    ] {
        let (a, _b) = pair_with(&Options::new());
        let mut script = Script {
            router: &a.inner.router,
            posted_at,
            polls: 0,
            registered: 0,
        };
        let (calls, waker) = Calls::new();
        for expected in [first, second] {
            assert!(poll(&mut script, &waker).is_pending());
            let counts = (calls.count(), script.registered);
            assert_eq!(counts, expected, "posted at poll {posted_at}");
        }
    }
}
