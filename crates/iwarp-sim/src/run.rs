//! Runs one seed: creates the world, handles its events in order of time, and runs the checks.

use std::cmp::Reverse;

use iwarp_rnic::qp::State;

use crate::plant::Plant;
use crate::reach::Reached;
use crate::world::{Ending, Event, Fate, Pool, World};

/// A run with more events than this is assumed not to terminate.
const STEPS_MAX: u64 = 5_000_000;

/// The result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The text of the first failure, if any.
    pub failure: Option<String>,
    /// What the run reached.
    pub reached: Reached,
    /// The buffers, for the next run.
    pub pool: Pool,
}

/// Runs a seed.
pub fn run(seed: u64, plant: Option<Plant>, pool: Pool, verbose: bool) -> Outcome {
    let mut world = World::generate(seed, plant, pool, verbose);
    world.describe();
    world.play();
    let failure = world.failure.take();
    let reached = std::mem::take(&mut world.reach.reached);
    let mut pool = std::mem::take(&mut world.pool);
    // Unfinished connections keep their plans and buffers. Return these to the pool as well.
    for mut ep in world.eps.drain(..) {
        pool.plans.extend(ep.plan.take().map(|mut plan| {
            plan.clear();
            plan
        }));
        pool.buffers.extend(ep.buffer.take().map(|mut buffer| {
            buffer.clear();
            buffer
        }));
    }
    pool.arenas
        .extend(world.nodes.drain(..).map(|node| node.arena));
    Outcome {
        failure,
        reached,
        pool,
    }
}

impl World {
    fn describe(&self) {
        for (i, conn) in self.conns.iter().enumerate() {
            for e in [2 * i, 2 * i + 1] {
                let ep = &self.eps[e];
                self.log(|| {
                    format!(
                        "ep {e} on node {}: {} requests, {} messages to receive, {:?} {:?} {:?}",
                        ep.node,
                        ep.ops.len(),
                        ep.inbound.len(),
                        conn.fate,
                        ep.stream,
                        ep.qp.config()
                    )
                });
            }
        }
    }

    fn play(&mut self) {
        self.run_until_idle();
        if self.failure.is_some() {
            return;
        }
        self.check_idle();
        for conn in 0..self.conns.len() {
            match self.conns[conn].fate {
                Fate::Clean(end) => self.end(conn, end),
                _ => self.end(conn, Ending::Reset),
            }
            // An endpoint that had stopped reading reads again, and detects the end.
            self.eps[2 * conn].stalled = false;
            self.eps[2 * conn + 1].stalled = false;
        }
        self.run_until_idle();
        // If a completion event was lost, completions were not polled, and this check reports that
        // they are missing.
        if self.failure.is_none() {
            self.check_end();
        }
        for (i, conn) in self.conns.iter().enumerate() {
            self.reach.fate(conn.fate.number_and_name());
            for ep in &self.eps[2 * i..2 * i + 2] {
                self.reach.ended(ep.qp.fault(), &ep.stream);
            }
        }
        if self.failure.is_none() {
            self.reuse_queue_pairs();
        }
    }

    /// Moves each queue pair through the states in which a program prepares it for its next
    /// connection. That must not write completions.
    fn reuse_queue_pairs(&mut self) {
        use State::{Error, Init, Reset, Rtr};
        for e in 0..self.eps.len() {
            for to in [Reset, Init, Error, Reset, Init, Rtr, Error] {
                let before = self.eps[e].qp.counters().completions;
                let changed = self.call(e, |c| c.ep.qp.modify(to, &mut c.host).is_ok());
                let ep = &self.eps[e];
                if !changed || ep.qp.state() != to || ep.qp.counters().completions != before {
                    self.fail(|| format!("endpoint {e}: cannot move to {to:?} for reuse"));
                }
            }
        }
    }

    fn run_until_idle(&mut self) {
        while let Some(Reverse((time, _, event))) = self.queue.pop() {
            self.now = time;
            self.steps += 1;
            if self.steps > STEPS_MAX {
                self.fail(|| "the run does not end".into());
            }
            if self.failure.is_some() {
                return;
            }
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Transmit(e) => {
                self.eps[e].tx_due = false;
                self.transmit(e);
            }
            Event::Readable(e) => {
                // Sometimes delay the event, so that a slow host gets several at once.
                if self.rng.chance(15) {
                    let delay = self.rng.below(30_000);
                    self.after(delay, Event::Readable(e));
                } else {
                    self.receive(e);
                }
            }
            Event::Writable(e) => {
                if std::mem::take(&mut self.eps[e].tx_blocked) {
                    self.transmit(e);
                }
            }
            Event::App(e) => self.app(e),
            Event::PostReceives(e) => {
                let burst = self.rng.range(1, 6);
                self.post_receives(e, burst);
            }
            Event::PostShared(n) => self.post_shared(n),
            Event::Complete(e) => self.complete(e),
            Event::Poll(n, cq) => self.poll(n, cq),
            Event::Time(e) => self.advance_time(e),
            Event::Fate(conn) => self.apply_fate(conn),
            Event::Pause(e) => self.pause(e),
            Event::Resume(e) => self.resume(e),
            Event::Unstall(e) => {
                if !matches!(self.conns[e / 2].fate, Fate::Stall(..)) {
                    self.eps[e].stalled = false;
                }
                self.receive(e);
            }
        }
    }
}
