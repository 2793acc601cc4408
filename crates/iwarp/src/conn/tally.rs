//! Counts of completed operations, the basis of completion counters.

use crate::conn::qp::QueuePair;
use crate::error::Result;
use iwarp_rnic::tally::{Count, Counted};

impl QueuePair {
    /// Starts counting completed operations, for [`tally`](Self::tally).
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the counts cannot be allocated.
    pub fn enable_tally(&self) -> Result<()> {
        let mut state = self.inner.state.lock();
        Ok(state.machine.enable_tally()?)
    }

    /// Returns how many operations of this kind have completed since
    /// [`enable_tally`](Self::enable_tally), signaled or not.
    pub fn tally(&self, kind: Counted) -> Count {
        self.inner.state.lock().machine.tally(kind)
    }
}
