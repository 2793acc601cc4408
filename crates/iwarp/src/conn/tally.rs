//! Counts of completed operations, on which completion counters are built.

use crate::conn::qp::QueuePair;
use crate::error::Result;
use iwarp_rnic::tally::{Count, Counted};

impl QueuePair {
    /// Counts completed operations from now on, for [`tally`](Self::tally).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn enable_tally(&self) -> Result<()> {
        let mut state = self.inner.state.lock();
        Ok(state.machine.enable_tally()?)
    }

    /// Returns how many operations of a kind have completed since
    /// [`enable_tally`](Self::enable_tally), whether or not their completions were asked for.
    pub fn tally(&self, what: Counted) -> Count {
        self.inner.state.lock().machine.tally(what)
    }
}
