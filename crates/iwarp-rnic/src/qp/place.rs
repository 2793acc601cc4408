//! Places payload in memory: tagged buffers, receives, sinks of Reads.

use super::send_queue::SendQueue;
use crate::memory::{AccessError, Accessor, Memory, MemoryTable, Span};
use crate::receive_queue::TakenRecv;
use crate::{Access, Sge};

/// The destination of the payload of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// A peer's RDMA Write into a tagged buffer.
    Tagged { stag: u32, to: u64 },
    /// The receive that is being filled, from this offset on.
    Receive { off: u32 },
    /// The elements of the oldest Read or atomic that waits for its answer, from this offset on.
    Sink { seq: u32, off: u32 },
}

/// What is needed to resolve a target.
pub(super) struct Places<'a, M> {
    pub(super) memory: &'a MemoryTable<M>,
    pub(super) who: Accessor,
    pub(super) receive: &'a TakenRecv,
    pub(super) sends: &'a SendQueue,
}

impl<'a, M: Memory> Places<'a, M> {
    /// Visits the memory behind `len` octets of a target that start `skip` octets into it, in order.
    #[inline]
    pub(super) fn for_each(
        &self,
        target: Target,
        skip: u32,
        len: u32,
        mut visit: impl FnMut(Span<'_, M>),
    ) -> Result<(), AccessError> {
        self.for_each_range(target, skip, len, |stag, to, len, need| {
            self.memory
                .access((stag, to, len), need, self.who, &mut visit)
        })
    }

    /// Visits the registered ranges, not checked yet, that make up `len` octets of a target: STag, tagged offset, length, and the right that is
    /// needed.
    #[inline]
    pub(super) fn for_each_range(
        &self,
        target: Target,
        skip: u32,
        len: u32,
        mut visit: impl FnMut(u32, u64, u32, Access) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let (sges, off) = match target {
            Target::Tagged { stag, to } => {
                let to = to.wrapping_add(u64::from(skip));
                return visit(stag, to, len, Access::REMOTE_WRITE);
            }
            Target::Receive { off } => (self.receive.sges(), off),
            Target::Sink { seq, off } => (self.sends.sges(seq), off),
        };
        for_each_part(sges, off.saturating_add(skip), len, |lkey, addr, len| {
            visit(lkey, addr, len, Access::LOCAL_WRITE)
        })
    }

    /// Copies octets to a target; the last octet becomes visible last.
    #[inline]
    pub(super) fn write(
        &self,
        target: Target,
        skip: u32,
        mut src: &[u8],
    ) -> Result<(), AccessError> {
        self.for_each(target, skip, src.len() as u32, |span| {
            let (now, later) = src
                .split_at_checked(span.len() as usize)
                .unwrap_or((src, &[]));
            span.write_last_octet_last(now);
            src = later;
        })
    }
}

/// Visits the parts of a scatter/gather list that make up octets `off` to `off + len`. If the list is too short, that is a
/// bounds error.
#[inline]
pub(super) fn for_each_part(
    sges: &[Sge],
    mut off: u32,
    mut len: u32,
    mut visit: impl FnMut(u32, u64, u32) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    for sge in sges {
        if len == 0 {
            break;
        }
        if off >= sge.len {
            off -= sge.len;
            continue;
        }
        let n = (sge.len - off).min(len);
        visit(sge.lkey, sge.addr.wrapping_add(u64::from(off)), n)?;
        off = 0;
        len -= n;
    }
    if len == 0 {
        Ok(())
    } else {
        Err(AccessError::BaseOrBounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn parts_cover_the_range_once(lens in proptest::collection::vec(0u32..20, 0..6), off in 0u32..60, len in 0u32..60) {
            let sges: Vec<Sge> = lens.iter().enumerate().map(|(i, l)| Sge { addr: 1000 * i as u64, len: *l, lkey: i as u32 }).collect();
            let all: Vec<u64> = sges.iter().flat_map(|s| (0..u64::from(s.len)).map(|o| s.addr + o)).collect();
            let mut got = Vec::new();
            let r = for_each_part(&sges, off, len, |_, addr, n| { got.extend((0..u64::from(n)).map(|o| addr + o)); Ok(()) });
            let want = all.get(off as usize..(off + len) as usize);
            match want {
                Some(w) => { prop_assert!(r.is_ok()); prop_assert_eq!(&got[..], w); }
                None if len == 0 => prop_assert!(r.is_ok() && got.is_empty()),
                None => prop_assert!(r.is_err()),
            }
        }
    }
}
