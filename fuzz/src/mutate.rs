//! Pseudo-random changes to inputs. The same seed gives the same inputs on every machine.

/// A small generator of pseudo-random numbers (SplitMix64). Not for secrets.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub const fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Values at or near the limits of length and offset fields.
const EDGES: &[u64] = &[
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x1fc,
    0x200,
    0x7fff,
    0x8000,
    0xfffc,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffc,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    u64::MAX - 3,
    u64::MAX,
];

/// Makes a new input: one of the seeds with a few changes. One input in 16, or every one if there are no seeds, is made from random
/// octets instead.
pub fn input(random: &mut Random, seeds: &[Vec<u8>], len_max: usize) -> Vec<u8> {
    let noise = seeds.is_empty() || random.below(16) == 0;
    let mut data = if noise {
        let len = random.below(len_max.min(64) + 1);
        (0..len).map(|_| random.next() as u8).collect()
    } else {
        seeds[random.below(seeds.len())].clone()
    };
    for _ in 0..=random.below(4) {
        change(random, &mut data, seeds);
    }
    data.truncate(len_max);
    data
}

fn change(random: &mut Random, data: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    let len = data.len();
    if len == 0 {
        data.push(random.next() as u8);
        return;
    }
    let at = random.below(len);
    match random.below(8) {
        0 => data[at] ^= 1 << random.below(8),
        1 => data[at] = random.next() as u8,
        2 | 3 => {
            // An edge value in network order, in a field of 1, 2, 4 or 8 octets.
            let octets = EDGES[random.below(EDGES.len())].to_be_bytes();
            let width = (1 << random.below(4)).min(len - at);
            data[at..at + width].copy_from_slice(&octets[8 - width..]);
        }
        4 => data.truncate(at),
        5 => {
            let end = at + random.below(len - at) + 1;
            let part: Vec<u8> = data[at..end].to_vec();
            data.splice(at..at, part);
        }
        6 => {
            let end = at + random.below((len - at).min(16)) + 1;
            data.drain(at..end);
        }
        _ => {
            // The head of this input and the tail of another seed.
            let Some(other) = seeds.get(random.below(seeds.len().max(1))) else {
                return;
            };
            data.truncate(at);
            data.extend_from_slice(other.get(at..).unwrap_or(other));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_inputs() {
        let seeds = vec![vec![1, 2, 3, 4], vec![5; 40]];
        let list = |seed| -> Vec<Vec<u8>> {
            let mut random = Random::new(seed);
            (0..100).map(|_| input(&mut random, &seeds, 64)).collect()
        };
        assert_eq!(list(1), list(1));
        assert_ne!(list(1), list(2));
    }

    #[test]
    fn inputs_are_bounded_and_differ() {
        for seeds in [vec![], vec![vec![]], vec![vec![7; 30]]] {
            let mut random = Random::new(3);
            let inputs: Vec<_> = (0..1000).map(|_| input(&mut random, &seeds, 32)).collect();
            assert!(inputs.iter().all(|input| input.len() <= 32));
            let mut distinct = inputs;
            distinct.sort();
            distinct.dedup();
            assert!(
                distinct.len() > 300,
                "{} distinct inputs of 1000",
                distinct.len()
            );
        }
    }
}
