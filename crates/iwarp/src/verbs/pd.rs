//! Protection domains, and memory windows.

use super::{Context, QpInitAttr, QueuePair, SharedReceiveQueue};
use crate::connection::BoundWindow;
use crate::error::{Error, Result};
use crate::owned::memory::{MemoryRegion, ProtectionDomain as Domain, RemoteMemory};
use iwarp_rnic::{Access, SendOp};
use std::ops::RangeBounds;

/// A protection domain (`ibv_alloc_pd(3)`): queue pairs use the memory of their own domain only. A clone is another handle to it.
#[derive(Debug, Clone)]
pub struct ProtectionDomain(pub(crate) Domain);

impl ProtectionDomain {
    /// Returns its device.
    pub fn context(&self) -> Context {
        Context(self.0.context().clone())
    }

    /// Allocates `length` octets of zeroed, page-aligned memory and registers them (`ibv_reg_mr(3)`). They are deregistered and freed when
    /// the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Memory`]: too many regions, or remote writing without [`Access::LOCAL_WRITE`].
    pub fn reg_mr(&self, length: usize, access: Access) -> Result<MemoryRegion> {
        self.0.allocate(length, access)
    }

    /// Allocates a memory window for a region (`ibv_alloc_mw(3)`, type 2).
    ///
    /// # Errors
    /// [`Error::Memory`]: too many; [`Error::InvalidArgument`]: a region of another domain, or without [`Access::MW_BIND`].
    pub fn alloc_mw(&self, mr: &MemoryRegion) -> Result<MemoryWindow> {
        if !mr.is_of(&self.0) || !mr.access().contains(Access::MW_BIND) {
            return Err(Error::InvalidArgument(
                "a window needs a region of its own domain with `MW_BIND`",
            ));
        }
        let bound = BoundWindow::new(self.0.context(), self.0.number(), mr)?;
        Ok(MemoryWindow {
            bound,
            region: mr.clone(),
        })
    }

    /// Creates a queue pair (`ibv_create_qp(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a size above the device's limit; [`Error::OutOfMemory`].
    pub fn create_qp(&self, attr: &QpInitAttr<'_>) -> Result<QueuePair> {
        attr.create(&self.0)
    }

    /// Creates a shared receive queue for `max_wr` receives of up to `max_sge` elements each (`ibv_create_srq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: above the device's limit; [`Error::OutOfMemory`].
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        let srq = self.0.shared_receive_queue(max_wr, max_sge)?;
        Ok(SharedReceiveQueue(srq))
    }
}

/// A memory window (`ibv_alloc_mw(3)`): remote rights to a part of a region, for the peer of the queue pair that binds it. They begin when the
/// bind has completed, and end when the window is dropped, or by an invalidation.
///
/// ```
/// use iwarp::verbs::{Access, MemoryRegion, ProtectionDomain, QueuePair, RemoteMemory, SendWr};
/// # use iwarp::verbs::MemoryWindow;
///
/// /// Lets the peer read the first 100 octets, after the bind that is posted here.
/// fn lend(pd: &ProtectionDomain, qp: &QueuePair, mr: &MemoryRegion) -> iwarp::Result<(MemoryWindow, RemoteMemory)> {
///     let window = pd.alloc_mw(mr)?;
///     let (bind, there) = window.bind_mw(..100, Access::REMOTE_READ)?;
///     qp.post_send(&[SendWr::new(1, bind, &[]).signaled()])?;
///     Ok((window, there))
/// }
/// ```
#[derive(Debug)]
pub struct MemoryWindow {
    bound: BoundWindow,
    region: MemoryRegion,
}

impl MemoryWindow {
    /// Returns the operation that binds it to a part of its region, for one work request (`ibv_bind_mw(3)`), and what the peer has to know.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    pub fn bind_mw(
        &self,
        range: impl RangeBounds<usize>,
        access: Access,
    ) -> Result<(SendOp, RemoteMemory)> {
        let part = self.region.sge(range)?;
        let len = u64::from(part.len);
        let there = RemoteMemory {
            addr: part.addr,
            len,
            rkey: self.rkey(),
        };
        Ok((SendOp::Bind(self.bound.bind(part.addr, len, access)), there))
    }

    /// Returns its key when it is bound: what a peer uses, and what an invalidation names.
    pub fn rkey(&self) -> u32 {
        self.bound.stag_when_bound().0
    }
}
