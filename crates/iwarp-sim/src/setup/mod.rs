//! Connection set-up with a fault at every octet, in all modes. Nothing here is random.
//!
//! A run is a whole short connection: MPA start-up, an RTR message if there is one, a Send in each
//! direction, a Write, a Read, and the end. Octets arrive one by one. At one octet of one
//! direction, the connection is reset, stalls forever, or is closed. In virtual time both ends must
//! end by themselves wherever a rule requires it: start-up has time limits, and so has the first
//! FPDU of the peer-to-peer model.

mod end;

use std::time::Duration;

use iwarp_proto::mpa::negotiate::{LocalParams, Rtr, RtrSet};
use iwarp_rnic::Time;
use iwarp_rnic::qp::Events;

use crate::world::Pool;
use end::{End, Phase, Seen};

/// Limit of turns, which only a run that does not end reaches.
const TURNS_MAX: u32 = 20_000;

/// How the two ends negotiate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// RFC 5044 alone.
    Plain,
    /// RFC 6581, to negotiate the depths.
    Enhanced,
    /// RFC 6581, with this RTR message.
    PeerToPeer(Rtr),
    /// The responder's program rejects.
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
pub enum What {
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
    /// The end whose octets are affected: 0 is the initiator.
    pub side: usize,
    /// Number of octets that arrive before the fault.
    pub at: u64,
    /// The effect.
    pub what: What,
}

/// A bug that is planted to show that the checks find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetupPlant {
    /// Start-up has no time limit.
    LoseDeadline,
    /// The first FPDU has no time limit.
    ForgetFirstFpdu,
    /// The responder inverts the agreement about CRCs.
    WrongCrc,
    /// A completion is lost.
    LoseCompletion,
    /// An octet outside of every range changes.
    StrayOctet,
}

struct Run {
    ends: [End; 2],
    delivered: [u64; 2],
    /// Directions that were closed; `true` if the FIN has not been delivered yet.
    closed: [Option<bool>; 2],
    fault: Option<Fault>,
    now: Time,
    /// The initiator's program has closed the connection.
    ended: bool,
    pool: Pool,
}

#[derive(Debug)]
struct Played {
    /// Number of octets of each end that arrived.
    delivered: [u64; 2],
    pool: Pool,
    result: Result<(), String>,
}

fn play(mode: Mode, fault: Option<Fault>, plant: Option<SetupPlant>, pool: Pool) -> Played {
    let mut run = Run {
        ends: [0, 1].map(|side| End::new(side, mode, plant)),
        delivered: [0; 2],
        closed: [None; 2],
        fault,
        now: Time::ZERO,
        ended: false,
        pool,
    };
    let result = run.until_quiet().and_then(|()| run.check(mode));
    Played {
        delivered: run.delivered,
        pool: run.pool,
        result,
    }
}

impl Run {
    fn until_quiet(&mut self) -> Result<(), String> {
        for _ in 0..TURNS_MAX {
            let mut moved = false;
            for side in [0, 1] {
                let seen = self.ends[side].work(&mut self.pool);
                self.see(side, seen);
                moved |= self.deliver(side);
            }
            if !self.ended && self.ends.iter().all(End::is_done) {
                self.ended = true;
                let seen = self.ends[0].close();
                self.see(0, seen);
                moved = true;
            }
            if moved {
                continue;
            }
            let due = self.ends.iter().filter_map(End::due).min();
            let Some(at) = due else { return Ok(()) };
            self.now = self.now.max(at);
            for side in [0, 1] {
                let seen = self.ends[side].on_time(self.now);
                self.see(side, seen);
            }
        }
        Err("the run does not end".into())
    }

    /// Applies what an end does with its stream.
    fn see(&mut self, side: usize, seen: Seen) {
        match seen {
            Seen::Nothing => {}
            Seen::Fin => {
                self.closed[side].get_or_insert(true);
            }
            Seen::Reset => self.ends[side ^ 1].reset(),
        }
    }

    /// Returns `true` if the fault has stopped this direction.
    fn is_cut(&self, side: usize, what: What) -> bool {
        self.fault.is_some_and(|fault| {
            fault.side == side && fault.what == what && self.delivered[side] >= fault.at
        })
    }

    /// Delivers one octet of an end, or the FIN or reset after the last one. Returns `true` if
    /// anything was delivered.
    fn deliver(&mut self, side: usize) -> bool {
        if self.is_cut(side, What::Stall) {
            return false;
        }
        if self.is_cut(side, What::Reset) {
            let open = |end: &End| matches!(end.phase, Phase::Startup(_) | Phase::Up);
            let moved = self.ends.iter().any(open);
            self.ends.iter_mut().for_each(End::reset);
            return moved;
        }
        if self.is_cut(side, What::Close) {
            self.ends[side].out.clear();
            self.closed[side].get_or_insert(true);
        }
        let now = self.now;
        let peer = side ^ 1;
        let Some(octet) = self.ends[side].out.pop_front() else {
            if self.closed[side] == Some(true) {
                self.closed[side] = Some(false);
                let seen = self.ends[peer].fin(&mut self.pool);
                self.see(peer, seen);
                return true;
            }
            return false;
        };
        self.delivered[side] += 1;
        let seen = match self.ends[peer].phase {
            Phase::Startup(_) => self.ends[peer].startup(octet, now),
            Phase::Up => self.ends[peer].receive(octet, &mut self.pool),
            Phase::Failed | Phase::Gone => Seen::Nothing,
        };
        self.see(peer, seen);
        true
    }

    fn check(&mut self, mode: Mode) -> Result<(), String> {
        self.check_startup(mode)?;
        let open = |end: &End| end.phase == Phase::Up;
        let stalled = self.fault.is_some_and(|fault| fault.what == What::Stall);
        if self.ends.iter().any(open) && !stalled {
            return Err("an end waits for ever, although the connection has ended".into());
        }
        // TCP's keep-alive detects a peer that has vanished, which is a reset to the queue pair.
        self.ends.iter_mut().for_each(End::reset);
        let [a, b] = &mut self.ends;
        a.check(b).map_err(|error| format!("initiator: {error}"))?;
        b.check(a).map_err(|error| format!("responder: {error}"))
    }

    /// Checks that start-up progressed exactly as far as its octets allow, and that its time limits
    /// ended it where nothing arrived.
    fn check_startup(&self, mode: Mode) -> Result<(), String> {
        let [initiator, responder] = &self.ends;
        let request = self.delivered[0] >= initiator.frame_len;
        let reply = responder.frame_len > 0 && self.delivered[1] >= responder.frame_len;
        if responder.agreed.is_some() && !request || initiator.agreed.is_some() && !reply {
            return Err("an end is up before the peer's frame is there".into());
        }
        for end in &self.ends {
            if matches!(end.phase, Phase::Startup(_)) {
                return Err("start-up has no end".into());
            }
        }
        if let (Some(a), Some(b)) = (&initiator.agreed, &responder.agreed)
            && ((a.crc, a.markers_tx, a.markers_rx) != (b.crc, b.markers_rx, b.markers_tx)
                || a.rtr != b.rtr
                || a.ord > b.ird
                || b.ord > a.ird)
        {
            return Err(format!("the ends do not agree: {a:?} and {b:?}"));
        }
        let unheard = responder.phase == Phase::Up && responder.qp.counters().rx_fpdus == 0;
        if mode.peer_to_peer() && unheard {
            return Err("the responder waits for the first FPDU without end".into());
        }
        if self.fault.is_none() && !mode.rejects() && initiator.agreed.is_none() {
            return Err("without a fault there is no connection".into());
        }
        let early = Time::ZERO.after(Duration::from_secs(5));
        if responder.events.contains(Events::FIRST_FPDU_OVERDUE) && self.now < early {
            return Err("the time limit of the first FPDU expired too early".into());
        }
        Ok(())
    }
}

/// The result of a sweep.
#[derive(Debug, Default)]
pub struct Swept {
    /// Number of modes.
    pub modes: usize,
    /// Number of runs, including those without a fault.
    pub runs: u64,
    /// The first failures, as texts.
    pub failures: Vec<String>,
}

const FAILURES_MAX: usize = 10;

/// Runs each mode with each fault at each octet of each direction.
pub fn sweep(plant: Option<SetupPlant>) -> Swept {
    let mut swept = Swept::default();
    let mut pool = Pool::default();
    for mode in Mode::all() {
        swept.modes += 1;
        let whole = play(mode, None, plant, std::mem::take(&mut pool));
        pool = whole.pool;
        swept.note(mode, None, whole.result);
        for side in [0, 1] {
            for at in 0..=whole.delivered[side] {
                for what in [What::Reset, What::Stall, What::Close] {
                    let fault = Some(Fault { side, at, what });
                    let played = play(mode, fault, plant, std::mem::take(&mut pool));
                    pool = played.pool;
                    swept.note(mode, fault, played.result);
                    if swept.failures.len() >= FAILURES_MAX {
                        return swept;
                    }
                }
            }
        }
    }
    swept
}

impl Swept {
    fn note(&mut self, mode: Mode, fault: Option<Fault>, result: Result<(), String>) {
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
    fn set_up_survives_fault_everywhere() {
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
