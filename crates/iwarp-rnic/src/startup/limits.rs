//! Time limits of MPA start-up, and of the beginning of a stream.

use core::time::Duration;

use iwarp_proto::mpa::negotiate::Agreed;

use crate::qp::{StreamConfig, StreamTimes};

/// Minimum time before an initiator ends a stream on which the responder has sent nothing.
///
/// A siw responder that waits for the RTR message crashes its kernel (`BUG` in `iwcm.c`) if the
/// stream ends before it has processed this message. siw in an emulated machine has needed 30 ms
/// for that.
pub const MATURITY: Duration = Duration::from_millis(50);

/// Time limits of the steps of start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The TCP connect. If shorter than [`reply`](Self::reply), this also limits the wait for the
    /// TCP acknowledgement of the request. Unlike the reply, the acknowledgement does not depend on
    /// the peer's program: if it is missing, the peer's host is gone.
    pub connect: Duration,
    /// The complete MPA reply, after the request was sent.
    pub reply: Duration,
    /// The complete MPA request, after TCP was connected. Octets that arrive do not extend it.
    pub request: Duration,
    /// The initiator's first FPDU after an accepting reply, in the peer-to-peer model.
    pub first_fpdu: Duration,
    /// The initiator's close after a rejecting reply.
    pub close: Duration,
    /// In the client-server model: how long the responder waits for the initiator's first FPDU
    /// before it sends. See [`StreamTimes::speak_first`].
    pub speak_first: Option<Duration>,
}

impl Limits {
    /// Defaults of a driver whose programs answer requests themselves. A program may do other work
    /// first, such as filling memory, so the limit for the reply is long. The other limits can be
    /// short, because the initiator's driver sends the request immediately.
    pub const PROGRAM: Self = Self {
        connect: Duration::from_secs(15),
        reply: Duration::from_secs(60),
        request: Duration::from_secs(5),
        first_fpdu: Duration::from_secs(5),
        close: Duration::from_secs(5),
        speak_first: Some(Duration::from_millis(200)),
    };

    /// Limits of a driver below the kernel's connection manager, which has no settings: for each
    /// step siw's time limit for a frame.
    pub const KERNEL: Self = Self {
        connect: Duration::from_secs(10),
        reply: Duration::from_secs(10),
        request: Duration::from_secs(10),
        first_fpdu: Duration::from_secs(10),
        close: Duration::from_secs(10),
        speak_first: Some(Duration::from_millis(200)),
    };

    /// Returns the configuration of the stream for its queue pair. Only an initiator uses
    /// `reminders` ([`StreamTimes::reminders`]).
    pub fn stream(
        &self,
        agreed: &Agreed,
        initiator: bool,
        emss: u32,
        reminders: [Option<Duration>; 3],
    ) -> StreamConfig {
        let times = StreamTimes {
            reminders,
            maturity: MATURITY,
            // In the client-server model the initiator need not send anything.
            speak_first: self.speak_first.filter(|_| !agreed.peer_to_peer),
            // In the peer-to-peer model the initiator has to send an FPDU (RFC 6581 section 9.2).
            first_fpdu: agreed.peer_to_peer.then_some(self.first_fpdu),
        };
        StreamConfig::agreed(agreed, initiator, emss, times)
    }
}
