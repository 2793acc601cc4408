//! Tests of a router's internals: hints, and reused buffers.

use super::*;
use crate::connection::operation::Operation;
use crate::connection::output::Done;
use crate::connection::testing::{Calls, LIMIT, done, pair, pair_with, until};
use crate::connection::wait::{Wait, poll};
use crate::connection::{Connection, End, Options};
use iwarp_rnic::Access;
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
fn each_list_has_waiters() {
    let lists: [fn(&mut State) -> &mut super::super::waiters::Waiters; 2] =
        [|s| &mut s.readers, |s| &mut s.end_waiters];
    for list in lists {
        let mut state = State::new(1);
        assert!(!state.has_waiters());
        let mut ticket = None;
        list(&mut state).wait(&mut ticket, Waker::noop().clone());
        assert!(state.has_waiters());
        list(&mut state).leave(ticket);
        assert!(!state.has_waiters());
    }
}

/// Sends the numbers from 0 on, and returns the operations.
fn started(connection: &Connection, count: u8) -> Vec<Operation<'static, Done>> {
    (0..count)
        .map(|n| connection.send(vec![n]).started())
        .collect()
}

/// Takes all places of the send queue, so that later requests are queued.
fn take_all_places(connection: &Connection) -> Vec<SlotId> {
    let slots = &connection.inner.router.slots;
    let depth = connection.inner.send_depth;
    until("room", &[connection], || {
        slots.take(depth).map(|id| slots.withdraw(id)).is_some()
    });
    (0..depth).map(|_| SlotId(slots.take(1).unwrap())).collect()
}

fn received(connection: &Connection, count: u8) -> Vec<u8> {
    let one = |_| connection.recv().wait_for(LIMIT).unwrap()[0];
    (0..count).map(one).collect()
}

/// The program awaits the last operation first, and takes no result before.
#[test]
fn any_number_starts_in_order() {
    for depth in [1, 2, 3, 4, 7, 16] {
        let (a, b) = pair_with(&Options::new().send_depth(depth));
        let operations = started(&a, 60);
        for operation in operations.into_iter().rev() {
            operation.wait_for(LIMIT).unwrap();
        }
        let expected: Vec<_> = (0..60).collect();
        assert_eq!(received(&b, 60), expected, "depth {depth}");
        // All places are free again.
        for n in 0..2 * depth {
            a.send(vec![n as u8]).wait_for(LIMIT).unwrap();
        }
    }
}

/// Nobody waits for the operations, or keeps them.
#[test]
fn backlog_is_posted_in_background() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    drop(started(&a, 50));
    assert_eq!(received(&b, 50), (0..50).collect::<Vec<_>>());
}

/// A cancelled wait is removed from the backlog; a started one stays.
#[test]
fn only_started_operations_stay_queued() {
    let (a, b) = pair_with(&Options::new().send_depth(1));
    let router = &a.inner.router;
    let places = take_all_places(&a);
    let queued = || router.state.lock().backlog.len();
    let mut polled = a.send(&[1]);
    let mut batch = a.batch();
    batch.send(&[2]).unwrap();
    {
        let mut submit = batch.submit();
        assert!(polled.poll_now().is_pending() && submit.poll_now().is_pending());
        drop(a.send(&[3]).started());
        assert_eq!(queued(), 3);
        drop(polled);
        assert_eq!(queued(), 2);
    }
    assert_eq!((queued(), batch.len()), (1, 1));
    router.withdraw(places[0]);
    assert_eq!(queued(), 0);
    done(&mut batch.submit(), &[&a]);
    assert_eq!(received(&b, 2), [3, 2]);
    assert!(batch.is_empty());
}

/// Queued requests use the right part of their region, and keep its memory.
#[test]
fn queued_requests_keep_their_regions() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    let there = b.share::<u8>(200, Access::REMOTE_WRITE).unwrap();
    let places = take_all_places(&a);
    let part = |first: u8| {
        let region = a.allocate::<u8>(100).unwrap();
        let octets: Vec<_> = (first..first + 100).collect();
        region.write_at(0, &octets).unwrap();
        region.slice(10..60).unwrap()
    };
    let one = a.write(part(0), &there.remote()).started();
    let mut batch = a.batch();
    batch
        .write(part(100), &there.remote().slice(50..).unwrap())
        .unwrap();
    let mut submit = batch.submit();
    assert!(submit.poll_now().is_pending());
    assert_eq!(
        submit.held.len(),
        1,
        "for a drop after the request was posted"
    );
    places
        .iter()
        .for_each(|place| a.inner.router.withdraw(*place));
    done(&mut submit, &[&a]);
    one.wait_for(LIMIT).unwrap();
    done(&mut a.send("x"), &[&a]);
    drop(done(&mut b.recv(), &[&b]));
    let expected: Vec<_> = (10..60).chain(110..160).collect();
    assert_eq!(there.to_vec().unwrap()[..100], expected);
    // The backlog is empty, so requests are posted directly again.
    until("the last end", &[&a], || {
        let Entry::Taken(id) = a.inner.router.enter(2) else {
            return false;
        };
        a.inner.router.withdraw(id);
        true
    });
}

#[test]
fn cancelled_request_drops_waker() {
    let (a, _b) = pair_with(&Options::new().send_depth(1));
    take_all_places(&a);
    let mut batch = a.batch();
    batch.send(&[1]).unwrap();
    let mut send = a.send(&[0]);
    let mut submit = batch.submit();
    let (calls, waker) = Calls::new();
    for _ in 0..3 {
        assert!(poll(&mut send, &waker).is_pending() && poll(&mut submit, &waker).is_pending());
    }
    assert!(Arc::strong_count(&calls) >= 4 && a.inner.router.slots.has_waiters());
    drop((send, submit, waker));
    assert_eq!(Arc::strong_count(&calls), 1);
    assert!(!a.inner.router.slots.has_waiters());
}

/// Requests that need more places than are free are not overtaken.
#[test]
fn batch_is_not_overtaken() {
    let (a, b) = pair_with(&Options::new().send_depth(3));
    let router = &a.inner.router;
    let places = take_all_places(&a);
    let first = a.send(&[0]).started();
    let mut batch = a.batch();
    for n in 1..4 {
        batch.send(&[n]).unwrap();
    }
    let mut submit = batch.submit();
    assert!(submit.poll_now().is_pending());
    let last = a.send(&[4]).started();
    places[..2].iter().for_each(|place| router.withdraw(*place));
    // Two places are free at most, and the batch needs three.
    assert_eq!(router.state.lock().backlog.len(), 2);
    assert!(matches!(router.enter(1), Entry::Full));
    router.withdraw(places[2]);
    done(&mut submit, &[&a]);
    for operation in [first, last] {
        operation.wait_for(LIMIT).unwrap();
    }
    assert_eq!(received(&b, 5), [0, 1, 2, 3, 4]);
}

/// A new request may not overtake the last one of the backlog, which a thread has taken, but not
/// posted yet: it waits for the queue pair.
#[test]
fn last_queued_request_is_not_overtaken() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    let router = &a.inner.router;
    let places = take_all_places(&a);
    let last = a.send(&[0]).started();
    // One place stays free when the request is posted.
    assert!(router.slots.withdraw(places[0].0));
    std::thread::scope(|scope| {
        let busy = a.inner.qp().inner.state.lock();
        scope.spawn(|| router.withdraw(places[1]));
        until("the request is taken", &[], || {
            router.state.lock().backlog.is_empty()
        });
        for _ in 0..1000 {
            assert!(matches!(router.enter(1), Entry::Full));
            std::thread::yield_now();
        }
        drop(busy);
    });
    let Entry::Taken(id) = router.enter(1) else {
        panic!("requests are still queued");
    };
    router.withdraw(id);
    last.wait_for(LIMIT).unwrap();
    done(&mut a.send(&[1]), &[&a]);
    assert_eq!(received(&b, 2), [0, 1]);
}

/// A shutdown waits for requests that are not posted yet. A close fails them.
#[test]
fn shutdown_waits_for_backlog() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    let places = take_all_places(&a);
    let operations = started(&a, 5);
    let mut shutdown = a.shutdown();
    for _ in 0..3 {
        assert!(shutdown.poll_now().is_pending());
        a.inner.router.drive();
    }
    let router = &a.inner.router;
    assert!(!router.has_ended());
    places.iter().for_each(|place| router.withdraw(*place));
    assert_eq!(shutdown.wait_for(LIMIT).unwrap(), End::Closed);
    for operation in operations {
        operation.wait_for(LIMIT).unwrap();
    }
    assert_eq!(received(&b, 5), [0, 1, 2, 3, 4]);
}

/// If a waiting batch is cancelled, the requests behind it are posted.
#[test]
fn cancelled_batch_frees_backlog() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    let places = take_all_places(&a);
    let first = a.send(&[0]).started();
    let mut batch = a.batch();
    batch.send(&[1]).unwrap();
    batch.send(&[2]).unwrap();
    let mut submit = batch.submit();
    assert!(submit.poll_now().is_pending());
    let last = a.send(&[3]).started();
    a.inner.router.withdraw(places[0]);
    assert_eq!(a.inner.router.state.lock().backlog.len(), 2);
    drop(submit);
    assert!(a.inner.router.state.lock().backlog.is_empty());
    for operation in [first, last] {
        operation.wait_for(LIMIT).unwrap();
    }
    assert_eq!(received(&b, 2), [0, 3]);
    assert_eq!(batch.len(), 2);
}

/// Answers of queued requests are read from the staging memory of later blocks.
#[test]
fn queued_requests_have_answers() {
    let (a, b) = pair_with(&Options::new().send_depth(2).message_size(64));
    let there = b.share::<u64>(40, Access::REMOTE_READ).unwrap();
    (0..40).for_each(|n| there.set(n, 100 + n as u64).unwrap());
    let token = there.remote();
    let gets: Vec<_> = (0..40)
        .map(|n| a.get(&token.at(n).unwrap()).started())
        .collect();
    for (n, get) in gets.into_iter().enumerate() {
        assert_eq!(get.wait_for(LIMIT).unwrap(), 100 + n as u64);
    }
}

/// The end comes before a completion returns places.
#[test]
fn queued_requests_fail_at_the_end() {
    let (a, _b) = pair_with(&Options::new().send_depth(1));
    take_all_places(&a);
    let operations = started(&a, 5);
    let mut batch = a.batch();
    batch.send(&[1]).unwrap();
    let mut submit = batch.submit();
    assert!(submit.poll_now().is_pending());
    a.close().unwrap();
    assert!(matches!(submit.wait_for(LIMIT), Err(Error::Closed)));
    let results = operations.into_iter().map(|op| op.wait_for(LIMIT));
    let failed = results.filter(|result| matches!(result, Err(Error::Closed)));
    assert_eq!(failed.count(), 5);
    assert!(matches!(a.send("x").started().wait(), Err(Error::Closed)));
}

/// A request that the queue pair refuses does not block those behind it.
#[test]
fn refused_request_leaves_backlog() {
    let (a, b) = pair_with(&Options::new().send_depth(1));
    let places = take_all_places(&a);
    let first = a.send(&[0]).started();
    // The region is longer than a message.
    let long = a.allocate::<u8>(1 << 32).unwrap();
    let refused = a.send(&long).started();
    let last = a.send(&[1]).started();
    a.inner.router.withdraw(places[0]);
    assert!(matches!(
        refused.wait_for(LIMIT),
        Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)))
    ));
    for operation in [first, last] {
        operation.wait_for(LIMIT).unwrap();
    }
    assert_eq!(received(&b, 2), [0, 1]);
}

/// A failed request ends the connection before the reason is known, so tasks go on waiting.
#[test]
fn each_end_wakes_waiters() {
    let (a, _b) = pair();
    let router = &a.inner.router;
    for _ in 0..2 {
        let (calls, waker) = Calls::new();
        router.wait_for_end(&mut None, &waker);
        router.end();
        assert_eq!(calls.count(), 1);
    }
}
