//! Tests of leases: what earns and what costs credit, and when a lease ends.

#![cfg(not(loom))]

use super::policy::{
    LEASE_DENSE_NS, LEASE_EARNED_DIVISOR, LEASE_ENDED_LATELY_NS, LEASE_LONGEST_NS,
    LEASE_RETURN_COST_NS,
};
use super::*;

const MS: u64 = 1_000_000;

/// Polls every `gap`, from `start` for `time`. Returns the time of the last poll.
fn poll(lease: &Lease, start: u64, gap: u64, time: u64) -> u64 {
    let mut now = start;
    while now + gap <= start + time {
        lease.renew_for_drive(now, 0, |_| 0);
        now += gap;
    }
    lease.renew_for_drive(now, 0, |_| 0);
    now
}

/// 4 ms earn 0.25 ms.
#[test]
fn dense_polls_earn_a_sixteenth() {
    let lease = Lease::new();
    assert_eq!(lease.end(MS), None, "no thread polls");
    let last = poll(&lease, MS, 8_000, 4 * MS);
    let end = last + (last - MS) / LEASE_EARNED_DIVISOR;
    assert_eq!(lease.end(last), Some(end));
    assert_eq!(lease.end(end), None, "the lease has ended");
    let last = poll(&lease, last, 8_000, 200 * MS);
    assert_eq!(lease.end(last), Some(last + LEASE_LONGEST_NS));
}

#[test]
fn pause_costs_its_length() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 200 * MS);
    lease.renew_for_drive(last + 4 * MS, 0, |_| 0);
    let end = last + 4 * MS + LEASE_LONGEST_NS;
    assert_eq!(lease.end(last + 4 * MS), Some(end));
    lease.renew_for_drive(last + 7 * MS, 0, |_| 0);
    assert_eq!(
        lease.end(last + 7 * MS),
        Some(last + 8 * MS),
        "a credit of one millisecond is left"
    );
    lease.renew_for_drive(last + 9 * MS, 0, |_| 0);
    assert_eq!(lease.end(last + 9 * MS), None);
}

/// The kernel may keep a polling thread from running for any time, and that is no pause.
#[test]
fn waiting_for_processor_is_no_pause() {
    for (kept, remains) in [(49 * MS, true), (30 * MS, false)] {
        let lease = Lease::new();
        let last = poll(&lease, MS, 10_000, 200 * MS);
        lease.renew_for_drive(last + 50 * MS, 0, |_| kept);
        assert_eq!(lease.end(last + 50 * MS).is_some(), remains);
    }
    // Threads that share one processor poll as densely as the kernel lets them.
    let lease = Lease::new();
    for turn in 1..1000 {
        lease.renew_for_drive(turn * 150_000, 0, |_| 90_000);
    }
    assert!(lease.end(999 * 150_000).is_some());
}

#[test]
fn rare_polls_earn_no_lease() {
    let lease = Lease::new();
    let mut now = MS;
    for _ in 0..1000 {
        now = poll(&lease, now, 5_000, 80_000);
        assert_eq!(lease.end(now), None);
        now += 450_000;
    }
    for _ in 0..1000 {
        lease.renew_for_drive(now, 0, |_| 0);
        assert_eq!(lease.end(now), None);
        now += LEASE_DENSE_NS + 1;
    }
}

/// Gives the lease back at `now`, for a thread that the kernel never kept from running.
fn give_back(lease: &Lease, now: u64) -> bool {
    lease.give_back(|| now, |_| 0)
}

#[test]
fn returned_lease_keeps_its_credit() {
    let lease = Lease::new();
    let unused = || panic!("no thread has the lease");
    assert!(!lease.give_back(unused, |_| unused()));
    let last = poll(&lease, MS, 10_000, 10 * MS);
    let credit = lease.end(last).unwrap() - last;
    assert!(give_back(&lease, last), "the progress thread must be woken");
    assert!(!lease.give_back(unused, |_| unused()));
    assert_eq!(lease.end(last), None);
    let again = last + 1_000 * MS;
    lease.renew_for_drive(again, 0, |_| panic!("the time without a lease is no pause"));
    assert_eq!(
        lease.end(again),
        Some(again + credit - LEASE_RETURN_COST_NS)
    );
}

/// Ceph's messenger polls for a millisecond before each wait. That is enough for a lease.
#[test]
fn long_polling_before_waits_earns_lease() {
    for (spell, held) in [(MS, true), (100_000, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..200 {
            let last = poll(&lease, now, 5_000, spell);
            give_back(&lease, last);
            now = last + 200_000;
        }
        lease.renew_for_drive(now, 0, |_| 0);
        assert_eq!(lease.end(now).is_some(), held, "{spell}");
    }
}

/// A program may compute between a poll and the wait that gives the lease back. If that cost no
/// credit, its peers would not be served for long, again and again.
#[test]
fn pause_before_giving_back_costs_credit() {
    for (kept, remains) in [(0, false), (4 * MS, true)] {
        let lease = Lease::new();
        let mut now = poll(&lease, MS, 10_000, 200 * MS);
        for _ in 0..2 {
            now += 4 * MS;
            assert!(lease.give_back(|| now, |_| kept), "the lease was held");
            now += MS;
            lease.renew_for_drive(now, 0, |_| 0);
        }
        assert_eq!(lease.end(now).is_some(), remains, "{kept}");
    }
}

/// A thread that takes completions but never drives loses its lease.
#[test]
fn completions_alone_keep_no_lease() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 100 * MS);
    let take_until = |lease: &Lease, until: u64| {
        let mut now = last;
        while now < until {
            now += 10_000;
            lease.renew_for_completions(now, 1, |_| 0);
        }
        now
    };
    let now = take_until(&lease, last + LEASE_LONGEST_NS / 2);
    assert!(lease.end(now).is_some());
    let now = take_until(&lease, last + 3 * LEASE_LONGEST_NS);
    assert_eq!(lease.end(now), None);
}

/// A thread that handles 64 completions between two polls keeps its lease. The same time for one
/// completion is a pause.
#[test]
fn completions_prolong_dense_time() {
    for (taken, dense) in [(64, true), (1, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..100 {
            lease.renew_for_drive(now, 0, |_| 0);
            lease.renew_for_completions(now + 1_000, taken, |_| 0);
            now += 600_000;
        }
        assert_eq!(lease.end(now - 599_000).is_some(), dense, "{taken}");
    }
}

#[test]
fn long_drives_are_dense() {
    for (busy, dense) in [(300_000, true), (200_000, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..100 {
            now += 350_000;
            lease.renew_for_drive(now, busy, |_| 0);
        }
        assert_eq!(lease.end(now).is_some(), dense, "{busy}");
    }
}

#[test]
fn lease_has_ended_lately_unless_given_back() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 100 * MS);
    assert!(!lease.has_ended_lately(last), "the lease has not ended");
    assert!(lease.has_ended_lately(last + 2 * LEASE_LONGEST_NS));
    assert!(lease.has_ended_lately(last + LEASE_ENDED_LATELY_NS - 1));
    assert!(!lease.has_ended_lately(last + LEASE_ENDED_LATELY_NS));
    give_back(&lease, last);
    assert!(!lease.has_ended_lately(last + 2 * LEASE_LONGEST_NS));
}

/// Only after a pause, the lease asks for how long the kernel kept the thread from running. The
/// time of a drive prolongs the time that is no pause.
#[test]
fn only_pauses_ask_for_lost_time() {
    for busy in [0, 1_000] {
        let lease = Lease::new();
        let mut now = MS;
        lease.renew_for_drive(now, busy, |_| 0);
        for _ in 0..100 {
            now += LEASE_DENSE_NS + busy;
            lease.renew_for_drive(now, busy, |_| panic!("this is no pause"));
        }
        assert!(lease.end(now).is_some(), "the renewals are dense");
        let mut asked = None;
        lease.renew_for_drive(now + LEASE_DENSE_NS + busy + 1, busy, |since| {
            asked = Some(since);
            0
        });
        assert_eq!(asked, Some(now));
    }
}

/// Taking completions renews the lease only if the thread has driven within the time of the longest
/// lease.
#[test]
fn completions_renew_after_recent_drive() {
    for (after, renewed) in [(LEASE_LONGEST_NS - 1, true), (LEASE_LONGEST_NS, false)] {
        let lease = Lease::new();
        let last = poll(&lease, MS, 10_000, 100 * MS);
        lease.renew_for_completions(last + after, 1, |_| 0);
        assert_eq!(
            lease.end(last + LEASE_LONGEST_NS).is_some(),
            renewed,
            "{after}"
        );
    }
}

/// After the threads have stopped driving, completions do not renew the lease. The next drive does.
#[test]
fn only_next_drive_renews_forgotten_lease() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 100 * MS);
    lease.forget_drive();
    assert!(give_back(&lease, last));
    lease.renew_for_completions(last + 10_000, 1, |_| 0);
    assert_eq!(lease.end(last + 10_000), None);
    lease.renew_for_drive(last + 20_000, 0, |_| 0);
    assert!(lease.end(last + 20_000).is_some());
}
