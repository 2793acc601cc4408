//! What the compared programs share: roles, work, the clock, and a count of allocations.
//!
//! A program runs its server on one processor. When the server listens, the program starts itself
//! again as the client on another processor. The client measures, and the server's process prints
//! the result as JSON.

mod count;
mod job;

pub use job::{Job, Outcome, Role, Work, role};

/// Returns the sum of all octets. Receivers of bulk data call it, so that each reads every octet.
pub fn sum(octets: &[u8]) -> u64 {
    octets.iter().map(|&octet| u64::from(octet)).sum()
}
