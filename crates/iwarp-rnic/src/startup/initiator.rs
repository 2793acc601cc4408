//! The initiator: sends the request and waits for the reply.

use iwarp_proto::mpa::negotiate::{self, Agreed, LocalParams, Outcome};
use iwarp_proto::mpa::startup::{FrameKind, FrameReader, StartupError};

use super::{Failure, Limits, Reading, Received, Step, push};
use crate::Time;

/// The initiator's side of a start-up. The same value is used again if the request is repeated on
/// another connection.
#[derive(Debug, Clone)]
pub struct Initiator {
    negotiation: negotiate::Initiator,
    reader: FrameReader,
    limits: Limits,
    state: State,
}

/// See the table in the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connecting {
        /// `None` before TCP starts to connect.
        until: Option<Time>,
    },
    Replying {
        /// Deadline for the acknowledgement of the request; `None` if no check is needed.
        acknowledged_by: Option<Time>,
        until: Time,
    },
    Accepted(Agreed),
    Over,
}

impl Initiator {
    /// Prepares the request.
    ///
    /// # Errors
    /// [`StartupError::PrivateDataTooLong`]: more than 512 octets, or 508 in an enhanced request.
    /// [`StartupError::UnsupportedRevision`]: the revision is neither 1 nor 2.
    pub fn new(
        params: LocalParams,
        private_data: &[u8],
        limits: Limits,
    ) -> Result<Self, StartupError> {
        Ok(Self {
            negotiation: negotiate::Initiator::new(params, private_data)?,
            reader: FrameReader::new(FrameKind::Reply),
            limits,
            state: State::Connecting { until: None },
        })
    }

    /// Starts the time limit of the TCP connect.
    pub fn connecting(&mut self, now: Time) {
        if let State::Connecting { until } = &mut self.state {
            *until = Some(now.after(self.limits.connect));
        }
    }

    /// Returns the request. Send it in one write: some hardware requires it in one TCP segment.
    pub fn request(&self) -> &[u8] {
        self.negotiation.request_octets()
    }

    /// Records that the request was sent.
    pub fn request_sent(&mut self, now: Time) {
        if let State::Connecting { .. } = self.state {
            let Limits { connect, reply, .. } = self.limits;
            //= rfc5044 section 7.1.2
            //# 10. MPA implementations SHOULD implement a reasonable timeout while waiting
            //# for the entire set of startup frames; this prevents certain
            //# denial-of-service attacks.
            self.state = State::Replying {
                acknowledged_by: (connect < reply).then(|| now.after(connect)),
                until: now.after(reply),
            };
        }
    }

    /// Handles the peer closing or resetting the connection. On success the request is ready for
    /// another connection: the peer may only have refused its revision
    /// ([`negotiate::Initiator::prepare_retry`]).
    ///
    /// # Errors
    /// [`Failure::Closed`] if part of a reply has arrived, so that the revision is not the reason,
    /// or if there is no other revision to try.
    pub fn peer_closed(&mut self) -> Result<(), Failure> {
        let begun = !self.reader.is_empty();
        let is_waiting = matches!(
            self.state,
            State::Connecting { .. } | State::Replying { .. }
        );
        if is_waiting && !begun && self.negotiation.prepare_retry() {
            self.state = State::Connecting { until: None };
            return Ok(());
        }
        self.state = State::Over;
        Err(Failure::Closed { begun })
    }

    /// Returns the agreement, if the peer has accepted.
    pub const fn agreed(&self) -> Option<&Agreed> {
        match &self.state {
            State::Accepted(agreed) => Some(agreed),
            _ => None,
        }
    }

    /// Returns when to call [`on_time`](Self::on_time) next; `None` without a deadline.
    pub fn poll_at(&self) -> Option<Time> {
        match self.state {
            State::Connecting { until } => until,
            State::Replying {
                acknowledged_by,
                until,
            } => Some(acknowledged_by.map_or(until, |at| at.min(until))),
            State::Accepted(_) | State::Over => None,
        }
    }

    /// Checks the deadlines. `is_acknowledged` returns whether the peer's TCP has acknowledged the
    /// complete request; it is called only when needed.
    ///
    /// # Errors
    /// [`Failure::TimedOut`]; the start-up is over.
    pub fn on_time(
        &mut self,
        now: Time,
        is_acknowledged: impl FnOnce() -> bool,
    ) -> Result<(), Failure> {
        let overdue = match &mut self.state {
            State::Connecting { until: Some(until) } if *until <= now => Step::Connect,
            State::Replying { until, .. } if *until <= now => Step::Reply,
            State::Replying {
                acknowledged_by, ..
            } => {
                let is_due = acknowledged_by.take_if(|at| *at <= now).is_some();
                if !is_due || is_acknowledged() {
                    return Ok(());
                }
                Step::Acknowledgement
            }
            _ => return Ok(()),
        };
        self.state = State::Over;
        Err(Failure::TimedOut(overdue))
    }

    fn reply(&mut self, octets: &[u8]) -> Result<Received<Outcome>, Failure> {
        let (consumed, is_complete) = push(&mut self.reader, octets)?;
        let frame = self.reader.frame().filter(|_| is_complete);
        let outcome = match frame {
            Some(frame) => self.negotiation.on_reply(&frame).map(Some),
            None => Ok(None),
        };
        let outcome = outcome.map_err(Failure::Frame)?;
        match outcome {
            Some(Outcome::Accepted(agreed)) => self.state = State::Accepted(agreed),
            Some(Outcome::Rejected { .. }) => self.state = State::Over,
            None => {}
        }
        Ok(Received { consumed, outcome })
    }
}

impl Reading for Initiator {
    type Outcome = Outcome;

    fn wanted(&self) -> usize {
        match self.state {
            State::Replying { .. } => self.reader.missing().unwrap_or(0),
            _ => 0,
        }
    }

    fn received(&mut self, octets: &[u8]) -> Result<Received<Outcome>, Failure> {
        if !matches!(self.state, State::Replying { .. }) {
            return Ok(Received {
                consumed: 0,
                outcome: None,
            });
        }
        self.reply(octets).inspect_err(|_| self.state = State::Over)
    }

    fn private_data(&self) -> &[u8] {
        let frame = self.reader.frame();
        frame.map_or(&[], |frame| frame.ulp_private_data())
    }
}
