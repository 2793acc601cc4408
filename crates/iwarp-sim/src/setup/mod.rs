//! Connection set-up with a fault at every octet, in all modes. Nothing here is random.
//!
//! A run is a short connection: MPA start-up, an RTR message if the mode has one, a Send in each
//! direction, a Write, a Read, and a close. Octets arrive one by one. After some octet of one
//! direction, the connection is reset, stalls forever, or is closed. The endpoints must give up by
//! themselves where a rule sets a time limit: for start-up, and for the first FPDU in the
//! peer-to-peer model.

mod endpoint;

use std::time::Duration;

use iwarp_proto::mpa::negotiate::{LocalParams, Rtr, RtrSet};
use iwarp_rnic::Time;
use iwarp_rnic::qp::Events;

use crate::world::Pool;
use endpoint::{Endpoint, Phase, StreamChange};

/// A run with more turns than this is assumed not to terminate.
const TURNS_MAX: u32 = 20_000;

/// How the two endpoints negotiate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// MPA revision 1 (RFC 5044).
    Plain,
    /// MPA revision 2 (RFC 6581), to negotiate IRD and ORD.
    Enhanced,
    /// MPA revision 2, with this RTR message.
    PeerToPeer(Rtr),
    /// MPA revision 2; the responder's program rejects the connection.
    Rejected,
}

/// A way to set up a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    kind: Kind,
    crc: [bool; 2],
    markers: [bool; 2],
}

impl Mode {
    /// Returns all modes.
    pub fn all() -> Vec<Self> {
        let kinds = [
            Kind::Plain,
            Kind::Enhanced,
            Kind::PeerToPeer(Rtr::Send),
            Kind::PeerToPeer(Rtr::Write),
            Kind::PeerToPeer(Rtr::Read),
            Kind::Rejected,
        ];
        let both = [false, true];
        let mut all = Vec::new();
        for kind in kinds {
            for crc in [[false, false], [true, false], [true, true]] {
                for a in both {
                    all.extend(both.map(|b| Self {
                        kind,
                        crc,
                        markers: [a, b],
                    }));
                }
            }
        }
        all
    }

    const fn rejects(self) -> bool {
        matches!(self.kind, Kind::Rejected)
    }

    const fn peer_to_peer(self) -> bool {
        matches!(self.kind, Kind::PeerToPeer(_))
    }

    fn params(self, side: usize) -> LocalParams {
        LocalParams {
            revision: if self.kind == Kind::Plain { 1 } else { 2 },
            crc: self.crc[side],
            markers_rx: self.markers[side],
            ird: 2,
            ord: 2,
            max_ird: 4,
            max_ord: 4,
            peer_to_peer: self.peer_to_peer(),
            rtr_offer: match self.kind {
                Kind::PeerToPeer(rtr) => RtrSet::only(rtr),
                _ => RtrSet::NONE,
            },
            ird_ord_negotiate: true,
        }
    }
}

/// The effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Both directions are reset.
    Reset,
    /// No more octets arrive in this direction.
    Stall,
    /// This direction is closed, and later octets are lost.
    Close,
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The sender of the affected direction: 0 is the initiator, 1 is the responder.
    pub side: usize,
    /// Number of octets that arrive before the fault.
    pub after: u64,
    /// The effect.
    pub kind: FaultKind,
}

/// A bug that is planted to show that the checks find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetupPlant {
    /// Start-up has no time limit.
    LoseDeadline,
    /// The first FPDU has no time limit.
    ForgetFirstFpdu,
    /// The responder uses CRCs if it agreed not to, and vice versa.
    WrongCrc,
    /// A completion is lost.
    LoseCompletion,
    /// An octet outside all registered ranges changes.
    StrayOctet,
}

struct Run {
    endpoints: [Endpoint; 2],
    /// For each endpoint, the number of its octets that arrived at the other one.
    delivered: [u64; 2],
    fins: [Fin; 2],
    fault: Option<Fault>,
    now: Time,
    /// The initiator's program has closed the connection.
    closed: bool,
    pool: Pool,
}

/// The FIN of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fin {
    NotSent,
    Sent,
    Delivered,
}

#[derive(Debug)]
struct RunOutcome {
    delivered: [u64; 2],
    pool: Pool,
    result: Result<(), String>,
}

/// Runs one connection and checks it.
fn run(mode: Mode, fault: Option<Fault>, plant: Option<SetupPlant>, pool: Pool) -> RunOutcome {
    let mut run = Run {
        endpoints: [0, 1].map(|side| Endpoint::new(side, mode, plant)),
        delivered: [0; 2],
        fins: [Fin::NotSent; 2],
        fault,
        now: Time::ZERO,
        closed: false,
        pool,
    };
    let result = run.until_idle().and_then(|()| run.check(mode));
    RunOutcome {
        delivered: run.delivered,
        pool: run.pool,
        result,
    }
}

impl Run {
    fn until_idle(&mut self) -> Result<(), String> {
        for _ in 0..TURNS_MAX {
            let mut progressed = false;
            for side in [0, 1] {
                let change = self.endpoints[side].transmit(&mut self.pool);
                self.apply(side, change);
                progressed |= self.deliver(side);
            }
            if !self.closed && self.endpoints.iter().all(Endpoint::is_done) {
                self.closed = true;
                let change = self.endpoints[0].close();
                self.apply(0, change);
                progressed = true;
            }
            if progressed {
                continue;
            }
            let next_timer = self.endpoints.iter().filter_map(Endpoint::next_timer);
            let Some(at) = next_timer.min() else {
                return Ok(());
            };
            self.now = self.now.max(at);
            for side in [0, 1] {
                let change = self.endpoints[side].on_time(self.now);
                self.apply(side, change);
            }
        }
        Err("the run does not terminate".into())
    }

    /// Applies a change that an endpoint makes to its stream.
    fn apply(&mut self, side: usize, change: StreamChange) {
        match change {
            StreamChange::None => {}
            StreamChange::Shutdown => self.send_fin(side),
            StreamChange::Reset => self.endpoints[side ^ 1].reset(),
        }
    }

    fn send_fin(&mut self, side: usize) {
        if self.fins[side] == Fin::NotSent {
            self.fins[side] = Fin::Sent;
        }
    }

    /// Returns `true` if the direction has a fault of this kind that is in effect now.
    fn has_fault(&self, side: usize, kind: FaultKind) -> bool {
        self.fault.is_some_and(|fault| {
            fault.side == side && fault.kind == kind && self.delivered[side] >= fault.after
        })
    }

    /// Delivers the next octet that `side` has sent, or the FIN or reset after its last one.
    /// Returns `true` if anything was delivered.
    fn deliver(&mut self, side: usize) -> bool {
        if self.has_fault(side, FaultKind::Stall) {
            return false;
        }
        if self.has_fault(side, FaultKind::Reset) {
            let is_open = |ep: &Endpoint| matches!(ep.phase, Phase::Startup(_) | Phase::Up);
            let any_open = self.endpoints.iter().any(is_open);
            self.endpoints.iter_mut().for_each(Endpoint::reset);
            return any_open;
        }
        if self.has_fault(side, FaultKind::Close) {
            self.endpoints[side].out.clear();
            self.send_fin(side);
        }
        let now = self.now;
        let peer = side ^ 1;
        let Some(octet) = self.endpoints[side].out.pop_front() else {
            if self.fins[side] == Fin::Sent {
                self.fins[side] = Fin::Delivered;
                let change = self.endpoints[peer].receive_fin(&mut self.pool);
                self.apply(peer, change);
                return true;
            }
            return false;
        };
        self.delivered[side] += 1;
        let change = match self.endpoints[peer].phase {
            Phase::Startup(_) => self.endpoints[peer].receive_startup(octet, now),
            Phase::Up => self.endpoints[peer].receive(octet, &mut self.pool),
            Phase::Failed | Phase::Gone => StreamChange::None,
        };
        self.apply(peer, change);
        true
    }

    fn check(&mut self, mode: Mode) -> Result<(), String> {
        self.check_startup(mode)?;
        let is_up = |ep: &Endpoint| ep.phase == Phase::Up;
        let stalled = self.fault.is_some_and(|f| f.kind == FaultKind::Stall);
        if self.endpoints.iter().any(is_up) && !stalled {
            return Err("an endpoint waits forever, although the connection has ended".into());
        }
        // After a stall, TCP keep-alive would report to the queue pair that the stream failed.
        self.endpoints.iter_mut().for_each(Endpoint::reset);
        let [a, b] = &mut self.endpoints;
        a.check(b).map_err(|error| format!("initiator: {error}"))?;
        b.check(a).map_err(|error| format!("responder: {error}"))
    }

    /// Checks that each endpoint completed start-up only after the peer's frame had arrived, that
    /// both agree, and that time limits ended start-up if nothing arrived.
    fn check_startup(&self, mode: Mode) -> Result<(), String> {
        let [initiator, responder] = &self.endpoints;
        let request = self.delivered[0] >= initiator.frame_len;
        let reply = responder.frame_len > 0 && self.delivered[1] >= responder.frame_len;
        if responder.agreed.is_some() && !request || initiator.agreed.is_some() && !reply {
            return Err("an endpoint completed start-up before the peer's frame arrived".into());
        }
        for ep in &self.endpoints {
            if matches!(ep.phase, Phase::Startup(_)) {
                return Err("an endpoint waits forever in start-up".into());
            }
        }
        if let (Some(a), Some(b)) = (&initiator.agreed, &responder.agreed)
            && ((a.crc, a.markers_tx, a.markers_rx) != (b.crc, b.markers_rx, b.markers_tx)
                || a.rtr != b.rtr
                || a.ord > b.ird
                || b.ord > a.ird)
        {
            return Err(format!("the endpoints do not agree: {a:?} and {b:?}"));
        }
        let no_fpdu = responder.phase == Phase::Up && responder.qp.counters().rx_fpdus == 0;
        if mode.peer_to_peer() && no_fpdu {
            return Err("the responder waits forever for the first FPDU".into());
        }
        if self.fault.is_none() && !mode.rejects() && initiator.agreed.is_none() {
            return Err("connection set-up failed without a fault".into());
        }
        let limit = Time::ZERO.after(Duration::from_secs(5));
        if responder.events.contains(Events::FIRST_FPDU_OVERDUE) && self.now < limit {
            return Err("the time limit of the first FPDU expired too early".into());
        }
        Ok(())
    }
}

/// The result of a sweep.
#[derive(Debug, Default)]
pub struct SweepResult {
    /// Number of modes.
    pub modes: usize,
    /// Number of runs, including those without a fault.
    pub runs: u64,
    /// Descriptions of the first failures.
    pub failures: Vec<String>,
}

const FAILURES_MAX: usize = 10;

/// Runs each mode without a fault, and with each fault after each octet of each direction.
pub fn sweep(plant: Option<SetupPlant>) -> SweepResult {
    let mut swept = SweepResult::default();
    let mut pool = Pool::default();
    for mode in Mode::all() {
        swept.modes += 1;
        let faultless = run(mode, None, plant, std::mem::take(&mut pool));
        pool = faultless.pool;
        swept.record(mode, None, faultless.result);
        for side in [0, 1] {
            for after in 0..=faultless.delivered[side] {
                for kind in [FaultKind::Reset, FaultKind::Stall, FaultKind::Close] {
                    let fault = Some(Fault { side, after, kind });
                    let outcome = run(mode, fault, plant, std::mem::take(&mut pool));
                    pool = outcome.pool;
                    swept.record(mode, fault, outcome.result);
                    if swept.failures.len() >= FAILURES_MAX {
                        return swept;
                    }
                }
            }
        }
    }
    swept
}

impl SweepResult {
    fn record(&mut self, mode: Mode, fault: Option<Fault>, result: Result<(), String>) {
        self.runs += 1;
        if let Err(error) = result {
            self.failures.push(format!("{mode:?} {fault:?}: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setup_survives_faults_everywhere() {
        let swept = sweep(None);
        assert_eq!(swept.failures, Vec::<String>::new());
        assert!(swept.runs > 50_000, "{}", swept.runs);
    }

    #[test]
    fn every_planted_bug_is_found() {
        for plant in [
            SetupPlant::LoseDeadline,
            SetupPlant::ForgetFirstFpdu,
            SetupPlant::WrongCrc,
            SetupPlant::LoseCompletion,
            SetupPlant::StrayOctet,
        ] {
            assert!(!sweep(Some(plant)).failures.is_empty(), "{plant:?}");
        }
    }
}
