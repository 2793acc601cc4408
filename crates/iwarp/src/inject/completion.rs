//! Faults of completions, and of messages that consume a receive.

use super::qp::{Action, QpInjector, op_of_completion};
use crate::fault::{Kind, Ops, Point};
use crate::objects::hooks::{Completion, QpFaults};
use iwarp_rnic::qp::Direction;
use iwarp_rnic::{Cqe, WcStatus};

impl QpInjector {
    /// Injects faults into a completion before it is written.
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
        let injected = self.injected(&mut state, Point::Completion, op, |_| true);
        let target = self.target(&state, Some(op));
        // The first fault ends the queue pair, so others are ignored.
        if let Some(injected) = injected.first() {
            self.plan.log.record(&self.plan, injected, &target);
            let Kind::Status(status) = injected.kind else {
                return Completion::Lost;
            };
            cqe.status = status;
            state.failing = true;
            let terminate = is_local(status);
            state.actions.push(Action::Fail { terminate });
            return Completion::ThenAct;
        }
        drop(state);
        if op == Ops::RECV {
            self.count_request(op);
        }
        match self.state.lock().actions.is_empty() {
            true => Completion::Written,
            false => Completion::ThenAct,
        }
    }

    /// Returns `true` if an arriving message may consume a receive.
    pub(super) fn offer_receive(&self) -> bool {
        if self.starves() {
            return false;
        }
        let mut state = self.state.lock();
        let injected = self.injected(&mut state, Point::Message, Ops::RECV, |_| true);
        let mut ready = true;
        for injected in injected {
            if let Kind::Rnr(time) = injected.kind {
                let target = self.target(&state, None);
                self.plan.log.record(&self.plan, &injected, &target);
                state.starved_until = super::act::until(time);
                state.actions.push(Action::Starve(time));
                ready = false;
            }
        }
        ready
    }
}

/// Returns `true` if a status stands for a local failure, which is reported to the peer. The other
/// statuses are caused by the peer or the network.
const fn is_local(status: WcStatus) -> bool {
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
