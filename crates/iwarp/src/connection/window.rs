//! Memory windows: remote rights to a part of a region, that end with their guard.

use super::region::Region;
use super::remote::RemoteRegion;
use crate::error::Result;
use crate::objects::context::Context;
use crate::owned::memory::MemoryRegion;
use crate::sys::fork::Origin;
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Access, Bind};

/// A window that is bound, or about to be. Dropping it ends the peer's rights at once.
#[derive(Debug)]
pub(crate) struct BoundWindow {
    ctx: Context,
    stag: Stag,
    origin: Origin,
    /// Dropped last: memory cannot be deregistered while a window is bound to it.
    memory: MemoryRegion,
}

impl BoundWindow {
    /// Allocates a window for memory of a region.
    pub(crate) fn new(ctx: &Context, pd: u32, memory: &MemoryRegion) -> Result<Self> {
        Ok(Self {
            ctx: ctx.clone(),
            stag: ctx.allocate_window(WindowType::Type2, pd)?,
            origin: Origin::here(),
            memory: memory.clone(),
        })
    }

    /// Returns what the bind says, and the STag afterwards.
    pub(crate) fn bind(&self, addr: u64, len: u64, access: Access) -> Bind {
        Bind {
            mw_stag: self.stag,
            new_stag: self.stag_when_bound(),
            mr_stag: Stag(self.memory.lkey()),
            addr,
            len,
            access,
        }
    }

    /// Returns the STag that a peer uses.
    pub(crate) const fn stag_when_bound(&self) -> Stag {
        self.stag.with_key(self.stag.key().wrapping_add(1))
    }
}

impl Drop for BoundWindow {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            return;
        }
        if let Err(error) = self.ctx.deallocate_window(self.stag_when_bound()) {
            // A bind that failed has left the first key.
            if self.ctx.deallocate_window(self.stag).is_err() {
                tracing::debug!(%error, "a memory window is gone already");
            }
        }
    }
}

/// Rights of the peer of one connection to a part of a region, from the bind until the guard is dropped. The region itself need
/// not be shared. Made by [`Connection::bind`](super::Connection::bind).
///
/// When the drop returns, the peer's rights are over: an access after that ends the connection, for the peer with an error. To end
/// them without a risk, tell the peer first, or let the peer do it by
/// [`send_with_invalidate`](super::Connection::send_with_invalidate).
#[derive(Debug)]
pub struct Window<T> {
    pub(super) bound: BoundWindow,
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: bytemuck::Pod> Window<T> {
    /// Returns what the peer has to know to use it.
    pub const fn remote(&self) -> RemoteRegion<T> {
        self.token
    }

    /// Returns the memory behind it.
    pub const fn region(&self) -> &Region<T> {
        &self.region
    }

    /// Returns `true` if this message has invalidated it: the peer has given its rights back.
    pub fn is_invalidated_by(&self, message: &super::Message) -> bool {
        message.invalidated() == Some(self.bound.stag_when_bound().0)
    }
}
