//! What the instrumented code tells while it runs: which edges it took, and which values it compared.
//!
//! LLVM's pass `sancov-module` adds one counter of eight bits to each edge of the control flow and one call to each comparison
//! (<https://clang.llvm.org/docs/SanitizerCoverage.html>). `instrument.sh` passes it to the compiler for the crates under test. This crate
//! is never instrumented: its callbacks would call themselves.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The counters of the program and of its shared objects: address and length of each region.
static REGIONS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// `true` while comparisons are recorded.
static RECORDS: AtomicBool = AtomicBool::new(false);
/// Number of comparisons since the recording began.
static RECORDED: AtomicUsize = AtomicUsize::new(0);
/// The most comparisons that are kept. Later ones take the place of the first ones.
const ROOM: usize = 256;
/// Width in octets and the two values of each comparison.
static PAIRS: [[AtomicU64; 3]; ROOM] = [const { [const { AtomicU64::new(0) }; 3] }; ROOM];

/// Called by the runtime's start-up code, once for each module.
///
/// # Safety
/// The range is that of the module's counters, which live as long as the process.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let region = (start as usize, stop as usize - start as usize);
    if let Ok(mut regions) = REGIONS.lock()
        && region.1 > 0
        && !regions.contains(&region)
    {
        regions.push(region);
    }
}

fn compared(width: u64, a: u64, b: u64) {
    if a != b && RECORDS.load(Ordering::Relaxed) {
        let at = RECORDED.fetch_add(1, Ordering::Relaxed) % ROOM;
        if let Some([w, x, y]) = PAIRS.get(at) {
            w.store(width, Ordering::Relaxed);
            x.store(a, Ordering::Relaxed);
            y.store(b, Ordering::Relaxed);
        }
    }
}

macro_rules! comparisons {
    ($($name:ident $type:ty),*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(a: $type, b: $type) {
            compared(size_of::<$type>() as u64, a.into(), b.into());
        }
    )*};
}

comparisons! {
    __sanitizer_cov_trace_cmp1 u8,
    __sanitizer_cov_trace_cmp2 u16,
    __sanitizer_cov_trace_cmp4 u32,
    __sanitizer_cov_trace_cmp8 u64,
    __sanitizer_cov_trace_const_cmp1 u8,
    __sanitizer_cov_trace_const_cmp2 u16,
    __sanitizer_cov_trace_const_cmp4 u32,
    __sanitizer_cov_trace_const_cmp8 u64
}

/// A value is compared with the cases of a switch.
///
/// # Safety
/// `cases` is what LLVM makes: the number of cases, the bits of the value, and the cases.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_trace_switch(value: u64, cases: *const u64) {
    if !RECORDS.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: as this function's contract says.
    let (count, bits) = unsafe { (*cases, *cases.add(1)) };
    for i in 0..(count as usize).min(32) {
        // SAFETY: there are `count` cases behind the two numbers.
        let case = unsafe { *cases.add(2 + i) };
        compared(bits / 8, value, case);
    }
}

/// Two values that were compared and differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pair {
    /// Octets of each value: 1, 2, 4 or 8.
    pub(crate) width: usize,
    pub(crate) a: u64,
    pub(crate) b: u64,
}

/// Runs `f` and returns what was compared meanwhile, each pair once.
pub(crate) fn record(f: impl FnOnce()) -> Vec<Pair> {
    RECORDED.store(0, Ordering::Relaxed);
    RECORDS.store(true, Ordering::Relaxed);
    f();
    RECORDS.store(false, Ordering::Relaxed);
    let count = RECORDED.load(Ordering::Relaxed).min(ROOM);
    let mut pairs: Vec<Pair> = PAIRS
        .iter()
        .take(count)
        .map(|[width, a, b]| Pair {
            width: width.load(Ordering::Relaxed) as usize,
            a: a.load(Ordering::Relaxed),
            b: b.load(Ordering::Relaxed),
        })
        .filter(|pair| matches!(pair.width, 1 | 2 | 4 | 8))
        .collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs
}

/// The edges that inputs have taken so far, each with the orders of magnitude of how often one input took it.
#[derive(Debug)]
pub(crate) struct Map {
    regions: Vec<(usize, usize)>,
    /// For each counter, one bit for each order of magnitude that was seen.
    seen: Vec<u8>,
    edges: usize,
    features: usize,
}

/// Returns the bit that stands for the order of magnitude of a count, which is not 0.
const fn magnitude(count: u8) -> u8 {
    match count {
        0..=2 => count,
        3 => 4,
        4..=7 => 8,
        8..=15 => 16,
        16..=31 => 32,
        32..=127 => 64,
        _ => 128,
    }
}

impl Map {
    /// Makes a map of all counters of the process, with nothing seen.
    pub(crate) fn new() -> Self {
        let regions = REGIONS.lock().map_or_else(|_| Vec::new(), |r| r.clone());
        let count = regions.iter().map(|r| r.1).sum();
        Self {
            regions,
            seen: vec![0; count],
            edges: 0,
            features: 0,
        }
    }

    /// Returns the number of counters: 0 if the program was built without instrumentation.
    pub(crate) const fn counters(&self) -> usize {
        self.seen.len()
    }

    /// Returns the number of edges that were taken.
    pub(crate) const fn edges(&self) -> usize {
        self.edges
    }

    /// Returns the number of pairs of an edge and an order of magnitude that were seen.
    pub(crate) const fn features(&self) -> usize {
        self.features
    }

    /// Sets all counters to zero.
    pub(crate) fn clear(&self) {
        for &(start, len) in &self.regions {
            // SAFETY: the region lives as long as the process and consists of octets that any value fits. Code that runs in other threads
            // may lose a count, as it does anyway because counting is not atomic.
            unsafe { std::ptr::write_bytes(start as *mut u8, 0, len) };
        }
    }

    /// Takes over what was counted since the last call, and sets the counters to zero. Returns the number of new features.
    pub(crate) fn take(&mut self) -> usize {
        let mut new = 0;
        let mut at = 0;
        for region in 0..self.regions.len() {
            let (start, len) = self.regions[region];
            let mut done = 0;
            while done < len {
                let left = len - done;
                let here = start + done;
                if left >= 8 && here % 8 == 0 {
                    // SAFETY: eight octets of the region, aligned.
                    let word = unsafe { (here as *const u64).read_volatile() };
                    if word != 0 {
                        // SAFETY: as above.
                        unsafe { (here as *mut u64).write_volatile(0) };
                        for (i, count) in word.to_ne_bytes().into_iter().enumerate() {
                            new += self.saw(at + done + i, count);
                        }
                    }
                    done += 8;
                } else {
                    // SAFETY: one octet of the region.
                    let count = unsafe { (here as *const u8).read_volatile() };
                    // SAFETY: as above.
                    unsafe { (here as *mut u8).write_volatile(0) };
                    new += self.saw(at + done, count);
                    done += 1;
                }
            }
            at += len;
        }
        self.features += new;
        new
    }

    fn saw(&mut self, index: usize, count: u8) -> usize {
        let bit = magnitude(count);
        let Some(seen) = self.seen.get_mut(index) else {
            return 0;
        };
        if bit & !*seen == 0 {
            return 0;
        }
        self.edges += usize::from(*seen == 0);
        *seen |= bit;
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_edges_and_new_magnitudes_are_features() {
        let mut counters = vec![0_u8; 37];
        let start = counters.as_mut_ptr();
        let mut map = Map {
            regions: vec![(start as usize, 37)],
            seen: vec![0; 37],
            edges: 0,
            features: 0,
        };
        let count = |at: usize, n: u8| {
            // SAFETY: `at` is in the vector, which is used through this pointer alone.
            unsafe { start.add(at).write_volatile(n) };
        };
        assert_eq!(map.take(), 0);
        count(0, 1);
        count(36, 1);
        assert_eq!(map.take(), 2);
        count(0, 1);
        assert_eq!(map.take(), 0, "seen already");
        count(0, 3);
        assert_eq!(map.take(), 1);
        count(0, 200);
        count(17, 255);
        assert_eq!((map.take(), map.edges(), map.features()), (2, 3, 5));
        count(5, 1);
        map.clear();
        assert_eq!(map.take(), 0, "cleared");
    }

    #[test]
    fn comparisons_are_recorded_while_somebody_asks() {
        __sanitizer_cov_trace_cmp4(1, 2);
        let pairs = record(|| {
            __sanitizer_cov_trace_const_cmp2(0x1234, 7);
            __sanitizer_cov_trace_cmp8(5, 5);
            __sanitizer_cov_trace_const_cmp2(0x1234, 7);
            let cases = [2, 32, 10, 11];
            // SAFETY: two cases of 32 bits.
            unsafe { __sanitizer_cov_trace_switch(11, cases.as_ptr()) };
        });
        let pair = |width, a, b| Pair { width, a, b };
        assert_eq!(pairs, [pair(2, 0x1234, 7), pair(4, 11, 10)]);
    }
}
