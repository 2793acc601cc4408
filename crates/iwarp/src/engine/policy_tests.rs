//! Tables of observations and decisions, on both sides of each threshold. The numbers are literals,
//! so that a change of a constant fails a test.

use super::*;

const fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

#[track_caller]
fn check<I: Copy + std::fmt::Debug, O: PartialEq + std::fmt::Debug>(
    decide: impl Fn(I) -> O,
    rows: impl IntoIterator<Item = (I, O)>,
) {
    for (observed, decision) in rows {
        assert_eq!(decide(observed), decision, "{observed:?}");
    }
}

#[test]
fn completions_extend_the_patience() {
    let rows = [
        (0, 70_000),
        (1, 80_000),
        (63, 700_000),
        (64, 710_000),
        (65, 710_000),
    ];
    check(lease_patience, rows);
    assert_eq!(lease_patience(usize::MAX), 710_000);
}

#[test]
fn pause_begins_after_the_patience() {
    let rows = [
        ((70_000, 70_000), false),
        ((70_001, 70_000), true),
        ((0, 0), false),
    ];
    check(|(gap, patience)| is_pause(gap, patience), rows);
}

#[test]
fn dense_polls_earn_and_pauses_cost() {
    let rows = [
        ((0, 0, 70_000), 0),
        ((0, 15, 70_000), 0),
        ((0, 16, 70_000), 1),
        ((5, 70_000, 70_000), 4_380),
        ((100_000, 70_001, 70_000), 29_999),
        ((70_000, 70_001, 70_000), 0),
        ((100_000, 80_000, 80_000), 105_000),
        // The credit has an upper bound.
        ((7_999_998, 16, 70_000), 7_999_999),
        ((7_999_999, 16, 70_000), 8_000_000),
        ((8_000_000, 16, 70_000), 8_000_000),
    ];
    check(
        |(credit, gap, patience)| lease_credit(credit, gap, patience),
        rows,
    );
}

#[test]
fn giving_back_costs_fixed_credit() {
    let rows = [(7_999, 0), (8_000, 0), (8_001, 1), (8_000_000, 7_992_000)];
    check(lease_credit_after_return, rows);
}

#[test]
fn short_lease_is_not_respected() {
    check(
        is_lease_respected,
        [
            (0, false),
            (49_999, false),
            (50_000, true),
            (u64::MAX, true),
        ],
    );
}

#[test]
fn lease_ends_with_its_credit() {
    let rows = [
        ((1_000, 49_999, 1_000), None),
        ((1_000, 50_000, 1_000), Some(51_000)),
        ((1_000, 50_000, 50_999), Some(51_000)),
        ((1_000, 50_000, 51_000), None),
        // No lease is longer than two milliseconds.
        ((1_000, 1_999_999, 1_000), Some(2_000_999)),
        ((1_000, 2_000_000, 1_000), Some(2_001_000)),
        ((1_000, 2_000_001, 1_000), Some(2_001_000)),
        ((1_000, 8_000_000, 2_001_000), None),
    ];
    check(
        |(renewed, credit, now)| lease_end(renewed, credit, now),
        rows,
    );
}

#[test]
fn lease_has_ended_lately_for_20_ms() {
    let rows = [
        // The lease ends at 51,000.
        ((1_000, 50_000, 50_999), false),
        ((1_000, 50_000, 51_000), true),
        // The lease was too short.
        ((1_000, 49_999, 51_000), false),
        // The lease was renewed 20 ms ago.
        ((1_000, 50_000, 20_000_999), true),
        ((1_000, 50_000, 20_001_000), false),
    ];
    check(
        |(renewed, credit, now)| has_lease_ended_lately(renewed, credit, now),
        rows,
    );
}

#[test]
fn completions_renew_soon_after_drive() {
    check(
        completions_renew,
        [(0, true), (1_999_999, true), (2_000_000, false)],
    );
}

#[test]
fn renewals_follow_the_pace_of_polls() {
    let rows = [
        ((8, 9_999), 8),
        ((4, 9_999), 8),
        ((1, 0), 2),
        ((4, 10_000), 4),
        ((4, 29_999), 4),
        ((4, 30_000), 2),
        ((2, u64::MAX), 1),
        ((1, 30_000), 1),
    ];
    check(|(every, gap)| renew_every(every, gap), rows);
}

#[test]
fn idle_process_is_served_less_often() {
    let rows = [
        ((64, true), 1),
        ((1, true), 1),
        ((1, false), 2),
        ((31, false), 62),
        ((32, false), 64),
        ((33, false), 64),
        ((64, false), 64),
    ];
    check(|(after, was_ready)| serve_all_after(after, was_ready), rows);
}

#[test]
fn poller_replaces_single_progress_thread() {
    let rows = [
        ((false, 0, false), false),
        ((false, 1, false), true),
        ((false, 2, false), false),
        ((true, 2, false), true),
        ((true, 1, false), true),
        // Other threads need the processor.
        ((false, 1, true), false),
        ((true, 1, true), true),
    ];
    check(
        |(many, engines, competes)| drives_whole_process(many, engines, competes),
        rows,
    );
}

#[test]
fn contended_pauses_double() {
    let rows = [
        (1, 50_000),
        (63, 50_000),
        (64, 100_000),
        (127, 100_000),
        (128, 200_000),
        (319, 800_000),
        (320, 1_600_000),
        (384, 1_600_000),
        (u32::MAX, 1_600_000),
    ];
    check(contended_pause, rows);
}

#[test]
fn full_engines_need_another_one() {
    let rows = [
        ((15, 1, 4), false),
        ((16, 1, 4), true),
        ((17, 3, 4), true),
        ((16, 4, 4), false),
        ((16, 1, 1), false),
    ];
    check(
        |(fewest, engines, max)| needs_engine(fewest, engines, max),
        rows,
    );
}

#[test]
fn short_waits_earn_windows() {
    let rows = [
        ((0, 0), false),
        ((1, 0), false),
        ((2, 0), true),
        ((3, 2), false),
        ((4, 2), true),
        ((1025, 1024), false),
        ((1026, 1024), true),
        ((u32::MAX, 1024), true),
    ];
    check(|(short, distrust)| earns_window(short, distrust), rows);
}

#[test]
fn fruitless_windows_double_distrust() {
    let rows = [
        (0, 2),
        (2, 6),
        (6, 14),
        (510, 1022),
        (511, 1024),
        (512, 1024),
        (1024, 1024),
    ];
    check(distrust_after_miss, rows);
}

#[test]
fn sleep_of_four_windows_is_short() {
    let rows = [
        ((Duration::ZERO, us(50)), true),
        ((us(200), us(50)), true),
        ((us(200) + Duration::from_nanos(1), us(50)), false),
        ((us(1), Duration::ZERO), false),
    ];
    check(|(waited, window)| is_short_sleep(waited, window), rows);
}

#[test]
fn long_gap_means_a_lost_processor() {
    check(
        has_lost_processor,
        [(0, false), (1_999_999, false), (2_000_000, true)],
    );
}

#[test]
fn empty_poll_ends_memory_watch() {
    let rows = [
        ((true, 7, 7), true),
        ((true, 7, 8), false),
        ((false, 7, 7), false),
    ];
    check(
        |(has_taken, then, now)| watches_memory(has_taken, then, now),
        rows,
    );
}

#[test]
fn silence_ends_answer_wait() {
    const LONG: u64 = 100_000;
    let rows = [
        ((Seen::Answer, u64::MAX, 0), AnswerWait::Done),
        ((Seen::Part, u64::MAX, 0), AnswerWait::Restart),
        ((Seen::Nothing, 0, LONG), AnswerWait::Again),
        ((Seen::Nothing, 49_999, LONG), AnswerWait::Again),
        ((Seen::Nothing, 50_000, LONG), AnswerWait::GiveUp),
        ((Seen::Nothing, 19_999, 20_000), AnswerWait::Again),
        ((Seen::Nothing, 20_000, 20_000), AnswerWait::GiveUp),
        ((Seen::Nothing, 0, 0), AnswerWait::GiveUp),
    ];
    check(
        |(seen, silence, window)| answer_wait(seen, silence, window),
        rows,
    );
}

#[test]
fn five_members_are_many() {
    check(are_many, [(0, false), (4, false), (5, true)]);
}

#[test]
fn answer_outranks_moved_bytes() {
    let rows = [
        ((false, 0), Seen::Nothing),
        ((false, 1), Seen::Part),
        ((true, 0), Seen::Answer),
        ((true, 1), Seen::Answer),
    ];
    check(|(answered, moved)| drive_outcome(answered, moved), rows);
}

#[test]
fn long_drive_grows_with_bytes() {
    check(
        long_drive_ns,
        [
            (0, None),
            (4095, None),
            (4096, Some(4096)),
            (1 << 20, Some(1 << 20)),
        ],
    );
}

#[test]
fn yield_duration_sets_pace() {
    let rows = [
        // No other thread needs the processor.
        ((4, 1_499), 8),
        ((32, 0), 64),
        ((64, 1_499), 64),
        ((4096, 0), 64),
        // Another thread ran for a short time.
        ((64, 1_500), 4),
        ((4096, 1_999_999), 4),
        // Another thread was computing.
        ((4, 2_000_000), 64),
        ((8, 2_000_000), 64),
        ((64, 2_000_000), 512),
        ((511, u64::MAX), 4088),
        ((513, u64::MAX), 4096),
    ];
    check(|(every, took)| yield_every(every, took), rows);
}

#[test]
fn pace_shows_competitors() {
    let rows = [
        (YIELD_ALONE, false),
        (YIELD_COMPETING, true),
        (YIELD_ALONE / 2, true),
        (YIELD_BESIDE_WORK, true),
    ];
    check(is_competing, rows);
}

#[test]
fn first_post_is_sent_without_clock() {
    check(sends_first, [(1, true), (2, false), (3, false)]);
}

/// The third post of a burst is deferred. Each row changes one observation.
#[test]
fn burst_is_deferred_until_pause() {
    let burst = Post {
        posts: 3,
        gap: 1_100,
        requests: 1,
        bytes: 64,
        enough: 65,
        has_room: true,
        has_deferred: false,
    };
    let rows = [
        (burst, Verdict::Defer),
        (
            Post {
                has_deferred: true,
                ..burst
            },
            Verdict::Join,
        ),
        (Post { posts: 2, ..burst }, Verdict::SendInBurst),
        (
            Post {
                gap: 1_101,
                ..burst
            },
            Verdict::SendInBurst,
        ),
        (
            Post {
                gap: 1_200,
                requests: 2,
                ..burst
            },
            Verdict::Defer,
        ),
        (
            Post {
                gap: 1_201,
                requests: 2,
                ..burst
            },
            Verdict::SendInBurst,
        ),
        (
            Post {
                has_room: false,
                ..burst
            },
            Verdict::SendInBurst,
        ),
        (Post { bytes: 65, ..burst }, Verdict::SendInBurst),
        (
            Post {
                bytes: 65,
                has_deferred: true,
                ..burst
            },
            Verdict::SendInBurst,
        ),
    ];
    check(cork_verdict, rows);
}

#[test]
fn trusted_posts_join_without_clock() {
    let rows = [
        ((0, 0, 1, 100), false),
        ((0, 1, 99, 100), true),
        ((1, 1, 99, 100), false),
        ((14, 15, 99, 100), true),
        ((0, 15, 100, 100), false),
    ];
    check(
        |(unread, trust, bytes, enough)| joins_unread(unread, trust, bytes, enough),
        rows,
    );
}

#[test]
fn trust_grows_until_pause() {
    let rows = [
        ((0, Verdict::Join, true), 1),
        ((3, Verdict::Join, true), 7),
        ((6, Verdict::Join, true), 13),
        ((7, Verdict::Join, true), 15),
        ((15, Verdict::Join, true), 15),
        ((7, Verdict::SendInBurst, true), 0),
        ((7, Verdict::SendInBurst, false), 7),
        ((7, Verdict::Defer, true), 7),
        ((7, Verdict::Send, true), 7),
    ];
    check(
        |(trust, verdict, has_room)| cork_trust(trust, verdict, has_room),
        rows,
    );
}

#[test]
fn impatient_task_tries_now_and_then() {
    let rows = [
        ((4, 1), true),
        ((1, 1), true),
        ((0, 1), false),
        ((0, 15), false),
        ((0, 16), true),
        ((0, 17), false),
        ((0, 32), true),
    ];
    check(
        |(patience, requests)| lets_others_first(patience, requests),
        rows,
    );
}

#[test]
fn others_restore_the_patience() {
    let rows = [
        ((4, false), 3),
        ((1, false), 0),
        ((0, false), 0),
        ((0, true), 4),
        ((4, true), 4),
    ];
    check(|(patience, others)| turns_patience(patience, others), rows);
}

/// Values that the documents state, and that no test above checks.
#[test]
fn documented_values_hold() {
    assert_eq!(CORK_SEND_DELAY, us(100));
    assert_eq!(
        (YIELD_COMPETING, YIELD_ALONE, POLL_DIRECTLY_MAX),
        (4, 64, 4)
    );
}
