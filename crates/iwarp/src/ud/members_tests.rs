//! Tests of the datagram queue pairs of a completion queue. Polls drive them if there are few.

use crate::engine::policy::POLL_DIRECTLY_MAX;
use crate::objects::members::UdMembers;
use crate::testing::{datagram_queue_pair, post_to_itself};
use iwarp_rnic::SendFlags;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn poll_drives_few_queue_pairs() {
    let members = UdMembers::default();
    assert!(!members.drive_first() && members.all().is_empty());
    let qps: Vec<_> = (0..7).map(|_| datagram_queue_pair()).collect();
    let expect = |count: usize| {
        assert_eq!((members.len(), members.all().len()), (count, count));
        let many = count > 4;
        assert_eq!(
            (members.are_many(), members.drive_first()),
            (many, many),
            "{count}"
        );
    };
    for (before, qp) in qps.iter().enumerate() {
        members.attach(&qp.inner);
        expect(before + 1);
    }
    for (remaining, qp) in qps.iter().enumerate().rev() {
        members.detach(&qp.inner);
        expect(remaining);
    }
}

#[test]
fn dropped_queue_pairs_do_not_count() {
    let members = UdMembers::default();
    let destroyed: Vec<_> = (0..POLL_DIRECTLY_MAX)
        .map(|_| datagram_queue_pair())
        .collect();
    destroyed.iter().for_each(|qp| members.attach(&qp.inner));
    let weak: Vec<_> = destroyed
        .iter()
        .map(|qp| Arc::downgrade(&qp.inner))
        .collect();
    drop(destroyed);
    let start = Instant::now();
    while weak.iter().any(|qp| qp.strong_count() > 0) {
        assert!(start.elapsed() < TIMEOUT, "a queue pair is not dropped");
        std::thread::yield_now();
    }
    assert!(members.len() == 0 && members.all().is_empty());
    let qp = datagram_queue_pair();
    members.attach(&qp.inner);
    assert_eq!(members.len(), 1);
    assert!(!members.are_many(), "dropped queue pairs are counted");
}

/// After a queue pair is detached, polls read the sockets of the others.
#[test]
fn remaining_queue_pairs_are_driven() {
    let members = UdMembers::default();
    let (remaining, destroyed) = (datagram_queue_pair(), datagram_queue_pair());
    for qp in [&remaining, &destroyed] {
        members.attach(&qp.inner);
        // No other thread reads the socket.
        qp.inner.pause();
        let ip = qp.inner.locals.all()[0].ip;
        post_to_itself(qp, ip, SendFlags::empty(), 1);
    }
    members.detach(&destroyed.inner);
    let start = Instant::now();
    while remaining.drops().no_receive == 0 {
        assert!(start.elapsed() < TIMEOUT, "the socket is not read");
        members.drive_first();
    }
    assert_eq!(destroyed.drops().no_receive, 0);
}
