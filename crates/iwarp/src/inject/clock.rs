//! Timers: faults at a given time, and the end of delays.

use super::act::until;
use super::plan::{Injected, PROCESS, Plan};
use super::qp::QpInjector;
use crate::conn::qp::QpInner;
use crate::engine::{Engine, Source};
use crate::error::Result;
use crate::fault::Kind;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Flag of timers for queue pairs; the lower bits are the queue pair's position in order of
/// creation. Other timers are the index of a rule, or [`PORT_UP`].
const QUEUE_PAIRS: u32 = 1 << 31;
/// Timer for the end of the port's down time.
const PORT_UP: u32 = QUEUE_PAIRS - 1;

pub(super) struct Clock {
    plan: Weak<Plan>,
    engine: Arc<Engine>,
    token: u64,
}

impl Clock {
    pub(super) fn start(plan: &Arc<Plan>) -> Result<Arc<Self>> {
        let engine = Engine::current()?;
        let token = engine.token();
        let clock = Arc::new(Self {
            plan: Arc::downgrade(plan),
            engine: Arc::clone(&engine),
            token,
        });
        engine.add_timed(token, Arc::clone(&clock) as Arc<dyn Source>);
        for (i, rule) in plan.spec.rules.iter().enumerate() {
            if rule.is_timed() {
                engine.at(plan.earliest(i, PROCESS), token, i as u32);
            }
        }
        Ok(clock)
    }

    /// Sets a timer that drives a queue pair.
    pub(super) fn wake(&self, after: Duration, ordinal: u32) {
        self.engine.after(after, self.token, QUEUE_PAIRS | ordinal);
    }

    pub(super) fn wake_port(&self, after: Duration) {
        self.engine.after(after, self.token, PORT_UP);
    }
}

impl Source for Clock {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        false
    }

    fn timer(self: Arc<Self>, kind: u32) {
        let Some(plan) = self.plan.upgrade() else {
            return;
        };
        match kind {
            PORT_UP => plan.port_may_be_up(),
            QUEUE_PAIRS.. => {
                let matches = |faults: &QpInjector| faults.ordinal == kind & !QUEUE_PAIRS;
                for (qp, _) in plan.find_queue_pairs(matches) {
                    qp.resume();
                }
            }
            rule => plan.apply_timed_rule(rule as usize),
        }
    }
}

impl Plan {
    /// Returns the queue pairs of all devices for which `matches` returns `true`, in order of
    /// creation.
    pub(super) fn find_queue_pairs(
        &self,
        matches: impl Fn(&QpInjector) -> bool,
    ) -> Vec<(Arc<QpInner>, u32)> {
        let contexts: Vec<_> = self
            .contexts
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let mut all = Vec::new();
        for ctx in contexts {
            for num in ctx.qp_numbers().unwrap_or_default() {
                let qp = ctx.qp_if_free(num);
                all.extend(qp.and_then(|qp| {
                    let faults = QpInjector::of(&qp).filter(|faults| matches(faults))?;
                    let ordinal = faults.ordinal;
                    Some((qp, ordinal))
                }));
            }
        }
        all.sort_by_key(|(_, ordinal)| *ordinal);
        all
    }

    fn apply_timed_rule(self: &Arc<Self>, index: usize) {
        let Some(rule) = self.spec.rules.get(index) else {
            return;
        };
        let injected = Injected {
            rule: index,
            kind: rule.kind,
            n: 0,
        };
        let is_device_fault = match rule.kind {
            Kind::PortDown(_) => true,
            Kind::Event(event) => event.is_of_device(),
            _ => false,
        };
        if is_device_fault {
            if self.count_injection(index) {
                self.log.record(self, &injected, &Default::default());
                match rule.kind {
                    Kind::PortDown(time) => self.port_down(time),
                    Kind::Event(event) => self.raise_everywhere(event),
                    _ => {}
                }
            }
            return;
        }
        for (qp, _) in self.find_queue_pairs(|_| true) {
            let Some(faults) = QpInjector::of(&qp) else {
                continue;
            };
            {
                let mut state = faults.state.lock();
                let connected = state.peer.is_some();
                if !connected
                    || !faults.selects(rule, state.peer, None)
                    || !self.count_injection(index)
                {
                    continue;
                }
                faults.plan_action(&mut state, &injected, None, None);
            }
            faults.execute_all(&qp);
        }
    }

    /// Ends the port's down time, unless it was extended.
    fn port_may_be_up(self: &Arc<Self>) {
        if self.end_port_down() {
            for (qp, _) in self.find_queue_pairs(|_| true) {
                qp.resume();
            }
        }
    }

    /// Sets a timer for the end of the port's down time. Returns that time.
    pub(super) fn wake_port_after(self: &Arc<Self>, time: u64) -> u64 {
        if time != u64::MAX {
            match self.clock() {
                Ok(clock) => clock.wake_port(Duration::from_nanos(time)),
                Err(error) => tracing::error!(%error, "cannot set a timer for the port"),
            }
        }
        until(time)
    }
}
