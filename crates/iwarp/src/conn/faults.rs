//! Injected faults of a queue pair on the data path.

use super::effects::{DriveHost, Due, Effects};
use super::post::Request;
use super::qp::QpInner;
use crate::objects::hooks::{QpFaults, StreamDirection};
use iwarp_rnic::PostError;
use iwarp_rnic::qp::QueuePair as Machine;
use std::sync::Arc;

impl QpInner {
    /// Returns the index of the first request that an injected fault refuses.
    pub(crate) fn first_refused<R: Request>(&self, wrs: &[R]) -> Option<usize> {
        let faults = self.faults.as_ref()?;
        wrs.iter().position(|wr| faults.refuses_send(&wr.wr().op))
    }

    /// Queues a request of a queue pair with faults. With `WHOLE`,
    /// [`first_refused`](Self::first_refused) has already checked it.
    #[cold]
    pub(crate) fn post_faulty<const WHOLE: bool, R: Request>(
        self: &Arc<Self>,
        faults: &dyn QpFaults,
        wr: &R,
        machine: &mut Machine,
        effects: &mut Effects,
    ) -> Result<(), PostError> {
        let op = &wr.wr().op;
        if !WHOLE && faults.refuses_send(op) {
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

    #[inline]
    pub(crate) fn act_before_sending(self: &Arc<Self>, effects: &mut Effects) {
        if let Some(faults) = &self.faults {
            effects.due.remove(Due::FAULT);
            faults.act(Arc::clone(self) as _);
        }
    }

    /// Returns `true` unless a fault holds back data of this direction.
    #[inline]
    pub(crate) fn passes(&self, way: StreamDirection) -> bool {
        self.faults.as_ref().is_none_or(|faults| !faults.holds(way))
    }
}
