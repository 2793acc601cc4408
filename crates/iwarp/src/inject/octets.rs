//! Faults of the octets of a stream: counted, held back, and with a bit flipped.
//!
//! Invariant of the `unsafe`: the callers own the ranges they pass for the length of the call, as for the system call next to it.

use super::plan::Taken;
use super::qp::{Progress, QpInjector};
use crate::fault::{Kind, Point, Rule};
use crate::objects::hooks::Way;
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use crate::sys::raw_slice::RawSlice;

/// The octets of an FPDU among which the one with the flipped bit is: behind the length, so that the end of the FPDU is still found, and within the
/// shortest header.
const SPOILT: std::ops::Range<usize> = 6..14;

/// In how many steps a slow connection carries the octets of a second, and how small these may be.
const STEPS_PER_SECOND: u64 = 50;
const STEP_MIN: u64 = 64;

impl QpInjector {
    /// Octets are about to be sent, or to be read. Shortens the list to what may pass before a fault is due.
    pub(super) fn limit_octets(&self, way: Way, runs: &mut Vec<RawSlice>) {
        let state = self.state.lock();
        let passed = state.octets[way.index()];
        let marks = self.marks(&state, way).map(|(_, at)| at);
        let to_mark = marks.min().map(|at| at.saturating_sub(passed).max(1));
        // A slow connection moves in small steps, not in bursts.
        let step = state.rate[way.index()].map(|rate| (rate / STEPS_PER_SECOND).max(STEP_MIN));
        if let Some(room) = to_mark.into_iter().chain(step).min() {
            shorten(runs, usize::try_from(room).unwrap_or(usize::MAX));
        }
    }

    /// The marks that the octets of the connection have not reached in this direction, each with its rule.
    fn marks(&self, state: &Progress, way: Way) -> impl Iterator<Item = (usize, u64)> {
        let concerns = |i: usize, rule: &Rule| {
            let counts = match rule.directions.out {
                true => Way::Out,
                false => Way::In,
            };
            let reached = state.reached.get(i).copied().unwrap_or(true);
            counts == way && !reached && self.concerns(rule, state.peer, None)
        };
        let rules = self.plan.rules(Point::Request);
        rules
            .filter(move |(i, rule)| concerns(*i, rule))
            .filter_map(|(i, _)| Some((i, self.plan.threshold(i, self.ordinal)?)))
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// Octets have passed.
    pub(super) fn count_octets(&self, way: Way, n: usize) {
        let mut state = self.state.lock();
        let passed = state.octets[way.index()].saturating_add(n as u64);
        state.octets[way.index()] = passed;
        let due: Vec<(usize, u64)> = self
            .marks(&state, way)
            .filter(|(_, at)| *at <= passed)
            .collect();
        for (i, _) in due {
            if let Some(reached) = state.reached.get_mut(i) {
                *reached = true;
            }
            let Some(rule) = self.plan.spec.rules.get(i) else {
                continue;
            };
            if now_ns() < self.plan.earliest(i, self.ordinal) || !self.plan.may(i) {
                continue;
            }
            let taken = Taken {
                rule: i,
                kind: rule.kind,
                n: 0,
            };
            self.plan_action(&mut state, &taken, None, Some(passed));
        }
        if let Some(rate) = state.rate[way.index()] {
            let pause = (n as u64).saturating_mul(1_000_000_000) / rate;
            let held = &mut state.held_until[way.index()];
            *held = super::act::until(pause).max(*held);
            drop(state);
            self.wake_after(pause);
        }
    }

    /// If a bit is to be flipped in what is sent, copies it and flips one. `runs` then refers to the copy, which the caller keeps. The octets
    /// begin with an FPDU.
    ///
    /// # Safety
    /// The ranges are readable for the length of the call.
    pub(super) unsafe fn flip_in_copy(&self, runs: &mut Vec<RawSlice>) -> Option<Vec<u8>> {
        let mut state = self.state.lock();
        let total = runs.iter().map(RawSlice::len).sum::<usize>();
        if !state.spoil[Way::Out.index()] || total < SPOILT.end {
            return None;
        }
        state.spoil[Way::Out.index()] = false;
        let mut copy = Vec::with_capacity(total);
        for run in runs.iter() {
            // SAFETY: the caller's promise.
            unsafe { run.append_to(&mut copy, usize::MAX) };
        }
        self.flip(&state, Way::Out, &mut copy);
        runs.clear();
        runs.push(RawSlice::of(&copy));
        Some(copy)
    }

    /// If a bit is to be flipped in what was received, flips one. The `n` octets begin with an FPDU.
    ///
    /// # Safety
    /// The ranges are readable and writable for the length of the call.
    pub(super) unsafe fn flip_in_place(&self, runs: &[RawSlice], n: usize) {
        let mut state = self.state.lock();
        let Some(first) = runs.first().filter(|run| run.len().min(n) >= SPOILT.end) else {
            return;
        };
        if !std::mem::take(&mut state.spoil[Way::In.index()]) {
            return;
        }
        let mut head = Vec::with_capacity(SPOILT.end);
        // SAFETY: the caller's promise.
        unsafe {
            first.append_to(&mut head, SPOILT.end);
            self.flip(&state, Way::In, &mut head);
            guarded::copy(head.as_ptr(), first.as_ptr().cast(), head.len());
        }
    }

    /// Flips a bit that the seed chooses.
    fn flip(&self, state: &Progress, way: Way, octets: &mut [u8]) {
        let rules = self.plan.rules(Point::Request);
        let rule = rules
            .filter(|(_, rule)| rule.kind == Kind::Crc)
            .map(|r| r.0)
            .next();
        let random = self.plan.draw(
            rule.unwrap_or(0),
            self.ordinal,
            state.octets[way.index()],
            "bit",
        );
        let at = SPOILT.start + (random >> 3) as usize % SPOILT.len();
        if let Some(octet) = octets.get_mut(at) {
            *octet ^= 1 << (random & 7);
        }
    }
}

/// Shortens a list to `most` octets.
fn shorten(runs: &mut Vec<RawSlice>, mut most: usize) {
    for run in runs.iter_mut() {
        *run = run.first(most);
        most -= run.len();
    }
    runs.retain(|run| !run.is_empty());
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;
    use super::*;
    use crate::objects::hooks::QpFaults;

    fn spoiling(text: &str, way: Way) -> Box<QpInjector> {
        let faults = QpInjector::new(&Plan::of(&text.parse().unwrap()).unwrap(), 1);
        faults.state.lock().spoil[way.index()] = true;
        faults
    }

    /// The place of the only bit in which two FPDUs differ.
    fn flipped(before: &[u8], after: &[u8]) -> usize {
        let differ: Vec<_> = (0..before.len())
            .filter(|i| before[*i] != after[*i])
            .collect();
        let [at] = differ[..] else {
            panic!("{differ:?}");
        };
        assert!((before[at] ^ after[at]).is_power_of_two());
        at
    }

    #[test]
    fn one_bit_of_a_copy_is_flipped_once() {
        let mut places = std::collections::HashSet::new();
        for seed in 240..270 {
            let faults = spoiling(&format!("seed={seed};crc"), Way::Out);
            let octets: Vec<u8> = (0..40).collect();
            let all = [RawSlice::of(&octets[..10]), RawSlice::of(&octets[10..])];
            // Too short for a header: the next write is met.
            let mut runs = vec![RawSlice::of(&octets[..SPOILT.end - 1])];
            // SAFETY: the octets are there.
            assert!(unsafe { faults.spoil_copy(&mut runs) }.is_none());
            let mut runs = all.to_vec();
            // SAFETY: as above.
            let copy = unsafe { faults.spoil_copy(&mut runs) }.unwrap();
            assert_eq!(runs, [RawSlice::of(&copy)]);
            places.insert(flipped(&octets, &copy));
            let mut runs = all.to_vec();
            // SAFETY: as above.
            assert!(unsafe { faults.spoil_copy(&mut runs) }.is_none());
            assert_eq!(runs, all);
        }
        // Whatever is in the length is left alone, and all of the header is met in the end.
        assert!(places.iter().all(|at| SPOILT.contains(at)));
        assert!(places.len() > SPOILT.len() / 2, "{places:?}");
    }

    /// Which bit it is depends on the number of the rule that asks for it, and not on the rules behind that one.
    #[test]
    fn the_bit_is_chosen_for_the_rule_that_asks_for_it() {
        let places = |rules: &str| -> Vec<usize> {
            let places = (300..316).map(|seed| {
                let faults = spoiling(&format!("seed={seed};{rules}"), Way::Out);
                let octets = [0; 40];
                let mut runs = vec![RawSlice::of(&octets)];
                // SAFETY: the octets are there.
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
    fn one_bit_of_what_was_received_is_flipped_once() {
        let faults = spoiling("seed=270;crc,dir=in", Way::In);
        let before: Vec<u8> = (0..40).collect();
        let mut after = before.clone();
        let runs = [RawSlice::of_mut(&mut after)];
        // SAFETY: the octets are there, and nobody else uses them.
        let spoil = |n| unsafe { faults.spoil_received(&runs, n) };
        spoil(SPOILT.end - 1);
        assert!(faults.state.lock().spoil[Way::In.index()]);
        spoil(SPOILT.end);
        assert!(!faults.state.lock().spoil[Way::In.index()]);
        spoil(40);
        assert!(SPOILT.contains(&flipped(&before, &after)));
    }

    #[test]
    fn a_list_is_shortened_to_the_octet() {
        let (a, b) = ([1u8; 5], [2u8; 7]);
        let lens = |most| {
            let mut runs = vec![RawSlice::of(&a), RawSlice::of(&b)];
            shorten(&mut runs, most);
            runs.iter().map(RawSlice::len).collect::<Vec<_>>()
        };
        assert_eq!(lens(12), [5, 7]);
        assert_eq!(lens(100), [5, 7]);
        assert_eq!(lens(6), [5, 1]);
        assert_eq!(lens(5), [5]);
        assert_eq!(lens(1), [1]);
    }
}
