//! What a queue pair keeps of its connection: a new connection begins with a new [`LinkState`].

use super::cork::Cork;
use super::liveness::Liveness;
use super::qp::CmSink;
use crate::by_number::peer_gone::Left;
use crate::sys::guarded::Often;
use crate::sys::poller::Interest;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{RxBuffer, TxPlan};
use std::sync::Weak;

/// The part of a connection's state that changes under the queue pair's lock.
pub(crate) struct LinkState {
    /// A plan that the stream took in part.
    pub(crate) stalled: Option<Box<TxPlan>>,
    /// Decides whether posting sends at once.
    pub(crate) cork: Cork,
    /// A part of an FPDU.
    pub(crate) partial: Option<Box<RxBuffer>>,
    /// What the engine looks for.
    pub(crate) interest: Interest,
    /// Application threads drive it, and the engine does not watch its socket.
    pub(crate) driven_by_app: bool,
    pub(crate) cm: Option<Weak<dyn CmSink>>,
    /// When a Send began to wait for a receive, for statistics; zero if none waits.
    pub(crate) held_since: u64,
    /// The earliest timer that is set for the state machine.
    pub(crate) timer: Option<Time>,
    /// The peer has closed its direction.
    pub(crate) eof: bool,
    /// The peer has left, and the program is not told.
    pub(crate) left: Left,
    /// The initiator's first message has come.
    pub(crate) established: bool,
    /// The stream is being ended: octets that the peer's TCP had acknowledged when its timer was set.
    pub(crate) ending: Option<u64>,
    /// Plans of large messages since the size of segments was asked for.
    pub(crate) mss_age: u8,
    /// Reads and plans, of which some look after the handler of faults.
    pub(crate) looks: Often,
    pub(crate) liveness: Liveness,
}

impl LinkState {
    /// That of a connection whose end `cm` is told of.
    pub(crate) fn new(cm: Option<Weak<dyn CmSink>>) -> Self {
        Self {
            stalled: None,
            cork: Cork::default(),
            partial: None,
            interest: Interest::READ,
            driven_by_app: false,
            cm,
            held_since: 0,
            timer: None,
            eof: false,
            left: Left::default(),
            established: false,
            ending: None,
            mss_age: 0,
            looks: Often::default(),
            liveness: Liveness::default(),
        }
    }

    /// The stream is gone. What is still to be told stays.
    pub(crate) fn end(&mut self) {
        *self = Self {
            established: self.established,
            ..Self::new(self.cm.take())
        };
    }
}

impl Default for LinkState {
    /// That of no connection.
    fn default() -> Self {
        Self::new(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new connection does not begin with times and flags of the last. That its first message has come is still to be told.
    #[test]
    fn what_is_still_to_be_told_stays() {
        for established in [false, true] {
            let mut state = LinkState {
                driven_by_app: true,
                held_since: 5,
                timer: Some(Time::ZERO),
                eof: true,
                established,
                ending: Some(3),
                mss_age: 2,
                ..LinkState::default()
            };
            state.end();
            assert_eq!(state.established, established);
            assert_eq!((state.driven_by_app, state.eof), (false, false));
            assert_eq!((state.held_since, state.mss_age), (0, 0));
            assert_eq!((state.timer, state.ending), (None, None));
        }
    }
}
