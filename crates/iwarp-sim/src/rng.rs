//! The simulator's only source of randomness: xoshiro256++ (Blackman and Vigna), seeded through
//! SplitMix64.
//!
//! A seed gives the same run on every machine.

/// A pseudo-random sequence.
#[derive(Debug, Clone)]
pub struct Rng([u64; 4]);

/// Mixes the bits of `x`: one step of SplitMix64.
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Rng {
    /// Starts the sequence of a seed.
    pub const fn new(seed: u64) -> Self {
        let a = mix(seed);
        let b = mix(a);
        let c = mix(b);
        Self([a, b, c, mix(c)])
    }

    /// Returns 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Returns 32 random bits.
    pub const fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// Returns a number below `n`, or 0 if `n` is 0.
    pub const fn below(&mut self, n: u64) -> u64 {
        if n == 0 {
            return 0;
        }
        // The bias of 2^-32 or less does not matter here.
        ((self.next_u64() as u128 * n as u128) >> 64) as u64
    }

    /// Returns a number from `low` to `high`, both included.
    pub const fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns an index below `n`, or 0 if `n` is 0.
    pub const fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Returns `true` with a probability of `percent` per cent.
    pub const fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns one of the items.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Starts an independent sequence, with a seed from this one.
    pub const fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_gives_same_sequence() {
        let (mut a, mut b, mut c) = (Rng::new(7), Rng::new(7), Rng::new(8));
        let mut differs = false;
        let mut seen = [false; 5];
        for _ in 0..200 {
            let x = a.next_u64();
            assert_eq!(x, b.next_u64());
            differs |= x != c.next_u64();
            let r = a.range(3, 7);
            b.range(3, 7);
            seen[(r - 3) as usize] = true;
        }
        assert!(differs);
        assert_eq!(seen, [true; 5]);
        assert_eq!(a.below(0), 0);
    }
}
