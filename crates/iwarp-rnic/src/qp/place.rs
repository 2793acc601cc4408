//! Placement of payload in memory: tagged buffers, receives, sinks of Reads.

use super::send_queue::SendQueue;
use crate::memory::{AccessError, Accessor, Memory, MemoryTable};
use crate::receive_queue::TakenRecv;
use crate::{Access, Sge};
use iwarp_proto::ddp::Stag;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// The tagged buffer of a peer's RDMA Write.
    Tagged { stag: Stag, to: u64 },
    /// The receive that is being filled, from this offset on.
    Receive { off: u32 },
    /// The elements of the oldest outstanding Read or atomic, from this offset on.
    Sink { seq: u32, off: u32 },
}

/// The data needed to resolve a target.
#[derive(Debug)]
pub(super) struct Places<'a, M> {
    pub(super) memory: &'a MemoryTable<M>,
    pub(super) accessor: Accessor,
    pub(super) receive: &'a TakenRecv,
    pub(super) sends: &'a SendQueue,
}

impl<'a, M: Memory> Places<'a, M> {
    /// Returns `Ok` if `len` octets of a target may be written from `skip` on.
    #[inline]
    pub(super) fn permits(&self, target: Target, skip: u32, len: u32) -> Result<(), AccessError> {
        self.for_each_range(target, skip, len, |stag, to, len, need| {
            self.memory.permits((stag, to, len), need, self.accessor)
        })
    }

    /// Calls a function for each unchecked range of `len` octets of a target: STag, tagged offset,
    /// length, and the required right.
    #[inline(always)]
    pub(super) fn for_each_range(
        &self,
        target: Target,
        skip: u32,
        len: u32,
        mut visit: impl FnMut(Stag, u64, u32, Access) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        if let Target::Tagged { stag, to } = target {
            let to = to.wrapping_add(u64::from(skip));
            return visit(stag, to, len, Access::REMOTE_WRITE);
        }
        let (sges, off) = self.elements(target);
        let mut parts = Parts::new(sges, off.saturating_add(skip), len);
        while let Some((lkey, addr, len)) = parts.next() {
            visit(lkey, addr, len, Access::LOCAL_WRITE)?;
        }
        parts.check_covered()
    }

    /// Copies octets to a target. The last octet becomes visible last.
    #[inline(always)]
    pub(super) fn write(&self, target: Target, skip: u32, src: &[u8]) -> Result<(), AccessError> {
        if let Target::Tagged { stag, to } = target {
            let to = to.wrapping_add(u64::from(skip));
            return self.copy((stag, to), Access::REMOTE_WRITE, src);
        }
        let (first, off) = match target {
            Target::Receive { off } => (Some(self.receive.first()), off),
            Target::Sink { seq, off } => (self.sends.first_sge_of(seq), off),
            Target::Tagged { .. } => (None, 0),
        };
        let (off, len) = (off.saturating_add(skip), src.len() as u32);
        // The octets nearly always fit into the first element. The general case is not inlined, so
        // that it costs nothing here.
        if let Some(first) = first
            && first.len.checked_sub(off).is_some_and(|room| len <= room)
        {
            let addr = first.addr.wrapping_add(u64::from(off));
            return self.copy((first.stag(), addr), Access::LOCAL_WRITE, src);
        }
        let (sges, off) = self.elements(target);
        // Pass a copy, so that the compiler keeps the original in registers.
        Self { ..*self }.write_parts(sges, off.saturating_add(skip), src)
    }

    #[inline(never)]
    fn write_parts(&self, sges: &[Sge], off: u32, mut src: &[u8]) -> Result<(), AccessError> {
        let mut parts = Parts::new(sges, off, src.len() as u32);
        while let Some((lkey, addr, len)) = parts.next() {
            let (now, later) = src.split_at_checked(len as usize).unwrap_or((src, &[]));
            self.copy((lkey, addr), Access::LOCAL_WRITE, now)?;
            src = later;
        }
        parts.check_covered()
    }

    #[inline(always)]
    fn copy(&self, at: (Stag, u64), need: Access, src: &[u8]) -> Result<(), AccessError> {
        self.memory.write(at, need, self.accessor, src)
    }

    /// Returns the scatter/gather list of an untagged target, and the target's offset in it.
    #[inline(always)]
    fn elements(&self, target: Target) -> (&'a [Sge], u32) {
        match target {
            Target::Receive { off } => (self.receive.sges(), off),
            Target::Sink { seq, off } => (self.sends.sges(seq), off),
            Target::Tagged { .. } => (&[], 0),
        }
    }
}

/// The parts of a scatter/gather list that cover octets `off` to `off + len`.
///
/// This is no `Iterator`, because [`check_covered`](Self::check_covered) must be called at the end.
/// It is no closure either, because the compiler would not inline it into the loop over small
/// messages.
pub(super) struct Parts<'a> {
    sges: core::slice::Iter<'a, Sge>,
    off: u32,
    len: u32,
}

impl<'a> Parts<'a> {
    #[inline(always)]
    pub(super) fn new(sges: &'a [Sge], off: u32, len: u32) -> Self {
        Self {
            sges: sges.iter(),
            off,
            len,
        }
    }

    /// Returns lkey, address and length of the next part.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<(Stag, u64, u32)> {
        if self.len == 0 {
            return None;
        }
        loop {
            let sge = self.sges.next()?;
            if let Some(behind) = self.off.checked_sub(sge.len) {
                self.off = behind;
                continue;
            }
            let len = sge.len.wrapping_sub(self.off).min(self.len);
            let part = (sge.stag(), sge.addr.wrapping_add(u64::from(self.off)), len);
            self.off = 0;
            self.len = self.len.wrapping_sub(len);
            return Some(part);
        }
    }

    /// Returns a bounds error if the list was too short. Must be called after the last part.
    #[inline(always)]
    pub(super) const fn check_covered(&self) -> Result<(), AccessError> {
        match self.len {
            0 => Ok(()),
            _ => Err(AccessError::BaseOrBounds),
        }
    }
}

/// Calls a function for the parts that cover octets `off` to `off + len` of a scatter/gather list.
/// Returns a bounds error if the list is too short.
#[inline]
pub(super) fn for_each_part(
    sges: &[Sge],
    off: u32,
    len: u32,
    mut visit: impl FnMut(Stag, u64, u32) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    let mut parts = Parts::new(sges, off, len);
    while let Some((lkey, addr, len)) = parts.next() {
        visit(lkey, addr, len)?;
    }
    parts.check_covered()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn parts_cover_range_once(
            lens in proptest::collection::vec(0u32..20, 0..6),
            off in 0u32..60,
            len in 0u32..60,
        ) {
            let sge = |(i, len): (usize, &u32)| Sge {
                addr: 1000 * i as u64,
                len: *len,
                lkey: i as u32,
            };
            let sges: Vec<Sge> = lens.iter().enumerate().map(sge).collect();
            let addresses = |s: &Sge| {
                let addr = s.addr;
                (0..u64::from(s.len)).map(move |o| addr + o)
            };
            let all: Vec<u64> = sges.iter().flat_map(addresses).collect();
            let mut visited = Vec::new();
            let r = for_each_part(&sges, off, len, |_, addr, n| {
                visited.extend((0..u64::from(n)).map(|o| addr + o));
                Ok(())
            });
            let expected = all.get(off as usize..(off + len) as usize);
            match expected {
                Some(w) => { prop_assert!(r.is_ok()); prop_assert_eq!(&visited[..], w); }
                None if len == 0 => prop_assert!(r.is_ok() && visited.is_empty()),
                None => prop_assert!(r.is_err()),
            }
        }
    }
}
