//! Finds rows that other programs, or a lost segment, have disturbed.
//!
//! On a busy machine, single measurements are wrong by orders of magnitude: a process waits for the
//! processor, or TCP waits 200 ms before it sends a lost segment again. Such a row looks like a
//! property of the operation, so the report marks it.

use super::{Report, Row};
use crate::perf::under_load::UnderLoad;
use iwarp_figures::Spread;

/// The fastest and the slowest round of an undisturbed row differ by less than this factor.
const ROUNDS_DIFFER: f64 = 5.0;
/// A message takes less than this factor longer than a larger one.
const LARGER_IS_FASTER: f64 = 3.0;
/// The 99th percentile of an undisturbed row is less than this factor above the median, or short.
const TAIL: f64 = 100.0;
/// A 99th percentile below this time is no sign of a lost segment: half of a round trip that waited
/// for at least 50 ms, in µs.
const SHORT_TAIL_US: f64 = 25_000.0;
/// Beside computing programs, a round trip waits for time slices, but hardly for this long, in µs.
const TIME_SLICES_US: f64 = 100_000.0;

/// The explanation of the mark.
pub(super) const NOTE: &str = "\
! disturbed: the rounds differ by more than a factor of 5, a larger message took much less time, or
  a round trip in 100 took very long. Another program had the processor, or TCP waited 200 ms before
  it sent a lost segment again. Measure again, without other programs.
";

fn rounds_differ(spread: Option<Spread>) -> bool {
    spread.is_some_and(|s| s.max > s.min * ROUNDS_DIFFER)
}

fn long_tail(p50: Option<Spread>, p99: Option<Spread>) -> bool {
    let (Some(p50), Some(p99)) = (p50, p99) else {
        return false;
    };
    p99.median >= SHORT_TAIL_US && p99.median > p50.median * TAIL
}

impl Report {
    /// Returns `true` if the row was disturbed.
    pub(super) fn is_disturbed(&self, row: &Row) -> bool {
        let same_kind = |other: &&Row| {
            (other.op, other.crc, other.poll) == (row.op, row.crc, row.poll)
                && other.size > row.size
        };
        let mut larger = self.tcp.iter().chain(&self.rows).filter(same_kind);
        let larger_is_faster = larger.any(|other| match (row.p50, other.p50) {
            (Some(own), Some(other)) => own.median > other.median * LARGER_IS_FASTER,
            _ => false,
        });
        larger_is_faster
            || rounds_differ(row.p50)
            || rounds_differ(row.bytes_per_s)
            || long_tail(row.p50, row.p99)
    }

    /// Returns `true` if some row was disturbed.
    pub(super) fn has_disturbed_rows(&self) -> bool {
        let mut rows = self.tcp.iter().chain(&self.rows);
        rows.any(|row| self.is_disturbed(row))
            || self.under_load.iter().any(is_disturbed_under_load)
    }
}

/// Returns `true` if a row beside a computing program was disturbed by something else.
pub(super) fn is_disturbed_under_load(row: &UnderLoad) -> bool {
    let long = |spread: Option<Spread>| spread.is_some_and(|s| s.median >= TIME_SLICES_US);
    long(row.p50) || long(row.p99)
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;
    use crate::perf::point::Op;

    fn marks(report: &Report) -> usize {
        let table = report.table();
        let marks = table.lines().filter(|line| line.ends_with(" !")).count();
        assert_eq!(table.contains(NOTE), marks > 0, "{table}");
        assert_eq!(report.has_disturbed_rows(), marks > 0);
        marks
    }

    #[test]
    fn disturbed_rows_are_marked() {
        let spread = |values: &[f64]| Spread::of(values.to_vec());
        assert_eq!(marks(&example()), 0);
        // A message of 4 octets that takes 202 ms in each round.
        let mut report = example();
        let tcp = report.tcp.iter_mut().find(|row| row.size == 4).unwrap();
        tcp.p50 = spread(&[202_000.0; 3]);
        assert_eq!(marks(&report), 1);
        assert!(report.json().contains("\"disturbed\": true"));
        // One round of the largest message.
        let mut report = example();
        let last = report.rows.last_mut().unwrap();
        last.p50 = spread(&[200.0, 210.0, 202_000.0]);
        assert_eq!(marks(&report), 1);
        let mut report = example();
        report.rows[0].bytes_per_s = spread(&[1e9, 1e9, 1e8]);
        assert_eq!(marks(&report), 1);
        // One round trip in 100.
        let mut report = example();
        report.rows[0].p99 = spread(&[101_000.0; 3]);
        assert_eq!(marks(&report), 1);
        let mut report = example();
        report.rows[0].p99 = spread(&[9_000.0; 3]);
        assert_eq!(marks(&report), 0, "time slices of other programs");
        let mut report = example();
        let polls = report
            .under_load
            .iter_mut()
            .find(|row| row.op == Op::TcpPolls);
        polls.unwrap().p99 = spread(&[202_000.0]);
        assert_eq!(marks(&report), 1);
    }
}
