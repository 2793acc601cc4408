//! Memory windows.

use super::{MemoryRegion, ProtectionDomain, RemoteMemory, WriteAccess};
use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::sys::fork::Origin;
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Access, Bind, SendOp};
use std::ops::RangeBounds;

/// A memory window (`ibv_alloc_mw(3)`): gives the peer of one queue pair rights to a part of a
/// region. The rights start when the bind completes. An invalidation, or dropping the window,
/// revokes them.
///
/// ```
/// use iwarp::verbs::{Access, MemoryRegion, ProtectionDomain, QueuePair, RemoteMemory, SendWr};
/// # use iwarp::verbs::MemoryWindow;
///
/// /// Grants the peer read access to the first 100 bytes once the bind posted here completes.
/// fn lend(
///     pd: &ProtectionDomain,
///     qp: &QueuePair,
///     mr: &MemoryRegion,
/// ) -> iwarp::Result<(MemoryWindow, RemoteMemory)> {
///     let window = pd.alloc_mw(mr)?;
///     let (bind, there) = window.bind_mw(..100, Access::REMOTE_READ)?;
///     qp.post_send(&[SendWr::new(1, bind, &[]).signaled()])?;
///     Ok((window, there))
/// }
/// ```
#[derive(Debug)]
pub struct MemoryWindow {
    ctx: Context,
    stag: Stag,
    origin: Origin,
    /// The region is dropped after the window, because memory cannot be deregistered while a window
    /// is bound to it.
    region: MemoryRegion,
    /// While the peer may write, no reference to the region's memory may exist.
    writes: Option<WriteAccess>,
}

impl MemoryWindow {
    /// Keeps the right to write the region for as long as the window exists.
    pub(crate) fn keep(&mut self, writes: WriteAccess) {
        self.writes = Some(writes);
    }

    pub(super) fn allocate(pd: &ProtectionDomain, region: &MemoryRegion) -> Result<Self> {
        if !region.is_of(pd) || !region.access().contains(Access::MW_BIND) {
            return Err(Error::InvalidArgument(
                "a window needs a region of its protection domain with `MW_BIND`",
            ));
        }
        let ctx = pd.context();
        Ok(Self {
            ctx: ctx.clone(),
            stag: ctx.allocate_window(WindowType::Type2, pd.number())?,
            origin: Origin::current_process(),
            region: region.clone(),
            writes: None,
        })
    }

    /// Returns the operation that binds the window to a part of its region, which the program has
    /// to post once (`ibv_bind_mw(3)`). Also returns the address, length and key that the peer
    /// needs.
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
        Ok((SendOp::Bind(self.bind_at(part.addr, len, access)), there))
    }

    /// Returns the operation that binds the window to `len` bytes at the tagged offset `addr`.
    pub(crate) fn bind_at(&self, addr: u64, len: u64, access: Access) -> Bind {
        Bind {
            mw_stag: self.stag,
            new_stag: self.stag_when_bound(),
            mr_stag: Stag(self.region.lkey()),
            addr,
            len,
            access,
        }
    }

    /// Returns the window's key after the bind, for the peer and for an invalidation.
    pub const fn rkey(&self) -> u32 {
        self.stag_when_bound().0
    }

    const fn stag_when_bound(&self) -> Stag {
        self.stag.with_key(self.stag.key().wrapping_add(1))
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            return;
        }
        if let Err(error) = self.ctx.deallocate_window(self.stag_when_bound()) {
            // After a failed bind, the window still has its first key.
            if self.ctx.deallocate_window(self.stag).is_err() {
                // The peer can still access the memory, so nothing else may rely on its end.
                std::mem::forget((self.region.clone(), self.writes.take()));
                tracing::debug!(%error, "cannot deallocate a memory window");
            }
        }
    }
}
