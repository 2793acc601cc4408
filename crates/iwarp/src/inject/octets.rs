//! Faults of a stream's data: counts octets, delays them, and flips bits.
//!
//! Invariant of the `unsafe` code: the caller guarantees that the slices it passes are valid during
//! the call, as they are for the system call that reads or writes them.

use super::plan::Injected;
use super::qp::{Progress, QpInjector};
use crate::fault::{Kind, Point, Rule};
use crate::objects::hooks::StreamDirection;
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use crate::sys::raw_slice::RawSlice;

/// Range of octets of an FPDU in which a bit is flipped. It starts after the length field, so that
/// the receiver still finds the end of the FPDU, and ends within the shortest header.
const FLIP_RANGE: std::ops::Range<usize> = 6..14;

/// Steps per second of a slow connection, and the minimum size of a step.
const STEPS_PER_SECOND: u64 = 50;
const STEP_MIN: u64 = 64;

impl QpInjector {
    /// Called before data is sent or read. Shortens the list to the octets that may pass before the
    /// next fault.
    pub(super) fn limit_octets(&self, direction: StreamDirection, runs: &mut Vec<RawSlice>) {
        let state = self.state.lock();
        let passed = state.octets[direction.index()];
        let thresholds = self.thresholds(&state, direction).map(|(_, count)| count);
        let to_threshold = thresholds
            .min()
            .map(|count| count.saturating_sub(passed).max(1));
        // A slow connection moves data in small steps, not in bursts.
        let step =
            state.rate[direction.index()].map(|rate| (rate / STEPS_PER_SECOND).max(STEP_MIN));
        if let Some(room) = to_threshold.into_iter().chain(step).min() {
            shorten(runs, usize::try_from(room).unwrap_or(usize::MAX));
        }
    }

    /// Returns the octet counts that are not yet reached in this direction, with the indices of
    /// their rules.
    fn thresholds(
        &self,
        state: &Progress,
        direction: StreamDirection,
    ) -> impl Iterator<Item = (usize, u64)> {
        let selects = |i: usize, rule: &Rule| {
            let counts = match rule.directions.out {
                true => StreamDirection::Out,
                false => StreamDirection::In,
            };
            let reached = state.reached.get(i).copied().unwrap_or(true);
            counts == direction && !reached && self.selects(rule, state.peer, None)
        };
        let rules = self.plan.rules(Point::Request);
        rules
            .filter(move |(i, rule)| selects(*i, rule))
            .filter_map(|(i, _)| Some((i, self.plan.threshold(i, self.ordinal)?)))
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// Called after `n` octets have passed.
    pub(super) fn count_octets(&self, direction: StreamDirection, n: usize) {
        let mut state = self.state.lock();
        let passed = state.octets[direction.index()].saturating_add(n as u64);
        state.octets[direction.index()] = passed;
        let due: Vec<(usize, u64)> = self
            .thresholds(&state, direction)
            .filter(|(_, count)| *count <= passed)
            .collect();
        for (i, _) in due {
            if let Some(reached) = state.reached.get_mut(i) {
                *reached = true;
            }
            let Some(rule) = self.plan.spec.rules.get(i) else {
                continue;
            };
            if now_ns() < self.plan.earliest(i, self.ordinal) || !self.plan.count_injection(i) {
                continue;
            }
            let injected = Injected {
                rule: i,
                kind: rule.kind,
                n: 0,
            };
            self.plan_action(&mut state, &injected, None, Some(passed));
        }
        if let Some(rate) = state.rate[direction.index()] {
            let pause = (n as u64).saturating_mul(1_000_000_000) / rate;
            let held = &mut state.held_until[direction.index()];
            *held = super::act::until(pause).max(*held);
            drop(state);
            self.wake_after(pause);
        }
    }

    /// If a bit is to be flipped in sent data, copies the data, flips a bit of the copy, and lets
    /// `runs` refer to the copy, which the caller has to keep. The data starts with an FPDU.
    ///
    /// # Safety
    /// The ranges must be readable during the call.
    pub(super) unsafe fn flip_in_copy(&self, runs: &mut Vec<RawSlice>) -> Option<Vec<u8>> {
        let mut state = self.state.lock();
        let total = runs.iter().map(RawSlice::len).sum::<usize>();
        if !state.flip_pending[StreamDirection::Out.index()] || total < FLIP_RANGE.end {
            return None;
        }
        state.flip_pending[StreamDirection::Out.index()] = false;
        let mut copy = Vec::with_capacity(total);
        for run in runs.iter() {
            // SAFETY: guaranteed by the caller.
            unsafe { run.append_to(&mut copy, usize::MAX) };
        }
        self.flip(&state, StreamDirection::Out, &mut copy);
        runs.clear();
        runs.push(RawSlice::of(&copy));
        Some(copy)
    }

    /// If a bit is to be flipped in received data, flips it. The `n` octets start with an FPDU.
    ///
    /// # Safety
    /// The ranges must be readable and writable during the call.
    pub(super) unsafe fn flip_in_place(&self, runs: &[RawSlice], n: usize) {
        let mut state = self.state.lock();
        let Some(first) = runs
            .first()
            .filter(|run| run.len().min(n) >= FLIP_RANGE.end)
        else {
            return;
        };
        if !std::mem::take(&mut state.flip_pending[StreamDirection::In.index()]) {
            return;
        }
        let mut head = Vec::with_capacity(FLIP_RANGE.end);
        // SAFETY: guaranteed by the caller.
        unsafe {
            first.append_to(&mut head, FLIP_RANGE.end);
            self.flip(&state, StreamDirection::In, &mut head);
            guarded::copy(head.as_ptr(), first.as_ptr().cast(), head.len());
        }
    }

    /// Flips a bit chosen by the seed.
    fn flip(&self, state: &Progress, direction: StreamDirection, octets: &mut [u8]) {
        let rules = self.plan.rules(Point::Request);
        let rule = rules
            .filter(|(_, rule)| rule.kind == Kind::Crc)
            .map(|r| r.0)
            .next();
        let random = self.plan.draw(
            rule.unwrap_or(0),
            self.ordinal,
            state.octets[direction.index()],
            "bit",
        );
        let offset = FLIP_RANGE.start + (random >> 3) as usize % FLIP_RANGE.len();
        if let Some(octet) = octets.get_mut(offset) {
            *octet ^= 1 << (random & 7);
        }
    }
}

fn shorten(runs: &mut Vec<RawSlice>, mut max: usize) {
    for run in runs.iter_mut() {
        *run = run.first(max);
        max -= run.len();
    }
    runs.retain(|run| !run.is_empty());
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;
    use super::*;
    use crate::objects::hooks::QpFaults;

    fn flipping_injector(text: &str, direction: StreamDirection) -> Box<QpInjector> {
        let faults = QpInjector::new(&Plan::of(&text.parse().unwrap()).unwrap(), 1);
        faults.state.lock().flip_pending[direction.index()] = true;
        faults
    }

    /// Returns the position of the only bit in which two FPDUs differ.
    fn flipped(before: &[u8], after: &[u8]) -> usize {
        let differ: Vec<_> = (0..before.len())
            .filter(|i| before[*i] != after[*i])
            .collect();
        let [offset] = differ[..] else {
            panic!("{differ:?}");
        };
        assert!((before[offset] ^ after[offset]).is_power_of_two());
        offset
    }

    #[test]
    fn flip_in_copy_changes_one_bit() {
        let mut places = std::collections::HashSet::new();
        for seed in 240..270 {
            let faults = flipping_injector(&format!("seed={seed};crc"), StreamDirection::Out);
            let octets: Vec<u8> = (0..40).collect();
            let all = [RawSlice::of(&octets[..10]), RawSlice::of(&octets[10..])];
            // This write is too short for a header, so a bit of the next write is flipped.
            let mut runs = vec![RawSlice::of(&octets[..FLIP_RANGE.end - 1])];
            // SAFETY: the ranges refer to `octets`.
            assert!(unsafe { faults.spoil_copy(&mut runs) }.is_none());
            let mut runs = all.to_vec();
            // SAFETY: the ranges refer to `octets`.
            let copy = unsafe { faults.spoil_copy(&mut runs) }.unwrap();
            assert_eq!(runs, [RawSlice::of(&copy)]);
            places.insert(flipped(&octets, &copy));
            let mut runs = all.to_vec();
            // SAFETY: the ranges refer to `octets`.
            assert!(unsafe { faults.spoil_copy(&mut runs) }.is_none());
            assert_eq!(runs, all);
        }
        // The flipped bits are within the range, and spread over it.
        assert!(places.iter().all(|offset| FLIP_RANGE.contains(offset)));
        assert!(places.len() > FLIP_RANGE.len() / 2, "{places:?}");
    }

    #[test]
    fn flipped_bit_depends_on_rule() {
        let places = |rules: &str| -> Vec<usize> {
            let places = (300..316).map(|seed| {
                let faults =
                    flipping_injector(&format!("seed={seed};{rules}"), StreamDirection::Out);
                let octets = [0; 40];
                let mut runs = vec![RawSlice::of(&octets)];
                // SAFETY: the ranges refer to `octets`.
                let copy = unsafe { faults.spoil_copy(&mut runs) }.unwrap();
                flipped(&octets, &copy)
            });
            places.collect()
        };
        let first = places("crc");
        assert_eq!(places("crc;reset,nth=9"), first);
        let second = places("reset,nth=9;crc");
        assert_eq!(places("close,nth=9;crc"), second);
        assert_ne!(second, first);
    }

    #[test]
    fn flip_in_place_changes_one_bit() {
        let faults = flipping_injector("seed=270;crc,dir=in", StreamDirection::In);
        let before: Vec<u8> = (0..40).collect();
        let mut after = before.clone();
        let runs = [RawSlice::of_mut(&mut after)];
        // SAFETY: the slices refer to `after`, which nothing else uses during the call.
        let flip_pending = |n| unsafe { faults.spoil_received(&runs, n) };
        flip_pending(FLIP_RANGE.end - 1);
        assert!(faults.state.lock().flip_pending[StreamDirection::In.index()]);
        flip_pending(FLIP_RANGE.end);
        assert!(!faults.state.lock().flip_pending[StreamDirection::In.index()]);
        flip_pending(40);
        assert!(FLIP_RANGE.contains(&flipped(&before, &after)));
    }

    #[test]
    fn list_is_shortened_exactly() {
        let (a, b) = ([1u8; 5], [2u8; 7]);
        let lens = |max| {
            let mut runs = vec![RawSlice::of(&a), RawSlice::of(&b)];
            shorten(&mut runs, max);
            runs.iter().map(RawSlice::len).collect::<Vec<_>>()
        };
        assert_eq!(lens(12), [5, 7]);
        assert_eq!(lens(100), [5, 7]);
        assert_eq!(lens(6), [5, 1]);
        assert_eq!(lens(5), [5]);
        assert_eq!(lens(1), [1]);
    }
}
