//! Pseudo-random changes to inputs. The same seed gives the same inputs on every machine.

use crate::coverage::Pair;

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

/// Makes a new input from `data`. `other` is another input, whose tail may become that of this one, and `pairs` are values that were
/// compared when `data` was run.
pub(crate) fn mutate(
    random: &mut Random,
    data: &mut Vec<u8>,
    other: &[u8],
    pairs: &[Pair],
    len_max: usize,
) {
    // One to eight changes, few more often than many.
    let most = 1 << random.below(4);
    for _ in 0..=random.below(most) {
        if pairs.is_empty() || random.below(3) > 0 || !follow(random, data, pairs) {
            change(random, data, other);
        }
    }
    data.truncate(len_max);
}

/// Makes one comparison come out differently: where one of the two values is in the input, in either byte order, it stores the other one,
/// or a neighbour of it. Returns `false` if the value is not there.
fn follow(random: &mut Random, data: &mut [u8], pairs: &[Pair]) -> bool {
    let pair = pairs[random.below(pairs.len())];
    let (from, to) = match random.below(2) {
        0 => (pair.a, pair.b),
        _ => (pair.b, pair.a),
    };
    let to = match random.below(4) {
        0 => to.wrapping_add(1),
        1 => to.wrapping_sub(1),
        _ => to,
    };
    // Fields are often extended before they are compared. So the value is also looked for in fewer octets, if it fits.
    let mut width = pair.width;
    while width > 1 && random.below(2) == 0 && from >> (4 * width) == 0 && to >> (4 * width) == 0 {
        width /= 2;
    }
    let big = |value: u64| value.to_be_bytes()[8 - width..].to_vec();
    let (mut from, mut to) = (big(from), big(to));
    if random.below(2) == 0 {
        from.reverse();
        to.reverse();
    }
    let places: Vec<usize> = data
        .windows(width)
        .enumerate()
        .filter_map(|(at, here)| (here == from).then_some(at))
        .take(64)
        .collect();
    let Some(&at) = places.get(random.below(places.len().max(1))) else {
        return false;
    };
    data[at..at + width].copy_from_slice(&to);
    true
}

fn change(random: &mut Random, data: &mut Vec<u8>, other: &[u8]) {
    let len = data.len();
    if len == 0 {
        data.push(random.next() as u8);
        return;
    }
    let at = random.below(len);
    match random.below(11) {
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
            let end = at + random.below((len - at).min(256)) + 1;
            let part: Vec<u8> = data[at..end].to_vec();
            data.splice(at..at, part);
        }
        6 => {
            let end = at + random.below((len - at).min(16)) + 1;
            data.drain(at..end);
        }
        7 => {
            // A part of this input over another part of it.
            let from = random.below(len);
            let count = random.below((len - at.max(from)).min(32)) + 1;
            data.copy_within(from..from + count, at);
        }
        8 => {
            let count = random.below(8) + 1;
            let new: Vec<u8> = (0..count).map(|_| random.next() as u8).collect();
            data.splice(at..at, new);
        }
        9 => {
            data[at] = data[at]
                .wrapping_add(random.below(33) as u8)
                .wrapping_sub(16)
        }
        _ => {
            // The head of this input and the tail of the other one.
            let from = match random.below(2) {
                0 => at.min(other.len()),
                _ => random.below(other.len() + 1),
            };
            data.truncate(at);
            data.extend_from_slice(&other[from..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_inputs() {
        let list = |seed| -> Vec<Vec<u8>> {
            let mut random = Random::new(seed);
            let mut data = vec![1, 2, 3, 4];
            let mut all = Vec::new();
            for _ in 0..100 {
                mutate(&mut random, &mut data, &[5; 40], &[], 64);
                all.push(data.clone());
            }
            all
        };
        assert_eq!(list(1), list(1));
        assert_ne!(list(1), list(2));
    }

    #[test]
    fn inputs_are_bounded_and_differ() {
        for seed in [vec![], vec![7; 30]] {
            let mut random = Random::new(3);
            let mut distinct = Vec::new();
            for _ in 0..1000 {
                let mut data = seed.clone();
                mutate(&mut random, &mut data, &[8; 100], &[], 32);
                assert!(data.len() <= 32);
                distinct.push(data);
            }
            distinct.sort();
            distinct.dedup();
            assert!(distinct.len() > 200, "{} of 1000", distinct.len());
        }
    }

    #[test]
    fn a_compared_value_is_found_in_both_byte_orders_and_in_fewer_octets() {
        let pairs = [Pair {
            width: 4,
            a: 0x0102,
            b: 0x0a0b,
        }];
        for (field, wanted) in [
            (&[9, 0, 0, 1, 2, 9][..], &[9, 0, 0, 10, 11, 9][..]),
            (&[9, 2, 1, 0, 0, 9], &[9, 11, 10, 0, 0, 9]),
            (&[9, 1, 2, 9], &[9, 10, 11, 9]),
        ] {
            let mut random = Random::new(1);
            let found = (0..200).any(|_| {
                let mut data = field.to_vec();
                follow(&mut random, &mut data, &pairs) && data == wanted
            });
            assert!(found, "{field:?}");
        }
        let mut random = Random::new(1);
        assert!((0..50).all(|_| !follow(&mut random, &mut [9; 8], &pairs)));
    }
}
