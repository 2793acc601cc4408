//! MPA start-up as one session without I/O (RFC 5044 section 7.1, RFC 6581): which octets to read
//! and to send, the time limits of the steps, and how the start-up ends.
//!
//! A driver uses an [`Initiator`] or a [`Responder`] for each connection. It sends the result of
//! [`Initiator::request`] or [`Responder::reply`], reads at most [`wanted`](Reading::wanted) octets
//! at a time, and keeps a timer for `poll_at`. It passes received octets to
//! [`received`](Reading::received) before it calls `on_time`: if the process or the machine was
//! suspended, octets that have arrived take precedence over the clock.
//!
//! [`Initiator`]:
//!
//! | State | Input | Next state | Result |
//! | --- | --- | --- | --- |
//! | Connecting | `request_sent` | Replying | |
//! | Connecting | deadline ([`Limits::connect`]) | Over | `TimedOut(Connect)` |
//! | Connecting, Replying | `peer_closed`, nothing received, another request to try | Connecting | the request is ready for another connection |
//! | Connecting, Replying | `peer_closed` otherwise | Over | `Closed` |
//! | Replying | part of a reply | Replying | |
//! | Replying | an invalid or unusable reply | Over | `Frame` |
//! | Replying | an accepting reply | Accepted | `Outcome::Accepted` |
//! | Replying | a rejecting reply | Over | `Outcome::Rejected` |
//! | Replying | request unacknowledged after [`Limits::connect`] | Over | `TimedOut(Acknowledgement)` |
//! | Replying | deadline ([`Limits::reply`]) | Over | `TimedOut(Reply)` |
//!
//! [`Responder`]:
//!
//! | State | Input | Next state | Result |
//! | --- | --- | --- | --- |
//! | Waiting | part of a request | Waiting | |
//! | Waiting | an invalid or unusable request | Over | `Frame` |
//! | Waiting | a valid request | Requested | the program decides, without a limit |
//! | Waiting | deadline ([`Limits::request`]) | Over | `TimedOut(Request)` |
//! | Requested | `accept` | Accepting | the reply |
//! | Requested | `reject` | Rejecting | the reply |
//! | Requested | `accept` or `reject`, private data too long | Requested | an error |
//! | Accepting | `reply_sent`, peer-to-peer | FirstFpdu | |
//! | Accepting | `reply_sent`, client-server | Established | |
//! | FirstFpdu | `fpdu_arrived` | Established | |
//! | FirstFpdu | deadline ([`Limits::first_fpdu`]) | Over | `TimedOut(FirstFpdu)` |
//! | Rejecting | `reply_sent` | Rejected | |
//! | Rejected | `peer_closed` | Over | |
//! | Rejected | deadline ([`Limits::close`]) | Over | `TimedOut(Close)` |
//! | any other state before Established | `peer_closed` | Over | `Closed` |
//!
//! Any other input is ignored. A driver may pass the stream to a queue pair as soon as the
//! parameters are agreed; the queue pair then enforces the time limit of the first FPDU.

mod initiator;
mod limits;
mod responder;
#[cfg(test)]
mod tests;

use core::fmt;

use iwarp_proto::mpa::startup::{FrameReader, Progress, StartupError};
use iwarp_proto::rdmap::TerminateCode;

pub use initiator::Initiator;
pub use iwarp_proto::mpa::negotiate::Outcome;
pub use limits::{Limits, MATURITY};
pub use responder::Responder;

/// Common functions of both sides, which read one frame of the peer.
pub trait Reading {
    /// The meaning of a complete frame.
    type Outcome;

    /// Returns how many octets to read next; 0 if the frame is complete. A driver must not read
    /// more: the octets after the frame are for the queue pair.
    fn wanted(&self) -> usize;

    /// Processes octets of the peer, up to the end of the frame.
    ///
    /// # Errors
    /// [`Failure::Frame`] as soon as the octets are known to be invalid; the start-up is over.
    fn received(&mut self, octets: &[u8]) -> Result<Received<Self::Outcome>, Failure>;

    /// Returns the private data of the peer's program; empty before the frame is complete.
    fn private_data(&self) -> &[u8];
}

/// The result of [`Reading::received`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received<T> {
    /// Octets consumed. Octets after them belong to FPDUs.
    pub consumed: usize,
    /// The meaning of the frame, if it is complete.
    pub outcome: Option<T>,
}

/// Why a start-up ended without a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The peer closed or reset the connection.
    Closed {
        /// Part of the peer's frame had arrived.
        begun: bool,
    },
    /// The peer's frame is malformed or cannot be used.
    Frame(StartupError),
    /// A step took too long.
    TimedOut(Step),
}

/// A step of the start-up with a time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The TCP connect.
    Connect,
    /// The TCP acknowledgement of the request.
    Acknowledgement,
    /// The reply.
    Reply,
    /// The request.
    Request,
    /// The initiator's first FPDU.
    FirstFpdu,
    /// The initiator's close after a rejection.
    Close,
}

/// What to do with the TCP connection of a failed start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Close it.
    Close,
    /// Reset it. Initiators in hardware try revision 1 only after a reset.
    Reset,
    /// Send this Terminate, then close it.
    Terminate(TerminateCode),
}

impl Failure {
    /// Returns what to do with the connection.
    pub const fn ending(&self) -> Ending {
        match self {
            Self::Closed { .. } | Self::TimedOut(Step::Connect | Step::Close) => Ending::Close,
            Self::TimedOut(_) => Ending::Reset,
            Self::Frame(error) => match error.terminate() {
                Some(code) => Ending::Terminate(code),
                //= rfc5044 section 7.1.2
                //# If the MPA Request Frame is improperly formatted, the implementation MUST
                //# close the TCP connection and exit MPA.
                //= rfc5044 section 7.1.2
                //# If the MPA Reply Frame is improperly formatted, the implementation MUST
                //# close the TCP connection and exit MPA.
                //= rfc5044 section 8
                //# In this case, the TCP connection MUST be immediately closed.
                None => Ending::Reset,
            },
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { begun: false } => f.write_str("the peer closed the connection"),
            Self::Closed { begun: true } => {
                f.write_str("the peer closed the connection in the middle of its frame")
            }
            Self::Frame(error) => error.fmt(f),
            Self::TimedOut(step) => f.write_str(match step {
                Step::Connect => "the TCP connection was not established in time",
                Step::Acknowledgement => "the MPA request was not acknowledged in time",
                Step::Reply => "no MPA reply arrived in time",
                Step::Request => "no MPA request arrived in time",
                Step::FirstFpdu => "the first FPDU did not arrive in time",
                Step::Close => "the initiator did not close in time",
            }),
        }
    }
}

impl core::error::Error for Failure {}

/// Passes octets to the reader. Returns how many were consumed, and whether the frame is complete.
fn push(reader: &mut FrameReader, octets: &[u8]) -> Result<(usize, bool), Failure> {
    match reader.push(octets) {
        Ok(Progress::NeedMore) => Ok((octets.len(), false)),
        Ok(Progress::Frame { consumed }) => Ok((consumed, true)),
        Err(error) => Err(Failure::Frame(error)),
    }
}
