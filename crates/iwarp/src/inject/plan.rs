//! The faults of a process: at which opportunities rules inject faults, how often, and the random
//! choices of the seed.

use super::clock::Clock;
use super::log::{Log, Target};
use crate::error::Result;
use crate::fault::{Kind, Point, Rule, Spec, When};
use crate::objects::context::{ContextInner, random_u32};
use crate::objects::hooks::DeviceFaults;
use crate::sys::clock::now_ns;
use crate::sys::process_lock::ProcessLock;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Plans of this process and its parent processes, with their process IDs. They are never dropped,
/// because a program may close its device and open it again.
static PLANS: ProcessLock<Vec<(u32, Arc<Plan>)>> =
    ProcessLock::new("inject::plan::PLANS", Vec::new());

/// The subject, in place of a queue pair, of opportunities that have no queue pair.
pub(super) const PROCESS: u32 = 0;

/// The state of a specification in a process.
pub(crate) struct Plan {
    pub(super) spec: Spec,
    pub(super) seed: u64,
    /// When the first device was opened.
    start: u64,
    pub(super) log: Log,
    /// For each rule, the number of injected faults.
    fired: Box<[AtomicU64]>,
    /// For each rule, the number of opportunities without a queue pair.
    counts: Mutex<Vec<u64>>,
    /// Number of queue pairs created.
    queue_pairs: AtomicU32,
    pub(super) contexts: Mutex<Vec<Weak<ContextInner>>>,
    /// Time, in terms of [`now_ns`], until which the port is down.
    pub(super) port_down_until: AtomicU64,
    clock: Mutex<Option<Arc<Clock>>>,
}

/// An opportunity at which a rule injects its fault.
#[derive(Debug, Clone, Copy)]
pub(super) struct Injected {
    pub(super) rule: usize,
    pub(super) kind: Kind,
    /// Number of the opportunity; 0 if it is not counted.
    pub(super) n: u64,
}

impl Plan {
    /// Returns the process's plan for a specification. Creates it at the first call.
    pub(crate) fn of(spec: &Spec) -> Result<Arc<Self>> {
        let pid = std::process::id();
        let mut plans = PLANS.lock();
        let known = plans
            .iter()
            .find(|(of, plan)| *of == pid && plan.spec == *spec);
        if let Some((_, plan)) = known {
            return Ok(Arc::clone(plan));
        }
        let seed = match spec.seed {
            Some(seed) => seed,
            None => u64::from(random_u32()?),
        };
        let plan = Arc::new(Self {
            seed,
            start: now_ns(),
            log: Log::open(spec.log.as_deref())?,
            fired: spec.rules.iter().map(|_| AtomicU64::new(0)).collect(),
            counts: Mutex::new(vec![0; spec.rules.len()]),
            queue_pairs: AtomicU32::new(0),
            contexts: Mutex::default(),
            port_down_until: AtomicU64::new(0),
            clock: Mutex::default(),
            spec: spec.clone(),
        });
        plan.log.begin(&plan);
        plans.push((pid, Arc::clone(&plan)));
        Ok(plan)
    }

    /// Registers a device.
    pub(crate) fn enter(self: &Arc<Self>, ctx: &Arc<ContextInner>) -> Result<()> {
        {
            let mut contexts = self.contexts.lock();
            contexts.retain(|ctx| ctx.strong_count() > 0);
            contexts.push(Arc::downgrade(ctx));
        }
        let timed = |rule: &Rule| rule.is_timed();
        if self.spec.rules.iter().any(timed) {
            self.clock()?;
        }
        Ok(())
    }

    /// Returns the timers. Starts them at the first call.
    pub(super) fn clock(self: &Arc<Self>) -> Result<Arc<Clock>> {
        let mut clock = self.clock.lock();
        if let Some(clock) = &*clock {
            return Ok(Arc::clone(clock));
        }
        let started = Clock::start(self)?;
        *clock = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Returns the ordinal number of a new queue pair, from 1.
    pub(super) fn next_queue_pair(&self) -> u32 {
        self.queue_pairs.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the time since the first device was opened, in nanoseconds.
    pub(super) fn age(&self) -> u64 {
        now_ns().saturating_sub(self.start)
    }

    /// Returns the earliest time, in terms of [`now_ns`], at which a rule may inject its fault.
    pub(super) fn earliest(&self, rule: usize, subject: u32) -> u64 {
        let span = self.spec.rules.get(rule).and_then(|rule| rule.not_before);
        let after = span.map_or(0, |span| span.choose(self.draw(rule, subject, 0, "time")));
        self.start.saturating_add(after)
    }

    /// Returns a random number that depends on the seed, the rule, the subject, the opportunity and
    /// the purpose.
    pub(super) fn draw(&self, rule: usize, subject: u32, n: u64, purpose: &str) -> u64 {
        let mut x = mix(self.seed ^ 0x6661_756c_7421);
        for part in [rule as u64, u64::from(subject), n] {
            x = mix(x ^ part);
        }
        purpose
            .bytes()
            .fold(x, |x, octet| mix(x ^ u64::from(octet)))
    }

    /// Returns the number of octets after which a rule injects its fault on a connection.
    pub(super) fn threshold(&self, rule: usize, subject: u32) -> Option<u64> {
        match self.spec.rules.get(rule)?.when {
            When::Bytes(span) => Some(span.choose(self.draw(rule, subject, 0, "bytes"))),
            _ => None,
        }
    }

    /// Counts an opportunity of a rule in the subject's `count`. Returns the fault, if the rule
    /// injects one.
    pub(super) fn opportunity(
        &self,
        rule: usize,
        subject: u32,
        count: &mut u64,
    ) -> Option<Injected> {
        let found = self.spec.rules.get(rule)?;
        if found.is_timed() || matches!(found.when, When::Bytes(_)) {
            return None;
        }
        if found.not_before.is_some() && now_ns() < self.earliest(rule, subject) {
            return None;
        }
        *count += 1;
        let n = *count;
        let takes = match found.when {
            When::Any => true,
            When::Nth(span) => n == span.choose(self.draw(rule, subject, 0, "nth")),
            When::Every(every) => n.is_multiple_of(every),
            When::Chance(chance) => chance.matches(self.draw(rule, subject, n, "p")),
            When::Bytes(_) => false,
        };
        (takes && self.count_injection(rule)).then_some(Injected {
            rule,
            kind: found.kind,
            n,
        })
    }

    /// Counts an injection of a rule. Returns `false` if the rule's maximum was reached before.
    pub(super) fn count_injection(&self, rule: usize) -> bool {
        let (Some(found), Some(fired)) = (self.spec.rules.get(rule), self.fired.get(rule)) else {
            return false;
        };
        let max = found.times.unwrap_or(u64::MAX);
        let next = |n: u64| (n < max).then(|| n + 1);
        fired
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .is_ok()
    }

    /// Returns the rules with this kind of opportunity, with their indices.
    pub(super) fn rules(&self, point: Point) -> impl Iterator<Item = (usize, &Rule)> {
        let rules = self.spec.rules.iter().enumerate();
        rules.filter(move |(_, rule)| rule.kind.point() == point)
    }

    pub(super) fn process_opportunity(&self, rule: usize) -> Option<Injected> {
        let mut counts = self.counts.lock();
        self.opportunity(rule, PROCESS, counts.get_mut(rule)?)
    }

    /// Called when the program connects to a peer. Returns the injected error, if any.
    pub(super) fn refuse_connect(&self, peer: SocketAddr) -> Option<i32> {
        if self.is_port_down() {
            return Some(libc::EHOSTUNREACH);
        }
        for (i, rule) in self.rules(Point::Connect) {
            let concerns = rule.select.peer.is_none_or(|filter| filter.matches(peer));
            if !concerns {
                continue;
            }
            if let Some(injected) = self.process_opportunity(i) {
                let target = Target {
                    peer: Some(peer),
                    ..Target::default()
                };
                self.log.record(self, &injected, &target);
                return Some(match injected.kind {
                    Kind::Refuse => libc::ECONNREFUSED,
                    _ => libc::EHOSTUNREACH,
                });
            }
        }
        None
    }
}

/// Performs a step of SplitMix64: each bit of the result depends on all bits of `x`.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    /// The first two numbers of SplitMix64 with seed 0, as printed by its authors' program.
    #[test]
    fn mix_matches_splitmix64() {
        assert_eq!(super::mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(super::mix(0x9E37_79B9_7F4A_7C15), 0x6e78_9e6a_a1b9_65f4);
    }
}
