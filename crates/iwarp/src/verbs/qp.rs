//! Queue pairs.

use super::{CompletionQueue, SharedReceiveQueue};
use crate::error::{Error, Result};
use crate::owned;
use crate::owned::memory::ProtectionDomain as Domain;
use crate::runtime;
use iwarp_rnic::counters::Counters;
use iwarp_rnic::qp::{Fault, State};
use iwarp_rnic::{Access, RecvWr, SendWr};
use std::fmt;

/// The attributes of a queue pair that is to be created (`ibv_create_qp(3)`). All but the completion queues have defaults.
///
/// ```
/// # use iwarp::verbs::{Config, Context, Device, QpInitAttr};
/// # fn main() -> iwarp::Result<()> {
/// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
/// let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(1024, None)?);
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
    /// Makes attributes with the defaults. Both completion queues may be the same one.
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

    /// Sets how many send and receive work requests may be outstanding; default 128 each.
    pub const fn cap(mut self, max_send_wr: u32, max_recv_wr: u32) -> Self {
        self.wr = (max_send_wr, max_recv_wr);
        self
    }

    /// Sets the scatter/gather elements per send and receive work request; default 4 each.
    pub const fn max_sge(mut self, max_send_sge: u32, max_recv_sge: u32) -> Self {
        self.sge = (max_send_sge, max_recv_sge);
        self
    }

    /// Sets the octets of inline data per work request; default 256.
    pub const fn max_inline_data(mut self, octets: u32) -> Self {
        self.inline = octets;
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight: inbound to serve, and outbound to have outstanding; default 16 each, at
    /// most 4096.
    pub const fn rd_atomic(mut self, max_dest_rd_atomic: u16, max_rd_atomic: u16) -> Self {
        self.reads = (max_dest_rd_atomic, max_rd_atomic);
        self
    }

    /// If `yes`, every send work request writes a completion. Otherwise only signaled ones do.
    pub const fn sq_sig_all(mut self, yes: bool) -> Self {
        self.all_signaled = yes;
        self
    }

    /// Takes receives from this shared receive queue instead of a receive queue of its own.
    pub const fn srq(mut self, srq: &'a SharedReceiveQueue) -> Self {
        self.srq = Some(srq);
        self
    }

    pub(super) fn create(&self, pd: &Domain) -> Result<QueuePair> {
        let mut builder = pd.queue_pair().depth(self.wr.0, self.wr.1);
        builder = builder.max_sge(self.sge.0, self.sge.1);
        builder = builder.max_inline(self.inline);
        builder = builder.signal_all(self.all_signaled);
        builder = builder.reads(self.reads.0, self.reads.1);
        if let Some(srq) = self.srq {
            builder = builder.shared_receive_queue(&srq.0);
        }
        let owner = builder.build(&self.send_cq.0, &self.recv_cq.0)?;
        Ok(QueuePair {
            raw: owner.handle(),
            owner: Some(owner),
        })
    }
}

/// Some work requests were not accepted: the first that was not, and why. Those before it were. `?` makes an [`Error`] of it.
#[derive(Debug)]
pub struct PostFailed {
    accepted: usize,
    error: Error,
}

impl PostFailed {
    pub(super) fn of((accepted, error): (usize, Error)) -> Self {
        Self { accepted, error }
    }

    /// Returns how many requests of the list were accepted, which is also the index of the one that was not.
    pub const fn accepted(&self) -> usize {
        self.accepted
    }

    /// Returns why: [`Error::Post`].
    pub const fn error(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for PostFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { accepted, error } = self;
        write!(f, "work request {accepted} of the list: {error}")
    }
}

impl std::error::Error for PostFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<PostFailed> for Error {
    fn from(failed: PostFailed) -> Self {
        failed.error
    }
}

/// A queue pair (`ibv_create_qp(3)`): one end of a connection. It has one owner and is destroyed with it. Module [`cm`](super::cm) connects it.
///
/// Receives may be posted before it is connected, Sends afterwards.
#[derive(Debug)]
pub struct QueuePair {
    raw: runtime::QueuePair,
    /// `None` if a connection owns it.
    owner: Option<owned::QueuePair>,
}

impl QueuePair {
    /// Gives the ownership to a connection. What is left refers to it.
    pub(super) fn hand_over(mut self) -> Result<(owned::QueuePair, Self)> {
        let owner = self.owner.take();
        // Nobody gets the rest of a queue pair by value.
        let owner = owner.ok_or(Error::InvalidState("a connection owns the queue pair"))?;
        Ok((owner, self))
    }

    /// Returns its number, which is unique on the device at any time; 24 bits.
    pub fn qp_num(&self) -> u32 {
        self.raw.num()
    }

    /// Returns its state (`ibv_query_qp(3)`).
    pub fn query_qp(&self) -> State {
        self.raw.state()
    }

    /// Returns why its connection has ended and which end is to blame, if it has ended in error.
    pub fn fault(&self) -> Option<Fault> {
        self.raw.fault()
    }

    /// Returns what it has sent and received.
    pub fn counters(&self) -> Counters {
        self.raw.counters()
    }

    /// Sets what the peer may do to memory through it: the remote rights of `access` (`qp_access_flags` of `ibv_modify_qp(3)`).
    pub fn set_access(&self, access: Access) {
        self.raw.set_remote_access(access);
    }

    /// Queues send work requests, in order, and starts to transmit them (`ibv_post_send(3)`). Never blocks.
    ///
    /// # Errors
    /// [`PostFailed`] for the first request that is not accepted: the queue is full, a list or inline data are too long, or it is not
    /// connected. Wrong keys and ranges show in completions.
    #[inline]
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailed> {
        self.raw.post_send(wrs).map_err(PostFailed::of)
    }

    /// Does the same, but accepts all of the requests or none.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); none is accepted then.
    pub fn post_send_all(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailed> {
        self.raw.post_send_all(wrs).map_err(PostFailed::of)
    }

    /// Queues receives, in order (`ibv_post_recv(3)`). Never blocks.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    #[inline]
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        self.raw.post_recv(wrs).map_err(PostFailed::of)
    }
}
