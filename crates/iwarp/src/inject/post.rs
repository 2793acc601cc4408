//! Faults of posted work requests.

use super::qp::{QpInjector, op_of};
use crate::fault::{Kind, Ops, Point};
use iwarp_rnic::SendOp;

/// Value that is XORed with an rkey. The result's index most likely refers to no entry of the
/// peer's table, so the peer refuses it.
const WRONG_KEY: u32 = 0x5a5a_5a00;

impl QpInjector {
    pub(super) fn refuses(&self, op: Ops) -> bool {
        let mut state = self.state.lock();
        let injected = self.injected(&mut state, Point::Post, op, |rule| rule.kind == Kind::Post);
        let target = self.target(&state, Some(op));
        for injected in &injected {
            self.plan.log.record(&self.plan, injected, &target);
        }
        !injected.is_empty()
    }

    /// Returns the operation with a wrong rkey, if a rule injects this fault.
    pub(super) fn with_wrong_key(&self, op: &SendOp) -> Option<SendOp> {
        let mut wrong = *op;
        let key = match &mut wrong {
            SendOp::Write { rkey, .. }
            | SendOp::WriteImm { rkey, .. }
            | SendOp::Read { rkey, .. }
            | SendOp::ReadInv { rkey, .. }
            | SendOp::FetchAdd { rkey, .. }
            | SendOp::CmpSwap { rkey, .. } => rkey,
            _ => return None,
        };
        let kind = op_of(op);
        let mut state = self.state.lock();
        let injected = self.injected(&mut state, Point::Post, kind, |rule| {
            rule.kind == Kind::RemoteAccess
        });
        let target = self.target(&state, Some(kind));
        for injected in &injected {
            self.plan.log.record(&self.plan, injected, &target);
        }
        if injected.is_empty() {
            return None;
        }
        *key ^= WRONG_KEY;
        Some(wrong)
    }

    /// Called after a request was posted or a receive has completed.
    pub(super) fn count_request(&self, op: Ops) {
        let mut state = self.state.lock();
        let all = self.injected(&mut state, Point::Request, op, |rule| {
            // Receives are opportunities only of rules that select them.
            op != Ops::RECV || rule.select.ops.is_some()
        });
        for injected in all {
            self.plan_action(&mut state, &injected, Some(op), None);
        }
    }
}
