//! Coverage: records the states, operations, completions and errors that a run reaches. What no
//! seed reaches is not tested. A seed that reaches only what many seeds reach is called dull.

use std::collections::{BTreeMap, BTreeSet};

use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::qp::{
    Blame, Events, Fault, QueuePair, RxStatus, State, StreamConfig, StreamWish, TxFill,
};
use iwarp_rnic::{SendFlags, SendOp, WcOpcode, WcStatus};

/// The names of what one run reached.
pub type Reached = BTreeSet<String>;

/// Records what one run reaches.
#[derive(Debug, Default)]
pub struct Reach {
    /// What was reached so far.
    pub reached: Reached,
    /// Numbers of the recorded names, so that each name is formatted only once.
    known: BTreeSet<u64>,
    /// The last state of each endpoint.
    states: Vec<Option<State>>,
}

impl Reach {
    /// Records a name. `number` identifies it among the names of its kind.
    fn note(&mut self, kind: u8, number: u64, name: impl FnOnce() -> String) {
        if self.known.insert(u64::from(kind) << 56 | number) {
            self.reached.insert(name());
        }
    }

    /// Records the state of an endpoint, and the transition to it.
    pub fn state(&mut self, e: usize, qp: &QueuePair) {
        if self.states.len() <= e {
            self.states.resize(e + 1, None);
        }
        let now = qp.state();
        let before = self.states[e].replace(now);
        if before != Some(now) {
            let from = before.map_or(0, |s| s as u64 + 1);
            self.note(1, from << 8 | now as u64, || transition(before, now));
        }
        let interest = qp.rx_interest();
        self.note(2, interest as u64, || named("reads", interest));
        let wish = qp.stream_wish();
        self.note(3, wish_number(wish), || named("stream", wish));
    }

    /// Records the events of a queue pair.
    pub fn events(&mut self, events: Events) {
        for (name, event) in events.iter_names() {
            self.note(4, u64::from(event.bits()), || format!("event {name}"));
        }
    }

    /// Records the result of filling a plan.
    pub fn fill(&mut self, fill: TxFill) {
        self.note(5, fill as u64, || named("fills", fill));
    }

    /// Records the result of receiving.
    pub fn receive(&mut self, status: RxStatus) {
        self.note(6, status as u64, || named("receives", status));
    }

    /// Records a posted request.
    pub fn posted(&mut self, op: &SendOp, flags: SendFlags) {
        let (number, name) = operation(op);
        self.note(7, number, || format!("posts {name}"));
        for (name, flag) in flags.iter_names() {
            self.note(8, u64::from(flag.bits()), || format!("flag {name}"));
        }
    }

    /// Records a completion.
    pub fn completed(&mut self, opcode: WcOpcode, status: WcStatus) {
        if status == WcStatus::Success {
            self.note(9, opcode as u64, || named("completes", opcode));
        }
        self.note(10, status as u64, || named("status", status));
    }

    /// Records the fate of a connection.
    pub fn fate(&mut self, (number, name): (u64, &'static str)) {
        self.note(11, number, || format!("fate {name}"));
    }

    /// Records how a stream ended and how it was set up.
    pub fn ended(&mut self, failed: Option<Fault>, stream: &StreamConfig) {
        match failed {
            Some(Fault { blame, code }) => {
                let number = u64::from(u32::from(code.layer) << 16)
                    | u64::from(u32::from(code.etype) << 8 | u32::from(code.code));
                self.note(12, (blame as u64) << 32 | number, || fault(blame, code));
            }
            None => self.note(13, 0, || "fault none".into()),
        }
        let rtr = stream.rtr.map_or(0, |rtr| rtr as u64 + 1);
        self.note(14, rtr, || match stream.rtr {
            Some(rtr) => named("RTR", rtr),
            None => "RTR none".into(),
        });
        let framing = (stream.crc, stream.markers_tx, stream.markers_rx);
        let number = u64::from(framing.0) | u64::from(framing.1) << 1 | u64::from(framing.2) << 2;
        self.note(15, number, || {
            format!(
                "framing crc {} markers {}/{}",
                framing.0, framing.1, framing.2
            )
        });
    }
}

fn named(kind: &str, value: impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    // The names of variants, without their contents.
    let name = text.split([' ', '(']).next().unwrap_or_default();
    format!("{kind} {name}")
}

fn transition(from: Option<State>, to: State) -> String {
    match from {
        Some(from) => format!("state {from:?} to {to:?}"),
        None => format!("state {to:?} at first"),
    }
}

fn fault(blame: Blame, code: TerminateCode) -> String {
    format!("fault {blame:?}: {code}")
}

const fn wish_number(wish: StreamWish) -> u64 {
    match wish {
        StreamWish::Keep => 0,
        StreamWish::ShutdownWrite => 1,
        StreamWish::Leave { .. } => 2,
        StreamWish::Abort => 3,
    }
}

const fn operation(op: &SendOp) -> (u64, &'static str) {
    match op {
        SendOp::Send => (0, "Send"),
        SendOp::SendImm(_) => (1, "SendImm"),
        SendOp::SendInv(_) => (2, "SendInv"),
        SendOp::Write { .. } => (3, "Write"),
        SendOp::WriteImm { .. } => (4, "WriteImm"),
        SendOp::Read { .. } => (5, "Read"),
        SendOp::ReadInv { .. } => (6, "ReadInv"),
        SendOp::FetchAdd { mask: 0, .. } => (7, "FetchAdd"),
        SendOp::FetchAdd { .. } => (8, "FetchAdd with a mask"),
        SendOp::CmpSwap { .. } => (9, "CmpSwap"),
        SendOp::LocalInvalidate { .. } => (10, "LocalInvalidate"),
        SendOp::Bind(_) => (11, "Bind"),
        SendOp::FastRegister(_) => (12, "FastRegister"),
        SendOp::AtomicWrite { .. } => (13, "AtomicWrite"),
        _ => (14, "something else"),
    }
}

/// What no run can reach, and why.
const EXCEPTIONS: &[(&str, &str)] = &[
    (
        "status BadResponse",
        "no simulated peer sends a wrong response; the fuzz target `engine` does",
    ),
    (
        "status TransportRetryExceeded",
        "only on queue pairs that are connected by number",
    ),
    (
        "status ReceiverNotReady",
        "only on queue pairs that are connected by number",
    ),
    (
        "status ResponseTimeout",
        "only on queue pairs that are connected by number",
    ),
    ("status General", "an internal error of the RNIC"),
    (
        "status TagMatching",
        "no simulated queue matches tags; the unit tests of `qp::tagged` cover it",
    ),
    (
        "status LocalQpOperation",
        "no program posts a request that its queue pair does not support",
    ),
    (
        "receives Waits",
        "no other thread accesses memory while it is invalidated",
    ),
    (
        "reads Waits",
        "no other thread accesses memory while it is invalidated",
    ),
    (
        "status Fatal",
        "needs a protocol violation while a request is outstanding; the unit tests of `qp::blamed` \
         cover it",
    ),
    (
        "fault Peer: RDMAP: local catastrophic error",
        "an RNIC reports only its own local errors",
    ),
    (
        "fault Peer: RDMAP: unspecified protection error",
        "every violation has a more specific code",
    ),
    (
        "fault Peer: RDMAP: catastrophic error, global",
        "only a broken RNIC reports it",
    ),
    (
        "fault Peer: RDMAP: STag cannot be invalidated (operation)",
        "another encoding of the same error, which we accept but never send",
    ),
    (
        "fault Peer: RDMAP: unspecified operation error",
        "only for malformed messages; the fuzz target `engine` sends them",
    ),
    (
        "fault Peer: DDP: local catastrophic error",
        "an RNIC reports only its own local errors",
    ),
    (
        "fault Peer: MPA: TCP connection lost",
        "a lost connection is blamed on the transport, not on the peer",
    ),
    (
        "fault Peer: MPA: invalid request or reply frame",
        "only in connection set-up (module `setup`)",
    ),
    (
        "fault Peer: MPA: local catastrophic error",
        "only in connection set-up (module `setup`)",
    ),
    (
        "fault Peer: MPA: insufficient IRD resources",
        "only in connection set-up (module `setup`)",
    ),
    (
        "fault Peer: MPA: no matching RTR option",
        "only in connection set-up (module `setup`)",
    ),
    (
        "event MESSAGE_IN_RTR",
        "no connected program stays in RTR; the unit tests of `qp::startup` cover it",
    ),
];

const STATUSES: [WcStatus; 17] = [
    WcStatus::Success,
    WcStatus::LocalLength,
    WcStatus::LocalQpOperation,
    WcStatus::LocalProtection,
    WcStatus::Flushed,
    WcStatus::MwBind,
    WcStatus::BadResponse,
    WcStatus::LocalAccess,
    WcStatus::RemoteInvalidRequest,
    WcStatus::RemoteAccess,
    WcStatus::RemoteOperation,
    WcStatus::TransportRetryExceeded,
    WcStatus::ReceiverNotReady,
    WcStatus::Fatal,
    WcStatus::ResponseTimeout,
    WcStatus::General,
    WcStatus::TagMatching,
];

const OPCODES: [WcOpcode; 11] = [
    WcOpcode::Send,
    WcOpcode::Write,
    WcOpcode::Read,
    WcOpcode::CmpSwap,
    WcOpcode::FetchAdd,
    WcOpcode::Bind,
    WcOpcode::LocalInvalidate,
    WcOpcode::FastRegister,
    WcOpcode::AtomicWrite,
    WcOpcode::Recv,
    WcOpcode::RecvWriteImm,
];

/// Returns the names of everything that runs should reach, as far as an enumeration lists it.
fn expected_coverage() -> Vec<String> {
    use State::{Error, Init, Reset, Rtr, Rts, Sqd};
    let mut all = Vec::new();
    for (from, to) in [(Init, Rtr), (Rtr, Rts), (Init, Rts), (Rts, Sqd), (Sqd, Rts)] {
        all.push(transition(Some(from), to));
    }
    for from in [Init, Rts, Sqd, Rtr] {
        all.push(transition(Some(from), Error));
    }
    all.push(transition(Some(Error), Reset));
    all.push(transition(Some(Reset), Init));
    all.extend(STATUSES.map(|status| named("status", status)));
    all.extend(OPCODES.map(|opcode| named("completes", opcode)));
    for name in ["Read", "Held", "Discard", "Waits", "None"] {
        all.push(format!("reads {name}"));
    }
    for name in ["Keep", "ShutdownWrite", "Leave", "Abort"] {
        all.push(format!("stream {name}"));
    }
    for name in ["Ok", "More", "Held", "Waits", "Failed"] {
        all.push(format!("receives {name}"));
    }
    for name in ["Idle", "Ready", "Memory", "More"] {
        all.push(format!("fills {name}"));
    }
    for name in ["none", "Send", "Write", "Read"] {
        all.push(format!("RTR {name}"));
    }
    all.extend(
        Events::all()
            .iter_names()
            .map(|(name, _)| format!("event {name}")),
    );
    all.extend(
        TerminateCode::ALL
            .iter()
            .map(|code| fault(Blame::Peer, *code)),
    );
    all
}

/// The totals of many runs.
#[derive(Debug, Default)]
pub struct Summary {
    /// For each name, the number of seeds that reached it.
    counts: BTreeMap<String, u64>,
    /// For each seed, the numbers of the names that it reached.
    seeds: Vec<Vec<u32>>,
    /// The number of each name.
    numbers: BTreeMap<String, u32>,
}

/// A name is common if at least one in this many seeds reaches it.
const COMMON: u64 = 10;

impl Summary {
    /// Adds what one seed reached.
    pub fn add(&mut self, reached: Reached) {
        let mut seed = Vec::with_capacity(reached.len());
        for name in reached {
            let next = self.numbers.len() as u32;
            seed.push(*self.numbers.entry(name.clone()).or_insert(next));
            *self.counts.entry(name).or_default() += 1;
        }
        self.seeds.push(seed);
    }

    /// Returns the number of seeds that reached only common names.
    fn dull(&self) -> usize {
        let mut common = vec![false; self.numbers.len()];
        for (name, number) in &self.numbers {
            common[*number as usize] = self.counts[name] * COMMON >= self.seeds.len() as u64;
        }
        let is_dull = |seed: &&Vec<u32>| seed.iter().all(|number| common[*number as usize]);
        self.seeds.iter().filter(is_dull).count()
    }

    /// Returns the names that no seed reached, without the exceptions.
    pub fn missing(&self) -> Vec<String> {
        let excused = |name: &String| EXCEPTIONS.iter().any(|(exception, _)| exception == name);
        let mut all = expected_coverage();
        all.retain(|name| !self.counts.contains_key(name) && !excused(name));
        all
    }

    /// Returns the exceptions that at least one seed reached.
    pub fn reached_but_listed_unreachable(&self) -> Vec<&'static str> {
        let names = EXCEPTIONS.iter().map(|(name, _)| *name);
        names
            .filter(|name| self.counts.contains_key(*name))
            .collect()
    }

    /// Prints how many seeds reached each name.
    pub fn print(&self) {
        println!(
            "Number of seeds, of {}, that reached each name:",
            self.seeds.len()
        );
        for (name, count) in &self.counts {
            println!("{count:>9} {name}");
        }
        for (name, why) in EXCEPTIONS {
            if !self.counts.contains_key(*name) {
                println!("{:>9} {name} ({why})", "-");
            }
        }
        for name in self.missing() {
            println!("{:>9} {name}", "NONE");
        }
        println!(
            "{} of {} seeds are dull: they reached only what at least one in {COMMON} seeds \
             reached",
            self.dull(),
            self.seeds.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_finds_dull_seeds_and_gaps() {
        let mut summary = Summary::default();
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        for _ in 0..20 {
            summary.add(set(&["status Success", "reads Read"]));
        }
        summary.add(set(&["status Success", "status MwBind"]));
        assert_eq!(summary.dull(), 20, "one seed reached an uncommon name");
        let missing = summary.missing();
        assert!(missing.contains(&"status RemoteAccess".to_owned()));
        assert!(!missing.contains(&"status MwBind".to_owned()));
        assert!(!missing.contains(&"status General".to_owned()), "exception");
        assert!(summary.reached_but_listed_unreachable().is_empty());
        summary.add(set(&["status General"]));
        assert_eq!(summary.reached_but_listed_unreachable(), ["status General"]);
    }
}
