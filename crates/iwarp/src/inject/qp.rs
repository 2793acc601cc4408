//! The state of fault injection of a queue pair: counts of opportunities (occasions on which a
//! fault may occur, see docs/fault-injection.md), and delays of its connection.

use super::log::Target;
use super::plan::{Injected, Plan};
use crate::conn::qp::QpInner;
use crate::fault::{Event, Ops, Point, Rule};
use crate::objects::any_qp::{AnyQp, downcast};
use crate::objects::hooks::DeviceFaults;
use crate::objects::hooks::StreamDirection;
use crate::objects::hooks::{Completion, QpFaults};
use crate::sys::clock::now_ns;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::Direction;
use iwarp_rnic::{SendOp, WcOpcode};
use parking_lot::Mutex;
use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;

/// The faults of one queue pair.
pub(crate) struct QpInjector {
    pub(super) plan: Arc<Plan>,
    /// Position in order of creation, from 1.
    pub(super) ordinal: u32,
    pub(super) number: u32,
    pub(super) state: Mutex<Progress>,
}

/// State of the rules for a queue pair.
#[derive(Default)]
pub(super) struct Progress {
    /// For each rule, the number of its opportunities.
    pub(super) counts: Vec<u64>,
    /// For each rule that counts octets: `true` if the count was reached on this connection.
    pub(super) reached: Vec<bool>,
    pub(super) peer: Option<SocketAddr>,
    /// `true` if the connection uses CRCs.
    pub(super) crc: bool,
    /// Octets that have passed, per direction.
    pub(super) octets: [u64; 2],
    /// Time until which no octets pass, per direction.
    pub(super) held_until: [u64; 2],
    /// Limit in octets per second, per direction.
    pub(super) rate: [Option<u64>; 2],
    /// `true` if a bit is to be flipped, per direction.
    pub(super) flip_pending: [bool; 2],
    /// Time until which the receiver is not ready.
    pub(super) starved_until: u64,
    /// `true` if a completion has failed, so that later completions are flushed.
    pub(super) failing: bool,
    /// Actions to execute after all locks are released.
    pub(super) actions: Vec<Action>,
}

/// An action to execute after all locks are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Reset,
    Close,
    /// Stops these directions for a time in nanoseconds.
    Hold([bool; 2], u64),
    Slow([bool; 2], u64),
    /// Ends the stream after a failed completion, with a Terminate or with a reset.
    Fail {
        terminate: bool,
    },
    Event(Event),
    PortDown(u64),
    /// The receiver is not ready for this time in nanoseconds.
    Starve(u64),
}

impl QpInjector {
    /// Returns the faults of a queue pair, if its device has any.
    pub(super) fn of(qp: &QpInner) -> Option<&Self> {
        let faults: &dyn Any = &**qp.faults.as_ref()?;
        faults.downcast_ref()
    }

    pub(super) fn new(plan: &Arc<Plan>, number: u32) -> Box<Self> {
        let rules = plan.spec.rules.len();
        Box::new(Self {
            ordinal: plan.next_queue_pair(),
            plan: Arc::clone(plan),
            number,
            state: Mutex::new(Progress {
                counts: vec![0; rules],
                reached: vec![false; rules],
                ..Progress::default()
            }),
        })
    }

    /// Called for a new connection. Resets the counts of octets, and keeps actions that wait for
    /// the connection.
    pub(super) fn begin_connection(&self, peer: SocketAddr, crc: bool) {
        let mut state = self.state.lock();
        let fresh = Progress {
            counts: std::mem::take(&mut state.counts),
            reached: vec![false; state.reached.len()],
            peer: Some(peer),
            crc,
            held_until: state.held_until,
            rate: state.rate,
            // Without CRCs the peer would not detect the flipped bit, and it would corrupt memory.
            flip_pending: state.flip_pending.map(|flip_pending| flip_pending && crc),
            actions: std::mem::take(&mut state.actions),
            ..Progress::default()
        };
        *state = fresh;
    }

    /// Returns `true` if a rule selects this queue pair, the peer, and the operation if `op` is
    /// given.
    pub(super) fn selects(&self, rule: &Rule, peer: Option<SocketAddr>, op: Option<Ops>) -> bool {
        let select = &rule.select;
        let by_qp = select
            .qp
            .is_none_or(|filter| filter.is(self.ordinal, self.number));
        let by_peer = select
            .peer
            .is_none_or(|filter| peer.is_some_and(|peer| filter.matches(peer)));
        let by_op = select.ops.is_none_or(|ops| op.is_none_or(|op| ops.has(op)));
        by_qp && by_peer && by_op
    }

    /// Counts an opportunity of each matching rule. Returns the faults to inject.
    pub(super) fn injected(
        &self,
        state: &mut Progress,
        point: Point,
        op: Ops,
        allowed: impl Fn(&Rule) -> bool,
    ) -> Vec<Injected> {
        let mut all = Vec::new();
        for (i, rule) in self.plan.rules(point) {
            if !allowed(rule) || !self.selects(rule, state.peer, Some(op)) {
                continue;
            }
            let Some(count) = state.counts.get_mut(i) else {
                continue;
            };
            all.extend(self.plan.opportunity(i, self.ordinal, count));
        }
        all
    }

    pub(super) fn target(&self, state: &Progress, op: Option<Ops>) -> Target {
        Target {
            qp: Some((self.ordinal, self.number)),
            peer: state.peer,
            op: op.map(Ops::name),
            octets: None,
        }
    }
}

impl QpFaults for QpInjector {
    fn connected(&self, peer: SocketAddr, crc: bool) {
        self.begin_connection(peer, crc);
    }

    fn refuses_send(&self, op: &SendOp) -> bool {
        self.refuses(op_of(op))
    }

    fn refuses_receive(&self) -> bool {
        self.refuses(Ops::RECV)
    }

    fn changed(&self, op: &SendOp) -> Option<SendOp> {
        self.with_wrong_key(op)
    }

    fn posted(&self, op: &SendOp) {
        self.count_request(op_of(op));
    }

    fn holds(&self, direction: StreamDirection) -> bool {
        let until = self.state.lock().held_until[direction.index()];
        self.plan.is_port_down() || until != 0 && now_ns() < until
    }

    fn limit(&self, direction: StreamDirection, runs: &mut Vec<RawSlice>) {
        self.limit_octets(direction, runs);
    }

    fn passed_octets(&self, direction: StreamDirection, n: usize) {
        self.count_octets(direction, n);
    }

    unsafe fn spoil_copy(&self, runs: &mut Vec<RawSlice>) -> Option<Vec<u8>> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.flip_in_copy(runs) }
    }

    unsafe fn spoil_received(&self, runs: &[RawSlice], n: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.flip_in_place(runs, n) }
    }

    fn receiver_ready(&self) -> bool {
        self.offer_receive()
    }

    fn starves(&self) -> bool {
        let until = self.state.lock().starved_until;
        until != 0 && now_ns() < until
    }

    fn completed(&self, direction: Direction, cqe: &mut Cqe) -> Completion {
        self.change_completion(direction, cqe)
    }

    fn is_due(&self) -> bool {
        !self.state.lock().actions.is_empty()
    }

    fn act(&self, qp: Arc<dyn AnyQp>) {
        if let Some(qp) = downcast(qp) {
            self.execute_all(&qp);
        }
    }
}

/// Returns the kind of a send work request.
pub(super) const fn op_of(op: &SendOp) -> Ops {
    match op {
        SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::AtomicWrite { .. } => Ops::WRITE,
        SendOp::Read { .. } | SendOp::ReadInv { .. } | SendOp::Flush { .. } => Ops::READ,
        SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => Ops::ATOMIC,
        SendOp::LocalInvalidate { .. } | SendOp::Bind(_) | SendOp::FastRegister(_) => Ops::LOCAL,
        _ => Ops::SEND,
    }
}

/// Returns the kind of the request of a completion.
pub(super) const fn op_of_completion(opcode: WcOpcode) -> Ops {
    match opcode {
        WcOpcode::Send => Ops::SEND,
        WcOpcode::Write | WcOpcode::AtomicWrite => Ops::WRITE,
        WcOpcode::Read | WcOpcode::Flush => Ops::READ,
        WcOpcode::CmpSwap | WcOpcode::FetchAdd => Ops::ATOMIC,
        WcOpcode::Bind
        | WcOpcode::LocalInvalidate
        | WcOpcode::FastRegister
        | WcOpcode::TagAdd
        | WcOpcode::TagRemove
        | WcOpcode::TagSync => Ops::LOCAL,
        WcOpcode::Recv | WcOpcode::RecvWriteImm | WcOpcode::TagRecv | WcOpcode::TagNone => {
            Ops::RECV
        }
    }
}
