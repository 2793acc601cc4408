//! Tests of a router's internals: hints, and reused buffers.

use super::*;
use crate::connection::testing::{LIMIT, done, pair, until};
use std::time::Instant;

/// Returns whether the next request lets others go first.
#[test]
fn others_post_first_while_useful() {
    let (a, _b) = pair();
    let router = &a.inner.router;
    let asked: Vec<_> = (0..8)
        .map(|_| {
            let asked = router.lets_others_post();
            router.drive();
            asked
        })
        .collect();
    assert_eq!(asked, [true, true, true, true, false, false, false, false]);
}

#[test]
fn queue_is_watched_until_next_completion() {
    let (a, b) = pair();
    let router = &b.inner.router;
    assert!(!router.is_watched());
    router.watch();
    assert!(router.is_watched());
    done(&mut a.send("x"), &[&a]);
    // Another thread writes and routes it.
    let end = Instant::now() + LIMIT;
    while !router.has_message() {
        assert!(Instant::now() < end, "the message is not routed");
        std::thread::yield_now();
    }
    assert!(!router.is_watched());
}

/// One call routes all completions, however many, and reuses its buffers.
#[test]
fn one_poll_routes_all_completions() {
    let (a, b) = pair();
    let router = &b.inner.router;
    for count in [1, TAKE, TAKE + 1, 2 * TAKE - 1] {
        for _ in 0..count {
            done(&mut a.send("x"), &[&a]);
        }
        let end = Instant::now() + LIMIT;
        while router.cq.len() < count {
            assert!(Instant::now() < end, "{count} messages do not come");
            std::thread::yield_now();
        }
        assert!(!router.has_message());
        router.route(false);
        assert_eq!(router.state.lock().inbox.len(), count);
        assert_eq!(router.scratch_pool.lock().len(), 1);
        for _ in 0..count {
            drop(done(&mut b.recv(), &[]));
        }
    }
    until("nothing more", &[&b], || !router.has_message());
}

/// A failed request or receive ends the connection before the connection manager reports it; a
/// successful one does not.
#[test]
fn failed_request_ends_connection() {
    for (wr_id, status, ends) in [
        (0, WcStatus::Success, false),
        (0, WcStatus::RemoteAccess, true),
        (receive_id(0), WcStatus::Flushed, true),
    ] {
        let (a, _b) = pair();
        let router = &a.inner.router;
        let mut due = Due::default();
        let mut run = Run {
            router,
            state: None,
            due: &mut due,
        };
        run.take(&Cqe {
            wr_id,
            status,
            ..Cqe::default()
        });
        drop(run);
        assert_eq!(router.has_ended(), ends, "{status:?}");
    }
}

#[test]
fn newcomers_queue_behind_waiters() {
    let lists: [fn(&mut State) -> &mut super::super::waiters::Waiters; 3] =
        [|s| &mut s.room, |s| &mut s.readers, |s| &mut s.end_waiters];
    for list in lists {
        let mut state = State::new(1);
        assert!(!state.somebody_waits());
        let mut ticket = None;
        list(&mut state).wait(&mut ticket, Waker::noop().clone());
        assert!(state.somebody_waits());
        list(&mut state).leave(ticket);
        assert!(!state.somebody_waits());
    }
}
