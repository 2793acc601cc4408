//! Actions of rules.

use super::log::Place;
use super::plan::Taken;
use super::qp::{Action, Progress, QpInjector};
use crate::conn::drive;
use crate::conn::effects::Effects;
use crate::conn::qp::QpInner;
use crate::fault::{Directions, Event, Kind, Ops};
use crate::objects::events::AsyncEventKind;
use crate::objects::hooks::StreamDirection;
use crate::objects::member::EventQp;
use crate::sys::clock::now_ns;
use std::sync::Arc;
use std::time::Duration;

/// Returns the time of [`now_ns`] after `time` nanoseconds; `u64::MAX` is forever.
pub(super) fn until(time: u64) -> u64 {
    now_ns().saturating_add(time)
}

const fn ways(directions: Directions) -> [bool; 2] {
    [directions.out, directions.into]
}

impl QpInjector {
    /// Logs a fault, and queues its actions.
    pub(super) fn plan_action(
        &self,
        state: &mut Progress,
        taken: &Taken,
        op: Option<Ops>,
        octets: Option<u64>,
    ) {
        let Some(rule) = self.plan.spec.rules.get(taken.rule) else {
            return;
        };
        let ways = ways(rule.directions);
        let action = match taken.kind {
            Kind::Reset => Action::Reset,
            Kind::Close => Action::Close,
            Kind::Delay(time) | Kind::Stall(time) => {
                let now = now_ns();
                let free = |way: StreamDirection| {
                    ways[way.index()] && state.held_until[way.index()] <= now
                };
                // Requests posted meanwhile wait with those before them, but not longer.
                if !StreamDirection::BOTH.into_iter().any(free) {
                    return;
                }
                Action::Hold(ways, time)
            }
            Kind::Slow(rate) => Action::Slow(ways, rate),
            Kind::Event(event) => Action::Event(event),
            Kind::PortDown(time) => Action::PortDown(time),
            Kind::Crc if state.peer.is_some() && !state.crc => return,
            Kind::Crc => {
                for way in StreamDirection::BOTH {
                    state.spoil[way.index()] |= ways[way.index()];
                }
                self.log(state, taken, op, octets);
                return;
            }
            _ => return,
        };
        self.log(state, taken, op, octets);
        state.actions.push(action);
    }

    fn log(&self, state: &Progress, taken: &Taken, op: Option<Ops>, octets: Option<u64>) {
        let place = Place {
            octets,
            ..self.place(state, op)
        };
        self.plan.log.note(&self.plan, taken, &place);
    }

    /// Executes queued actions. No lock may be held.
    #[cold]
    pub(super) fn carry_out_all(&self, qp: &Arc<QpInner>) {
        let actions = std::mem::take(&mut self.state.lock().actions);
        for action in actions {
            self.carry_out(qp, action);
        }
    }

    fn carry_out(&self, qp: &Arc<QpInner>, action: Action) {
        match action {
            Action::Reset | Action::Close if self.state.lock().peer.is_none() => {
                // The requests wait for their connection, and so does this action.
                self.state.lock().actions.push(action);
            }
            Action::Reset => {
                let link = qp.state.lock().link.socket().cloned();
                if let Some(link) = link.filter(|link| !link.engine.is_foreign()) {
                    link.stream.abort();
                    // The driver notices the end, as if the peer had caused it.
                    qp.drive_rx();
                }
            }
            Action::Close => qp.with_machine(|machine, host| machine.close(host)),
            Action::Hold(ways, time) => {
                let end = until(time);
                {
                    let mut state = self.state.lock();
                    for way in StreamDirection::BOTH
                        .into_iter()
                        .filter(|way| ways[way.index()])
                    {
                        let held = &mut state.held_until[way.index()];
                        *held = end.max(*held);
                    }
                }
                self.wake_after(time);
                // The engine stops watching a socket that may not be read.
                qp.with_machine(|_, _| ());
            }
            Action::Slow(ways, rate) => {
                let mut state = self.state.lock();
                for way in StreamDirection::BOTH
                    .into_iter()
                    .filter(|way| ways[way.index()])
                {
                    state.rate[way.index()] = Some(rate);
                }
            }
            Action::Fail { terminate: true } => {
                qp.with_machine(|machine, host| machine.give_up(host))
            }
            Action::Fail { terminate: false } => {
                qp.with_machine(|machine, host| machine.abort(host))
            }
            Action::Event(event) => self.raise(qp, event),
            Action::PortDown(time) => self.plan.port_down(time),
            Action::Starve(time) => self.wake_after(time),
        }
    }

    /// Schedules a drive of the queue pair for when the delay ends.
    pub(super) fn wake_after(&self, time: u64) {
        if time == u64::MAX {
            return;
        }
        match self.plan.clock() {
            Ok(clock) => clock.wake(Duration::from_nanos(time), self.ordinal),
            Err(error) => tracing::error!(%error, "no timer for delayed data"),
        }
    }

    fn raise(&self, qp: &Arc<QpInner>, event: Event) {
        let handle = || EventQp(Arc::clone(qp) as _);
        let kind = match event {
            Event::QpFatal => {
                let mut effects = Effects::default();
                {
                    let mut g = qp.state.lock();
                    drive::fail(qp, &mut g, &mut effects);
                    qp.collect_effects(&mut g, &mut effects);
                }
                effects.apply(qp);
                return;
            }
            Event::QpRequestError | Event::QpAccessError => {
                let access = event == Event::QpAccessError;
                qp.with_machine(|machine, host| machine.accuse_peer(access, host));
                return;
            }
            Event::CommunicationEstablished => AsyncEventKind::CommunicationEstablished(handle()),
            Event::SqDrained => AsyncEventKind::SqDrained(handle()),
            Event::LastWqeReached => AsyncEventKind::LastWqeReached(handle()),
            Event::SrqLimitReached => {
                if let Some(srq) = &qp.srq {
                    srq.inner.raise_limit_event();
                }
                return;
            }
            other => {
                self.plan.raise_everywhere(other);
                return;
            }
        };
        qp.ctx.raise(kind);
    }
}

impl QpInner {
    /// Called when a delay may have ended.
    pub(super) fn go_on(self: &Arc<Self>) {
        // The engine watches the socket again, and waiting data is sent.
        self.with_machine(|_, _| ());
        self.drive_rx();
    }
}
