//! The time limits of MPA start-up, and of the first moments of a stream.

use core::time::Duration;

use iwarp_proto::mpa::negotiate::Agreed;

use crate::qp::{StreamConfig, StreamTimes};

/// How old a connection has to be for its end, unless the responder has spoken.
///
/// siw as responder that waits for the RTR message takes the kernel down with it (`BUG` in
/// `iwcm.c`) if the end of the stream comes before it has looked at that message, which it may
/// overlook for a while. An emulated one has needed 30 ms.
pub const MATURITY: Duration = Duration::from_millis(50);

/// How long each step of the start-up may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The TCP connect. If it is shorter than [`reply`](Self::reply), the peer's TCP also has this
    /// time to acknowledge the request: the reply is up to the peer's program, but the
    /// acknowledgement is not. Without it the peer's host is gone, and nobody has to wait longer.
    pub connect: Duration,
    /// The whole MPA reply, from the moment when the request is sent.
    pub reply: Duration,
    /// The whole MPA request, from the moment when TCP is connected. A peer that sends an octet
    /// now and then does not get more time.
    pub request: Duration,
    /// The initiator's first FPDU after an accepting reply, in the peer-to-peer model.
    pub first_fpdu: Duration,
    /// The initiator's close after a rejecting reply.
    pub close: Duration,
    /// How long the responder waits for the initiator's first FPDU in the client-server model
    /// before it sends without it. See [`StreamTimes::speak_first`].
    pub speak_first: Option<Duration>,
}

impl Limits {
    /// Defaults of a driver whose programs answer requests themselves. Such a program may do other
    /// things first, such as filling memory, so the reply has a long limit. The request comes from
    /// the initiator's driver, which sends it at once.
    pub const PROGRAM: Self = Self {
        connect: Duration::from_secs(15),
        reply: Duration::from_secs(60),
        request: Duration::from_secs(5),
        first_fpdu: Duration::from_secs(5),
        close: Duration::from_secs(5),
        speak_first: Some(Duration::from_millis(200)),
    };

    /// Limits of a driver below the kernel's connection manager, which has no settings: siw's time
    /// for a frame, for each step.
    pub const KERNEL: Self = Self {
        connect: Duration::from_secs(10),
        reply: Duration::from_secs(10),
        request: Duration::from_secs(10),
        first_fpdu: Duration::from_secs(10),
        close: Duration::from_secs(10),
        speak_first: Some(Duration::from_millis(200)),
    };

    /// Returns what the queue pair that takes the stream needs to know. Only an initiator uses
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
            // In the peer-to-peer model the initiator has to send it (RFC 6581 section 9.2).
            first_fpdu: agreed.peer_to_peer.then_some(self.first_fpdu),
        };
        StreamConfig::agreed(agreed, initiator, emss, times)
    }
}
