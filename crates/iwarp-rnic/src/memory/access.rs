//! Access by STag: all checks, the users of an entry, and invalidation.

use super::entry::{Entry, Grant, Kind, RegionInfo};
use super::on_demand::Checked;
use super::span::{Memory, Span};
use super::table::MemoryTable;
use super::window::WindowType;
use super::{AccessError, Pager};
use crate::Access;
use core::sync::atomic::Ordering;
use iwarp_proto::ddp::Stag;

impl<M: Memory> MemoryTable<M> {
    /// Describes an entry, whether or not its STag is valid.
    pub fn info(&self, stag: Stag) -> Option<RegionInfo> {
        let e = self.entry(stag)?;
        // While the entry has a user, no fast registration changes its fields.
        let stag = e.state.stag();
        let valid = e.state.add_user(stag);
        let grant = e.grant();
        if valid {
            self.note_unused(e.state.remove_user());
        }
        Some(RegionInfo {
            stag,
            pd: e.pd,
            access: grant.access,
            iova: grant.base,
            len: grant.len,
            valid,
            on_demand: e.is_on_demand(),
        })
    }

    /// Checks an access to `len` bytes at tagged offset `to`, and passes the memory to `f`. No
    /// invalidation of this memory completes meanwhile.
    ///
    /// A zero-length access is not checked at all (RFC 5041 section 5.2, RFC 5040 section 7.2). An
    /// on-demand region is [refused](AccessError::NotMapped), because its memory may be unmapped
    /// before `f` uses it.
    #[inline(always)]
    pub fn access<R>(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
        f: impl FnOnce(Span<'_, M>) -> R,
    ) -> Result<R, AccessError> {
        match self.check_uncounted((stag, to, len), need, accessor) {
            Ok(span) => Ok(f(span)),
            Err(Miss::NeedsCount) => Ok(f(self.check_held(stag, to, len, need, accessor)?.span())),
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Returns `Ok` if [`read`](Self::read) or [`write`](Self::write) would be allowed. Pages of an
    /// on-demand region may be missing even then.
    #[inline]
    pub fn permits(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, len), need, accessor) {
            Ok(_) => Ok(()),
            Err(Miss::NeedsCount) => self.check_counted(stag, to, len, need, accessor).map(drop),
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Checks an access like [`access`](Self::access). The access ends when the result is dropped.
    #[inline]
    pub fn check(
        &self,
        stag: Stag,
        to: u64,
        len: u32,
        need: Access,
        accessor: Accessor,
    ) -> Result<Held<'_, M>, AccessError> {
        match self.check_uncounted((stag, to, len), need, accessor) {
            Ok(span) => Ok(Held::of(span)),
            Err(Miss::NeedsCount) => self.check_held(stag, to, len, need, accessor),
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Checks an access like [`check`](Self::check), but only for ordinary regions. They need no
    /// user count, because they are deregistered only while nobody borrows the table. Returns
    /// `None` for other regions and refused accesses; [`check`](Self::check) distinguishes the two.
    #[inline]
    pub(crate) fn check_ordinary(
        &self,
        range: (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Option<Span<'_, M>> {
        self.check_uncounted(range, need, accessor).ok()
    }

    /// Checks an access to an ordinary region, which needs no user count.
    #[inline(always)]
    pub(super) fn check_uncounted(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<Span<'_, M>, Miss> {
        //= rfc5041 section 5.2
        //# The STag and TO fields MUST NOT be checked for a zero-length Tagged DDP
        //# Message.
        //= rfc5041 section 5.2
        //# Only the DDP Control and RsvdULP Fields MUST be valid for a zero-length
        //# Tagged DDP Segment.
        //= rfc5040 section 5.2.1
        //# MUST NOT validate the Data Source STag and Data Source Tagged Offset
        //# contained in the RDMA Read Request Header, and
        if len == 0 {
            return Ok(Span::EMPTY);
        }
        //= rfc5041 section 4.2
        //# The STag MUST be valid for this DDP Stream.
        let Some(entry) = self.at(stag) else {
            return Err(Miss::Refused(AccessError::InvalidStag));
        };
        if !entry.state.is(stag) {
            return Err(Miss::Refused(AccessError::InvalidStag));
        }
        let Kind::Region { memory, .. } = &entry.kind else {
            return Err(Miss::NeedsCount);
        };
        // An ordinary region's range is all of its memory.
        match self.check_grant(entry, (memory, None), (to, len), need, accessor) {
            Ok(span) => Ok(span),
            Err(e) => Err(Miss::Refused(e)),
        }
    }

    /// Checks an access and counts it. The arguments are separate, because a reference would force
    /// them into memory even for uncounted accesses.
    #[cold]
    #[inline(never)]
    pub(super) fn check_counted(
        &self,
        stag: Stag,
        to: u64,
        len: u32,
        need: Access,
        accessor: Accessor,
    ) -> Result<(Checked<'_, M>, Hold<'_, M>), AccessError> {
        let entry = self.entry(stag).ok_or(AccessError::InvalidStag)?;
        let ((memory, pager), hold) = self.use_counted(entry, stag, need, accessor)?;
        // Each access to a null region starts at its beginning.
        let to = match &entry.kind {
            Kind::Null { .. } => 0,
            _ => to,
        };
        let part = Some(entry.grant());
        let span = self.check_grant(entry, (memory, part), (to, len), need, accessor)?;
        let checked = match pager {
            None => Checked::Mapped(span),
            Some(pager) => Checked::OnDemand(pager, span),
        };
        Ok((checked, hold))
    }

    /// Checks an access that lasts until the result is dropped; on-demand regions are refused.
    #[cold]
    #[inline(never)]
    fn check_held(
        &self,
        stag: Stag,
        to: u64,
        len: u32,
        need: Access,
        accessor: Accessor,
    ) -> Result<Held<'_, M>, AccessError> {
        let (checked, hold) = self.check_counted(stag, to, len, need, accessor)?;
        Ok(Held {
            span: checked.mapped()?,
            _hold: Some(hold),
        })
    }

    /// Checks everything except the STag's validity. `part` is the part of the memory that the STag
    /// gives access to; `None` means all of it.
    #[inline(always)]
    fn check_grant<'t>(
        &self,
        entry: &Entry<M>,
        (memory, part): (&'t M, Option<Grant>),
        (to, len): (u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<Span<'t, M>, AccessError> {
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that a specific Stream in a specific Protection
        //# Domain cannot access an STag in a different Protection Domain.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that a specific DDP Stream in a specific Protection
        //# Domain cannot access an STag in a different Protection Domain.
        //= rfc5041 section 8.2
        //# For an incoming DDP Segment of a Tagged DDP Message on a DDP Stream, if
        //# the PD ID of the DDP Stream is not the same as the PD ID of the STag
        //# targeted by the Tagged DDP Message, then the DDP Segment is not Placed,
        //# and the DDP layer MUST surface a local error to the ULP.
        if entry.pd != accessor.pd {
            return Err(AccessError::NotAssociated);
        }
        let access = part.map_or_else(|| entry.access(), |part| part.access);
        if !access.contains(need) {
            return Err(AccessError::AccessDenied);
        }
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that a Remote Peer is not able to access memory
        //# outside of the buffer specified when the STag was enabled for remote
        //# access.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that a Remote Peer is not able to access memory
        //# outside the buffer specified when the STag was enabled for remote
        //# access.
        let base = part.map_or_else(|| entry.base(), |part| part.base);
        // No closures here: the compiler would not inline them in the loop over small messages.
        let at = match (to.checked_sub(base), part) {
            (Some(offset), Some(part)) => self.offset_in(part, offset, len),
            (offset, _) => offset,
        };
        if let Some(at) = at
            && let Some(span) = Span::new(memory, at, len)
        {
            return Ok(span);
        }
        match to.checked_add(u64::from(len)) {
            None => Err(AccessError::ToWrap),
            Some(_) => Err(AccessError::BaseOrBounds),
        }
    }

    /// Returns the position of byte `offset` of a part in the memory; `None` if the `len` bytes
    /// extend beyond the part.
    fn offset_in(&self, part: Grant, offset: u64, len: u32) -> Option<u64> {
        #[cfg(feature = "planted-bugs")]
        let bounded = !self.skip_bounds;
        #[cfg(not(feature = "planted-bugs"))]
        let bounded = true;
        let end = offset.checked_add(u64::from(len))?;
        if bounded && end > part.len {
            return None;
        }
        part.offset.checked_add(offset)
    }

    /// Becomes a user of a fast-registration region, or of a window and its region.
    #[cold]
    fn use_counted<'t>(
        &'t self,
        entry: &'t Entry<M>,
        stag: Stag,
        need: Access,
        accessor: Accessor,
    ) -> Result<(Backing<'t, M>, Hold<'t, M>), AccessError> {
        if !self.add_user(entry, stag) {
            return Err(AccessError::InvalidStag);
        }
        let hold = Hold { table: self, stag };
        //= rfc5040 section 7.2
        //# The STag MUST be associated to this RDMAP Stream.
        //= rfc5040 section 7.2
        //# The STag MUST be associated to this RDMAP Stream.
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that if an STag is limited in scope to a single
        //# Stream, no other Stream can use the STag.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that if an STag is limited in scope to a single DDP
        //# Stream, no other DDP Stream can use the STag.
        //= rfc5041 section 8.2
        //# In this case, for an incoming DDP Segment of a Tagged DDP Message on a
        //# DDP Stream, if the DDP Stream ID of the DDP Stream is not the same as
        //# the DDP Stream ID of the STag targeted by the Tagged DDP Message, then
        //# the DDP Segment is not Placed and the DDP layer MUST surface a local
        //# error to the ULP.
        //= rfc5041 section 8.2
        //# DDP MUST support Protection Domain association and DDP Stream
        //# association mechanisms for associating an STag and a DDP Stream.
        if entry.only_qp().is_some_and(|qp| qp != accessor.qp) {
            return Err(AccessError::NotAssociated);
        }
        let memory = match &entry.kind {
            Kind::Region { .. } | Kind::OnDemand { .. } | Kind::Fast { .. } => entry.backing(),
            Kind::Null { sink, .. } if need.intersects(Access::WRITING) => Some((sink, None)),
            Kind::Null { zeros, .. } => Some((zeros, None)),
            // A window gives access to the peer only. Elements of local requests must name regions.
            Kind::Window { .. } if !need.intersects(Access::REMOTE) => {
                return Err(AccessError::AccessDenied);
            }
            Kind::Window { parent, .. } => parent.and_then(|parent| self.entry(parent)?.backing()),
            Kind::Free => None,
        };
        Ok((memory.ok_or(AccessError::InvalidStag)?, hold))
    }

    /// Adds a user to an entry, and to the region behind a window. Returns `false` if the STag is
    /// not valid.
    fn add_user(&self, entry: &Entry<M>, stag: Stag) -> bool {
        let Kind::Window { parent, .. } = &entry.kind else {
            return entry.state.add_user(stag);
        };
        // The region first: once it has a user, its memory stays valid even if the window does not.
        let Some(region) = parent.and_then(|parent| self.entry(parent)) else {
            return false;
        };
        if !region.state.add_user(region.state.stag()) {
            return false;
        }
        let entered = entry.state.add_user(stag);
        if !entered {
            self.note_unused(region.state.remove_user());
        }
        entered
    }

    /// Checks an access like [`check`](Self::check) for a plan, which stays a user of the memory
    /// until it calls [`release`](Self::release) with the STag. An access of zero length has no
    /// user.
    pub(super) fn check_and_use(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<Span<'_, M>, AccessError> {
        let span = match self.check_uncounted((stag, to, len), need, accessor) {
            Ok(span) => span,
            Err(Miss::NeedsCount) => {
                // The plan becomes a user before this call's own use ends.
                let held = self.check_held(stag, to, len, need, accessor)?;
                let entry = self.entry(stag).ok_or(AccessError::InvalidStag)?;
                return match self.add_user(entry, stag) {
                    true => Ok(held.span),
                    false => Err(AccessError::InvalidStag),
                };
            }
            Err(Miss::Refused(e)) => return Err(e),
        };
        if len > 0 {
            // This cannot fail: an ordinary region is deregistered only while nobody borrows the
            // table.
            let region = self.entry(stag).ok_or(AccessError::InvalidStag)?;
            region.state.add_user(stag);
        }
        Ok(span)
    }

    /// Checks an access by a caller that already is a user of the memory.
    pub(super) fn check_as_user(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<Span<'_, M>, AccessError> {
        Ok(self.check(stag, to, len, need, accessor)?.span)
    }

    pub(super) fn release(&self, stag: Stag) {
        let Some(entry) = self.entry(stag) else {
            return;
        };
        // Look up the region first: once the window has no user, it can be bound elsewhere.
        let region = match &entry.kind {
            Kind::Window { parent, .. } => parent.and_then(|parent| self.entry(parent)),
            _ => None,
        };
        self.note_unused(entry.state.remove_user());
        if let Some(region) = region {
            self.note_unused(region.state.remove_user());
        }
    }

    /// Records that memory became unused while an invalidation or a registration waits for it.
    fn note_unused(&self, wanted: bool) {
        if wanted {
            self.unused.store(true, Ordering::Release);
        }
    }

    /// Returns `true` if, since the last call, memory has become unused that an invalidation or a
    /// registration waits for.
    ///
    /// Drivers call this after each operation that uses memory. If it returns `true`, they call
    /// [`QueuePair::retry_memory`](crate::qp::QueuePair::retry_memory) on the queue pairs of this
    /// table that wait for memory.
    #[inline]
    pub fn take_unused(&self) -> bool {
        self.unused.load(Ordering::Relaxed) && self.unused.swap(false, Ordering::AcqRel)
    }

    /// Returns `true` if the memory of a formerly valid STag has no users. If it has,
    /// [`take_unused`](Self::take_unused) returns `true` when the last user is gone.
    pub(crate) fn is_unused(&self, stag: Stag) -> bool {
        self.entry(stag)
            .is_none_or(|entry| entry.state.is_unused_or_wanted())
    }

    /// Invalidates an STag for a peer (`remote`) or for a local work request.
    ///
    /// Only fast-registration regions and type 2 windows can be invalidated. An ordinary region is
    /// deregistered by the program only, because a peer must not revoke more than it was granted
    /// (RFC 5042 section 6.2).
    ///
    /// Returns `true` if the invalidation is complete. `false` means that the memory is still in
    /// use: a queue pair places octets there, or a plan that refers to it is being written. New
    /// accesses are refused, and [`take_unused`](Self::take_unused) returns `true` when the last
    /// user is gone.
    pub fn invalidate(
        &self,
        stag: Stag,
        accessor: Accessor,
        remote: bool,
    ) -> Result<bool, AccessError> {
        let entry = self.entry(stag).ok_or(AccessError::InvalidStag)?;
        // While the entry has a user, the checked rights are those of the STag that is invalidated.
        if !entry.state.add_user(stag) {
            return Err(AccessError::InvalidStag);
        }
        let allowed = Self::may_invalidate(entry, accessor, remote);
        let invalidated = allowed.is_ok() && entry.state.invalidate(stag).is_some();
        let last = entry.state.remove_user();
        if invalidated {
            self.unbind(entry);
            return Ok(last);
        }
        self.note_unused(last);
        allowed.and(Err(AccessError::InvalidStag))
    }

    fn may_invalidate(
        entry: &Entry<M>,
        accessor: Accessor,
        remote: bool,
    ) -> Result<(), AccessError> {
        if entry.pd != accessor.pd {
            return Err(AccessError::NotAssociated);
        }
        match entry.kind {
            Kind::Window {
                ty: WindowType::Type2,
                qp,
                ..
            } => {
                if qp != Some(accessor.qp) {
                    return Err(AccessError::NotAssociated);
                }
            }
            Kind::Fast { qp, .. } => {
                if qp.is_some_and(|qp| qp != accessor.qp) {
                    return Err(AccessError::NotAssociated);
                }
                if remote && !entry.access().intersects(Access::REMOTE) {
                    return Err(AccessError::AccessDenied);
                }
                // A window must not outlive its region.
                if entry.windows.load(Ordering::Acquire) > 0 {
                    return Err(AccessError::AccessDenied);
                }
            }
            //= rfc5040 section 8.1.1
            //# An RNIC MUST ensure that a Remote Peer is not able to invalidate an STag
            //# enabled for remote access, if the STag is shared on multiple streams.
            _ => return Err(AccessError::AccessDenied),
        }
        Ok(())
    }

    pub(super) fn unbind(&self, entry: &Entry<M>) {
        if let Kind::Window {
            parent: Some(parent),
            ..
        } = entry.kind
            && let Some(region) = self.entry(parent)
        {
            region.windows.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The memory of a region, and its pager if pages may be missing.
type Backing<'t, M> = (&'t M, Option<&'static Pager>);

/// Why [`MemoryTable::check_uncounted`] returned no memory.
pub(super) enum Miss {
    /// The entry is no ordinary region, so accesses to it must be counted.
    NeedsCount,
    Refused(AccessError),
}

/// An access in progress. No invalidation of the memory completes before it is dropped.
#[derive(Debug)]
pub struct Held<'t, M: Memory> {
    span: Span<'t, M>,
    _hold: Option<Hold<'t, M>>,
}

impl<'t, M: Memory> Held<'t, M> {
    const fn of(span: Span<'t, M>) -> Self {
        Self { span, _hold: None }
    }

    /// Returns the memory, for the duration of the access.
    #[inline]
    pub const fn span(&self) -> Span<'_, M> {
        self.span
    }
}

/// One user of an entry, removed when dropped.
#[derive(Debug)]
pub(super) struct Hold<'t, M: Memory> {
    table: &'t MemoryTable<M>,
    stag: Stag,
}

impl<M: Memory> Drop for Hold<'_, M> {
    #[cold]
    fn drop(&mut self) {
        self.table.release(self.stag);
    }
}

/// The queue pair on whose behalf memory is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accessor {
    /// Protection domain of the queue pair.
    pub pd: u32,
    /// Queue pair number.
    pub qp: u32,
}
