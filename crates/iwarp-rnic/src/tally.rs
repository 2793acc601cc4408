//! Counts of completed operations, for completion counters (`ibv_qp_attach_comp_cntr(3)`).
//!
//! A queue pair counts only after [`enable_tally`](crate::qp::QueuePair::enable_tally). Until then
//! a message costs one comparison, and the counts use no memory.

use crate::storage::filled;
use crate::{AllocError, SendOp, WcStatus};
use alloc::vec::Vec;

/// Kinds of counted operations. The values are the bit numbers of `enum
/// ibv_qp_attach_comp_cntr_op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Sends.
    Send = 0,
    /// Receives, including those consumed by immediate data.
    Recv = 1,
    /// RDMA Reads of this end.
    Read = 2,
    /// RDMA Reads of the peer, counted when their response is planned.
    RemoteRead = 3,
    /// RDMA Writes of this end.
    Write = 4,
    /// RDMA Writes of the peer, counted when they are placed.
    RemoteWrite = 5,
}

impl Counted {
    /// All kinds, in the order of their values.
    pub const ALL: [Self; 6] = [
        Self::Send,
        Self::Recv,
        Self::Read,
        Self::RemoteRead,
        Self::Write,
        Self::RemoteWrite,
    ];

    /// Returns the kind of a request, or `None` if it is not counted.
    const fn of(op: &SendOp) -> Option<Self> {
        match op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => Some(Self::Send),
            SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::AtomicWrite { .. } => {
                Some(Self::Write)
            }
            SendOp::Read { .. } | SendOp::ReadInv { .. } => Some(Self::Read),
            _ => None,
        }
    }
}

/// Completed operations of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Operations that succeeded.
    pub succeeded: u64,
    /// Operations that failed or were flushed.
    pub failed: u64,
    /// Octets of the successful operations.
    pub octets: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Tally(Vec<Count>);

impl Tally {
    pub(crate) fn enable(&mut self) -> Result<(), AllocError> {
        if self.0.is_empty() {
            self.0 = filled(Counted::ALL.len())?;
        }
        Ok(())
    }

    pub(crate) fn get(&self, kind: Counted) -> Count {
        self.0.get(kind as usize).copied().unwrap_or_default()
    }

    #[inline(always)]
    pub(crate) const fn is_on(&self) -> bool {
        !self.0.is_empty()
    }

    pub(crate) fn add(&mut self, kind: Counted, octets: u32) {
        self.count(kind, WcStatus::Success, octets);
    }

    /// Counts a successful operation of the peer. Operations of zero octets are not counted,
    /// because they are probes and notes.
    pub(crate) fn add_remote(&mut self, kind: Counted, octets: u32) {
        if octets > 0 {
            self.add(kind, octets);
        }
    }

    pub(crate) fn add_failed(&mut self, kind: Counted) {
        self.count(kind, WcStatus::Flushed, 0);
    }

    pub(crate) fn add_request(&mut self, op: &SendOp, status: WcStatus, octets: u32) {
        if let Some(kind) = Counted::of(op) {
            self.count(kind, status, octets);
        }
    }

    /// Has no effect before counting is enabled. Not inlined: hot paths only check
    /// [`is_on`](Self::is_on).
    #[cold]
    #[inline(never)]
    fn count(&mut self, kind: Counted, status: WcStatus, octets: u32) {
        let Some(count) = self.0.get_mut(kind as usize) else {
            return;
        };
        match status {
            WcStatus::Success => {
                count.succeeded = count.succeeded.wrapping_add(1);
                count.octets = count.octets.wrapping_add(u64::from(octets));
            }
            _ => count.failed = count.failed.wrapping_add(1),
        }
    }
}
