//! Memory windows, type 1 and 2 (`ibv_alloc_mw(3)`, `ibv_bind_mw(3)`).

use super::access::Accessor;
use super::entry::{Entry, Grant, Kind};
use super::table::MemoryTable;
use super::{Memory, MemoryError};
use crate::{Access, Bind};
use core::sync::atomic::Ordering;
use iwarp_proto::ddp::Stag;

/// The type of a window: how it is bound, and which queue pairs can use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowType {
    /// Bound by the bind verb; usable on every queue pair of its protection domain.
    Type1,
    /// Bound by a send work request with the consumer's key; usable on that queue pair only.
    Type2,
}

impl<M: Memory> MemoryTable<M> {
    /// Allocates an unbound window.
    pub fn allocate_window(
        &mut self,
        ty: WindowType,
        pd: u32,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        let kind = Kind::Window {
            ty,
            parent: None,
            qp: None,
        };
        self.insert(kind, pd, random)
    }

    /// Removes a window, even if it is bound.
    pub fn deallocate_window(&mut self, stag: Stag) -> Result<(), MemoryError> {
        let window = self.entry(stag).ok_or(MemoryError::NoSuchStag)?;
        if !matches!(window.kind, Kind::Window { .. }) {
            return Err(MemoryError::NoSuchStag);
        }
        window.state.check_unused()?;
        self.invalidate_window(window);
        self.remove_window(stag)
    }

    /// Makes a window invalid and releases its region. The caller must have exclusive access to the
    /// table.
    fn invalidate_window(&self, window: &Entry<M>) {
        if window.state.invalidate(window.state.stag()).is_some() {
            self.unbind(window);
        }
    }

    //= rfc5041 section 8.3
    //# DDP MUST provide a mechanism for the ULP to communicate the association
    //# between a STag and a specific DDP Stream.
    /// Binds a window for a queue pair.
    ///
    /// A type 2 window must be invalid, and can then be used only by this queue pair. A type 1
    /// window can be bound again at any time; a length of zero unbinds it. Fails with `InUse` while
    /// the memory of an earlier bind is in use; the earlier bind is then already invalid, and new
    /// accesses are refused.
    pub fn bind(&mut self, wr: &Bind, accessor: Accessor) -> Result<(), MemoryError> {
        let window = self.entry(wr.mw_stag).ok_or(MemoryError::NoSuchStag)?;
        let Kind::Window { ty, .. } = window.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if window.pd != accessor.pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        // The key in `mw_stag` may belong to a bind that was flushed.
        if window.state.stag().index() != wr.new_stag.index() {
            return Err(MemoryError::NoSuchStag);
        }
        if ty == WindowType::Type2 && window.state.is_valid() {
            return Err(MemoryError::StillValid);
        }
        let target = match wr.len == 0 && ty == WindowType::Type1 {
            true => None,
            false => Some(self.bind_target(wr, accessor)?),
        };
        self.invalidate_window(window);
        window.state.check_unused()?;
        let Some((parent, offset)) = target else {
            if let Some(e) = self.entry_mut(wr.mw_stag) {
                e.state.set(false, wr.new_stag);
            }
            return Ok(());
        };
        if let Some(region) = self.entry(parent) {
            region.windows.fetch_add(1, Ordering::AcqRel);
        }
        let base = if wr.access.contains(Access::ZERO_BASED) {
            0
        } else {
            wr.addr
        };
        if let Some(e) = self.entry_mut(wr.mw_stag) {
            e.set_grant(Grant {
                access: wr.access,
                base,
                len: wr.len,
                offset,
            });
            e.kind = Kind::Window {
                ty,
                parent: Some(parent),
                qp: (ty == WindowType::Type2).then_some(accessor.qp),
            };
            e.state.set(true, wr.new_stag);
        }
        Ok(())
    }

    /// Checks the region of a bind. Returns the region's STag, and the window's position in the
    /// region's memory.
    fn bind_target(&self, wr: &Bind, accessor: Accessor) -> Result<(Stag, u64), MemoryError> {
        let region = self.entry(wr.mr_stag).ok_or(MemoryError::NoSuchStag)?;
        if matches!(region.kind, Kind::Window { .. }) || !region.state.is(wr.mr_stag) {
            return Err(MemoryError::NoSuchStag);
        }
        if region.pd != accessor.pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        if !region.access().contains(Access::MW_BIND)
            || region.access().contains(Access::ZERO_BASED)
        {
            return Err(MemoryError::NotBindable);
        }
        // A window that can be written needs a region with local write access.
        if wr
            .access
            .intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !region.access().contains(Access::LOCAL_WRITE)
        {
            return Err(MemoryError::NotBindable);
        }
        let grant = region.grant();
        let from = wr
            .addr
            .checked_sub(grant.base)
            .ok_or(MemoryError::OutOfRange)?;
        let end = from.checked_add(wr.len).ok_or(MemoryError::OutOfRange)?;
        if end > grant.len {
            return Err(MemoryError::OutOfRange);
        }
        let offset = grant
            .offset
            .checked_add(from)
            .ok_or(MemoryError::OutOfRange)?;
        Ok((wr.mr_stag, offset))
    }
}
