//! The responder: waits for the request, and sends the reply after its program has decided.

use core::fmt;

use iwarp_proto::mpa::negotiate::{self, Agreed, LocalParams, PendingRequest};
use iwarp_proto::mpa::startup::{FrameKind, FrameReader, MAX_FRAME_LEN, StartupError};

use super::{Failure, Limits, Reading, Received, Step, push};
use crate::Time;

/// The responder's side of a start-up.
#[derive(Clone)]
pub struct Responder {
    params: LocalParams,
    reader: FrameReader,
    limits: Limits,
    state: State,
    out: [u8; MAX_FRAME_LEN],
}

/// See the table in the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Waiting {
        until: Time,
    },
    Requested(PendingRequest),
    Accepting {
        len: usize,
        agreed: Agreed,
    },
    Rejecting {
        len: usize,
    },
    /// The reply is sent. The initiator has to send the first FPDU.
    FirstFpdu {
        until: Time,
        agreed: Agreed,
    },
    Established(Agreed),
    /// The rejection is sent. The initiator has to close.
    Rejected {
        until: Time,
    },
    Over,
}

impl Responder {
    /// Starts waiting for the request on a new connection.
    pub const fn new(params: LocalParams, limits: Limits, now: Time) -> Self {
        Self {
            params,
            reader: FrameReader::new(FrameKind::Request),
            //= rfc5044 section 7.1.2
            //# Implementations SHOULD put a timeout on waiting for the MPA Request Frame
            //# when started in Responder mode, to detect incorrect "Responder/Responder"
            //# startups.
            //= rfc5044 section 7.1.2
            //# 10. MPA implementations SHOULD implement a reasonable timeout while waiting
            //# for the entire set of startup frames; this prevents certain
            //# denial-of-service attacks.
            state: State::Waiting {
                until: now.after(limits.request),
            },
            limits,
            out: [0; MAX_FRAME_LEN],
        }
    }

    /// Returns the request that waits for the program's decision.
    pub const fn request(&self) -> Option<&PendingRequest> {
        match &self.state {
            State::Requested(request) => Some(request),
            _ => None,
        }
    }

    /// Accepts the request with these parameters, and prepares the reply. Returns the agreement;
    /// `None` if no request waits.
    ///
    /// # Errors
    /// [`StartupError::PrivateDataTooLong`]: more than 512 octets, or 508 if the request is
    /// enhanced. The request then remains pending.
    pub fn accept(
        &mut self,
        params: &LocalParams,
        private_data: &[u8],
    ) -> Result<Option<Agreed>, StartupError> {
        let State::Requested(request) = &self.state else {
            return Ok(None);
        };
        let (len, agreed) = request.accept(params, private_data, &mut self.out)?;
        self.state = State::Accepting { len, agreed };
        Ok(Some(agreed))
    }

    /// Rejects the request, and prepares the reply. Returns `false` if no request waits, or if the
    /// private data is too long; the request then remains pending.
    pub fn reject(&mut self, private_data: &[u8]) -> bool {
        let State::Requested(request) = &self.state else {
            return false;
        };
        let len = request.reject(private_data, &mut self.out);
        if len == 0 {
            return false;
        }
        self.state = State::Rejecting { len };
        true
    }

    /// Returns the reply; empty if there is none to send. Send it in one write, and nothing after
    /// it until the first FPDU has arrived.
    pub fn reply(&self) -> &[u8] {
        match self.state {
            State::Accepting { len, .. } | State::Rejecting { len } => {
                self.out.get(..len).unwrap_or_default()
            }
            _ => &[],
        }
    }

    /// Records that the reply was sent.
    pub fn reply_sent(&mut self, now: Time) {
        match self.state {
            State::Accepting { agreed, .. } if agreed.peer_to_peer => {
                self.state = State::FirstFpdu {
                    until: now.after(self.limits.first_fpdu),
                    agreed,
                };
            }
            State::Accepting { agreed, .. } => self.state = State::Established(agreed),
            State::Rejecting { .. } => {
                self.state = State::Rejected {
                    until: now.after(self.limits.close),
                };
            }
            _ => {}
        }
    }

    /// Records that octets have arrived after the request and the reply. They are the initiator's
    /// first FPDU, and belong to the queue pair.
    pub fn fpdu_arrived(&mut self) {
        if let State::FirstFpdu { agreed, .. } = self.state {
            self.state = State::Established(agreed);
        }
    }

    /// Handles the peer closing or resetting the connection.
    ///
    /// # Errors
    /// [`Failure::Closed`], unless the request was rejected and the peer was expected to close.
    pub fn peer_closed(&mut self) -> Result<(), Failure> {
        if matches!(self.state, State::Established(_)) {
            return Ok(());
        }
        let is_rejected = matches!(self.state, State::Rejected { .. });
        self.state = State::Over;
        match is_rejected {
            true => Ok(()),
            false => Err(Failure::Closed {
                begun: !self.reader.is_empty(),
            }),
        }
    }

    /// Returns the agreement, if the request was accepted.
    pub const fn agreed(&self) -> Option<&Agreed> {
        match &self.state {
            State::Accepting { agreed, .. }
            | State::FirstFpdu { agreed, .. }
            | State::Established(agreed) => Some(agreed),
            _ => None,
        }
    }

    /// Returns when to call [`on_time`](Self::on_time) next; `None` without a deadline.
    pub const fn poll_at(&self) -> Option<Time> {
        match self.state {
            State::Waiting { until }
            | State::FirstFpdu { until, .. }
            | State::Rejected { until } => Some(until),
            _ => None,
        }
    }

    /// Checks the deadlines.
    ///
    /// # Errors
    /// [`Failure::TimedOut`]; the start-up is over.
    pub fn on_time(&mut self, now: Time) -> Result<(), Failure> {
        let overdue = match self.state {
            State::Waiting { until } if until <= now => Step::Request,
            State::FirstFpdu { until, .. } if until <= now => Step::FirstFpdu,
            State::Rejected { until } if until <= now => Step::Close,
            _ => return Ok(()),
        };
        self.state = State::Over;
        Err(Failure::TimedOut(overdue))
    }

    fn take(&mut self, octets: &[u8]) -> Result<Received<()>, Failure> {
        let (consumed, is_complete) = push(&mut self.reader, octets)?;
        let frame = self.reader.frame().filter(|_| is_complete);
        let request = match frame {
            //= rfc5044 section 7.1.2
            //# 2. When MPA is started in the Responder mode, the MPA implementation MUST
            //# wait until an MPA Request Frame is received and validated before entering
            //# Full MPA/DDP Operation.
            Some(frame) => negotiate::Responder::on_request(&frame, &self.params).map(Some),
            None => Ok(None),
        };
        let outcome = request
            .map_err(Failure::Frame)?
            .map(|request| self.state = State::Requested(request));
        Ok(Received { consumed, outcome })
    }
}

impl Reading for Responder {
    /// The request waits for the program's decision ([`Responder::request`]).
    type Outcome = ();

    fn wanted(&self) -> usize {
        match self.state {
            State::Waiting { .. } => self.reader.missing().unwrap_or(0),
            _ => 0,
        }
    }

    fn received(&mut self, octets: &[u8]) -> Result<Received<()>, Failure> {
        if !matches!(self.state, State::Waiting { .. }) {
            return Ok(Received {
                consumed: 0,
                outcome: None,
            });
        }
        self.take(octets).inspect_err(|_| self.state = State::Over)
    }

    fn private_data(&self) -> &[u8] {
        let frame = self.reader.frame();
        frame.map_or(&[], |frame| frame.ulp_private_data())
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder")
            .field("reader", &self.reader)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
