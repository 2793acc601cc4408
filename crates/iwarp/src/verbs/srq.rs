//! Shared receive queues.

use super::PostFailed;
use crate::error::Result;
use crate::runtime;
use iwarp_rnic::RecvWr;

/// A receive queue that several queue pairs draw from (`ibv_create_srq(3)`). A clone is another handle to it.
///
/// ```
/// # use iwarp::verbs::{Access, Config, Context, Device, QpInitAttr, RecvWr};
/// # fn main() -> iwarp::Result<()> {
/// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
/// let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64, None)?);
/// let (srq, inbox) = (pd.create_srq(16, 1)?, pd.reg_mr(16 * 256, Access::LOCAL_WRITE)?);
/// for slot in 0..16 {
///     let sges = [inbox.sge(slot * 256..(slot + 1) * 256)?];
///     srq.post_srq_recv(&[RecvWr { wr_id: slot as u64, sges: &sges }])?;
/// }
/// let peers = [(); 4].map(|()| pd.create_qp(&QpInitAttr::new(&cq, &cq).srq(&srq)));
/// # peers.into_iter().collect::<iwarp::Result<Vec<_>>>()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SharedReceiveQueue(pub(crate) runtime::SharedReceiveQueue);

impl SharedReceiveQueue {
    /// Queues receives, in order (`ibv_post_srq_recv(3)`). Never blocks.
    ///
    /// # Errors
    /// [`PostFailed`] for the first request that does not fit; those before it were queued.
    pub fn post_srq_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        self.0.post(wrs).map_err(PostFailed::of)
    }

    /// Asks for one event ([`AsyncEvent::SrqLimitReached`](super::AsyncEvent::SrqLimitReached)) when fewer than `srq_limit` receives wait
    /// (`ibv_modify_srq(3)`); 0 disarms.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): above the capacity.
    pub fn modify_srq(&self, srq_limit: u32) -> Result<()> {
        self.0.set_limit(srq_limit)
    }

    /// Changes how many receives it can hold, and keeps those that wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn resize(&self, max_wr: u32) -> Result<()> {
        self.0.resize(max_wr)
    }

    /// Returns how many receives it can hold, how many elements each, and the limit (`ibv_query_srq(3)`).
    pub fn query_srq(&self) -> (u32, u32, u32) {
        self.0.attributes()
    }

    /// Returns how many receives wait.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if none waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns `true` if both handles mean the same queue.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }
}
