//! Requests that only change the memory table: binds, fast registrations, and local invalidations.
//!
//! An invalidation completes when the memory has no more users: another queue pair may be placing
//! octets there, or a system call may be writing a plan that refers to the memory. Until then the
//! request waits at the head of the send queue, and the driver calls [`QueuePair::retry_memory`]
//! when the memory has no users. The queue pair's own plans cannot block the request indefinitely:
//! they use memory only during a write or a read, and a blocked stream writes nothing. Send with
//! Invalidate and Read with Invalidate wait in the same way before they complete (`deliver`).

use super::{Env, Host, QueuePair, TxFill};
use crate::memory::{MemoryError, MemoryTable};
use crate::{FastRegister, SendOp, WcStatus};
use iwarp_proto::ddp::Stag;

/// State of the request at the head of the send queue, if it changes the table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LocalRequest {
    /// The request has invalidated the STag, and waits for the users of the memory.
    invalidated: bool,
    /// Retrying is useless before [`QueuePair::retry_memory`].
    pub(super) waits: bool,
}

/// The result of executing the request at the head of the send queue.
pub(super) enum LocalStep {
    /// The request was executed, or waits. Choose the next message again.
    Done,
    /// Stop filling the plan.
    Stop(TxFill),
}

impl QueuePair {
    /// Returns `true` if an invalidation or a registration waits for the users of memory. The
    /// driver must call [`retry_memory`](Self::retry_memory) once after recording this, in case the
    /// use ended in between.
    pub const fn waits_for_memory(&self) -> bool {
        self.tx.local.waits || self.rx.invalidating.is_some()
    }

    /// Allows a retry of requests that wait for memory, after the memory became unused
    /// ([`MemoryTable::take_unused`]). The caller then transmits, and processes received octets as
    /// for a held Send.
    pub const fn retry_memory(&mut self) {
        self.tx.local.waits = false;
    }

    /// Executes the bind that [`TxFill::Memory`] announced.
    pub fn tx_memory<H: Host>(&mut self, table: &mut MemoryTable<H::Memory>, host: &mut H) {
        let Some((seq, slot)) = self.startable() else {
            return;
        };
        let SendOp::Bind(bind) = slot.op else {
            return;
        };
        let result = table.bind(&bind, self.accessor());
        if result == Err(MemoryError::InUse) {
            self.tx.local.waits = !table.is_unused(bind.mw_stag);
            return;
        }
        self.start_next();
        self.finish_memory(seq, result, host);
        // A closing stream may have waited for this request.
        self.note_drained();
    }

    fn finish_memory<H: Host>(&mut self, seq: u32, result: Result<(), MemoryError>, host: &mut H) {
        match result {
            Ok(()) => self.complete_request(seq, host),
            Err(_) => self.fail_request(seq, WcStatus::MwBind, host),
        }
    }

    /// Executes the request at the head of the send queue, which only changes the table.
    #[cold]
    #[inline(never)]
    pub(super) fn local_request<H: Host>(
        &mut self,
        plan_is_empty: bool,
        env: &mut Env<'_, H>,
    ) -> LocalStep {
        let Some((seq, slot)) = self.sq.next() else {
            return LocalStep::Done;
        };
        if self.tx.local_done >= self.config.budget.local_requests() {
            return LocalStep::Stop(TxFill::More);
        }
        self.tx.local_done = self.tx.local_done.wrapping_add(1);
        match slot.op {
            // Requests in the plan may send from this memory, so the plan is written first.
            SendOp::LocalInvalidate { .. } if !plan_is_empty => {
                return LocalStep::Stop(TxFill::Ready);
            }
            SendOp::LocalInvalidate { stag } => self.local_invalidate(seq, stag, env),
            SendOp::FastRegister(wr) => self.fast_register(seq, &wr, env),
            _ => return LocalStep::Stop(TxFill::Memory),
        }
        LocalStep::Done
    }

    /// Executes the fast registration at the head of the send queue, unless it has to wait.
    pub(super) fn fast_register<H: Host>(
        &mut self,
        seq: u32,
        wr: &FastRegister,
        env: &mut Env<'_, H>,
    ) {
        let result = env.memory.fast_register(wr, self.config.pd);
        if result == Err(MemoryError::InUse) {
            self.tx.local.waits = !env.memory.is_unused(wr.new_stag);
            return;
        }
        self.start_next();
        self.finish_memory(seq, result, env.host);
    }

    /// Executes the invalidation at the head of the send queue, unless it has to wait.
    pub(super) fn local_invalidate<H: Host>(&mut self, seq: u32, stag: Stag, env: &mut Env<'_, H>) {
        let complete = match self.tx.local.invalidated {
            true => Ok(env.memory.is_unused(stag)),
            false => env.memory.invalidate(stag, self.accessor(), false),
        };
        if complete == Ok(false) {
            self.tx.local = LocalRequest {
                invalidated: true,
                waits: true,
            };
            return;
        }
        self.tx.local = LocalRequest::default();
        self.start_next();
        match complete {
            Ok(_) => self.complete_request(seq, env.host),
            Err(_) => self.fail_request(seq, WcStatus::LocalProtection, env.host),
        }
    }
}
