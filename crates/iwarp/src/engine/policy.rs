//! The thresholds and decisions of the heuristics: which thread drives a socket, and when.
//!
//! Each function maps observations to a decision. It reads no clock and has no state, so tables of
//! cases can test it (`policy_tests.rs`). The callers measure, count, and keep the state:
//!
//! | heuristic | question | state in |
//! | --- | --- | --- |
//! | lease | How long does the progress thread not serve the sockets of a polling thread? | `engine/lease.rs` |
//! | pace of polls | How often does a poll renew the lease, and serve the whole process? | `engine/pollers.rs` |
//! | contention | How long does the progress thread ignore sources that other threads drive? | `engine/progress_thread.rs` |
//! | placement | Does a connection start another engine? | `engine/core.rs` |
//! | busy polling | Does a wait poll before it sleeps? | `engine/busy_poll.rs` |
//! | answers | Does a poll that found completions wait for the peer's answer? | `engine/answers.rs` |
//! | yield pacing | After how many empty polls does a thread yield its processor? | `engine/yield_pacing.rs` |
//! | outcome of a drive | What arrived when a queue's sockets were driven, and how long did that take? | `objects/cq.rs` |
//! | cork | Is a posted request sent at once, or together with later ones? | `conn/cork.rs` |
//! | turns | Does a task let other tasks post before it polls? | `connection/turns.rs` |
//!
//! Constants that are times end in their unit; all others are counts or factors.

use std::time::Duration;

// ------------------------------------------------------------
// Lease
// ------------------------------------------------------------

/// Renewals that are at most this far apart are *dense*. Not every poll renews the lease, so this
/// spans several polls.
pub(crate) const LEASE_DENSE_NS: u64 = 70_000;
/// Time to handle one completion, by which the next renewal may be later for each completion taken.
pub(crate) const LEASE_ANSWER_NS: u64 = 10_000;
/// Maximum number of completions that prolong the time until the next renewal. Without a maximum, a
/// full queue could keep a lease for long.
pub(crate) const LEASE_ANSWERS_MAX: u64 = 64;
/// Divisor: dense polls earn this fraction of their time as credit. It bounds the time in which
/// peers are not served.
pub(crate) const LEASE_EARNED_DIVISOR: u64 = 16;
/// Largest credit: the total length of the pauses after which a thread that polled for long still
/// has its lease.
pub(crate) const LEASE_CREDIT_MAX_NS: u64 = 8_000_000;
/// Longest lease: how long peers are not served after a program has stopped polling.
pub(crate) const LEASE_LONGEST_NS: u64 = 2_000_000;
/// Credit that giving the lease back costs, because the progress thread then must watch the sockets
/// again. Dense polls earn this in 128 µs; polling for a shorter time is not worth that work.
pub(crate) const LEASE_RETURN_COST_NS: u64 = 8_000;
/// Shortest lease that the progress thread respects. For a shorter lease, its wake-up at the end
/// would cost more than the lease saves.
pub(crate) const LEASE_SHORTEST_NS: u64 = 50_000;
// `is_lease_respected` compares the credit, and not the length of the lease. With this, both
// give the same result.
const _: () = assert!(LEASE_SHORTEST_NS <= LEASE_LONGEST_NS);
/// A thread whose lease has ended within this time may only be waiting for a processor.
pub(crate) const LEASE_ENDED_LATELY_NS: u64 = 20_000_000;

/// Returns the longest time to the next dense renewal, after a thread has taken `completions`.
#[inline]
pub(crate) const fn lease_patience(completions: usize) -> u64 {
    let completions = completions as u64;
    let counted = if completions < LEASE_ANSWERS_MAX {
        completions
    } else {
        LEASE_ANSWERS_MAX
    };
    LEASE_DENSE_NS + LEASE_ANSWER_NS * counted
}

/// Returns `true` if `gap`, the time since the last renewal, is longer than dense renewals may be.
#[inline]
pub(crate) const fn is_pause(gap: u64, patience: u64) -> bool {
    gap > patience
}

/// Returns the credit after a renewal. `gap` is the time since the last renewal, without the time
/// in which the thread had no processor.
#[inline]
pub(crate) fn lease_credit(credit: u64, gap: u64, patience: u64) -> u64 {
    match is_pause(gap, patience) {
        true => credit.saturating_sub(gap),
        false => (credit + gap / LEASE_EARNED_DIVISOR).min(LEASE_CREDIT_MAX_NS),
    }
}

/// Returns the credit after the first renewal since the lease was given back.
#[inline]
pub(crate) const fn lease_credit_after_return(credit: u64) -> u64 {
    credit.saturating_sub(LEASE_RETURN_COST_NS)
}

/// Returns `true` if the progress thread respects a lease with this credit.
#[inline]
pub(crate) const fn is_lease_respected(credit: u64) -> bool {
    credit >= LEASE_SHORTEST_NS
}

/// Returns when a lease ends that was renewed at the time `renewed` with this credit. Returns
/// `None` if it has ended, or is too short to be respected.
#[inline]
pub(crate) fn lease_end(renewed: u64, credit: u64, now: u64) -> Option<u64> {
    let end = renewed.saturating_add(credit.min(LEASE_LONGEST_NS));
    (is_lease_respected(credit) && now < end).then_some(end)
}

/// Returns `true` if the lease ended a short time ago.
pub(crate) fn has_lease_ended_lately(renewed: u64, credit: u64, now: u64) -> bool {
    let age = now.saturating_sub(renewed);
    age < LEASE_ENDED_LATELY_NS
        && is_lease_respected(credit)
        && lease_end(renewed, credit, now).is_none()
}

/// Returns `true` if taking completions renews the lease of a thread that drove `since_drive` ago.
/// A thread that never drives keeps no lease.
#[inline]
pub(crate) const fn completions_renew(since_drive: u64) -> bool {
    since_drive < LEASE_LONGEST_NS
}

// ------------------------------------------------------------
// Pace of polls
// ------------------------------------------------------------

/// Maximum number of empty polls and completions between two renewals. A renewal reads the clock,
/// which costs a tenth of a poll.
pub(crate) const RENEW_EVERY_MAX: u32 = 8;
/// If two renewals are closer than this, the next one comes after twice as many polls.
pub(crate) const RENEW_TOO_SOON_NS: u64 = 10_000;
/// If two renewals are further apart than this, the next one comes after half as many polls: the
/// program does other work between polls, and its renewals might not be dense
/// ([`LEASE_DENSE_NS`]).
pub(crate) const RENEW_TOO_LATE_NS: u64 = 30_000;
/// Maximum number of empty polls before a poll also serves the whole process.
pub(crate) const SERVE_ALL_EVERY_MAX: u32 = 64;

/// Returns the number of polls until the next renewal. The last two renewals were `gap` and `every`
/// polls apart.
#[inline]
pub(crate) fn renew_every(every: u32, gap: u64) -> u32 {
    match gap {
        ..RENEW_TOO_SOON_NS => (every * 2).min(RENEW_EVERY_MAX),
        RENEW_TOO_SOON_NS..RENEW_TOO_LATE_NS => every,
        RENEW_TOO_LATE_NS.. => (every / 2).max(1),
    }
}

/// Returns after how many empty polls a poll serves the whole process again. If a source was ready,
/// the next poll does, because more data is likely to follow: the program may poll one queue while
/// its peer writes through another queue pair. If no source was ready, the number doubles.
pub(crate) fn serve_all_after(after: u32, was_ready: bool) -> u32 {
    match was_ready {
        true => 1,
        false => (after * 2).min(SERVE_ALL_EVERY_MAX),
    }
}

/// Returns `true` if a thread that serves the whole process does so instead of the progress
/// threads. With several engines, it does so only if it has no other way to drive its `many` queue
/// pairs. The same holds if other threads compete for its processor: it then runs rarely, whereas a
/// progress thread is woken and runs at once.
pub(crate) const fn drives_whole_process(many: bool, engines: usize, competes: bool) -> bool {
    many || engines == 1 && !competes
}

// ------------------------------------------------------------
// Contention and placement
// ------------------------------------------------------------

/// How long the progress thread ignores ready sources that other threads drive. The kernel would
/// report them again at once.
pub(crate) const CONTENDED_NS: u64 = 50_000;
/// After this many times in a row, that pause doubles: the socket of a thread that is stuck stays
/// ready forever.
pub(crate) const CONTENDED_OFTEN: u32 = 64;
pub(crate) const CONTENDED_MAX_NS: u64 = 1_600_000;
/// Connections per engine before another engine is started.
pub(crate) const CONNECTIONS_EACH: usize = 16;

/// Returns how long the progress thread pauses after other threads drove all ready sources `times`
/// times in a row.
pub(crate) fn contended_pause(times: u32) -> u64 {
    let doublings = (times / CONTENDED_OFTEN).min(16);
    (CONTENDED_NS << doublings).min(CONTENDED_MAX_NS)
}

/// Returns `true` if a connection needs another engine: each engine has its share of connections,
/// and there are fewer than `max` engines.
pub(crate) const fn needs_engine(fewest_connections: usize, engines: usize, max: usize) -> bool {
    fewest_connections >= CONNECTIONS_EACH && engines < max
}

// ------------------------------------------------------------
// Busy polling (waiting for answers uses the same record)
// ------------------------------------------------------------

/// Number of short waits in a row that the first window of polling requires.
pub(crate) const WINDOW_SHORT_WAITS: u32 = 2;
/// Factor: a wait that slept was short if it lasted at most this many windows. The wake-ups of both
/// ends may have taken most of that time.
pub(crate) const WINDOW_SLEEP_FACTOR: u32 = 4;
/// Maximum number of additional short waits that a window requires after windows without result.
pub(crate) const DISTRUST_MAX: u32 = 1024;
/// If the time between two polls is at least this long, the thread has lost its processor. No poll
/// takes that long.
pub(crate) const PROCESSOR_LOST_NS: u64 = 2_000_000;

#[inline]
pub(crate) const fn earns_window(short_waits: u32, distrust: u32) -> bool {
    short_waits >= WINDOW_SHORT_WAITS + distrust
}

/// Returns the distrust after another window without result, which makes the next window require
/// more short waits.
pub(crate) fn distrust_after_miss(distrust: u32) -> u32 {
    (distrust * 2 + 2).min(DISTRUST_MAX)
}

pub(crate) fn is_short_sleep(waited: Duration, window: Duration) -> bool {
    waited <= window * WINDOW_SLEEP_FACTOR
}

pub(crate) const fn has_lost_processor(gap: u64) -> bool {
    gap >= PROCESSOR_LOST_NS
}

// ------------------------------------------------------------
// Answers, and the outcome of a drive
// ------------------------------------------------------------

/// Longest wait for an answer while nothing arrives. After a longer silence the peer is probably
/// busy, and the program may have other work.
pub(crate) const ANSWER_SILENCE_MAX_NS: u64 = 50_000;
/// Maximum number of queue pairs whose sockets an empty poll reads one by one. If a queue has more,
/// the poll calls `epoll_wait` instead of reading each idle socket.
pub(crate) const POLL_DIRECTLY_MAX: usize = 4;
/// A drive that moves at least this many bytes takes longer than an empty poll. Its time then
/// counts as time of dense polls.
pub(crate) const DRIVE_BULK_BYTES: u64 = 4096;
/// Approximate time to move one byte of many: to read or write it, and perhaps to compute its CRC.
pub(crate) const DRIVE_BYTE_NS: u64 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    /// Bytes were moved, but no message is complete.
    Part,
    /// A complete message has arrived.
    Answer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerWait {
    Done,
    /// Part of a message has arrived: restart the window, and drive again.
    Restart,
    Again,
    GiveUp,
}

/// Returns `true` if the program watches memory for its peer's answer: it has taken completions
/// since the last answer, and has not polled without result after that. `at_last_taking` is the
/// number of empty polls when it took completions, `empty_polls` the number now.
pub(crate) const fn watches_memory(has_taken: bool, at_last_taking: u32, empty_polls: u32) -> bool {
    has_taken && at_last_taking == empty_polls
}

/// Returns the next step after a drive with the outcome `seen`, if nothing has arrived for
/// `silence`. The configured `window` may be shorter than [`ANSWER_SILENCE_MAX_NS`].
pub(crate) fn answer_wait(seen: Seen, silence: u64, window: u64) -> AnswerWait {
    match seen {
        Seen::Answer => AnswerWait::Done,
        Seen::Part => AnswerWait::Restart,
        Seen::Nothing if silence >= window.min(ANSWER_SILENCE_MAX_NS) => AnswerWait::GiveUp,
        Seen::Nothing => AnswerWait::Again,
    }
}

/// Returns `true` if a queue has too many queue pairs (`members`) to read their sockets one by one.
#[inline]
pub(crate) const fn are_many(members: usize) -> bool {
    members > POLL_DIRECTLY_MAX
}

#[inline]
pub(crate) const fn drive_outcome(answered: bool, moved: u64) -> Seen {
    match (answered, moved) {
        (true, _) => Seen::Answer,
        (false, 0) => Seen::Nothing,
        (false, _) => Seen::Part,
    }
}

/// Returns how many nanoseconds a drive took that moved this many bytes; `None` if it took no
/// longer than an empty poll.
#[inline]
pub(crate) fn long_drive_ns(moved_bytes: u64) -> Option<u64> {
    (moved_bytes >= DRIVE_BULK_BYTES).then_some(moved_bytes * DRIVE_BYTE_NS)
}

// ------------------------------------------------------------
// Yield pacing
// ------------------------------------------------------------

/// Empty polls between two yields while no other thread needs the processor.
pub(crate) const YIELD_ALONE: u32 = 64;
/// Empty polls between two yields while other threads use the processor for short times. With 1,
/// two ends on one processor move few bytes per turn: messages took a third longer.
pub(crate) const YIELD_COMPETING: u32 = 4;
/// Maximum number of empty polls between two yields while another thread computes. That thread
/// does not wait for this one, and the scheduler gives it the processor anyway.
pub(crate) const YIELD_BESIDE_WORK: u32 = 4096;
/// During a yield that took at least this long, another thread ran.
pub(crate) const YIELD_SWITCHED_NS: u64 = 1_500;
/// If a yield took at least this long, the other thread was computing, and not just replying. It
/// ran until the scheduler preempted it.
pub(crate) const YIELD_WORKED_NS: u64 = 2_000_000;

/// Returns `true` if other threads need the processor of a thread that yields after `every` polls.
pub(crate) const fn is_competing(every: u32) -> bool {
    every != YIELD_ALONE
}

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

/// Number of posts after an empty poll that are sent at once. A program that waits after each post
/// needs that.
pub(crate) const CORK_AT_ONCE: u32 = 2;
/// Longest time in a burst from the end of one post to the beginning of the next.
pub(crate) const CORK_GAP_NS: u64 = 1_000;
/// Additional time for each request of a list, because building a request takes time, and the clock
/// is read once per list.
pub(crate) const CORK_REQUEST_NS: u64 = 100;
/// Maximum number of consecutive posts for which the clock is not read. Reading it costs as much as
/// the rest of a post.
pub(crate) const CORK_UNREAD_MAX: u8 = 15;
/// Deferred posts are sent after this time if the program does not poll.
pub(crate) const CORK_SEND_DELAY: Duration = Duration::from_micros(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Send,
    /// Sent now; the caller must record when sending ends, because the gap to the next post begins
    /// there.
    SendInBurst,
    /// Deferred; the caller must notify the completion queue, and set the timer.
    Defer,
    /// Deferred together with earlier posts.
    Join,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Post {
    /// Including this post.
    pub(crate) posts: u32,
    /// Nanoseconds since the previous post.
    pub(crate) gap: u64,
    pub(crate) requests: usize,
    /// Deferred payload, including this post.
    pub(crate) bytes: u64,
    /// Number of bytes from which one system call is worth it.
    pub(crate) enough: u64,
    pub(crate) has_room: bool,
    pub(crate) has_deferred: bool,
}

/// Returns `true` if a post is sent without reading the clock, because it is the first one since
/// an empty poll.
#[inline]
pub(crate) const fn sends_first(posts: u32) -> bool {
    posts < CORK_AT_ONCE
}

#[inline]
pub(crate) const fn cork_verdict(post: Post) -> Verdict {
    let list = CORK_REQUEST_NS.saturating_mul(post.requests as u64);
    let is_pause = post.gap > CORK_GAP_NS.saturating_add(list);
    if post.posts <= CORK_AT_ONCE || is_pause || !post.has_room || post.bytes >= post.enough {
        return Verdict::SendInBurst;
    }
    match post.has_deferred {
        true => Verdict::Join,
        false => Verdict::Defer,
    }
}

/// Returns `true` if a post joins the deferred posts without reading the clock. `unread` posts in a
/// row have done so, and at most `trust` may.
#[inline]
pub(crate) const fn joins_unread(unread: u8, trust: u8, bytes: u64, enough: u64) -> bool {
    unread < trust && bytes < enough
}

/// Returns how many posts after this verdict may join without reading the clock. The number grows
/// as long as the burst goes on, and drops to zero after a pause. If the send queue has no room,
/// the verdict `SendInBurst` is no sign of a pause.
#[inline]
pub(crate) fn cork_trust(trust: u8, verdict: Verdict, has_room: bool) -> u8 {
    match verdict {
        Verdict::Send | Verdict::Defer => trust,
        Verdict::Join => (2 * trust + 1).min(CORK_UNREAD_MAX),
        Verdict::SendInBurst if has_room => 0,
        Verdict::SendInBurst => trust,
    }
}

// ------------------------------------------------------------
// Turns
// ------------------------------------------------------------

/// After this many turns in a row in which no other task posted, tasks no longer let others post
/// first.
pub(crate) const TURNS_PATIENCE: u32 = 4;
/// Even then, one of this many requests lets others post first, to notice that the program behaves
/// differently now.
pub(crate) const TURNS_TRY_EVERY: u32 = 16;

pub(crate) const fn lets_others_first(patience: u32, requests: u32) -> bool {
    patience > 0 || requests.is_multiple_of(TURNS_TRY_EVERY)
}

pub(crate) const fn turns_patience(patience: u32, others_posted: bool) -> u32 {
    match others_posted {
        true => TURNS_PATIENCE,
        false => patience.saturating_sub(1),
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
