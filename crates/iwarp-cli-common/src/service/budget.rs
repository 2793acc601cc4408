//! Limits the memory of all clients together. Registered memory and buffers are counted before
//! they are allocated. A client that exceeds the limit is refused; others are not affected.

use crate::error::{Error, Result};
use crate::units;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A client that can work with less memory gets at most the remaining budget divided by this, so
/// that a few clients cannot take everything.
const FAIR_DIVISOR: u64 = 8;

/// The memory that all clients together may use, in bytes.
#[derive(Debug)]
pub struct Budget {
    available: AtomicU64,
}

impl Budget {
    /// Creates a budget of `octets`.
    pub fn new(octets: u64) -> Arc<Self> {
        Arc::new(Self {
            available: AtomicU64::new(octets),
        })
    }

    /// Returns `true` if `octets` is a fair share for a client that could work with less.
    pub fn is_fair(&self, octets: usize) -> bool {
        octets as u64 <= self.available.load(Ordering::Acquire) / FAIR_DIVISOR
    }

    /// Takes `octets` bytes from the budget. Dropping the share returns them.
    ///
    /// # Errors
    /// Fails if fewer bytes are available.
    pub fn take(self: &Arc<Self>, octets: usize) -> Result<Share> {
        let octets = octets as u64;
        self.available
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |available| {
                available.checked_sub(octets)
            })
            .map_err(|available| {
                Error::failed(format!(
                    "no memory for this connection: it needs {}, and {} are left for all clients \
                     (see --memory); try again later",
                    units::size(octets),
                    units::size(available)
                ))
            })?;
        Ok(Share {
            budget: Arc::clone(self),
            octets,
        })
    }
}

/// Memory taken from a budget.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    octets: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget
            .available
            .fetch_add(self.octets, Ordering::AcqRel);
    }
}

/// Allocates a buffer of `len` zeros.
///
/// # Errors
/// Fails if there is not enough memory; the process is not aborted.
pub fn zeros(len: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| {
        Error::failed(format!(
            "no memory for a buffer of {}",
            units::size(len as u64)
        ))
    })?;
    buffer.resize(len, 0);
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_taken_and_returned() {
        let budget = Budget::new(100);
        assert!(budget.is_fair(12) && !budget.is_fair(13));
        let share = budget.take(60).unwrap();
        assert!(
            budget.is_fair(5) && !budget.is_fair(6),
            "an eighth of what is left"
        );
        let e = budget.take(41).unwrap_err().to_string();
        assert!(e.contains("40 B are left"), "{e}");
        let rest = budget.take(40).unwrap();
        drop(share);
        assert!(budget.take(61).is_err());
        assert!(budget.take(60).is_ok());
        drop(rest);
        assert!(budget.take(100).is_ok());
        assert!(zeros(isize::MAX as usize).is_err());
    }
}
