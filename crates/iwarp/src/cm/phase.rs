//! The phases of an identifier, from its creation to its end.

use super::active::Active;
use super::awaiting_first_fpdu::AwaitingFirstFpdu;
use super::passive::{Listening, Requested};
use super::resolve::Resolving;
use super::sidr::{Asked, Asking, Serving};
use crate::conn::attach::Handover;
use std::sync::Arc;

/// How far a connection has come ([`CmId::progress`](super::CmId::progress)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmProgress {
    /// The identifier neither connects nor listens.
    Idle,
    /// The identifier connects, listens, or has a request to answer.
    Begun,
    /// The program has accepted, and the peer has not confirmed yet.
    Accepted,
    /// The connection is up.
    Up,
    /// The connection is over.
    Over,
}

pub(super) enum Phase {
    Idle,
    /// The next hop to the peer has not answered yet.
    Resolving(Arc<Resolving>),
    /// The address is resolved, so the device is known.
    Resolved,
    /// Address and route are resolved.
    Routed,
    /// An attempt has failed. The program may connect again, to the same address or to another.
    Failed,
    Connecting(Arc<Active>),
    /// The peer has accepted, and the program has not called [`CmId::establish`] yet.
    Answered(Box<Handover>),
    Listening(Arc<Listening>),
    /// In the client-server model: the reply is sent, and the event Established follows
    /// immediately.
    Accepting,
    /// A peer's request waits for an answer.
    Requested(Box<Requested>),
    /// For datagrams: the identifier has asked a listener for its queue pair.
    Asking(Arc<Asking>),
    /// For datagrams: the identifier listens.
    Serving(Arc<Serving>),
    /// For datagrams: a peer's request waits for an answer.
    Asked(Box<Asked>),
    /// Accepted. The queue pair takes the stream when the peer's first FPDU arrives.
    AwaitingFirstFpdu(Arc<AwaitingFirstFpdu>),
    /// Accepted or connected; `true` after the event Established. For datagrams: the request was
    /// answered.
    Connected(bool),
    Disconnected,
    Destroyed,
}

impl Phase {
    /// Stops a listener, rejects a request, or cancels an attempt.
    pub(super) fn end(self) {
        match self {
            Self::Resolving(resolving) => resolving.cancel(),
            Self::Connecting(active) => active.cancel(),
            Self::Listening(listening) => listening.stop(),
            Self::Requested(requested) => requested.reject(&[]),
            Self::AwaitingFirstFpdu(pending) => {
                pending.cancel();
            }
            Self::Asking(asking) => asking.cancel(),
            Self::Serving(serving) => serving.stop(),
            // Dropping a request for datagrams rejects it.
            _ => {}
        }
    }

    /// Returns how far the connection has come.
    pub(super) const fn progress(&self) -> CmProgress {
        match self {
            Self::Idle
            | Self::Resolving(_)
            | Self::Resolved
            | Self::Routed
            | Self::Failed
            | Self::Destroyed => CmProgress::Idle,
            Self::Connecting(_)
            | Self::Answered(_)
            | Self::Listening(_)
            | Self::Requested(_)
            | Self::Asking(_)
            | Self::Serving(_)
            | Self::Asked(_) => CmProgress::Begun,
            Self::Accepting | Self::AwaitingFirstFpdu(_) | Self::Connected(false) => {
                CmProgress::Accepted
            }
            Self::Connected(true) => CmProgress::Up,
            Self::Disconnected => CmProgress::Over,
        }
    }
}
