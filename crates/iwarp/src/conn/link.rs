//! The state of a queue pair's stream, as the driver (the code that reads and writes the socket)
//! sees it: one enum, whose variants hold the data that is meaningful in each state.
//!
//! The state machine (`Life` in `iwarp-rnic`) decides what may be sent and how the stream ends.
//! [`Link`] records what the driver knows about the stream and has done with it. Both change only
//! with the queue pair's lock held. Whether the peer has closed its direction is stored in the
//! state machine ([`QueuePair::peer_has_closed`](iwarp_rnic::qp::QueuePair::peer_has_closed)). A
//! stream that the queue pair has given up is no longer part of `Link`: see `Closing` in
//! `linger.rs`.
//!
//! The table shows the transitions. A dash means that nothing changes. "Impossible" events do not
//! occur in that state: the state machine hides the end of a stream only until the program ends the
//! connection.
//!
//! | event | `None` | `Up` | `PeerGone` | `Ending` |
//! | --- | --- | --- | --- | --- |
//! | [`attach`](Link::attach): MPA start-up is complete | `Up` | refused | refused | refused |
//! | [`cannot_write`](Link::cannot_write): a write failed, and the end is hidden | – | `PeerGone(Unwritable)` | – | records `Unwritable`, unless the peer is gone already |
//! | [`end_behind_held`](Link::end_behind_held): a hang-up while a Send is held | – | `PeerGone(BehindHeld)` | `BehindHeld`; `ReadToEnd` stays | impossible |
//! | [`read_to_end`](Link::read_to_end): the hidden end was read | – | `PeerGone(ReadToEnd)` | `ReadToEnd` | impossible |
//! | [`watch_again`](Link::watch_again): the held Send has its receive | – | – | `BehindHeld` becomes `Unwritable` | as for `PeerGone` |
//! | [`await_answer`](Link::await_answer): the time limit of a request starts | – | – | once, if the stream is neither read nor watched | as for `PeerGone` |
//! | [`begin_ending`](Link::begin_ending): the state machine ends the stream | – | `Ending` | `Ending`, which records that the peer is gone | – |
//! | [`detach`](Link::detach): the stream is closed, failed, or given up | – | `None` | `None` | `None` |

use super::liveness::Liveness;
use super::qp::CmSink;
use crate::engine::Engine;
use crate::objects::hooks::Observer;
use crate::sys::connect::Ends;
use crate::sys::guarded::PeriodicKeep;
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{RxBuffer, TxPlan};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A TCP stream that has finished MPA start-up, and the engine that watches it.
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    pub(crate) ends: Ends,
    pub(crate) flow: Option<Box<dyn Observer>>,
    pub(crate) token: u64,
    pub(crate) engine: Arc<Engine>,
    pub(crate) start: Instant,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.engine.connection_removed();
    }
}

#[derive(Clone, Default)]
pub(crate) struct Report {
    pub(crate) cm: Option<Weak<dyn CmSink>>,
    /// The connection was established, which may not have been reported yet.
    pub(crate) established: bool,
}

/// A stream, and the driver's state for it.
pub(crate) struct Open {
    pub(crate) socket: Arc<Socket>,
    pub(crate) report: Report,
    pub(crate) stalled: Option<Box<TxPlan>>,
    pub(crate) partial: Option<Box<RxBuffer>>,
    /// The events for which the engine watches the socket. While application threads drive it, the
    /// events for which the engine will watch it afterwards.
    pub(crate) interest: Interest,
    /// Application threads drive the socket, and the engine does not watch it.
    pub(crate) driven_by_app: bool,
    /// For statistics, the time since which a Send is held; zero if none is.
    pub(crate) held_since: u64,
    /// Time of the earliest timer that is set for the state machine.
    pub(crate) timer: Option<Time>,
    /// Number of plans of large messages since the MSS was last read.
    pub(crate) mss_age: u8,
    /// Counts reads and plans, to check at some of them whether the handler of memory faults is
    /// still installed.
    pub(crate) fault_checks: PeriodicKeep,
    pub(crate) liveness: Liveness,
}

impl Open {
    /// Creates the state of a new stream, which the engine watches for reading. `cm` is notified
    /// when the stream ends.
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
            fault_checks: PeriodicKeep::default(),
            liveness,
        }
    }
}

/// How much of the stream of a peer that is gone was read. The queue pair stays in RTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// Writes fail. Data that the peer sent before its end is still read.
    Unwritable,
    /// The stream has ended while a Send is held, after which nothing was read. The engine does not
    /// watch the stream until the Send has its receive.
    BehindHeld,
    /// The stream was read to its end, and the engine does not watch it.
    ReadToEnd,
}

/// The queue pair fails only if a request is not answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerGone {
    pub(crate) gone: Gone,
    /// The timer for unanswered requests is set.
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
    /// Number of bytes that the peer's TCP had acknowledged when the linger timer was set.
    pub(crate) acknowledged: u64,
    pub(crate) peer_gone: Option<PeerGone>,
}

pub(crate) enum Link {
    /// There is no stream. A report about the last stream may be pending.
    None(Report),
    /// The stream works in both directions, as far as the driver knows.
    Up(Open),
    PeerGone(Open, PeerGone),
    /// The stream is being ended: the driver writes pending data, discards received data, and waits
    /// for the peer's FIN for a limited time.
    Ending(Open, Ending),
}

impl Default for Link {
    fn default() -> Self {
        Self::None(Report::default())
    }
}

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

    /// Returns the socket, unless it belongs to the parent of this forked child.
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

    /// Returns `true` if the stream was read to its end, which is hidden from the queue pair.
    #[inline]
    pub(crate) fn is_read_to_end(&self) -> bool {
        self.peer_gone()
            .is_some_and(|peer| peer.gone == Gone::ReadToEnd)
    }

    #[inline]
    pub(crate) const fn is_peer_gone(&self) -> bool {
        self.peer_gone().is_some()
    }

    pub(crate) const fn ending_mut(&mut self) -> Option<&mut Ending> {
        match self {
            Self::Ending(_, ending) => Some(ending),
            _ => None,
        }
    }
}

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

    pub(crate) fn cannot_write(&mut self) {
        match self {
            Self::Up(_) => self.set_peer_gone(Gone::Unwritable),
            Self::Ending(_, Ending { peer_gone, .. }) => {
                peer_gone.get_or_insert(Gone::Unwritable.into());
            }
            Self::None(_) | Self::PeerGone(..) => {}
        }
    }

    /// Records that the stream has ended while a Send is held, and that the engine no longer
    /// watches the stream.
    pub(crate) fn end_behind_held(&mut self) {
        if !self.is_read_to_end() {
            self.set_peer_gone(Gone::BehindHeld);
        }
    }

    /// Records that the stream was read to its end, which is hidden from the queue pair.
    pub(crate) fn read_to_end(&mut self) {
        self.set_peer_gone(Gone::ReadToEnd);
    }

    fn set_peer_gone(&mut self, gone: Gone) {
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

    /// Records that a held Send has its receive. Returns `true` if the stream has ended meanwhile,
    /// so that the engine must watch it again.
    pub(crate) fn watch_again(&mut self) -> bool {
        match self.peer_gone_mut() {
            Some(peer) if peer.gone == Gone::BehindHeld => {
                peer.gone = Gone::Unwritable;
                true
            }
            _ => false,
        }
    }

    /// Records that a request waits for an answer. Returns `true` if no answer can come, so that
    /// the caller must start the request timer.
    pub(crate) fn await_answer(&mut self) -> bool {
        match self.peer_gone_mut() {
            Some(peer) if peer.gone != Gone::Unwritable => {
                !std::mem::replace(&mut peer.request_timer, true)
            }
            _ => false,
        }
    }

    /// Changes to `Ending`, unless the state is `Ending` already. `acknowledged` is the number of
    /// bytes that the peer's TCP has acknowledged.
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

    /// Removes the stream, except a pending report, and returns its socket.
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
