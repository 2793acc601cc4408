//! Execution of the actions that rules trigger.

use super::log::Target;
use super::plan::Injected;
use super::qp::{Action, Progress, QpInjector};
use crate::conn::drive;
use crate::conn::effects::Effects;
use crate::conn::qp::QpInner;
use crate::fault::{Directions, Event, Kind, Ops};
use crate::objects::any_qp::EventQp;
use crate::objects::events::AsyncEventKind;
use crate::objects::hooks::StreamDirection;
use crate::sys::clock::now_ns;
use std::sync::Arc;
use std::time::Duration;

/// Returns the time, in terms of [`now_ns`], that is `time` nanoseconds from now; `u64::MAX` is
/// forever.
pub(super) fn until(time: u64) -> u64 {
    now_ns().saturating_add(time)
}

const fn direction_flags(directions: Directions) -> [bool; 2] {
    [directions.out, directions.into]
}

impl QpInjector {
    /// Logs a fault, and queues its actions.
    pub(super) fn plan_action(
        &self,
        state: &mut Progress,
        injected: &Injected,
        op: Option<Ops>,
        octets: Option<u64>,
    ) {
        let Some(rule) = self.plan.spec.rules.get(injected.rule) else {
            return;
        };
        let directions = direction_flags(rule.directions);
        let action = match injected.kind {
            Kind::Reset => Action::Reset,
            Kind::Close => Action::Close,
            Kind::Delay(time) | Kind::Stall(time) => {
                let now = now_ns();
                let free = |direction: StreamDirection| {
                    directions[direction.index()] && state.held_until[direction.index()] <= now
                };
                // While octets are held already, later requests do not extend the delay.
                if !StreamDirection::BOTH.into_iter().any(free) {
                    return;
                }
                Action::Hold(directions, time)
            }
            Kind::Slow(rate) => Action::Slow(directions, rate),
            Kind::Event(event) => Action::Event(event),
            Kind::PortDown(time) => Action::PortDown(time),
            Kind::Crc if state.peer.is_some() && !state.crc => return,
            Kind::Crc => {
                for direction in StreamDirection::BOTH {
                    state.flip_pending[direction.index()] |= directions[direction.index()];
                }
                self.log(state, injected, op, octets);
                return;
            }
            _ => return,
        };
        self.log(state, injected, op, octets);
        state.actions.push(action);
    }

    fn log(&self, state: &Progress, injected: &Injected, op: Option<Ops>, octets: Option<u64>) {
        let target = Target {
            octets,
            ..self.target(state, op)
        };
        self.plan.log.record(&self.plan, injected, &target);
    }

    /// Executes the queued actions. The caller holds no lock.
    #[cold]
    pub(super) fn execute_all(&self, qp: &Arc<QpInner>) {
        let actions = std::mem::take(&mut self.state.lock().actions);
        for action in actions {
            self.execute(qp, action);
        }
    }

    pub(super) fn execute(&self, qp: &Arc<QpInner>, action: Action) {
        match action {
            Action::Reset | Action::Close if self.state.lock().peer.is_none() => {
                // Not connected yet: the action waits for the connection, as the requests do.
                self.state.lock().actions.push(action);
            }
            Action::Reset => {
                let link = qp.state.lock().link.own_socket().cloned();
                if let Some(link) = link {
                    link.stream.abort();
                    // The driver handles the end of the stream, as if the peer had caused it.
                    qp.drive_rx();
                }
            }
            Action::Close => qp.with_machine(|machine, host| machine.close(host)),
            Action::Hold(directions, time) => {
                let end = until(time);
                {
                    let mut state = self.state.lock();
                    for direction in StreamDirection::BOTH
                        .into_iter()
                        .filter(|direction| directions[direction.index()])
                    {
                        let held = &mut state.held_until[direction.index()];
                        *held = end.max(*held);
                    }
                }
                self.wake_after(time);
                // Lets the engine stop watching the socket while it must not be read.
                qp.with_machine(|_, _| ());
            }
            Action::Slow(directions, rate) => {
                let mut state = self.state.lock();
                for direction in StreamDirection::BOTH
                    .into_iter()
                    .filter(|direction| directions[direction.index()])
                {
                    state.rate[direction.index()] = Some(rate);
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

    /// Schedules a drive of the queue pair after a delay.
    pub(super) fn wake_after(&self, time: u64) {
        if time == u64::MAX {
            return;
        }
        match self.plan.clock() {
            Ok(clock) => clock.wake(Duration::from_nanos(time), self.ordinal),
            Err(error) => tracing::error!(%error, "cannot set a timer for delayed data"),
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
    /// Resumes sending and receiving. Called when a delay may have ended.
    pub(super) fn resume(self: &Arc<Self>) {
        // Lets the engine watch the socket again, and sends waiting data.
        self.with_machine(|_, _| ());
        self.drive_rx();
    }
}
