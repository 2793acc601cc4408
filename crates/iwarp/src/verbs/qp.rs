//! Queue pairs.

use super::{CompletionQueue, ProtectionDomain, SharedReceiveQueue};
use crate::error::Result;
use crate::runtime;
use crate::runtime::QpAttributes;
use iwarp_rnic::qp::State;
use std::ops::Deref;

/// Attributes of a new queue pair (`ibv_create_qp(3)`). All but the completion queues have
/// defaults.
///
/// ```
/// # use iwarp::verbs::{Config, Context, Device, ProtectionDomain, QpInitAttr};
/// # fn main() -> iwarp::Result<()> {
/// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
/// let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(1024, None)?);
/// let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq).cap(512, 512).max_inline_data(64))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "attributes do nothing by themselves"]
pub struct QpInitAttr<'a> {
    send_cq: &'a CompletionQueue,
    recv_cq: &'a CompletionQueue,
    srq: Option<&'a SharedReceiveQueue>,
    wr: (u32, u32),
    sge: (u32, u32),
    inline: u32,
    all_signaled: bool,
    reads: (u16, u16),
}

impl<'a> QpInitAttr<'a> {
    /// Returns the default attributes. `send_cq` and `recv_cq` may be the same queue.
    pub const fn new(send_cq: &'a CompletionQueue, recv_cq: &'a CompletionQueue) -> Self {
        Self {
            send_cq,
            recv_cq,
            srq: None,
            wr: (128, 128),
            sge: (4, 4),
            inline: 256,
            all_signaled: false,
            reads: (16, 16),
        }
    }

    /// Sets the maximum numbers of outstanding send and receive work requests (default 128 each).
    pub const fn cap(mut self, max_send_wr: u32, max_recv_wr: u32) -> Self {
        self.wr = (max_send_wr, max_recv_wr);
        self
    }

    /// Sets the number of scatter/gather elements per send and receive work request (default 4
    /// each).
    pub const fn max_sge(mut self, max_send_sge: u32, max_recv_sge: u32) -> Self {
        self.sge = (max_send_sge, max_recv_sge);
        self
    }

    /// Sets the maximum of inline data per work request, in bytes (default 256).
    pub const fn max_inline_data(mut self, octets: u32) -> Self {
        self.inline = octets;
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight, inbound and outbound (default 16
    /// each, at most 4096).
    pub const fn rd_atomic(mut self, max_dest_rd_atomic: u16, max_rd_atomic: u16) -> Self {
        self.reads = (max_dest_rd_atomic, max_rd_atomic);
        self
    }

    /// If `yes`, every send work request writes a completion. By default only signaled requests do.
    pub const fn sq_sig_all(mut self, yes: bool) -> Self {
        self.all_signaled = yes;
        self
    }

    /// Takes receives from a shared receive queue, instead of a receive queue of the queue pair.
    pub const fn srq(mut self, srq: &'a SharedReceiveQueue) -> Self {
        self.srq = Some(srq);
        self
    }

    pub(super) fn create(&self, pd: &ProtectionDomain) -> Result<QueuePair> {
        let handle = pd.context().create_qp(&QpAttributes {
            pd: pd.number(),
            send_cq: self.send_cq.clone(),
            recv_cq: self.recv_cq.clone(),
            srq: self.srq.cloned(),
            unreliable: false,
            max_send_wr: self.wr.0,
            max_recv_wr: self.wr.1,
            max_send_sge: self.sge.0,
            max_recv_sge: self.sge.1,
            max_inline: self.inline,
            signal_all: self.all_signaled,
            max_ird: self.reads.0,
            max_ord: self.reads.1,
        })?;
        let qp = QueuePair {
            handle,
            _pd: pd.clone(),
        };
        // In INIT, receives can be posted before the connection is established.
        qp.modify(State::Init)?;
        Ok(qp)
    }
}

/// A queue pair (`ibv_create_qp(3)`): one end of a connection. Dropping it destroys it. It
/// dereferences to [`runtime::QueuePair`], which has further calls. The module [`cm`](super::cm)
/// connects queue pairs.
///
/// Receives can be posted before the queue pair is connected, Sends only afterwards.
#[derive(Debug)]
pub struct QueuePair {
    handle: runtime::QueuePair,
    _pd: ProtectionDomain,
}

impl Deref for QueuePair {
    type Target = runtime::QueuePair;

    fn deref(&self) -> &runtime::QueuePair {
        &self.handle
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.handle.destroy();
    }
}
