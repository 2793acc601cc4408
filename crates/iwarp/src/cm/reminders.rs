//! When an initiator reminds a silent responder ([`StreamTimes::reminders`]).
//!
//! A reminder costs both ends about a sixth of the time of a connection set-up. If a process
//! creates very many connections in a short time, the first reminders would be sent while it still
//! creates connections. Therefore connections in such a burst have no early reminder. If the peer
//! is a siw that has missed a message, it is then reminded after a second.

use crate::sys::clock::now_ns;
use iwarp_rnic::qp::StreamTimes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of recent connections above which a burst is assumed.
const BURST: u64 = 256;
/// The time in nanoseconds after which the number of recent connections is halved.
const PERIOD: u64 = 50_000_000;
/// Number of bits of [`RECENT`] that count connections. The bits above hold the period of the last
/// connection.
const COUNT_BITS: u32 = 20;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

/// Number of recent connections of this process. An atomic and not a lock, because a forked child
/// could inherit a locked lock.
static RECENT: AtomicU64 = AtomicU64::new(0);

/// Counts a new connection. Returns the times of its reminders.
pub(super) fn count_connection() -> [Option<Duration>; 3] {
    let now = now_ns();
    let add = |recent| Some(increment(recent, now));
    let before = RECENT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    reminders_for(increment(before.unwrap_or_else(|recent| recent), now))
}

fn increment(recent: u64, now: u64) -> u64 {
    let period = now / PERIOD;
    let passed = period.saturating_sub(recent >> COUNT_BITS);
    let passed = u32::try_from(passed).unwrap_or(u32::MAX);
    let count = (recent & COUNT_MAX).checked_shr(passed).unwrap_or(0);
    period << COUNT_BITS | (count + 1).min(COUNT_MAX)
}

fn reminders_for(recent: u64) -> [Option<Duration>; 3] {
    let [early, late, later] = StreamTimes::REMINDERS;
    match recent & COUNT_MAX > BURST {
        true => [late, later, None],
        false => [early, late, later],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a connection every `pause` nanoseconds, for a second starting at `begin`. Returns
    /// the numbers of connections with and without an early reminder.
    fn simulate(recent: &mut u64, begin: u64, pause: u64) -> (usize, usize) {
        let early = (begin..begin + 1_000_000_000)
            .step_by(pause as usize)
            .filter(|&now| {
                *recent = increment(*recent, now);
                reminders_for(*recent) == StreamTimes::REMINDERS
            });
        let early = early.count();
        (early, 1_000_000_000_usize.div_ceil(pause as usize) - early)
    }

    #[test]
    fn burst_has_no_early_reminders() {
        let mut recent = 0;
        let now = 77_777_777_777_777;
        assert_eq!(simulate(&mut recent, now, 1_000_000), (1000, 0));
        let (early, late) = simulate(&mut recent, now + 2_000_000_000, 50_000);
        assert!((200..=300).contains(&early), "{early} and {late}");
        let (early, late) = simulate(&mut recent, now + 3_000_000_000, 1_000_000);
        assert!(
            late < 400 && early > 600,
            "after a burst: {early} and {late}"
        );
    }

    #[test]
    fn count_is_limited_and_decays() {
        let now = 5_000_000 * PERIOD;
        let mut recent = 0;
        for _ in 0..COUNT_MAX + 10 {
            recent = increment(recent, now);
        }
        assert_eq!(recent & COUNT_MAX, COUNT_MAX);
        assert_eq!(
            reminders_for(increment(recent, now + 100 * PERIOD)),
            StreamTimes::REMINDERS
        );
        // Two threads may read the clock in one order and count in the other order.
        assert!(increment(recent, now - 1) & COUNT_MAX > BURST);
    }

    #[test]
    fn burst_has_late_reminders() {
        let [_, late, later] = StreamTimes::REMINDERS;
        for count in [BURST + 1, COUNT_MAX] {
            assert_eq!(reminders_for(count), [late, later, None]);
        }
        assert_eq!(reminders_for(BURST), StreamTimes::REMINDERS);
        assert!(late.is_some() && later.is_some());
    }
}
