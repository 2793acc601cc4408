//! Checks that several cases use.

use anyhow::{Result, bail};

/// Fails unless exactly `count` lines contain the text.
pub(super) fn expect_lines(output: &str, text: &str, count: usize) -> Result<()> {
    let found = output.lines().filter(|line| line.contains(text)).count();
    if found != count {
        bail!("{found} output lines contain {text:?} instead of {count}");
    }
    Ok(())
}

pub(super) fn expect(output: &str, text: &str) -> Result<()> {
    if !output.contains(text) {
        bail!("no {text:?} in the output");
    }
    Ok(())
}

/// Returns pseudorandom octets. The same seed gives the same octets.
pub(super) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Returns the number of octets sent, from a line that `--stats` printed.
pub(super) fn octets_sent(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("iwarp: process ")?;
    let (_, rest) = rest.split_once(" sent ")?;
    let number = rest.split(' ').next()?;
    number.parse().ok()
}
