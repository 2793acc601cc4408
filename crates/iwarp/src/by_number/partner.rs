//! The partner of a queue pair: what this end knows of the peer, and what it does to meet it.
//!
//! There is one value per queue pair number, and no I/O: [`step`] takes an event and returns the
//! next state and what the directory has to do. Events about a connection request carry its
//! identifier; an identifier of an earlier attempt changes nothing.
//!
//! Transitions. "None" is a queue pair without a partner. A dash means that nothing changes.
//!
//! | event | None | `Early` | `Expected` | `Accepted` | `Pausing` | `Asking` | `Unreachable` | `Connected` |
//! | --- | --- | --- | --- | --- | --- | --- | --- | --- |
//! | `Named`, the peer connects | `Expected` | `Accepted` (1) | (2) | (2) | (2) | (2) | `Expected` | `Expected` (1) |
//! | `Named`, we connect | `Pausing` | `Pausing` | (2) | (2) | (2) | (2) | `Pausing` | `Pausing` |
//! | `Named`, unreachable | `Unreachable` | `Unreachable` | (2) | (2) | (2) | (2) | `Unreachable` | `Unreachable` |
//! | `Asked` | `Early` | `Early` | `Accepted` (3) | `Accepted` (3, 4) | refused | refused | refused | keeps it |
//! | `Begin` | – | – | – | – | `Asking` | – | – | – |
//! | `Lost` | – | – | – | `Accepted` (5), `Expected` | – | `Pausing` | – | – |
//! | `Established` | – | – | – | `Connected` | – | `Connected` | – | – |
//! | `Disconnected` | – | – | – | – | – | – | – | `Early` (5), None |
//! | `RequestsWait` | – | – | begins | begins | begins | begins | begins | – |
//! | `TimeOver` | – | – | (6) | (6) | (6) | (6) | (6) | – |
//! | `Expire` | – | None | – | drops (5) | – | – | – | drops (5) |
//! | `GivenUp` | – | None | None | None | None | None | None | None |
//!
//! 1. If the request that was kept is the peer's. Any other is refused, and the state is
//!    `Expected`.
//! 2. Nothing changes if the queue pair has named this peer in this epoch already. Otherwise as in
//!    the column None; a request that was kept is treated as in the column `Early`.
//! 3. A request of any other peer is refused.
//! 4. A peer asks again only after it has given up its earlier request. If nothing has come on the
//!    stream of the earlier one, the new one is accepted in its place. Otherwise the new one is
//!    kept until the end of the earlier one is noticed.
//! 5. With the request that is kept, if there is one.
//! 6. The queue pair fails if its requests have waited for the limit. Otherwise a timer is set for
//!    the rest of it.

use crate::cm::CmId;
use crate::conn::qp::QpInner;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a request of the peer is kept for a queue pair that has not named the peer. The peer
/// asks again afterwards.
pub(super) const EARLY_LIMIT: Duration = Duration::from_secs(30);
/// The pause before the next attempt is an eighth of the time that the attempts have taken so far,
/// within these limits.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];
/// The least time after which a peer that has not come counts as absent. Programs need processor
/// time to connect, which hardware does not. It is about four times what most programs set, and
/// InfiniBand's timers may take four times what is set.
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
    /// When it came, in nanoseconds.
    pub(super) since: u64,
    /// Shared by all requests that a directory keeps, so that it can count them.
    pub(super) _counted: Arc<()>,
}

/// What a queue pair has named, until it is connected.
pub(super) struct Named {
    pub(super) qp: Weak<QpInner>,
    /// The epoch of the queue pair that the connection is for. A reset ends it.
    pub(super) epoch: u64,
    pub(super) peer: Address,
    /// When the time limit of its requests began, in nanoseconds; `None` if none is posted.
    pub(super) requests_since: Option<u64>,
}

impl Named {
    /// Returns `true` if the time limit of requests begins now: it has not begun, or it is to
    /// `restart`.
    pub(super) const fn begins_limit(&self, restart: bool) -> bool {
        restart || self.requests_since.is_none()
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.epoch, self.peer) == (other.epoch, other.peer)
    }
}

/// The part of the end that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connector {
    /// The address by which the peer knows this end.
    pub(super) own: IpAddr,
    /// When the first attempt began, in nanoseconds.
    pub(super) since: u64,
}

/// Who connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Peer,
    Us(Connector),
    /// Neither end: this one could not listen for the peer, or not connect to itself.
    Unreachable,
}

/// The state of a partner. See the module.
pub(super) enum Partner {
    /// A peer has asked, and the queue pair has not named its peer.
    Early(Request),
    /// The peer will connect.
    Expected(Named),
    /// The peer's request was accepted.
    Accepted {
        named: Named,
        id: CmId,
        /// The peer has asked again.
        kept: Option<Request>,
    },
    /// We connect after a pause.
    Pausing { named: Named, connector: Connector },
    /// We have asked the peer.
    Asking {
        named: Named,
        connector: Connector,
        id: CmId,
    },
    /// No attempt is made. Requests fail when their time is over.
    Unreachable(Named),
    /// The connection is up.
    Connected {
        id: CmId,
        /// A peer has asked since.
        kept: Option<Request>,
    },
}

/// What happens to a partner. Times are nanoseconds.
pub(super) enum Event {
    /// The queue pair has named its peer.
    Named(Named, Role),
    /// A connection request has come.
    Asked {
        request: Request,
        /// The peer has not given it up.
        is_live: bool,
        /// Nothing has come on the stream of the request that was accepted before.
        is_silent: bool,
    },
    /// The pause is over, and this identifier is for the next attempt.
    Begin { id: CmId },
    /// A request was refused or broken off.
    Lost { id: CmId, now: u64 },
    /// The connection is up.
    Established { id: CmId },
    /// The connection is over.
    Disconnected { id: CmId },
    /// Requests are posted. `restart`: their time begins anew.
    RequestsWait { now: u64, restart: bool },
    /// The time of requests may be over; `limit` is what the queue pair allows now.
    TimeOver { now: u64, limit: Option<Duration> },
    /// Requests that were kept for too long are refused.
    Expire { now: u64 },
    /// The queue pair does not want its peer any more. With an epoch, only in that epoch.
    GivenUp { epoch: Option<u64> },
}

/// What the directory has to do after a transition, without locks: first destroy, then the rest.
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
    /// Ask this peer from this address, with the identifier of [`Event::Begin`].
    Ask {
        qp: Weak<QpInner>,
        epoch: u64,
        own: IpAddr,
        peer: Address,
    },
    /// Accept this request.
    Accept {
        id: CmId,
        qp: Weak<QpInner>,
        epoch: u64,
    },
    /// Set a timer for the limit of the queue pair's requests.
    SetTimer,
    /// Set a timer for the rest of the limit.
    SetTimerFor(Duration),
    /// Fail the queue pair if it still has no stream in this epoch.
    Fail { qp: Weak<QpInner>, epoch: u64 },
}

/// Returns how long requests wait for a peer that has not come, if the queue pair's own limit is
/// `limit`.
pub(super) fn absent_after(limit: Option<Duration>) -> Option<Duration> {
    Some(limit?.max(ABSENT_MIN))
}

/// Returns the pause after attempts that have taken `elapsed` so far.
fn pause_after(elapsed: Duration) -> Duration {
    (elapsed / 8).clamp(PAUSES[0], PAUSES[1])
}

const fn elapsed(since: u64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(since))
}

impl Partner {
    /// Returns what the queue pair has named, until it is connected.
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

    /// Returns the identifier of the request that was accepted.
    pub(super) const fn accepted(&self) -> Option<&CmId> {
        match self {
            Self::Accepted { id, .. } => Some(id),
            _ => None,
        }
    }

    /// Returns the request that is kept.
    const fn kept(&self) -> Option<&Request> {
        match self {
            Self::Early(request) => Some(request),
            Self::Accepted { kept, .. } | Self::Connected { kept, .. } => kept.as_ref(),
            _ => None,
        }
    }

    /// Takes it apart: its identifier, and the request that is kept.
    fn into_parts(self) -> (Option<CmId>, Option<Request>) {
        match self {
            Self::Early(request) => (None, Some(request)),
            Self::Accepted { id, kept, .. } | Self::Connected { id, kept } => (Some(id), kept),
            Self::Asking { id, .. } => (Some(id), None),
            Self::Expected(_) | Self::Pausing { .. } | Self::Unreachable(_) => (None, None),
        }
    }

    /// Returns all identifiers of it.
    pub(super) fn into_ids(self) -> impl Iterator<Item = CmId> {
        let (id, kept) = self.into_parts();
        id.into_iter().chain(kept.map(|request| request.id))
    }
}

/// Takes an event. Returns the next state, and what the directory has to do.
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
            Some(partner) if !is_of(&partner, epoch) => Some(partner),
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

/// Returns `true` if the queue pair has named its peer in this epoch, or any epoch will do.
fn is_of(partner: &Partner, epoch: Option<u64>) -> bool {
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

/// Accepts a request.
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

/// Handles a request. `replaces`: it takes the place of the one that was accepted before.
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
        && named.begins_limit(restart)
    {
        named.requests_since = Some(now);
        effects.then = Then::SetTimer;
    }
    partner
}

/// Timers are not cancelled, so this one may have been set for an earlier time.
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
