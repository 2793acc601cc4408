//! Decides for how long a thread polls before it sleeps.
//!
//! A sleep costs wake-ups of two threads: the progress thread, which receives the data, and the
//! waiting thread. So a thread whose last waits were short polls for up to [`LONG`]; other threads
//! poll for the time that the administrator has set (`polling_time`). Each window without result
//! makes the next long window require more short waits. A thread that loses its processor while it
//! polls does not poll for long for a while, because other threads need the processor.

use crate::settings::Settings;
use std::cell::Cell;
use std::time::Duration;

/// The long window.
const LONG: Duration = Duration::from_micros(100);
/// Longest wait that counts as short: the wake-ups may take most of it.
const SHORT: Duration = Duration::from_micros(400);
/// Number of short waits in a row that the first long window requires.
const SHORT_WAITS: u32 = 2;
/// Maximum number of further short waits that a long window requires.
const DISTRUST_MAX: u32 = 1024;
/// If a window lasts this much longer than it should, the thread has lost its processor.
const PROCESSOR_LOST: Duration = Duration::from_millis(2);

#[derive(Debug, Default, Clone, Copy)]
struct Record {
    /// Short waits in a row.
    short: u32,
    distrust: u32,
}

impl Record {
    const fn new() -> Self {
        Self {
            short: 0,
            distrust: 0,
        }
    }

    fn window(self, configured: Duration) -> Duration {
        let is_long = self.short >= SHORT_WAITS + self.distrust && !configured.is_zero();
        match is_long {
            true => configured.max(LONG),
            false => configured,
        }
    }

    /// Records a window that ended with a result.
    const fn hit(&mut self) {
        self.short = self.short.saturating_add(1);
        self.distrust = 0;
    }

    /// Records a window that ended without result after `elapsed`.
    fn miss(&mut self, window: Duration, elapsed: Duration) {
        if elapsed >= window + PROCESSOR_LOST {
            *self = Self {
                short: 0,
                distrust: DISTRUST_MAX,
            };
        } else if window >= LONG {
            self.short = 0;
            self.distrust = (self.distrust * 2 + 2).min(DISTRUST_MAX);
        }
    }

    /// Records a wait that slept.
    fn slept(&mut self, waited: Duration) {
        self.short = match waited <= SHORT {
            true => self.short.saturating_add(1),
            false => 0,
        };
    }
}

thread_local! {
    static RECORD: Cell<Record> = const { Cell::new(Record::new()) };
}

fn with_record<R: Default>(f: impl FnOnce(&mut Record) -> R) -> R {
    // An exiting thread has no record any more.
    let result = RECORD.try_with(|cell| {
        let mut record = cell.get();
        let result = f(&mut record);
        cell.set(record);
        result
    });
    result.unwrap_or_default()
}

/// Returns for how long the calling thread polls before it sleeps.
pub(crate) fn window() -> Duration {
    let configured = Settings::get().polling_time;
    with_record(|record| record.window(configured))
}

/// Records that polling found what the thread waits for.
pub(crate) fn hit() {
    with_record(Record::hit);
}

/// Records that polling for `window` ended without result after `elapsed`.
pub(crate) fn miss(window: Duration, elapsed: Duration) {
    with_record(|record| record.miss(window, elapsed));
}

/// Records that a wait slept, and lasted `waited`.
pub(crate) fn slept(waited: Duration) {
    with_record(|record| record.slept(waited));
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIGURED: Duration = Duration::from_micros(10);

    #[test]
    fn short_waits_earn_long_window() {
        let mut record = Record::new();
        assert_eq!(record.window(CONFIGURED), CONFIGURED);
        for _ in 0..SHORT_WAITS {
            assert_eq!(record.window(CONFIGURED), CONFIGURED);
            record.slept(SHORT);
        }
        assert_eq!(record.window(CONFIGURED), LONG);
        assert_eq!(record.window(LONG * 2), LONG * 2);
        assert_eq!(record.window(Duration::ZERO), Duration::ZERO);
        record.slept(SHORT + CONFIGURED);
        assert_eq!(record.window(CONFIGURED), CONFIGURED);
    }

    #[test]
    fn empty_windows_cost_trust() {
        let mut record = Record::new();
        let mut waits = Vec::new();
        for _ in 0..12 {
            let mut count = 0;
            while record.window(CONFIGURED) < LONG {
                record.slept(SHORT);
                count += 1;
            }
            waits.push(count);
            record.miss(LONG, LONG);
        }
        assert_eq!(waits[..4], [2, 4, 8, 16]);
        assert_eq!(waits[11], SHORT_WAITS + DISTRUST_MAX);
        record.hit();
        record.hit();
        assert_eq!(record.window(CONFIGURED), LONG);
        // The end of a short window says nothing about a long one.
        record.miss(CONFIGURED, CONFIGURED);
        assert_eq!(record.window(CONFIGURED), LONG);
    }

    #[test]
    fn lost_processor_ends_trust() {
        let mut record = Record::new();
        record.hit();
        record.hit();
        record.miss(CONFIGURED, CONFIGURED + PROCESSOR_LOST);
        for _ in 0..DISTRUST_MAX {
            record.slept(SHORT);
        }
        assert_eq!(record.window(CONFIGURED), CONFIGURED);
    }
}
