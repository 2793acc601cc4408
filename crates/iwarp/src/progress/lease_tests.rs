//! Tests of how long a lease lasts.

#![cfg(not(loom))]

use super::*;

const MS: u64 = 1_000_000;

/// Polls from `begin` on, every `gap`, for `time`. Returns when it polled last.
fn poll(lease: &Lease, begin: u64, gap: u64, time: u64) -> u64 {
    let mut now = begin;
    while now + gap <= begin + time {
        lease.drive(now, 0, |_| 0);
        now += gap;
    }
    lease.drive(now, 0, |_| 0);
    now
}

/// Dense polls for 4 ms earn a quarter of one.
#[test]
fn a_lease_lasts_a_sixteenth_of_the_time_of_dense_polls() {
    let lease = Lease::new();
    assert_eq!(lease.end(MS), None, "nobody polls");
    let last = poll(&lease, MS, 8_000, 4 * MS);
    let end = last + (last - MS) / SHARE;
    assert_eq!(lease.end(last), Some(end));
    assert_eq!(lease.end(end), None, "it is over");
    let last = poll(&lease, last, 8_000, 200 * MS);
    assert_eq!(lease.end(last), Some(last + LONGEST));
}

/// Who polls for long and is kept from the processor now and then remains the driver. Who pauses for longer than that, is not.
#[test]
fn pauses_cost_what_they_last() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 200 * MS);
    lease.drive(last + 4 * MS, 0, |_| 0);
    let end = last + 4 * MS + LONGEST;
    assert_eq!(lease.end(last + 4 * MS), Some(end));
    lease.drive(last + 7 * MS, 0, |_| 0);
    assert_eq!(
        lease.end(last + 7 * MS),
        Some(last + 8 * MS),
        "a millisecond is left"
    );
    lease.drive(last + 9 * MS, 0, |_| 0);
    assert_eq!(lease.end(last + 9 * MS), None);
}

/// The kernel may keep a polling thread from its processor for any time.
#[test]
fn waiting_for_the_processor_is_no_pause() {
    for (kept, remains) in [(49 * MS, true), (30 * MS, false)] {
        let lease = Lease::new();
        let last = poll(&lease, MS, 10_000, 200 * MS);
        lease.drive(last + 50 * MS, 0, |_| kept);
        assert_eq!(lease.end(last + 50 * MS).is_some(), remains);
    }
    // Threads that take turns on one processor poll as densely as it allows.
    let lease = Lease::new();
    for turn in 1..1000 {
        lease.drive(turn * 150_000, 0, |_| 90_000);
    }
    assert!(lease.end(999 * 150_000).is_some());
}

/// A program that looks now and then leaves nothing unserved.
#[test]
fn bursts_and_pauses_give_no_lease() {
    let lease = Lease::new();
    let mut now = MS;
    for _ in 0..1000 {
        now = poll(&lease, now, 5_000, 80_000);
        assert_eq!(lease.end(now), None);
        now += 450_000;
    }
    for _ in 0..1000 {
        lease.drive(now, 0, |_| 0);
        assert_eq!(lease.end(now), None);
        now += DENSE + 1;
    }
}

/// Gives the lease back at `now`, as a thread does that never lacked a processor.
fn give_back(lease: &Lease, now: u64) -> bool {
    lease.give_back(|| now, |_| 0)
}

#[test]
fn returned_lease_keeps_its_credit() {
    let lease = Lease::new();
    let unused = || panic!("nobody has the lease");
    assert!(!lease.give_back(unused, |_| unused()));
    let last = poll(&lease, MS, 10_000, 10 * MS);
    let credit = lease.end(last).unwrap() - last;
    assert!(
        give_back(&lease, last),
        "the progress thread may sleep for it"
    );
    assert!(!lease.give_back(unused, |_| unused()));
    assert_eq!(lease.end(last), None);
    let again = last + 1_000 * MS;
    lease.drive(again, 0, |_| panic!("the time without lease is no pause"));
    assert_eq!(lease.end(again), Some(again + credit - RETURN_COST));
}

/// Ceph's messenger polls for a millisecond before each wait.
#[test]
fn long_spells_before_waits_earn_a_lease() {
    for (spell, held) in [(MS, true), (100_000, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..200 {
            let last = poll(&lease, now, 5_000, spell);
            give_back(&lease, last);
            now = last + 200_000;
        }
        lease.drive(now, 0, |_| 0);
        assert_eq!(lease.end(now).is_some(), held, "{spell}");
    }
}

/// Otherwise a program that works between its only poll and its wait would leave its peers unserved
/// for ever.
#[test]
fn pause_before_the_return_costs_credit() {
    for (kept, remains) in [(0, false), (4 * MS, true)] {
        let lease = Lease::new();
        let mut now = poll(&lease, MS, 10_000, 200 * MS);
        for _ in 0..2 {
            now += 4 * MS;
            assert!(lease.give_back(|| now, |_| kept), "it was held");
            now += MS;
            lease.drive(now, 0, |_| 0);
        }
        assert_eq!(lease.end(now).is_some(), remains, "{kept}");
    }
}

/// Who only takes what others have driven is no driver, however long it does that.
#[test]
fn completions_alone_keep_no_lease() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 100 * MS);
    let taken = |lease: &Lease, until: u64| {
        let mut now = last;
        while now < until {
            now += 10_000;
            lease.stay(now, 1, |_| 0);
        }
        now
    };
    let now = taken(&lease, last + LONGEST / 2);
    assert!(lease.end(now).is_some());
    let now = taken(&lease, last + 3 * LONGEST);
    assert_eq!(lease.end(now), None);
}

/// Who answers many completions between two polls drives nevertheless, but not who takes few and works for as long.
#[test]
fn completions_take_their_time() {
    for (taken, dense) in [(64, true), (1, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..100 {
            lease.drive(now, 0, |_| 0);
            lease.stay(now + 1_000, taken, |_| 0);
            now += 600_000;
        }
        assert_eq!(lease.end(now - 599_000).is_some(), dense, "{taken}");
    }
}

/// Long turns at the sockets are driving, and no pauses.
#[test]
fn long_turns_are_dense() {
    for (busy, dense) in [(300_000, true), (200_000, false)] {
        let lease = Lease::new();
        let mut now = MS;
        for _ in 0..100 {
            now += 350_000;
            lease.drive(now, busy, |_| 0);
        }
        assert_eq!(lease.end(now).is_some(), dense, "{busy}");
    }
}

#[test]
fn a_lease_that_ended_is_remembered_for_a_while() {
    let lease = Lease::new();
    let last = poll(&lease, MS, 10_000, 100 * MS);
    assert!(!lease.has_ended_lately(last), "it has not ended");
    assert!(lease.has_ended_lately(last + 2 * LONGEST));
    assert!(lease.has_ended_lately(last + LATELY - 1));
    assert!(!lease.has_ended_lately(last + LATELY));
    give_back(&lease, last);
    assert!(!lease.has_ended_lately(last + 2 * LONGEST));
}

/// A renewal follows closely up to the time of dense polls, and a turn that was busy may take so much longer.
#[test]
fn only_after_a_pause_it_matters_who_had_the_processor() {
    for busy in [0, 1_000] {
        let lease = Lease::new();
        let mut now = MS;
        lease.drive(now, busy, |_| 0);
        for _ in 0..100 {
            now += DENSE + busy;
            lease.drive(now, busy, |_| panic!("that is no pause"));
        }
        assert!(lease.end(now).is_some(), "they are dense");
        let mut asked = None;
        lease.drive(now + DENSE + busy + 1, busy, |since| {
            asked = Some(since);
            0
        });
        assert_eq!(asked, Some(now));
    }
}

/// Who has not driven for as long as a lease lasts at most is no driver any more.
#[test]
fn completions_renew_the_lease_of_who_has_driven_lately() {
    for (after, renewed) in [(LONGEST - 1, true), (LONGEST, false)] {
        let lease = Lease::new();
        let last = poll(&lease, MS, 10_000, 100 * MS);
        lease.stay(last + after, 1, |_| 0);
        assert_eq!(lease.end(last + LONGEST).is_some(), renewed, "{after}");
    }
}
