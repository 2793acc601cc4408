//! Where the data path asks for injected faults of a queue pair.

use super::effects::{DriveHost, Due, Effects};
use super::post::Request;
use super::qp::QpInner;
use crate::objects::hooks::{QpFaults, StreamDirection};
use iwarp_rnic::PostError;
use iwarp_rnic::qp::QueuePair as Machine;
use std::sync::Arc;

impl QpInner {
    pub(crate) fn first_refused<R: Request>(&self, wrs: &[R]) -> Option<usize> {
        let faults = self.faults.as_ref()?;
        wrs.iter().position(|wr| faults.refuses_send(&wr.wr().op))
    }

    /// Posts a request of a queue pair with faults. With `ALL_OR_NONE`, the caller has already
    /// checked all requests with [`first_refused`](Self::first_refused).
    #[cold]
    pub(crate) fn post_faulty<const ALL_OR_NONE: bool, R: Request>(
        self: &Arc<Self>,
        faults: &dyn QpFaults,
        wr: &R,
        machine: &mut Machine,
        effects: &mut Effects,
    ) -> Result<(), PostError> {
        let op = &wr.wr().op;
        if !ALL_OR_NONE && faults.refuses_send(op) {
            return Err(PostError::QueueFull);
        }
        let mut host = DriveHost::new(self, effects);
        match faults.changed(op) {
            Some(op) => wr.with_op(op).post(machine, &mut host)?,
            None => wr.post(machine, &mut host)?,
        }
        drop(host);
        faults.posted(op);
        Ok(())
    }

    /// Carries out due faults after posting, before the requests are sent.
    #[inline]
    pub(crate) fn act_before_sending(self: &Arc<Self>, effects: &mut Effects) {
        if let Some(faults) = &self.faults {
            effects.due.remove(Due::FAULT);
            faults.act(Arc::clone(self) as _);
        }
    }

    #[inline]
    pub(crate) fn passes(&self, direction: StreamDirection) -> bool {
        let faults = self.faults.as_ref();
        faults.is_none_or(|faults| !faults.holds(direction))
    }
}
