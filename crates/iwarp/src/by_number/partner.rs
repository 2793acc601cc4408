//! The partner of a queue pair: what this end knows about the peer, and how far the connection to
//! it has come.
//!
//! There is one [`Partner`] per queue pair number. It performs no I/O: [`step`] takes an event, and
//! returns the next state and the effects, which the directory applies. Events of a connection
//! request carry its identifier. An event with the identifier of an earlier attempt has no effect.
//!
//! Transitions. "None" is a queue pair without a partner. A dash means that nothing changes.
//!
//! | event | None | `Early` | `Expected` | `Accepted` | `Pausing` | `Asking` | `Unreachable` | `Connected` |
//! | --- | --- | --- | --- | --- | --- | --- | --- | --- |
//! | `Named`, the peer connects | `Expected` | `Accepted` (1) | (2) | (2) | (2) | (2) | `Expected` | `Expected` (1) |
//! | `Named`, we connect | `Pausing` | `Pausing` | (2) | (2) | (2) | (2) | `Pausing` | `Pausing` |
//! | `Named`, unreachable | `Unreachable` | `Unreachable` | (2) | (2) | (2) | (2) | `Unreachable` | `Unreachable` |
//! | `Asked` | `Early` | `Early` | `Accepted` (3) | `Accepted` (3, 4) | refused | refused | refused | keeps the request |
//! | `Begin` | – | – | – | – | `Asking` | – | – | – |
//! | `Lost` | – | – | – | `Accepted` (5), `Expected` | – | `Pausing` | – | – |
//! | `Established` | – | – | – | `Connected` | – | `Connected` | – | – |
//! | `Disconnected` | – | – | – | – | – | – | – | `Early` (5), None |
//! | `RequestsWait` | – | – | starts the limit | starts the limit | starts the limit | starts the limit | starts the limit | – |
//! | `TimeOver` | – | – | (6) | (6) | (6) | (6) | (6) | – |
//! | `Expire` | – | None | – | drops (5) | – | – | – | drops (5) |
//! | `GivenUp` | – | None | None | None | None | None | None | None |
//!
//! 1. If the kept request is from the named peer. Any other request is refused, and the next state
//!    is `Expected`.
//! 2. Nothing changes if the queue pair has already named this peer in this epoch. If it has not,
//!    the column None applies, or the column `Early` if a request is kept.
//! 3. A request of any other peer is refused.
//! 4. A peer sends a new request only after it has given up the first one. If no octet has arrived
//!    on the stream of the first request, the new request is accepted instead. If octets have
//!    arrived, the new request is kept until the first connection ends.
//! 5. If a request is kept; that request is accepted, kept or dropped.
//! 6. The queue pair fails if its work requests have reached the time limit. If not, a timer is set
//!    for the remaining time.

use crate::cm::CmId;
use crate::conn::qp::QpInner;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a connection request is kept for a queue pair that has not named its peer yet. After
/// that it is refused, and the peer sends another.
pub(super) const EARLY_LIMIT: Duration = Duration::from_secs(30);
/// The pause before the next attempt is an eighth of the time that the attempts have taken so far,
/// within these limits.
const PAUSE_LIMITS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];
/// Minimum time that work requests wait for the peer. Hardware answers without processor time, but
/// here the peer's process has to run first. The value is about four times what most programs set;
/// InfiniBand allows a timer to take up to four times its value.
const ABSENT_MIN: Duration = Duration::from_secs(2);

/// The GID and number of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) gid: [u8; 16],
    pub(super) num: u32,
}

/// A connection request of a peer that is not accepted yet.
pub(super) struct Request {
    pub(super) id: CmId,
    pub(super) from: Address,
    /// When it arrived, in nanoseconds.
    pub(super) since: u64,
    /// Shared by all requests that a directory keeps, so that it can count them.
    pub(super) _counted: Arc<()>,
}

/// A queue pair that is not connected yet, and the peer it has named.
pub(super) struct Named {
    pub(super) qp: Weak<QpInner>,
    /// Epoch of the queue pair when it named the peer. A reset starts a new epoch.
    pub(super) epoch: u64,
    pub(super) peer: Address,
    /// When the time limit of its work requests started, in nanoseconds; `None` if none is posted.
    pub(super) requests_since: Option<u64>,
}

impl Named {
    /// Returns `true` if the time limit of work requests has not started yet, or is to `restart`.
    pub(super) const fn starts_limit(&self, restart: bool) -> bool {
        restart || self.requests_since.is_none()
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.epoch, self.peer) == (other.epoch, other.peer)
    }
}

/// State of the end that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connector {
    /// Our address, as the peer knows it.
    pub(super) own: IpAddr,
    /// When the first attempt began, in nanoseconds.
    pub(super) since: u64,
}

/// Which end connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Peer,
    Us(Connector),
    /// Neither end, because this end can neither listen for the peer nor connect to itself.
    Unreachable,
}

/// The state of a partner. The module describes the transitions.
pub(super) enum Partner {
    /// A connection request has arrived before the queue pair named its peer.
    Early(Request),
    /// The peer will connect.
    Expected(Named),
    /// The peer's connection request was accepted.
    Accepted {
        named: Named,
        id: CmId,
        /// A later connection request of the peer.
        kept: Option<Request>,
    },
    /// This end connects after a pause.
    Pausing { named: Named, connector: Connector },
    /// This end has sent a connection request.
    Asking {
        named: Named,
        connector: Connector,
        id: CmId,
    },
    /// Neither end connects. Work requests fail after their time limit.
    Unreachable(Named),
    /// The connection is up.
    Connected {
        id: CmId,
        /// A connection request that arrived after this one.
        kept: Option<Request>,
    },
}

/// An event. Times are in nanoseconds.
pub(super) enum Event {
    /// The queue pair has named its peer.
    Named(Named, Role),
    /// A connection request has arrived.
    Asked {
        request: Request,
        /// The peer has not closed the connection request.
        is_live: bool,
        /// Nothing has arrived on the stream of the request that was accepted before.
        is_silent: bool,
    },
    /// The pause is over, and this identifier is for the next attempt.
    Begin { id: CmId },
    /// A connection request was refused or aborted.
    Lost { id: CmId, now: u64 },
    /// The connection is up.
    Established { id: CmId },
    /// The connection is over.
    Disconnected { id: CmId },
    /// Work requests are posted. `restart`: their time limit starts again.
    RequestsWait { now: u64, restart: bool },
    /// The timer of the work requests has expired. `limit` is the queue pair's current time limit.
    TimeOver { now: u64, limit: Option<Duration> },
    /// Connection requests that were kept for too long are to be refused.
    Expire { now: u64 },
    /// The queue pair no longer needs its peer. If `epoch` is given, this applies only to a partner
    /// of that epoch.
    GivenUp { epoch: Option<u64> },
}

/// What the directory has to do after a transition, without locks: destroy identifiers first, then
/// execute `then`.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) destroy: Vec<CmId>,
    pub(super) then: Then,
}

#[derive(Default)]
pub(super) enum Then {
    #[default]
    Nothing,
    /// Begin an attempt now.
    Connect,
    /// Begin an attempt after this pause.
    ConnectAfter(Duration),
    /// Send a connection request to `peer` from `own`, with the identifier of [`Event::Begin`].
    Ask {
        qp: Weak<QpInner>,
        epoch: u64,
        own: IpAddr,
        peer: Address,
    },
    /// Accept this connection request.
    Accept {
        id: CmId,
        qp: Weak<QpInner>,
        epoch: u64,
    },
    /// Set a timer for the time limit of the queue pair's work requests.
    SetTimer,
    /// Set a timer for the remaining time.
    SetTimerFor(Duration),
    /// Fail the queue pair if it still has no stream in this epoch.
    Fail { qp: Weak<QpInner>, epoch: u64 },
}

/// Returns how long work requests wait for the peer. `limit` is the queue pair's own limit.
pub(super) fn absent_after(limit: Option<Duration>) -> Option<Duration> {
    Some(limit?.max(ABSENT_MIN))
}

/// Returns the pause after attempts that have taken `elapsed` so far.
fn pause_after(elapsed: Duration) -> Duration {
    (elapsed / 8).clamp(PAUSE_LIMITS[0], PAUSE_LIMITS[1])
}

const fn elapsed(since: u64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(since))
}

impl Partner {
    /// Returns the named peer; `None` if the queue pair has not named one or is connected.
    pub(super) const fn named(&self) -> Option<&Named> {
        match self {
            Self::Early(_) | Self::Connected { .. } => None,
            Self::Expected(named)
            | Self::Accepted { named, .. }
            | Self::Pausing { named, .. }
            | Self::Asking { named, .. }
            | Self::Unreachable(named) => Some(named),
        }
    }

    const fn named_mut(&mut self) -> Option<&mut Named> {
        match self {
            Self::Early(_) | Self::Connected { .. } => None,
            Self::Expected(named)
            | Self::Accepted { named, .. }
            | Self::Pausing { named, .. }
            | Self::Asking { named, .. }
            | Self::Unreachable(named) => Some(named),
        }
    }

    /// Returns the identifier of the accepted request.
    pub(super) const fn accepted(&self) -> Option<&CmId> {
        match self {
            Self::Accepted { id, .. } => Some(id),
            _ => None,
        }
    }

    const fn kept(&self) -> Option<&Request> {
        match self {
            Self::Early(request) => Some(request),
            Self::Accepted { kept, .. } | Self::Connected { kept, .. } => kept.as_ref(),
            _ => None,
        }
    }

    /// Returns the partner's identifier and the kept request.
    fn into_parts(self) -> (Option<CmId>, Option<Request>) {
        match self {
            Self::Early(request) => (None, Some(request)),
            Self::Accepted { id, kept, .. } | Self::Connected { id, kept } => (Some(id), kept),
            Self::Asking { id, .. } => (Some(id), None),
            Self::Expected(_) | Self::Pausing { .. } | Self::Unreachable(_) => (None, None),
        }
    }

    /// Returns all identifiers of the partner.
    pub(super) fn into_ids(self) -> impl Iterator<Item = CmId> {
        let (id, kept) = self.into_parts();
        id.into_iter().chain(kept.map(|request| request.id))
    }
}

/// Handles an event. Returns the next state and the effects.
pub(super) fn step(partner: Option<Partner>, event: Event) -> (Option<Partner>, Effects) {
    let mut effects = Effects::default();
    let next = match event {
        Event::Named(named, role) => Some(name(partner, named, role, &mut effects)),
        Event::Asked {
            request,
            is_live,
            is_silent,
        } => Some(ask(partner, request, is_live && is_silent, &mut effects)),
        Event::Begin { id } => begin(partner, id, &mut effects),
        Event::Lost { id, now } => lose(partner, &id, now, &mut effects),
        Event::Established { id } => establish(partner, &id),
        Event::Disconnected { id } => disconnect(partner, &id),
        Event::RequestsWait { now, restart } => wait(partner, now, restart, &mut effects),
        Event::TimeOver { now, limit } => {
            time_over(partner.as_ref(), now, limit, &mut effects);
            partner
        }
        Event::Expire { now } => expire(partner, now, &mut effects),
        Event::GivenUp { epoch } => match partner {
            Some(partner) if !is_in_epoch(&partner, epoch) => Some(partner),
            partner => {
                effects
                    .destroy
                    .extend(partner.into_iter().flat_map(Partner::into_ids));
                None
            }
        },
    };
    (next, effects)
}

/// Returns `true` if the queue pair has named its peer in `epoch`, or if `epoch` is `None`.
fn is_in_epoch(partner: &Partner, epoch: Option<u64>) -> bool {
    epoch.is_none_or(|epoch| partner.named().is_some_and(|named| named.epoch == epoch))
}

fn name(partner: Option<Partner>, named: Named, role: Role, effects: &mut Effects) -> Partner {
    let kept = match partner {
        Some(Partner::Unreachable(_)) | None => None,
        Some(before) if before.named().is_some_and(|before| before.is_same(&named)) => {
            return before;
        }
        Some(before) => {
            let (id, kept) = before.into_parts();
            effects.destroy.extend(id);
            kept
        }
    };
    match role {
        Role::Peer => match kept {
            Some(request) if request.from == named.peer => accept(named, request, None, effects),
            other => {
                effects.destroy.extend(other.map(|request| request.id));
                Partner::Expected(named)
            }
        },
        Role::Us(connector) => {
            effects.destroy.extend(kept.map(|request| request.id));
            effects.then = Then::Connect;
            Partner::Pausing { named, connector }
        }
        Role::Unreachable => {
            effects.destroy.extend(kept.map(|request| request.id));
            Partner::Unreachable(named)
        }
    }
}
fn accept(named: Named, request: Request, kept: Option<Request>, effects: &mut Effects) -> Partner {
    effects.then = Then::Accept {
        id: request.id.clone(),
        qp: Weak::clone(&named.qp),
        epoch: named.epoch,
    };
    Partner::Accepted {
        named,
        id: request.id,
        kept,
    }
}

/// Handles a connection request. `replaces`: the request replaces the one that was accepted before.
fn ask(
    partner: Option<Partner>,
    request: Request,
    replaces: bool,
    effects: &mut Effects,
) -> Partner {
    match partner {
        None => Partner::Early(request),
        Some(Partner::Early(before)) => {
            effects.destroy.push(before.id);
            Partner::Early(request)
        }
        Some(Partner::Connected { id, kept }) => {
            effects.destroy.extend(kept.map(|before| before.id));
            let kept = Some(request);
            Partner::Connected { id, kept }
        }
        Some(Partner::Expected(named)) if named.peer == request.from => {
            accept(named, request, None, effects)
        }
        Some(Partner::Accepted { named, id, kept }) if named.peer == request.from => {
            effects.destroy.extend(kept.map(|before| before.id));
            if replaces {
                effects.destroy.push(id);
                return accept(named, request, None, effects);
            }
            let kept = Some(request);
            Partner::Accepted { named, id, kept }
        }
        Some(other) => {
            effects.destroy.push(request.id);
            other
        }
    }
}

fn begin(partner: Option<Partner>, id: CmId, effects: &mut Effects) -> Option<Partner> {
    let Some(Partner::Pausing { named, connector }) = partner else {
        effects.destroy.push(id);
        return partner;
    };
    effects.then = Then::Ask {
        qp: Weak::clone(&named.qp),
        epoch: named.epoch,
        own: connector.own,
        peer: named.peer,
    };
    Some(Partner::Asking {
        named,
        connector,
        id,
    })
}

fn lose(partner: Option<Partner>, lost: &CmId, now: u64, effects: &mut Effects) -> Option<Partner> {
    Some(match partner? {
        Partner::Accepted { named, id, kept } if id.is_same(lost) => match kept {
            Some(request) => accept(named, request, None, effects),
            None => Partner::Expected(named),
        },
        Partner::Asking {
            named,
            connector,
            id,
        } if id.is_same(lost) => {
            let pause = pause_after(elapsed(connector.since, now));
            effects.then = Then::ConnectAfter(pause);
            Partner::Pausing { named, connector }
        }
        other => other,
    })
}

fn establish(partner: Option<Partner>, up: &CmId) -> Option<Partner> {
    Some(match partner? {
        Partner::Accepted { id, kept, .. } if id.is_same(up) => Partner::Connected { id, kept },
        Partner::Asking { id, .. } if id.is_same(up) => Partner::Connected { id, kept: None },
        other => other,
    })
}

fn disconnect(partner: Option<Partner>, over: &CmId) -> Option<Partner> {
    match partner? {
        Partner::Connected { id, kept } if id.is_same(over) => kept.map(Partner::Early),
        other => Some(other),
    }
}

fn wait(
    mut partner: Option<Partner>,
    now: u64,
    restart: bool,
    effects: &mut Effects,
) -> Option<Partner> {
    if let Some(named) = partner.as_mut().and_then(Partner::named_mut)
        && named.starts_limit(restart)
    {
        named.requests_since = Some(now);
        effects.then = Then::SetTimer;
    }
    partner
}

/// Handles an expired timer. Timers are not cancelled, so the limit may have changed since it was
/// set.
fn time_over(partner: Option<&Partner>, now: u64, limit: Option<Duration>, effects: &mut Effects) {
    let Some(named) = partner.and_then(Partner::named) else {
        return;
    };
    let (Some(since), Some(limit)) = (named.requests_since, limit) else {
        return;
    };
    let left = limit.saturating_sub(elapsed(since, now));
    effects.then = match left.is_zero() {
        true => Then::Fail {
            qp: Weak::clone(&named.qp),
            epoch: named.epoch,
        },
        false => Then::SetTimerFor(left),
    };
}

fn expire(mut partner: Option<Partner>, now: u64, effects: &mut Effects) -> Option<Partner> {
    let is_late = |request: &Request| elapsed(request.since, now) >= EARLY_LIMIT;
    if !partner
        .as_ref()
        .and_then(Partner::kept)
        .is_some_and(is_late)
    {
        return partner;
    }
    let dropped = match &mut partner {
        Some(Partner::Accepted { kept, .. } | Partner::Connected { kept, .. }) => kept.take(),
        _ => partner.take().and_then(|partner| partner.into_parts().1),
    };
    effects.destroy.extend(dropped.map(|request| request.id));
    partner
}

#[cfg(test)]
#[path = "partner_tests.rs"]
mod tests;
