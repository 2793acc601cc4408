//! Queries about a queue pair.

use super::{Events, Fault, QpConfig, QueuePair, State};
use crate::AllocError;
use crate::counters::Counters;
use crate::memory::Accessor;
use crate::tally::{Count, Counted};

impl QueuePair {
    /// Returns the configuration with which the queue pair was created.
    pub const fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Returns the state of the queue pair.
    pub const fn state(&self) -> State {
        self.life.state()
    }

    /// Returns the counters of the queue pair.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Starts counting completed operations.
    ///
    /// # Errors
    /// Fails if there is no memory for the counts.
    pub fn enable_tally(&mut self) -> Result<(), AllocError> {
        self.sq.tally.enable()?;
        self.receives_out_of_line = true;
        Ok(())
    }

    /// Returns how many operations of a kind have completed since
    /// [`enable_tally`](Self::enable_tally).
    pub fn tally(&self, kind: Counted) -> Count {
        self.sq.tally.get(kind)
    }

    /// Returns why the stream ended, if it ended in error.
    pub const fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Returns and clears the events since the last call.
    pub const fn take_events(&mut self) -> Events {
        let events = self.events;
        self.events = Events::empty();
        events
    }

    /// Returns the identity used for memory accesses.
    pub const fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.config.pd,
            qp: self.config.qp_num,
        }
    }

    /// Returns the number of send work requests that have not started.
    pub const fn sends_waiting(&self) -> u32 {
        self.sq.unsent()
    }

    /// Returns the number of incomplete send work requests.
    pub const fn sends_outstanding(&self) -> u32 {
        self.sq.len()
    }

    /// Returns the number of receives in the queue pair's own queue.
    pub const fn receives_posted(&self) -> u32 {
        self.rq.len()
    }

    /// Returns `true` if a Terminate is pending that is not in a plan yet.
    pub const fn owes_terminate(&self) -> bool {
        self.life.has_terminate()
    }

    /// Returns `true` if there is a stream whose peer has closed its direction.
    pub const fn peer_has_closed(&self) -> bool {
        self.life.has_eof()
    }

    /// Returns `true` if the stream is being ended, by either side or by an error.
    pub const fn is_ending(&self) -> bool {
        self.life.is_ending()
    }
}
