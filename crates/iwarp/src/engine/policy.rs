//! The thresholds and decisions of the heuristics that say who drives a socket, and when.
//!
//! Each function maps observations to a decision. It reads no clock and has no state, so a table of
//! cases tests it (`policy_tests.rs`). The callers measure, count, and keep the lock-free state:
//!
//! | heuristic | question | state in |
//! | --- | --- | --- |
//! | lease | How long does the progress thread leave the sockets of a polling thread alone? | `engine/lease.rs` |
//! | pace of polls | How often does a poll renew the lease, and serve the whole process? | `engine/pollers.rs` |
//! | contention | How long does the progress thread leave alone what other threads drive? | `engine/progress_thread.rs` |
//! | placement | Does a connection get another engine? | `engine/core.rs` |
//! | busy polling | Does a wait poll before it sleeps? | `engine/busy_poll.rs` |
//! | answers | Does a poll that found completions stay for the peer's answer? | `engine/answers.rs` |
//! | yield pacing | After how many empty polls does a thread yield its processor? | `engine/yield_pacing.rs` |
//! | outcome of a drive | What did the poll of a queue's sockets bring, and was it long? | `objects/cq.rs` |
//! | cork | Is a posted request sent at once, or with later ones? | `conn/cork.rs` |
//! | turns | Do other tasks post first, before a task polls? | `connection/turns.rs` |
//!
//! Names of times end in their unit; all other constants are counts or factors.

use std::time::Duration;

// ------------------------------------------------------------
// Lease
// ------------------------------------------------------------

/// Longest time between two dense renewals. Not every poll renews, so this spans several polls.
pub(crate) const LEASE_DENSE_NS: u64 = 70_000;
/// Time that a thread needs to answer one completion: the next renewal may be later by this.
pub(crate) const LEASE_ANSWER_NS: u64 = 10_000;
/// Completions beyond this number allow no further time, so that a full queue cannot keep a lease
/// for long.
pub(crate) const LEASE_ANSWERS_MAX: u64 = 64;
/// Divisor: dense polls earn this part of their time as credit. It bounds the time in which peers
/// are not served.
pub(crate) const LEASE_EARNED_PART: u64 = 16;
/// Largest credit. A thread that polled for long survives pauses of this length in all.
pub(crate) const LEASE_CREDIT_MAX_NS: u64 = 8_000_000;
/// Longest lease: how long a peer waits, once, when a program stops polling after a long time.
pub(crate) const LEASE_LONGEST_NS: u64 = 2_000_000;
/// Credit that a return costs, because the progress thread then watches the sockets again. Dense
/// polls earn it in 128 µs; shorter spells of polling are not worth that work.
pub(crate) const LEASE_RETURN_COST_NS: u64 = 8_000;
/// Shortest lease that the progress thread respects. A wake-up at its end costs more than a shorter
/// lease saves.
pub(crate) const LEASE_WORTH_NS: u64 = 50_000;
// The credit alone then says whether a lease is worth being respected.
const _: () = assert!(LEASE_WORTH_NS <= LEASE_LONGEST_NS);
/// A thread whose lease ended within this time may only be waiting for a processor.
pub(crate) const LEASE_LATELY_NS: u64 = 20_000_000;

/// Returns how long the next renewal may take and still be dense, after a thread took
/// `completions`.
#[inline]
pub(crate) const fn lease_patience(completions: usize) -> u64 {
    let answered = completions as u64;
    let counted = if answered < LEASE_ANSWERS_MAX {
        answered
    } else {
        LEASE_ANSWERS_MAX
    };
    LEASE_DENSE_NS + LEASE_ANSWER_NS * counted
}

/// Returns `true` if `gap` since the last renewal is a pause, where renewals within `patience` are
/// dense.
#[inline]
pub(crate) const fn is_pause(gap: u64, patience: u64) -> bool {
    gap > patience
}

/// Returns the credit after `gap` since the last renewal, without the time in which the thread had
/// no processor. Dense polls earn credit, and a pause costs as much as it lasts.
#[inline]
pub(crate) fn lease_credit(credit: u64, gap: u64, patience: u64) -> u64 {
    match is_pause(gap, patience) {
        true => credit.saturating_sub(gap),
        false => (credit + gap / LEASE_EARNED_PART).min(LEASE_CREDIT_MAX_NS),
    }
}

/// Returns the credit of the first renewal after a return.
#[inline]
pub(crate) const fn lease_credit_after_return(credit: u64) -> u64 {
    credit.saturating_sub(LEASE_RETURN_COST_NS)
}

/// Returns `true` if the progress thread may sleep for a lease with this credit.
#[inline]
pub(crate) const fn is_lease_worth(credit: u64) -> bool {
    credit >= LEASE_WORTH_NS
}

/// Returns the end of a lease that was `renewed` with this credit. `None` if it has ended, or is
/// too short.
#[inline]
pub(crate) fn lease_end(renewed: u64, credit: u64, now: u64) -> Option<u64> {
    let end = renewed.saturating_add(credit.min(LEASE_LONGEST_NS));
    (is_lease_worth(credit) && now < end).then_some(end)
}

/// Returns `true` if the lease ended a short time ago. Its thread polled much, and may be waiting
/// for a processor.
pub(crate) fn has_lease_ended_lately(renewed: u64, credit: u64, now: u64) -> bool {
    let age = now.saturating_sub(renewed);
    age < LEASE_LATELY_NS && is_lease_worth(credit) && lease_end(renewed, credit, now).is_none()
}

/// Returns `true` if completions renew the lease of a thread that drove `since_drive` ago. A thread
/// that only takes what others have driven keeps no lease.
#[inline]
pub(crate) const fn completions_renew(since_drive: u64) -> bool {
    since_drive < LEASE_LONGEST_NS
}

// ------------------------------------------------------------
// Pace of polls
// ------------------------------------------------------------

/// Most empty polls and completions between two renewals. A renewal reads the clock: a tenth of a
/// poll's cost.
pub(crate) const RENEW_EVERY_MAX: u32 = 8;
/// Renewals closer than this cost more than they bring: the next one comes after twice as many
/// polls.
pub(crate) const RENEW_TOO_SOON_NS: u64 = 10_000;
/// Renewals further apart than this could miss the limit of dense polls ([`LEASE_DENSE_NS`]),
/// because the program does much else between two polls: the next one comes after half
/// as many.
pub(crate) const RENEW_TOO_LATE_NS: u64 = 30_000;
/// Most empty polls before a poll also serves the sockets and timers of the rest of the process.
pub(crate) const SERVE_ALL_EVERY_MAX: u32 = 64;

/// Returns the number of polls between two renewals, which took `gap` with `every` polls.
#[inline]
pub(crate) fn renew_every(every: u32, gap: u64) -> u32 {
    match gap {
        ..RENEW_TOO_SOON_NS => (every * 2).min(RENEW_EVERY_MAX),
        RENEW_TOO_SOON_NS..RENEW_TOO_LATE_NS => every,
        RENEW_TOO_LATE_NS.. => (every / 2).max(1),
    }
}

/// Returns after how many empty polls the whole process is served again. If something was ready,
/// the next poll does it, because more is likely to follow: the program may poll one queue while
/// its peer writes through another queue pair. If nothing was ready, the distance doubles.
pub(crate) fn serve_all_after(after: u32, was_ready: bool) -> u32 {
    match was_ready {
        true => 1,
        false => (after * 2).min(SERVE_ALL_EVERY_MAX),
    }
}

/// Returns `true` if a thread that serves the whole process drives everything instead of the
/// progress threads. With one engine, a process gains no processor by both. With several, this
/// holds only for a thread that has no other way to its `many` queue pairs.
pub(crate) const fn drives_everything(many: bool, engines: usize) -> bool {
    many || engines == 1
}

// ------------------------------------------------------------
// Contention and placement
// ------------------------------------------------------------

/// How long the progress thread leaves alone what other threads drive. The kernel would report it
/// again at once.
pub(crate) const CONTENDED_NS: u64 = 50_000;
/// After this many times in a row that pause doubles: a thread that never comes back keeps its
/// socket ready forever.
pub(crate) const CONTENDED_OFTEN: u32 = 64;
/// Longest pause.
pub(crate) const CONTENDED_MAX_NS: u64 = 1_600_000;
/// Connections of each engine before another engine is started.
pub(crate) const CONNECTIONS_EACH: usize = 16;

/// Returns how long to leave alone what was contended this many times in a row.
pub(crate) fn contended_pause(times: u32) -> u64 {
    let doublings = (times / CONTENDED_OFTEN).min(16);
    (CONTENDED_NS << doublings).min(CONTENDED_MAX_NS)
}

/// Returns `true` if another engine is started for a connection: the idlest one has its share of
/// connections, and there are fewer engines than the configuration allows.
pub(crate) const fn needs_engine(fewest_connections: usize, engines: usize, most: usize) -> bool {
    fewest_connections >= CONNECTIONS_EACH && engines < most
}

// ------------------------------------------------------------
// Busy polling, and the record that answers share
// ------------------------------------------------------------

/// Short waits in a row that earn the first window of polling. One is no habit.
pub(crate) const WINDOW_SHORT_WAITS: u32 = 2;
/// Factor: a wait that slept was short if it took at most this many windows. Most of that time may
/// have been the wake-ups of both ends.
pub(crate) const WINDOW_SLEEP_FACTOR: u32 = 4;
/// Most further short waits that one window needs after windows without result.
pub(crate) const DISTRUST_MAX: u32 = 1024;
/// A thread that needed this long between two polls lost its processor. No poll takes that long.
pub(crate) const PROCESSOR_LOST_NS: u64 = 2_000_000;

/// Returns `true` if the next wait begins with a window of polling.
#[inline]
pub(crate) const fn earns_window(short_waits: u32, distrust: u32) -> bool {
    short_waits >= WINDOW_SHORT_WAITS + distrust
}

/// Returns the distrust after another window without result: each one makes the next window dearer.
pub(crate) fn distrust_after_miss(distrust: u32) -> u32 {
    (distrust * 2 + 2).min(DISTRUST_MAX)
}

/// Returns `true` if a wait that slept for `waited` was short, measured in windows.
pub(crate) fn is_short_sleep(waited: Duration, window: Duration) -> bool {
    waited <= window * WINDOW_SLEEP_FACTOR
}

/// Returns `true` if the thread lost its processor between two polls that are `gap` apart.
pub(crate) const fn has_lost_processor(gap: u64) -> bool {
    gap >= PROCESSOR_LOST_NS
}

// ------------------------------------------------------------
// Answers, and the outcome of a drive
// ------------------------------------------------------------

/// Longest wait for an answer while nothing arrives. A longer silence means that the peer is busy,
/// and the program may have other work.
pub(crate) const ANSWER_SILENCE_MAX_NS: u64 = 50_000;
/// Most queue pairs whose sockets an empty poll reads one by one. If a queue has more, the poll
/// asks `epoll`, which costs a system call but none for each idle socket.
pub(crate) const POLL_DIRECTLY: usize = 4;
/// Bytes that take longer to move than an empty poll. Only then the drive counts as time of dense
/// polls.
pub(crate) const DRIVE_BULK_BYTES: u64 = 4096;
/// Approximate time to move one of many bytes: it is read or written, and perhaps summed.
pub(crate) const DRIVE_BYTE_NS: u64 = 1;

/// The outcome of one drive of the sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    /// Bytes were moved, but no answer is complete.
    Part,
    Answer,
}

/// What a thread does that waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerWait {
    /// The answer is there.
    Done,
    /// Something arrived, and the time of silence begins again.
    Restart,
    /// Looks once more.
    Again,
    /// Gives up.
    GiveUp,
}

/// Returns `true` if the program watches memory for its peer's answer: it took completions since
/// the last answer, and has not polled without result after that.
pub(crate) const fn looks_at_memory(took: bool, empty_polls_then: u32, empty_polls: u32) -> bool {
    took && empty_polls_then == empty_polls
}

/// Returns what a thread does after a drive that has `seen` this, when nothing came for `silence`.
/// The configured `window` may be shorter than [`ANSWER_SILENCE_MAX_NS`].
pub(crate) fn answer_wait(seen: Seen, silence: u64, window: u64) -> AnswerWait {
    match seen {
        Seen::Answer => AnswerWait::Done,
        Seen::Part => AnswerWait::Restart,
        Seen::Nothing if silence >= window.min(ANSWER_SILENCE_MAX_NS) => AnswerWait::GiveUp,
        Seen::Nothing => AnswerWait::Again,
    }
}

/// Returns `true` if `members` are too many to read their sockets one by one.
#[inline]
pub(crate) const fn are_many(members: usize) -> bool {
    members > POLL_DIRECTLY
}

/// Returns what a drive has come to, in which an answer became complete or not, and bytes were
/// moved.
#[inline]
pub(crate) const fn drive_outcome(answered: bool, moved: u64) -> Seen {
    match (answered, moved) {
        (true, _) => Seen::Answer,
        (false, 0) => Seen::Nothing,
        (false, _) => Seen::Part,
    }
}

/// Returns how long a drive took that moved this many bytes. `None` if it took no longer than an
/// empty poll.
#[inline]
pub(crate) fn drive_time(moved: u64) -> Option<u64> {
    (moved >= DRIVE_BULK_BYTES).then_some(moved * DRIVE_BYTE_NS)
}

// ------------------------------------------------------------
// Yield pacing
// ------------------------------------------------------------

/// Empty polls between two yields while no other thread wants the processor.
pub(crate) const YIELD_ALONE: u32 = 64;
/// Empty polls between two yields while other threads take the processor. With 1, two ends on one
/// processor move little at a time: messages of 64 KiB took a third longer, and short ones as well.
pub(crate) const YIELD_COMPETING: u32 = 4;
/// Most empty polls between two yields beside a thread that computes. That thread waits for nothing
/// from here, and gets its turns from the scheduler.
pub(crate) const YIELD_BESIDE_WORK: u32 = 4096;
/// A yield that took this long let another thread run.
pub(crate) const YIELD_SWITCHED_NS: u64 = 1_500;
/// A thread that ran this long was computing, and not just replying: about until the scheduler took
/// the processor away.
pub(crate) const YIELD_WORKED_NS: u64 = 2_000_000;

/// Returns the number of empty polls between two yields, after a yield that `took` this long.
#[inline]
pub(crate) fn yield_every(every: u32, took: u64) -> u32 {
    match took {
        ..YIELD_SWITCHED_NS => (every * 2).min(YIELD_ALONE),
        YIELD_SWITCHED_NS..YIELD_WORKED_NS => YIELD_COMPETING,
        YIELD_WORKED_NS.. => (every * 8).clamp(YIELD_ALONE, YIELD_BESIDE_WORK),
    }
}

// ------------------------------------------------------------
// Cork
// ------------------------------------------------------------

/// Posts between two empty polls that are sent at once: a program that waits after each needs them
/// sent.
pub(crate) const CORK_AT_ONCE: u32 = 2;
/// Posts further apart than this, from the end of one to the beginning of the next, are no burst.
pub(crate) const CORK_GAP_NS: u64 = 1_000;
/// What each request of a list adds to that: the clock is read once for a list, and each request
/// takes time to build.
pub(crate) const CORK_REQUEST_NS: u64 = 100;
/// Most posts in a burst for which the clock is not read. Reading it costs as much as the rest of a
/// post.
pub(crate) const CORK_UNREAD_MAX: u8 = 15;
/// How long a program may go without polling before its posts are sent anyway.
pub(crate) const CORK_SEND_DELAY: Duration = Duration::from_micros(100);

/// What a post does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Sends now.
    Send,
    /// Sends now, and notes when that ends: the gap to the next post begins there.
    SendInBurst,
    /// Waits; the completion queue and the timer have to be notified.
    Defer,
    /// Waits together with earlier ones.
    Join,
}

/// What is known about a post when the clock was read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Post {
    /// Posts since the last empty poll, with this one.
    pub(crate) posts: u32,
    /// Nanoseconds since the post before.
    pub(crate) gap: u64,
    /// Requests in this post.
    pub(crate) requests: usize,
    /// Bytes of payload that wait, with this post.
    pub(crate) bytes: u64,
    /// Bytes that are enough for one system call.
    pub(crate) enough: u64,
    /// The send queue has room for many more requests.
    pub(crate) room: bool,
    /// Earlier requests wait.
    pub(crate) waits: bool,
}

/// Returns `true` if a post is sent without reading the clock, because it is the first one since
/// an empty poll.
#[inline]
pub(crate) const fn sends_first(posts: u32) -> bool {
    posts < CORK_AT_ONCE
}

/// Returns what a post does whose distance from the one before is known.
#[inline]
pub(crate) const fn cork_verdict(post: Post) -> Verdict {
    let list = CORK_REQUEST_NS.saturating_mul(post.requests as u64);
    let pauses = post.gap > CORK_GAP_NS.saturating_add(list);
    if post.posts <= CORK_AT_ONCE || pauses || !post.room || post.bytes >= post.enough {
        return Verdict::SendInBurst;
    }
    match post.waits {
        true => Verdict::Join,
        false => Verdict::Defer,
    }
}

/// Returns `true` if a post joins those that wait without reading the clock: `unread` posts in a
/// row did so, and up to `trust` may.
#[inline]
pub(crate) const fn joins_unread(unread: u8, trust: u8, bytes: u64, enough: u64) -> bool {
    unread < trust && bytes < enough
}

/// Returns how many posts need not read the clock after this verdict. The number grows
/// as long as the burst goes on. It drops to none after a pause; if the send queue has no `room`,
/// sending was no pause.
#[inline]
pub(crate) fn cork_trust(trust: u8, verdict: Verdict, room: bool) -> u8 {
    match verdict {
        Verdict::Send | Verdict::Defer => trust,
        Verdict::Join => (2 * trust + 1).min(CORK_UNREAD_MAX),
        Verdict::SendInBurst if room => 0,
        Verdict::SendInBurst => trust,
    }
}

// ------------------------------------------------------------
// Turns
// ------------------------------------------------------------

/// Turns in which no other task posted, after which tasks no longer wait for others.
pub(crate) const TURNS_PATIENCE: u32 = 4;
/// Once that is given up, one of this many requests tries it again, to notice that a program has
/// changed.
pub(crate) const TURNS_TRY_EVERY: u32 = 16;

/// Returns `true` if a task lets others post first: there is patience left, or this request is one
/// that tries it.
pub(crate) const fn lets_others_first(patience: u32, requests: u32) -> bool {
    patience > 0 || requests.is_multiple_of(TURNS_TRY_EVERY)
}

/// Returns the patience after a turn in which others posted, or did not.
pub(crate) const fn turns_patience(patience: u32, others_posted: bool) -> u32 {
    match others_posted {
        true => TURNS_PATIENCE,
        false => patience.saturating_sub(1),
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
