//! What a queue pair tells about itself.

use super::{Events, Fault, QpConfig, QueuePair, State};
use crate::AllocError;
use crate::counters::Counters;
use crate::memory::Accessor;
use crate::tally::{Count, Counted};

/// Look.
impl QueuePair {
    /// Returns the sizes it was created with.
    pub const fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Returns its state.
    pub const fn state(&self) -> State {
        self.life.state()
    }

    /// Returns its counters.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counts completed operations from now on.
    ///
    /// # Errors
    /// There is no memory for the counts.
    pub fn enable_tally(&mut self) -> Result<(), AllocError> {
        self.sq.tally.enable()?;
        self.receives_apart = true;
        Ok(())
    }

    /// Returns how many operations of a kind have completed since
    /// [`enable_tally`](Self::enable_tally).
    pub fn tally(&self, what: Counted) -> Count {
        self.sq.tally.get(what)
    }

    /// Returns why the stream ended, if it ended in error.
    pub const fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Takes the events since the last call.
    pub const fn take_events(&mut self) -> Events {
        let events = self.events;
        self.events = Events::empty();
        events
    }

    /// The identity with which it accesses memory.
    pub const fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.config.pd,
            qp: self.config.qp_num,
        }
    }

    /// Returns how many send work requests have no octet in a plan yet.
    pub const fn sends_waiting(&self) -> u32 {
        self.sq.unsent()
    }

    /// Returns how many send work requests have not completed.
    pub const fn sends_outstanding(&self) -> u32 {
        self.sq.len()
    }

    /// Returns how many receives wait in the queue pair's own queue.
    pub const fn receives_posted(&self) -> u32 {
        self.rq.len()
    }

    /// Returns `true` if a Terminate is to be sent that is in no plan yet.
    pub const fn owes_terminate(&self) -> bool {
        self.life.has_terminate()
    }

    /// Returns `true` if the peer has closed its direction of a stream that is not gone.
    pub const fn peer_has_closed(&self) -> bool {
        self.life.has_eof()
    }

    /// Returns `true` if the stream is being ended, by either side or by an error, and is not gone.
    pub const fn is_ending(&self) -> bool {
        self.life.is_ending()
    }
}
