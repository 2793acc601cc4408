//! Protection domains.

use super::{MemoryRegion, MemoryWindow, QpInitAttr, QueuePair};
use crate::error::Result;
use crate::runtime::Context;
use crate::runtime::SharedReceiveQueue;
use iwarp_rnic::Access;

/// A protection domain (`ibv_alloc_pd(3)`): queue pairs use the memory of their own domain only. A clone is another handle
/// to it.
#[derive(Debug, Clone)]
pub struct ProtectionDomain {
    ctx: Context,
    num: u32,
}

impl ProtectionDomain {
    /// Allocates a protection domain on a device.
    pub fn new(ctx: &Context) -> Self {
        Self {
            ctx: ctx.clone(),
            num: ctx.allocate_pd(),
        }
    }

    /// Returns its device.
    pub const fn context(&self) -> &Context {
        &self.ctx
    }

    /// Returns its number, by which the objects of [`runtime`](crate::runtime) name it.
    pub const fn number(&self) -> u32 {
        self.num
    }

    /// Allocates `length` octets of zeroed, page-aligned memory and registers them (`ibv_reg_mr(3)`). They are deregistered
    /// and freed when the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory); [`Error::Memory`](crate::Error::Memory): too many regions, or
    /// remote writing without [`Access::LOCAL_WRITE`].
    pub fn reg_mr(&self, length: usize, access: Access) -> Result<MemoryRegion> {
        MemoryRegion::register(self, length, access)
    }

    /// Allocates a memory window for a region (`ibv_alloc_mw(3)`, type 2).
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory): too many; [`Error::InvalidArgument`](crate::Error::InvalidArgument): a
    /// region of another domain, or without [`Access::MW_BIND`].
    pub fn alloc_mw(&self, mr: &MemoryRegion) -> Result<MemoryWindow> {
        MemoryWindow::allocate(self, mr)
    }

    /// Creates a queue pair (`ibv_create_qp(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): a size above the device's limit;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn create_qp(&self, attr: &QpInitAttr<'_>) -> Result<QueuePair> {
        attr.create(self)
    }

    /// Creates a shared receive queue for `max_wr` receives of up to `max_sge` elements each (`ibv_create_srq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): above the device's limit;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        self.ctx.create_srq(self.num, max_wr, max_sge)
    }
}
