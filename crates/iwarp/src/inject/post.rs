//! Faults of requests that are posted.

use super::Way;
use super::qp::{QpFaults, op_of};
use crate::conn::after::{After, DriveHost};
use crate::conn::qp::{QpInner, Request};
use crate::fault::{Kind, Ops, Point};
use iwarp_rnic::qp::QueuePair as Machine;
use iwarp_rnic::{PostError, SendOp};
use std::sync::Arc;

/// What is changed in a key that the peer is to refuse: the index names another entry of its table, in all likelihood none.
const WRONG_KEY: u32 = 0x5a5a_5a00;

impl QpFaults {
    /// Returns `true` if a request must be refused as if its queue were full.
    pub(crate) fn refuses_send(&self, op: &SendOp) -> bool {
        self.refuses(op_of(op))
    }

    /// As [`refuses_send`](Self::refuses_send), for a receive.
    pub(crate) fn refuses_receive(&self) -> bool {
        self.refuses(Ops::RECV)
    }

    fn refuses(&self, op: Ops) -> bool {
        let mut state = self.state.lock();
        let taken = self.taken(&mut state, Point::Post, op, |rule| rule.kind == Kind::Post);
        let place = self.place(&state, Some(op));
        for taken in &taken {
            self.plan.log.note(&self.plan, taken, &place);
        }
        !taken.is_empty()
    }

    /// Returns the operation to post instead, if a fault changes it.
    pub(crate) fn changed(&self, op: &SendOp) -> Option<SendOp> {
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

    /// A send work request was queued, and nothing of it is sent yet. What it brings about is done by [`act`](Self::act).
    pub(crate) fn posted(&self, op: &SendOp) {
        self.passed(op_of(op));
    }

    /// A request was posted, or a receive has completed.
    pub(super) fn passed(&self, op: Ops) {
        let mut state = self.state.lock();
        let all = self.taken(&mut state, Point::Request, op, |rule| {
            // Receives are opportunities only of those who ask for them.
            op != Ops::RECV || rule.select.ops.is_some()
        });
        for taken in all {
            self.plan_action(&mut state, &taken, Some(op), None);
        }
    }
}

impl QpInner {
    /// Returns the first request of a list that an injected fault refuses.
    pub(crate) fn first_refused<R: Request>(&self, wrs: &[R]) -> Option<usize> {
        let faults = self.faults.as_ref()?;
        wrs.iter().position(|wr| faults.refuses_send(&wr.wr().op))
    }

    /// Queues a request of a queue pair with faults. Those that are posted as a `WHOLE` have been asked for already.
    #[cold]
    pub(crate) fn post_faulty<const WHOLE: bool, R: Request>(
        self: &Arc<Self>,
        faults: &QpFaults,
        wr: &R,
        machine: &mut Machine,
        after: &mut After,
    ) -> Result<(), PostError> {
        let op = &wr.wr().op;
        if !WHOLE && faults.refuses_send(op) {
            return Err(PostError::QueueFull);
        }
        let mut host = DriveHost::new(self, after);
        match faults.changed(op) {
            Some(op) => wr.with_op(op).post(machine, &mut host)?,
            None => wr.post(machine, &mut host)?,
        }
        drop(host);
        faults.posted(op);
        Ok(())
    }

    /// What a fault does about a request that was posted, it does before the request is sent.
    #[inline]
    pub(crate) fn act_before_sending(self: &Arc<Self>, after: &mut After) {
        if let Some(faults) = &self.faults {
            after.act = false;
            faults.act(self);
        }
    }

    /// Returns `true` unless a fault holds back what passes in this direction.
    #[inline]
    pub(crate) fn passes(&self, way: Way) -> bool {
        self.faults.as_ref().is_none_or(|faults| !faults.holds(way))
    }
}
