//! Makes a failing input small, so that a person sees what matters in it.

/// The most runs that are spent on one input.
const RUNS_MAX: u32 = 20_000;

/// Returns a smaller input for which `fails` returns `true`, as it does for `data`: with parts left out, then with octets set to zero.
pub(crate) fn minimise(data: &[u8], mut fails: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut best = data.to_vec();
    let mut left = RUNS_MAX;
    let mut attempt = |candidate: &[u8]| {
        left = left.saturating_sub(1);
        left > 0 && fails(candidate)
    };
    let mut changed = true;
    while changed {
        changed = false;
        let mut size = best.len().next_power_of_two();
        while size > 0 {
            let mut at = 0;
            while at < best.len() {
                let mut candidate = best.clone();
                candidate.drain(at..(at + size).min(best.len()));
                if attempt(&candidate) {
                    best = candidate;
                    changed = true;
                } else {
                    at += size;
                }
            }
            size /= 2;
        }
    }
    for at in 0..best.len() {
        let was = std::mem::take(&mut best[at]);
        if was != 0 && !attempt(&best) {
            best[at] = was;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_matters_is_left() {
        let data: Vec<u8> = (0..200).collect();
        // It fails with a 7 in front of a 99, in at least four octets.
        let small = minimise(&data, |data| {
            let seven = data.iter().position(|octet| *octet == 7);
            let behind = seven.and_then(|at| data.get(at..));
            data.len() >= 4 && behind.is_some_and(|rest| rest.contains(&99))
        });
        assert_eq!(small.len(), 4);
        let rest: Vec<u8> = small.into_iter().filter(|octet| *octet != 0).collect();
        assert_eq!(rest, [7, 99]);
    }

    #[test]
    fn an_input_that_fails_always_becomes_empty() {
        assert_eq!(minimise(&[1; 100], |_| true), []);
        let mut runs = 0;
        let same = minimise(&[1; 3], |_| {
            runs += 1;
            false
        });
        assert_eq!((same, runs < 100), (vec![1; 3], true));
    }
}
