//! The states of a queue pair and the transitions between them (`ibv_modify_qp(3)`).
//!
//! ```text
//!  RESET ──► INIT ──► RTR ──► RTS ◄──► SQD
//!    ▲         │        │      │        │
//!    │         ╰────────┴──┬───┴────────╯
//!    ╰───────────────── ERR ◄── stream ends, error, modify
//! ```
//! An iWARP queue pair enters RTS when its stream is handed over ([`QueuePair::start`]). The changes INIT → RTR → RTS by the
//! program are accepted, too, because some programs make them although they use the connection manager. SQE exists for
//! datagrams only and is never entered.

use super::{Direction, Events, Host, QueuePair, StreamConfig, StreamWish};
use crate::{Cqe, WcOpcode, WcStatus};

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// New. Takes no work requests.
    Reset,
    /// Takes receives.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue draining or drained: requests are queued and not started.
    Sqd,
    /// Send queue in error. Never entered by a connected queue pair.
    Sqe,
    /// Every work request is flushed.
    Error,
}

impl State {
    /// Returns `true` if a queue pair may be modified from this state to `to`.
    pub const fn may_become(self, to: Self) -> bool {
        use State::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
        matches!(
            (self, to),
            (_, Reset | Error)
                | (Reset | Init, Init)
                | (Init, Rtr | Rts)
                | (Rtr | Rts | Sqd | Sqe, Rts)
                | (Rts | Sqd, Sqd)
        )
    }
}

/// The state change is not one the verbs allow (EINVAL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidTransition;

impl core::fmt::Display for InvalidTransition {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the verbs do not allow this change of state")
    }
}

impl core::error::Error for InvalidTransition {}

/// The phase of closing a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Closing {
    /// Not closing.
    #[default]
    No,
    /// Send what is queued, then shut down.
    Draining,
    /// The sending side may be shut down now.
    Drained,
    /// The sending side is shut down.
    ShutDown,
    /// The stream must be taken away, and ends without the queue pair.
    Leave,
    /// It must be reset.
    Abort,
    /// The stream is gone.
    Gone,
}

impl QueuePair {
    /// Changes the state as `ibv_modify_qp` does. A change to ERR flushes everything; a change to RESET drops everything. Both
    /// ask for the end of the stream ([`StreamWish::Leave`]). If the stream is ending already, ERR leaves it alone.
    pub fn modify<H: Host>(&mut self, to: State, host: &mut H) -> Result<(), InvalidTransition> {
        if !self.state.may_become(to) {
            return Err(InvalidTransition);
        }
        match to {
            State::Error => {
                // In the error state the stream is ending already, perhaps with a Terminate that is still to be sent.
                if self.state != State::Error {
                    self.leave(host);
                }
            }
            State::Reset => {
                self.leave_stream();
                self.sq.clear();
                self.acknowledge.reset();
                self.rq.clear();
                self.responses.clear();
                self.rx.reset();
                self.tx.job = None;
                self.tx.terminate.cancel();
                self.state = State::Reset;
                self.events = Events::empty();
                self.fault = None;
                if self.tx.closing == Closing::Gone {
                    self.tx = super::tx::Tx::default();
                }
            }
            _ => {
                self.state = to;
                self.note_drained();
            }
        }
        Ok(())
    }

    /// Hands over a stream after MPA start-up; the queue pair becomes RTS.
    ///
    /// This is also allowed in RESET and INIT: the connection manager does the steps in between.
    pub fn start(&mut self, stream: StreamConfig) -> Result<(), InvalidTransition> {
        if matches!(self.state, State::Error | State::Sqe) || self.tx.stream.is_some() {
            return Err(InvalidTransition);
        }
        self.responses.set_limit(stream.ird);
        //= rfc5040 section 6.1
        //# The RDMAP layer MUST provide the maximum number of outstanding, outbound
        //# RDMA Read Requests for the RDMAP Stream direction that were negotiated
        //# between the ULP and the Local Peer's RDMAP layer.
        self.sq.set_ord(stream.ord.min(self.config.max_ord));
        //= rfc5040 section 6.1
        //# Once in RDMA enabled mode, an implementation MUST send only RDMA
        //# Messages across the transport Stream until the RDMAP Stream is torn
        //# down.
        self.tx.start(&stream);
        self.acknowledge.reset();
        self.rx.start(&stream);
        if !self.keep_state {
            self.state = State::Rts;
        }
        Ok(())
    }

    /// Tells that the program moves the queue pair to RTR and RTS itself. The stream may attach before, between or after;
    /// attaching does not change the state. A queue pair in INIT becomes RTR.
    pub fn await_stream(&mut self) -> Result<(), InvalidTransition> {
        match self.state {
            State::Init => self.state = State::Rtr,
            State::Rtr | State::Rts => {}
            _ => return Err(InvalidTransition),
        }
        self.keep_state = true;
        Ok(())
    }

    /// Returns `true` if a stream was handed over and is not gone.
    pub fn has_stream(&self) -> bool {
        self.tx.stream.is_some() && self.tx.closing < Closing::Gone
    }

    //= rfc5041 section 6.2
    //# DDP MUST NOT independently initiate Stream Teardown.
    //= rfc5041 section 6.2.1
    //# If the Local Peer ULP indicates graceful teardown, the DDP layer on the
    //# Local Peer SHOULD ensure that all ULP data would be transferred before
    //# the underlying LLP Stream and Connection are torn down, and any further
    //# data transfer requests by the Local Peer ULP MUST return an error.
    /// Begins the graceful end (`rdma_disconnect(3)`): what is queued is sent, then the sending side is
    /// shut down and the remaining requests are flushed.
    pub fn close<H: Host>(&mut self, host: &mut H) {
        if self.tx.stream.is_none() {
            self.enter_error(host);
            return;
        }
        if self.tx.closing == Closing::No {
            self.tx.closing = Closing::Draining;
        }
        self.note_drained();
    }

    /// Gives the stream up and flushes everything ([`StreamWish::Leave`]).
    pub fn leave<H: Host>(&mut self, host: &mut H) {
        self.leave_stream();
        self.enter_error(host);
    }

    /// Gives the stream up, as it is. What TCP has taken is not taken back, because it may have completed.
    fn leave_stream(&mut self) {
        if self.tx.stream.is_some() && self.tx.closing < Closing::Leave {
            self.tx.closing = Closing::Leave;
        }
    }

    /// Ends the stream with a reset and flushes everything.
    pub fn abort<H: Host>(&mut self, host: &mut H) {
        if self.tx.stream.is_some() && self.tx.closing < Closing::Abort {
            self.tx.closing = Closing::Abort;
        }
        self.enter_error(host);
    }

    /// Returns what should be done with the stream. `ShutdownWrite` is returned again until
    /// [`shutdown_done`](Self::shutdown_done) is called, `Leave` and `Abort` until [`stream_gone`](Self::stream_gone) is.
    pub const fn stream_wish(&self) -> StreamWish {
        match self.tx.closing {
            Closing::Drained => StreamWish::ShutdownWrite,
            Closing::Leave => StreamWish::Leave {
                cut: self.tx.unwritten,
            },
            Closing::Abort => StreamWish::Abort,
            _ => StreamWish::Keep,
        }
    }

    /// Notes that the sending side was shut down. Everything that still waits is flushed.
    pub fn shutdown_done<H: Host>(&mut self, host: &mut H) {
        if self.tx.closing == Closing::Drained {
            self.tx.closing = Closing::ShutDown;
            if self.state == State::Rts {
                self.end_acknowledging(host);
            }
        }
        self.enter_error(host);
    }

    /// Returns `true` if the sending side was shut down ([`shutdown_done`](Self::shutdown_done)): TCP has everything.
    pub fn is_shut_down(&self) -> bool {
        self.tx.closing == Closing::ShutDown
    }

    /// Notes that the stream is closed.
    pub fn stream_gone<H: Host>(&mut self, host: &mut H) {
        self.tx.closing = Closing::Gone;
        self.tx.unwritten = false;
        if self.state == State::Reset {
            // The queue pair is ready for another stream.
            self.tx = super::tx::Tx::default();
        }
        self.enter_error(host);
    }

    /// Checks whether nothing is left to send, for SQD and for a graceful end.
    pub(super) fn note_drained(&mut self) {
        let idle = self.tx.job.is_none() && !self.tx.unwritten;
        if self.state == State::Sqd
            && idle
            && self.sq.nothing_outstanding()
            && !self.tx.drained_told
        {
            self.tx.drained_told = true;
            self.events |= Events::SQ_DRAINED;
        }
        if self.state != State::Sqd {
            self.tx.drained_told = false;
        }
        // A Terminate that waits is sent first. Requests that wait for the peer are given up.
        let queue_done =
            self.sq.nothing_unsent() || self.state != State::Rts || !self.tx.may_send();
        if self.tx.closing == Closing::Draining
            && idle
            && queue_done
            && !self.tx.terminate.is_pending()
        {
            self.tx.closing = Closing::Drained;
        }
    }

    //= rfc5040 section 5.4
    //# After sending a Terminate Message on an RDMAP Stream, the Local Peer
    //# MUST NOT send any more Messages on that specific RDMAP Stream.
    //= rfc5041 section 6.2.2
    //# If the LLP indicates to the ULP that a fatal error has occurred, the DDP
    //# layer SHOULD report the error to the ULP (see Section 7.2, DDP Error
    //# Numbers) and complete all outstanding ULP requests with an error.
    //= rfc5044 section 8
    //# Once MPA delivers an error of any type, it MUST NOT pass or deliver any
    //# additional FPDUs on that half connection.
    /// Enters the error state: every request that is outstanding completes as flushed, in order.
    pub(super) fn enter_error<H: Host>(&mut self, host: &mut H) {
        if self.state == State::Reset {
            return;
        }
        self.state = State::Error;
        self.tx.job = None;
        self.responses.clear();
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        self.sq.flush(|cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
        self.flush_receives(host);
        self.note_drained();
    }

    pub(super) fn flush_receives<H: Host>(&mut self, host: &mut H) {
        if let Some(wr_id) = self.rx.abandon_receive() {
            self.complete_receive(wr_id, WcStatus::Flushed, host);
        }
        while let Some(wr_id) = self.rq.flush_one() {
            self.complete_receive(wr_id, WcStatus::Flushed, host);
        }
        if self.config.shared_receive && !self.rx.last_wqe_told {
            self.rx.last_wqe_told = true;
            self.events |= Events::LAST_WQE;
        }
    }

    pub(super) fn complete_receive<H: Host>(&mut self, wr_id: u64, status: WcStatus, host: &mut H) {
        self.counters.completions = self.counters.completions.wrapping_add(1);
        let cqe = Cqe {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qp_num: self.config.qp_num,
            ..Cqe::default()
        };
        host.complete(Direction::Recv, cqe);
    }
}
