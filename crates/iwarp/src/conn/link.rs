//! The connection of a queue pair as its driver sees it: one enum, each variant of which holds the
//! data that is meaningful in it.
//!
//! The state machine (`Life` in `iwarp-rnic`) decides what may be sent and what becomes of the
//! stream. [`Link`] records what the driver knows and has done about it. Both change under the
//! queue pair's lock. Whether the peer has closed its direction is not stored here: the machine
//! knows it ([`QueuePair::peer_has_closed`](iwarp_rnic::qp::QueuePair::peer_has_closed)). A stream
//! that the queue pair has given up is not part of it either: see `Closing` in `linger.rs`.
//!
//! Transitions. A dash means that nothing changes. Events marked "impossible" do not occur in that
//! state: the machine hides the end of a stream only until the program begins to end it.
//!
//! | event | `None` | `Up` | `PeerGone` | `Ending` |
//! | --- | --- | --- | --- | --- |
//! | [`attach`](Link::attach): MPA start-up is over | `Up` | refused | refused | refused |
//! | [`cannot_write`](Link::cannot_write): a write failed, the end is hidden | – | `PeerGone(Unwritable)` | – | notes `Unwritable`, unless the peer is gone already |
//! | [`end_behind_held`](Link::end_behind_held): a hang-up behind a held Send | – | `PeerGone(BehindHeld)` | `BehindHeld`; `ReadToEnd` stays | impossible |
//! | [`read_to_end`](Link::read_to_end): the hidden end was read | – | `PeerGone(ReadToEnd)` | `ReadToEnd` | impossible |
//! | [`watch_again`](Link::watch_again): the held Send has its receive | – | – | `BehindHeld` becomes `Unwritable` | the same for what is noted |
//! | [`await_answer`](Link::await_answer): a request gets its time limit | – | – | once, if the stream is neither read nor watched | the same for what is noted |
//! | [`begin_ending`](Link::begin_ending): the machine ends the stream | – | `Ending` | `Ending`, which notes that the peer is gone | – |
//! | [`detach`](Link::detach): the stream is closed, failed, or given up | – | `None` | `None` | `None` |

use super::liveness::Liveness;
use super::qp::CmSink;
use crate::engine::Engine;
use crate::objects::hooks::Observer;
use crate::sys::connect::Ends;
use crate::sys::guarded::Often;
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{RxBuffer, TxPlan};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A TCP stream in full operation, and the engine that watches it.
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    pub(crate) ends: Ends,
    pub(crate) flow: Option<Box<dyn Observer>>,
    pub(crate) token: u64,
    pub(crate) engine: Arc<Engine>,
    /// When full operation began.
    pub(crate) start: Instant,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.engine.connection_removed();
    }
}

/// Whom to notify about the connection, and a report that is still pending.
#[derive(Clone, Default)]
pub(crate) struct Report {
    pub(crate) cm: Option<Weak<dyn CmSink>>,
    pub(crate) established: bool,
}

pub(crate) struct Open {
    pub(crate) socket: Arc<Socket>,
    pub(crate) report: Report,
    /// A plan that the socket took in part.
    pub(crate) stalled: Option<Box<TxPlan>>,
    /// A received part of an FPDU.
    pub(crate) partial: Option<Box<RxBuffer>>,
    /// What the engine watches the socket for, or will when it watches it again.
    pub(crate) interest: Interest,
    /// Application threads drive the socket, and the engine does not watch it.
    pub(crate) driven_by_app: bool,
    /// When a Send began to wait for a receive, for statistics; zero if none waits.
    pub(crate) held_since: u64,
    /// The earliest timer that is set for the state machine.
    pub(crate) timer: Option<Time>,
    /// Plans of large messages since the MSS was last read.
    pub(crate) mss_age: u8,
    /// Counts reads and plans. Now and then one checks the handler of memory faults.
    pub(crate) fault_checks: Often,
    pub(crate) liveness: Liveness,
}

impl Open {
    /// Creates the state of a new stream, which the engine watches for reading. `cm` is notified
    /// when it ends.
    pub(crate) fn new(
        socket: Arc<Socket>,
        cm: Option<Weak<dyn CmSink>>,
        liveness: Liveness,
    ) -> Self {
        Self {
            socket,
            report: Report {
                cm,
                established: false,
            },
            stalled: None,
            partial: None,
            interest: Interest::READ,
            driven_by_app: false,
            held_since: 0,
            timer: None,
            mss_age: 0,
            fault_checks: Often::default(),
            liveness,
        }
    }
}

/// How the peer is gone while the queue pair stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// Writes fail. What the peer sent before is still read.
    Unwritable,
    /// The stream has ended behind a held Send. The engine does not watch it until the Send has its
    /// receive.
    BehindHeld,
    /// The stream was read to its end, and the engine does not watch it.
    ReadToEnd,
}

/// A peer that is gone. The queue pair fails only when a request has waited for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerGone {
    pub(crate) gone: Gone,
    pub(crate) request_timer: bool,
}

impl From<Gone> for PeerGone {
    fn from(gone: Gone) -> Self {
        Self {
            gone,
            request_timer: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    /// Bytes that the peer's TCP had acknowledged when the linger timer was set.
    pub(crate) acknowledged: u64,
    pub(crate) peer_gone: Option<PeerGone>,
}

pub(crate) enum Link {
    /// There is no stream. A report about the last one may be pending.
    None(Report),
    /// The stream works in both directions, as far as the driver knows.
    Up(Open),
    PeerGone(Open, PeerGone),
    /// The stream is being ended: pending data is written, received data is discarded, and the
    /// peer's FIN is awaited for a limited time.
    Ending(Open, Ending),
}

impl Default for Link {
    fn default() -> Self {
        Self::None(Report::default())
    }
}

/// Queries.
impl Link {
    #[inline]
    pub(crate) const fn open(&self) -> Option<&Open> {
        match self {
            Self::None(_) => None,
            Self::Up(open) | Self::PeerGone(open, _) | Self::Ending(open, _) => Some(open),
        }
    }

    #[inline]
    pub(crate) const fn open_mut(&mut self) -> Option<&mut Open> {
        match self {
            Self::None(_) => None,
            Self::Up(open) | Self::PeerGone(open, _) | Self::Ending(open, _) => Some(open),
        }
    }

    #[inline]
    pub(crate) const fn is_none(&self) -> bool {
        matches!(self, Self::None(_))
    }

    #[inline]
    pub(crate) const fn is_open(&self) -> bool {
        !self.is_none()
    }

    #[inline]
    pub(crate) fn socket(&self) -> Option<&Arc<Socket>> {
        self.open().map(|open| &open.socket)
    }

    /// Returns the socket, unless it belongs to the process that forked this one.
    pub(crate) fn own_socket(&self) -> Option<&Arc<Socket>> {
        self.socket().filter(|socket| !socket.engine.is_foreign())
    }

    pub(crate) const fn report(&self) -> &Report {
        match self {
            Self::None(report) => report,
            Self::Up(open) | Self::PeerGone(open, _) | Self::Ending(open, _) => &open.report,
        }
    }

    pub(crate) const fn report_mut(&mut self) -> &mut Report {
        match self {
            Self::None(report) => report,
            Self::Up(open) | Self::PeerGone(open, _) | Self::Ending(open, _) => &mut open.report,
        }
    }

    #[inline]
    pub(crate) const fn peer_gone(&self) -> Option<PeerGone> {
        match *self {
            Self::None(_) | Self::Up(_) => None,
            Self::PeerGone(_, peer_gone) => Some(peer_gone),
            Self::Ending(_, Ending { peer_gone, .. }) => peer_gone,
        }
    }

    const fn peer_gone_mut(&mut self) -> Option<&mut PeerGone> {
        match self {
            Self::None(_) | Self::Up(_) => None,
            Self::PeerGone(_, peer_gone) => Some(peer_gone),
            Self::Ending(_, Ending { peer_gone, .. }) => peer_gone.as_mut(),
        }
    }

    /// Returns `true` if the stream was read to its end and that end is hidden from the queue pair.
    #[inline]
    pub(crate) fn is_read_to_end(&self) -> bool {
        self.peer_gone()
            .is_some_and(|peer| peer.gone == Gone::ReadToEnd)
    }

    /// Returns `true` if the peer no longer takes what is queued.
    #[inline]
    pub(crate) const fn takes_nothing(&self) -> bool {
        self.peer_gone().is_some()
    }

    pub(crate) const fn ending_mut(&mut self) -> Option<&mut Ending> {
        match self {
            Self::Ending(_, ending) => Some(ending),
            _ => None,
        }
    }
}

/// Transitions.
impl Link {
    /// Attaches a stream that has finished MPA start-up. Returns `false` if there is a stream
    /// already.
    pub(crate) fn attach(&mut self, open: Open) -> bool {
        let is_free = self.is_none();
        if is_free {
            *self = Self::Up(open);
        }
        is_free
    }

    /// Records that a write failed where the end of the stream is hidden from the queue pair.
    pub(crate) fn cannot_write(&mut self) {
        match self {
            Self::Up(_) => self.lose_peer(Gone::Unwritable),
            Self::Ending(_, Ending { peer_gone, .. }) => {
                peer_gone.get_or_insert(Gone::Unwritable.into());
            }
            Self::None(_) | Self::PeerGone(..) => {}
        }
    }

    /// Records that the stream has ended behind a held Send, and that the engine no longer watches
    /// it.
    pub(crate) fn end_behind_held(&mut self) {
        if !self.is_read_to_end() {
            self.lose_peer(Gone::BehindHeld);
        }
    }

    /// Records that the stream was read to its end, which is hidden from the queue pair.
    pub(crate) fn read_to_end(&mut self) {
        self.lose_peer(Gone::ReadToEnd);
    }

    fn lose_peer(&mut self, gone: Gone) {
        match self {
            Self::PeerGone(open, peer) => {
                peer.gone = gone;
                if gone == Gone::ReadToEnd {
                    open.stalled = None;
                }
            }
            Self::Up(_) => {
                let Self::Up(mut open) = std::mem::take(self) else {
                    return;
                };
                if gone == Gone::ReadToEnd {
                    open.stalled = None;
                }
                *self = Self::PeerGone(open, gone.into());
            }
            Self::None(_) | Self::Ending(..) => {}
        }
    }

    /// Records that a held Send has its receive. Returns `true` if the stream has ended behind it
    /// and must be watched again.
    pub(crate) fn watch_again(&mut self) -> bool {
        match self.peer_gone_mut() {
            Some(peer) if peer.gone == Gone::BehindHeld => {
                peer.gone = Gone::Unwritable;
                true
            }
            _ => false,
        }
    }

    /// Records that a request waits for an answer. Returns `true` if none can come and the request
    /// timer must be started.
    pub(crate) fn await_answer(&mut self) -> bool {
        match self.peer_gone_mut() {
            Some(peer) if peer.gone != Gone::Unwritable => {
                !std::mem::replace(&mut peer.request_timer, true)
            }
            _ => false,
        }
    }

    /// Begins to end the stream. Does nothing if that has begun already.
    pub(crate) fn begin_ending(&mut self, acknowledged: u64) {
        let (open, peer_gone) = match std::mem::take(self) {
            Self::Up(open) => (open, None),
            Self::PeerGone(open, peer) => (open, Some(peer)),
            other @ (Self::None(_) | Self::Ending(..)) => {
                *self = other;
                return;
            }
        };
        let ending = Ending {
            acknowledged,
            peer_gone,
        };
        *self = Self::Ending(open, ending);
    }

    /// Detaches the stream from the queue pair and returns its socket. A pending report is kept.
    pub(crate) fn detach(&mut self) -> Option<Arc<Socket>> {
        let (report, socket) = match std::mem::take(self) {
            Self::None(report) => (report, None),
            Self::Up(open) | Self::PeerGone(open, _) | Self::Ending(open, _) => {
                (open.report, Some(open.socket))
            }
        };
        *self = Self::None(report);
        socket
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
