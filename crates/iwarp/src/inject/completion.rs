//! Faults of completions, and of messages that need a receive.

use super::qp::{Action, QpInjector, op_of_completion};
use crate::fault::{Kind, Ops, Point};
use crate::objects::hooks::{Completion, QpFaults};
use iwarp_rnic::qp::Direction;
use iwarp_rnic::{Cqe, WcStatus};

impl QpInjector {
    /// Called before a completion is written.
    pub(super) fn change_completion(&self, direction: Direction, cqe: &mut Cqe) -> Completion {
        if cqe.status != WcStatus::Success {
            return Completion::Written;
        }
        let op = match direction {
            Direction::Send => op_of_completion(cqe.opcode),
            Direction::Recv => Ops::RECV,
        };
        let mut state = self.state.lock();
        if state.failing {
            cqe.status = WcStatus::Flushed;
            return Completion::Written;
        }
        let taken = self.taken(&mut state, Point::Completion, op, |_| true);
        let place = self.place(&state, Some(op));
        // One fault ends the queue pair, so the others are ignored.
        if let Some(taken) = taken.first() {
            self.plan.log.note(&self.plan, taken, &place);
            let Kind::Status(status) = taken.kind else {
                return Completion::Lost;
            };
            cqe.status = status;
            state.failing = true;
            let terminate = is_ours(status);
            state.actions.push(Action::Fail { terminate });
            return Completion::ThenAct;
        }
        drop(state);
        if op == Ops::RECV {
            self.passed(op);
        }
        match self.state.lock().actions.is_empty() {
            true => Completion::Written,
            false => Completion::ThenAct,
        }
    }

    /// Returns `true` if an arrived message may take a receive.
    pub(super) fn offer_receive(&self) -> bool {
        if self.starves() {
            return false;
        }
        let mut state = self.state.lock();
        let taken = self.taken(&mut state, Point::Message, Ops::RECV, |_| true);
        let mut ready = true;
        for taken in taken {
            if let Kind::Rnr(time) = taken.kind {
                let place = self.place(&state, None);
                self.plan.log.note(&self.plan, &taken, &place);
                state.starved_until = super::act::until(time);
                state.actions.push(Action::Starve(time));
                ready = false;
            }
        }
        ready
    }
}

/// Returns `true` if a status means a local failure, which is reported to the peer. Other statuses
/// blame the peer or the network.
const fn is_ours(status: WcStatus) -> bool {
    !matches!(
        status,
        WcStatus::RemoteInvalidRequest
            | WcStatus::RemoteAccess
            | WcStatus::RemoteOperation
            | WcStatus::TransportRetryExceeded
            | WcStatus::ReceiverNotReady
            | WcStatus::ResponseTimeout
    )
}
