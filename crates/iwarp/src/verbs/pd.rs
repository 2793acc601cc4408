//! Protection domains.

use super::{MemoryRegion, MemoryWindow, QpInitAttr, QueuePair};
use crate::error::Result;
use crate::runtime::Context;
use crate::runtime::SharedReceiveQueue;
use iwarp_rnic::Access;

/// A protection domain (`ibv_alloc_pd(3)`): a queue pair can use only memory of its own domain. A
/// clone refers to the same domain.
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

    /// Returns the device context.
    pub const fn context(&self) -> &Context {
        &self.ctx
    }

    /// Returns the number of the protection domain in [`runtime`](crate::runtime).
    pub const fn number(&self) -> u32 {
        self.num
    }

    /// Allocates and registers `length` bytes of zeroed, page-aligned memory (`ibv_reg_mr(3)`).
    /// Dropping the last handle deregisters and frees it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory); [`Error::Memory`](crate::Error::Memory):
    /// too many regions, or remote write access without [`Access::LOCAL_WRITE`].
    pub fn reg_mr(&self, length: usize, access: Access) -> Result<MemoryRegion> {
        MemoryRegion::allocate(self, length, access)
    }

    /// Allocates a type 2 memory window for a region (`ibv_alloc_mw(3)`).
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory): too many windows;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): the region is of another domain
    /// or lacks [`Access::MW_BIND`].
    pub fn alloc_mw(&self, mr: &MemoryRegion) -> Result<MemoryWindow> {
        MemoryWindow::allocate(self, mr)
    }

    /// Creates a queue pair (`ibv_create_qp(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): a size exceeds the device's
    /// limit; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn create_qp(&self, attr: &QpInitAttr<'_>) -> Result<QueuePair> {
        attr.create(self)
    }

    /// Creates a shared receive queue for `max_wr` receives of up to `max_sge` elements each
    /// (`ibv_create_srq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): a size exceeds the device's
    /// limit; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        self.ctx.create_srq(self.num, max_wr, max_sge)
    }
}
