//! The states of a queue pair and the transitions between them (`ibv_modify_qp(3)`).
//!
//! ```text
//!  RESET ──► INIT ──► RTR ──► RTS ◄──► SQD
//!    ▲         │        │      │        │
//!    │         ╰────────┴──┬───┴────────╯
//!    ╰───────────────── ERR ◄── stream ends, error, modify
//! ```
//! An iWARP queue pair enters RTS when its stream is attached ([`QueuePair::start`]). The changes
//! INIT → RTR → RTS by the program are accepted as well, because some programs make them although
//! they use the connection manager. SQE exists for datagrams only and is never entered.

use super::farewell::Parting;
use super::life::Life;
use super::{Direction, Events, Host, QueuePair, StreamConfig, StreamWish};
use crate::tally::Counted;
use crate::{Cqe, Time, WcOpcode, WcStatus, Work};

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// New. Accepts no work requests.
    Reset,
    /// Accepts receives.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue draining or drained: requests are queued and not started.
    Sqd,
    /// Send queue in error. Never entered by a connected queue pair.
    Sqe,
    /// All work requests are flushed.
    Error,
}

impl State {
    /// Returns `true` if the verbs allow a change from this state to `to`.
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

/// The verbs do not allow this change of state (EINVAL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidTransition;

impl core::fmt::Display for InvalidTransition {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the verbs do not allow this change of state")
    }
}

impl core::error::Error for InvalidTransition {}

impl QueuePair {
    /// Changes the state like `ibv_modify_qp`. A change to ERR flushes everything; a change to
    /// RESET drops everything. Both request the end of the stream ([`StreamWish::Leave`]). A stream
    /// that is already ending is not affected by ERR.
    pub fn modify<H: Host>(&mut self, to: State, host: &mut H) -> Result<(), InvalidTransition> {
        if !self.state().may_become(to) {
            return Err(InvalidTransition);
        }
        self.step_and_flush(|life| life.modify(to), host);
        if to == State::Reset {
            self.sq.reset();
            self.rq.clear();
            self.responses.clear();
            self.acknowledge.reset();
            self.xrc.start();
            self.rx.reset();
            if self.config.match_tags {
                self.forget_reads(host);
            }
            self.tx.job = None;
            self.events = Events::empty();
            self.fault = None;
        }
        self.note_drained();
        Ok(())
    }

    /// Attaches a stream after MPA start-up; the queue pair enters RTS. The time limits of the
    /// stream count from `now`.
    ///
    /// This is also allowed in RESET and INIT: the connection manager performs the steps in
    /// between. It is refused in ERR, and until an earlier stream is gone
    /// ([`stream_gone`](Self::stream_gone)).
    pub fn start(&mut self, stream: StreamConfig, now: Time) -> Result<(), InvalidTransition> {
        if !self.life.start(&stream, now) {
            return Err(InvalidTransition);
        }
        self.responses
            .set_limit(stream.ird.min(self.config.max_ird));
        //= rfc5040 section 6.1
        //# The RDMAP layer MUST provide the maximum number of outstanding, outbound
        //# RDMA Read Requests for the RDMAP Stream direction that were negotiated
        //# between the ULP and the Local Peer's RDMAP layer.
        self.sq.set_ord(stream.ord.min(self.config.max_ord));
        //= rfc5040 section 6.1
        //# Once in RDMA enabled mode, an implementation MUST send only RDMA
        //# Messages across the transport Stream until the RDMAP Stream is torn
        //# down.
        self.times = stream.times;
        self.tx.start(&stream);
        self.rx.start(&stream);
        self.acknowledge.start();
        self.xrc.start();
        Ok(())
    }

    /// Records that the program itself moves the queue pair to RTR and RTS. The stream may attach
    /// before, between or after these steps, and does not change the state. A queue pair in INIT
    /// enters RTR.
    pub fn await_stream(&mut self) -> Result<(), InvalidTransition> {
        match self.life.await_stream() {
            true => Ok(()),
            false => Err(InvalidTransition),
        }
    }

    /// Returns `true` if a stream is attached and not gone.
    pub const fn has_stream(&self) -> bool {
        self.life.has_stream()
    }

    //= rfc5041 section 6.2
    //# DDP MUST NOT independently initiate Stream Teardown.
    //= rfc5041 section 6.2.1
    //# If the Local Peer ULP indicates graceful teardown, the DDP layer on the
    //# Local Peer SHOULD ensure that all ULP data would be transferred before
    //# the underlying LLP Stream and Connection are torn down, and any further
    //# data transfer requests by the Local Peer ULP MUST return an error.
    /// Starts the graceful end (`rdma_disconnect(3)`): queued requests are sent, and the Reads and
    /// atomics received so far are answered. Then the sending direction is shut down and the
    /// remaining requests are flushed.
    pub fn close<H: Host>(&mut self, host: &mut H) {
        if self.life.is_open() {
            // Later requests are not answered: a peer that continues to send them must not prevent
            // the end.
            self.tx.answer_until = Some(self.responses.mark());
        }
        self.step_and_flush(Life::close, host);
        self.note_drained();
    }

    /// Gives up the stream ([`StreamWish::Leave`]) and flushes everything.
    pub fn leave<H: Host>(&mut self, host: &mut H) {
        self.step_and_flush(Life::abandon, host);
    }

    /// Ends the stream with a reset and flushes everything.
    pub fn abort<H: Host>(&mut self, host: &mut H) {
        self.step_and_flush(Life::abort, host);
    }

    /// Returns what should be done with the stream. `ShutdownWrite` is returned until
    /// [`shutdown_done`](Self::shutdown_done) is called, `Leave` and `Abort` until
    /// [`stream_gone`](Self::stream_gone) is called.
    pub const fn stream_wish(&self) -> StreamWish {
        self.life.wish()
    }

    /// Records that the sending direction was shut down, as requested by
    /// [`stream_wish`](Self::stream_wish). All pending requests are flushed.
    pub fn shutdown_done<H: Host>(&mut self, host: &mut H) {
        self.step_and_flush(Life::shutdown_done, host);
    }

    /// Returns `true` if the sending direction was shut down
    /// ([`shutdown_done`](Self::shutdown_done)), after everything was written to the socket.
    pub const fn is_shut_down(&self) -> bool {
        self.life.is_shut_down()
    }

    /// Records that the stream is closed. The end of a stream that was given up does not change the
    /// state.
    pub fn stream_gone<H: Host>(&mut self, host: &mut H) {
        self.step_and_flush(Life::gone, host);
    }

    /// Checks whether nothing is left to send, for SQD and for a graceful end.
    #[inline]
    pub(super) fn note_drained(&mut self) {
        if self.life.acts_when_drained() && self.tx.job.is_none() {
            self.check_drained();
        }
    }

    #[cold]
    fn check_drained(&mut self) {
        if self.sq.nothing_outstanding() && self.life.idle() {
            self.events |= Events::SQ_DRAINED;
        }
        if self.life.is_closing() && self.queue_is_done() {
            self.life.drained();
        }
    }

    /// Returns `true` if no requests, responses or farewell delay a graceful end. Requests that
    /// wait for the peer's first FPDU are given up.
    fn queue_is_done(&self) -> bool {
        let requests = self.sq.nothing_unsent()
            || !self.life.starts_requests()
            || self.life.awaits_first_fpdu() && !self.has_startable();
        let answers = self.tx.answer_until;
        let farewell = matches!(self.acknowledge.parting, Parting::Due { .. });
        requests && !farewell && answers.is_none_or(|mark| self.responses.has_served(mark))
    }

    //= rfc5041 section 6.2.2
    //# If the LLP indicates to the ULP that a fatal error has occurred, the DDP
    //# layer SHOULD report the error to the ULP (see Section 7.2, DDP Error
    //# Numbers) and complete all outstanding ULP requests with an error.
    //= rfc5044 section 8
    //# Once MPA delivers an error of any type, it MUST NOT pass or deliver any
    //# additional FPDUs on that half connection.
    /// Changes the life by `step`. If the queue pair is then in ERR, all outstanding requests are
    /// flushed in order; those beyond the budget of a call are due
    /// ([`completions_due`](Self::completions_due)).
    pub(super) fn step_and_flush<H: Host>(&mut self, step: impl FnOnce(&mut Life), host: &mut H) {
        let before = self.state();
        step(&mut self.life);
        if self.state() != State::Error {
            return;
        }
        if before != State::Error && self.config.shared_receive {
            // The first flush completes the receive that is being filled; no other receive of the
            // shared queue belongs to this queue pair.
            self.events |= Events::LAST_WQE;
        }
        let _ = self.flush(host);
    }

    /// Returns `true` if completions are due beyond the number that one call writes
    /// ([`Budget::completions`](super::Budget)). Check this after each call that may have completed
    /// or failed requests. If `true`, call [`complete_due`](Self::complete_due) until it returns
    /// [`Work::Done`], before the program is notified of events.
    #[inline]
    pub fn completions_due(&self) -> bool {
        match self.state() {
            State::Error => self.sq.len() > 0 || !self.rq.is_empty() || self.rx.receiving,
            _ => self.sq.is_front_done(),
        }
    }

    /// Writes a limited number of the completions that are due. Between two calls, locks may be
    /// released and the queue pair may change.
    pub fn complete_due<H: Host>(&mut self, host: &mut H) -> Work {
        if self.state() == State::Error {
            return self.flush(host);
        }
        self.retire_done(self.config.budget.completions(), host);
        self.note_drained();
        match self.sq.is_front_done() {
            true => Work::More,
            false => Work::Done,
        }
    }

    /// Flushes everything within the budget: the receive that is being filled, the send queue, then
    /// the receive queue.
    pub(super) fn flush<H: Host>(&mut self, host: &mut H) -> Work {
        self.responses.clear();
        if let Some(wr_id) = self.rx.abandon_receive() {
            self.complete_receive(wr_id, WcStatus::Flushed, host);
        }
        if core::mem::take(&mut self.tagged.spare) {
            self.complete_receive(self.rx.receive.wr_id, WcStatus::Flushed, host);
        }
        let most = self.config.budget.completions();
        if !self.search_refused(most, host) {
            return Work::More;
        }
        self.tx.job = None;
        let qp_num = self.config.qp_num;
        let counters = &mut self.counters;
        let sent = self.sq.flush(most, |cqe| {
            counters.completions = counters.completions.wrapping_add(1);
            host.complete(Direction::Send, Cqe { qp_num, ..cqe });
        });
        if self.config.match_tags {
            self.flush_reads(host);
        }
        for _ in sent..most {
            match self.rq.flush_one() {
                Some(wr_id) => self.complete_receive(wr_id, WcStatus::Flushed, host),
                None => break,
            }
        }
        match self.completions_due() {
            true => Work::More,
            false => Work::Done,
        }
    }

    pub(super) fn complete_receive<H: Host>(&mut self, wr_id: u64, status: WcStatus, host: &mut H) {
        self.counters.completions = self.counters.completions.wrapping_add(1);
        self.sq.tally.add_failed(Counted::Recv);
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
