//! Memory windows, type 1 and 2 (`ibv_alloc_mw(3)`, `ibv_bind_mw(3)`).

use super::access::Accessor;
use super::entry::{Entry, Kind, Reach};
use super::table::MemoryTable;
use super::{Memory, MemoryError};
use crate::{Access, Bind};
use core::sync::atomic::Ordering;
use iwarp_proto::ddp::Stag;

/// The type of a window: how it is bound, and which queue pairs may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowType {
    /// Bound by the bind verb; serves every queue pair of its protection domain.
    Type1,
    /// Bound by a send work request with the consumer's key; serves that queue pair alone.
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

    /// Removes a window, bound or not.
    pub fn deallocate_window(&mut self, stag: Stag) -> Result<(), MemoryError> {
        let window = self.entry(stag).ok_or(MemoryError::NoSuchStag)?;
        if !matches!(window.kind, Kind::Window { .. }) {
            return Err(MemoryError::NoSuchStag);
        }
        window.state.check_unused()?;
        self.retire(window);
        self.remove_window(stag)
    }

    /// Ends the validity of a window, while nobody else has the table. It no longer holds its region then.
    fn retire(&self, window: &Entry<M>) {
        if window.state.invalidate(window.state.stag()).is_some() {
            self.unbind(window);
        }
    }

    //= rfc5041 section 8.3
    //# DDP MUST provide a mechanism for the ULP to communicate the association
    //# between a STag and a specific DDP Stream.
    /// Carries out a bind for a queue pair.
    ///
    /// A type 2 window has to be invalid, and afterwards serves this queue pair only. A type 1 window can be bound again at
    /// any time; a length of zero unbinds it. Fails with `InUse` while somebody uses the memory of an earlier bind. That bind has
    /// ended then, so no access begins any more.
    pub fn bind(&mut self, wr: &Bind, who: Accessor) -> Result<(), MemoryError> {
        let window = self.entry(wr.mw_stag).ok_or(MemoryError::NoSuchStag)?;
        let Kind::Window { ty, .. } = window.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if window.pd != who.pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        // The key in `mw_stag` may be that of a bind that was flushed.
        if window.state.stag().index() != wr.new_stag.index() {
            return Err(MemoryError::NoSuchStag);
        }
        if ty == WindowType::Type2 && window.state.is_valid() {
            return Err(MemoryError::StillValid);
        }
        let target = match wr.len == 0 && ty == WindowType::Type1 {
            true => None,
            false => Some(self.bind_target(wr, who)?),
        };
        self.retire(window);
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
            e.set_reach(Reach {
                access: wr.access,
                base,
                len: wr.len,
                offset,
            });
            e.kind = Kind::Window {
                ty,
                parent: Some(parent),
                qp: (ty == WindowType::Type2).then_some(who.qp),
            };
            e.state.set(true, wr.new_stag);
        }
        Ok(())
    }

    /// Checks the region of a bind; returns its STag and where the window starts in its memory.
    fn bind_target(&self, wr: &Bind, who: Accessor) -> Result<(Stag, u64), MemoryError> {
        let region = self.entry(wr.mr_stag).ok_or(MemoryError::NoSuchStag)?;
        if matches!(region.kind, Kind::Window { .. }) || !region.state.is(wr.mr_stag) {
            return Err(MemoryError::NoSuchStag);
        }
        if region.pd != who.pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        if !region.access().contains(Access::MW_BIND)
            || region.access().contains(Access::ZERO_BASED)
        {
            return Err(MemoryError::NotBindable);
        }
        // A window with a right to write needs a region that the local side may write.
        if wr
            .access
            .intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !region.access().contains(Access::LOCAL_WRITE)
        {
            return Err(MemoryError::NotBindable);
        }
        let reach = region.reach();
        let from = wr
            .addr
            .checked_sub(reach.base)
            .ok_or(MemoryError::OutOfRange)?;
        let end = from.checked_add(wr.len).ok_or(MemoryError::OutOfRange)?;
        if end > reach.len {
            return Err(MemoryError::OutOfRange);
        }
        let offset = reach
            .offset
            .checked_add(from)
            .ok_or(MemoryError::OutOfRange)?;
        Ok((wr.mr_stag, offset))
    }
}
