//! Faults of posted requests.

use super::qp::{QpInjector, op_of};
use crate::fault::{Kind, Ops, Point};
use iwarp_rnic::SendOp;

/// XORed with a key to make the peer refuse it: the index most likely names no entry of its table.
const WRONG_KEY: u32 = 0x5a5a_5a00;

impl QpInjector {
    pub(super) fn refuses(&self, op: Ops) -> bool {
        let mut state = self.state.lock();
        let taken = self.taken(&mut state, Point::Post, op, |rule| rule.kind == Kind::Post);
        let place = self.place(&state, Some(op));
        for taken in &taken {
            self.plan.log.note(&self.plan, taken, &place);
        }
        !taken.is_empty()
    }

    /// Returns a modified operation to post, if a fault changes it.
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
        let taken = self.taken(&mut state, Point::Post, kind, |rule| {
            rule.kind == Kind::RemoteAccess
        });
        let place = self.place(&state, Some(kind));
        for taken in &taken {
            self.plan.log.note(&self.plan, taken, &place);
        }
        if taken.is_empty() {
            return None;
        }
        *key ^= WRONG_KEY;
        Some(wrong)
    }

    /// Called when a request was posted or a receive has completed.
    pub(super) fn passed(&self, op: Ops) {
        let mut state = self.state.lock();
        let all = self.taken(&mut state, Point::Request, op, |rule| {
            // Receives are opportunities only of rules that select them.
            op != Ops::RECV || rule.select.ops.is_some()
        });
        for taken in all {
            self.plan_action(&mut state, &taken, Some(op), None);
        }
    }
}
