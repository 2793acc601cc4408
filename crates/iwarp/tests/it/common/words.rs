//! Registered memory of 64-bit words, and a blocking poll, for tests of `iwarp::runtime`.

use iwarp::runtime::{CompletionQueue, Context};
use iwarp_rnic::{Access, Cqe, Sge};
use std::time::{Duration, Instant};

/// Registered memory that both ends may access at any time.
pub struct Mem {
    pub words: Box<[u64]>,
    pub stag: u32,
}

impl Mem {
    pub fn new(ctx: &Context, pd: u32, len: usize) -> Self {
        let words = vec![0u64; len.div_ceil(8)].into_boxed_slice();
        let access = Access::all() - Access::ZERO_BASED;
        let addr = words.as_ptr() as u64;
        // SAFETY: the memory is valid until the end of the test, and is read only after
        // completions.
        let stag =
            unsafe { ctx.register(addr, (words.len() * 8) as u64, addr, pd, access) }.unwrap();
        Self { words, stag }
    }

    pub fn addr(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    pub fn sge(&self, len: u32) -> Sge {
        Sge {
            addr: self.addr(),
            len,
            lkey: self.stag,
        }
    }

    pub fn fill(&self, seed: u64) {
        for (i, w) in self.words.iter().enumerate() {
            // SAFETY: the test owns the memory between operations.
            unsafe {
                std::ptr::from_ref(w)
                    .cast_mut()
                    .write_volatile(seed.wrapping_add(i as u64 * 0x9e37_79b9))
            };
        }
    }

    pub fn word(&self, i: usize) -> u64 {
        // SAFETY: the test owns the memory between operations.
        unsafe { std::ptr::from_ref(&self.words[i]).read_volatile() }
    }
}

/// Waits for the next completion.
pub fn poll(cq: &CompletionQueue) -> Cqe {
    let mut out = [Cqe::default()];
    let start = Instant::now();
    while cq.poll(&mut out).unwrap() == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "no completion");
    }
    out[0]
}
