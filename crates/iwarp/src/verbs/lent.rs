//! Memory that is lent to the peer of one queue pair, taken back, and read in place, again and
//! again.
//!
//! Invariant of the `unsafe` code: [`LentMemory`] owns its pages. `state` is either [`LENT`] or the
//! number of readers. While the pages are lent, the peer may write them at any time, and there are
//! no readers. While they are not lent, nothing writes them. References exist only in readers. The
//! pages are unmapped only after deregistration has returned, and nothing accesses them from then
//! on.

use super::ProtectionDomain;
use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::sys::fork::Origin;
use crate::sys::mapping::Mapping;
use iwarp_rnic::memory::{Accessor, Stag};
use iwarp_rnic::{Access, FastRegister};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The state of lent memory; any other value is the number of readers.
const LENT: u32 = u32::MAX;

/// Zeroed pages that the peer of one queue pair may write while they are lent. The kernel allocates
/// a page when it is first written.
#[derive(Debug)]
pub(crate) struct LentMemory {
    ctx: Context,
    accessor: Accessor,
    /// The STag with its current key.
    stag: AtomicU32,
    state: AtomicU32,
    origin: Origin,
    pages: ManuallyDrop<Mapping>,
}

impl LentMemory {
    /// Allocates `len` bytes for the queue pair with number `qp`. They are not lent yet.
    pub(crate) fn new(pd: &ProtectionDomain, qp: u32, len: usize) -> Result<Arc<Self>> {
        let pages = Mapping::new(len).map_err(|_| Error::OutOfMemory)?;
        let (ctx, pd) = (pd.context().clone(), pd.number());
        let accessor = Accessor { pd, qp };
        let addr = pages.as_ptr().expose_provenance() as u64;
        // SAFETY: the pages are owned by the result, and outlive `deregister` in `Drop`. By the
        // module's invariant, they are not referenced while they can be written.
        let stag = unsafe { ctx.allocate_fast_for((addr, len as u64), accessor) }?;
        Ok(Arc::new(Self {
            ctx,
            accessor,
            stag: AtomicU32::new(stag.0),
            state: AtomicU32::new(0),
            origin: Origin::current_process(),
            pages: ManuallyDrop::new(pages),
        }))
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Lends the memory, and returns the STag with a new key. The peer's tagged offsets begin at 0.
    ///
    /// # Errors
    /// [`Error::Busy`]: there are readers, or it is lent already. [`Error::Memory`]: an access that
    /// began before the last `take_back` has not ended.
    pub(crate) fn lend(&self) -> Result<u32> {
        let state = &self.state;
        let lent = state.compare_exchange(0, LENT, Ordering::AcqRel, Ordering::Relaxed);
        lent.map_err(|_| Error::Busy)?;
        let stag = Stag(self.stag.load(Ordering::Relaxed));
        let stag = stag.with_key(stag.key().wrapping_add(1));
        let lending = FastRegister {
            new_stag: stag,
            offset: 0,
            len: self.len() as u64,
            iova: 0,
            access: Access::REMOTE_WRITE | Access::LOCAL_WRITE,
            pages: None,
        };
        if let Err(error) = self.ctx.fast_register(&lending, self.accessor.pd) {
            state.store(0, Ordering::Release);
            return Err(error);
        }
        self.stag.store(stag.0, Ordering::Relaxed);
        Ok(stag.0)
    }

    /// Takes the memory back, and returns a reader of its first `len` bytes, or of fewer if it is
    /// shorter. The peer's accesses fail from now on.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: it is not lent, or the peer is writing it.
    pub(crate) fn take_back(self: &Arc<Self>, len: usize) -> Result<LentBytes> {
        let stag = Stag(self.stag.load(Ordering::Relaxed));
        if !self.ctx.invalidate(stag, self.accessor)? {
            // It counts as lent for ever.
            return Err(Error::InvalidState("the peer is writing this memory"));
        }
        self.state.store(1, Ordering::Release);
        Ok(LentBytes {
            len: len.min(self.len()),
            memory: Some(Arc::clone(self)),
            at: 0,
        })
    }
}

/// A reader of memory that was taken back: dereferences to its bytes. A clone is another reader.
#[derive(Debug)]
pub(crate) struct LentBytes {
    /// `None` after the reader has ended.
    memory: Option<Arc<LentMemory>>,
    at: usize,
    len: usize,
}

impl LentBytes {
    /// Restricts the reader to `len` of its bytes, from `at` on. The caller has checked the range.
    pub(crate) const fn restrict(&mut self, at: usize, len: usize) {
        self.at += at;
        self.len = len;
    }

    /// Ends the reader. Returns the memory if this was the last one, so that it can be lent again.
    pub(crate) fn end(&mut self) -> Option<Arc<LentMemory>> {
        let memory = self.memory.take()?;
        let was_last = memory.state.fetch_sub(1, Ordering::AcqRel) == 1;
        was_last.then_some(memory)
    }
}

impl Deref for LentBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Some(memory) = &self.memory else {
            return &[];
        };
        let end = self.at.checked_add(self.len);
        if end.is_none_or(|end| end > memory.len()) {
            return &[];
        }
        // SAFETY: initialised memory of the mapping, inside its bounds. This reader is counted, so
        // the memory is not lent, and nothing writes it.
        unsafe { std::slice::from_raw_parts(memory.pages.as_ptr().add(self.at), self.len) }
    }
}

impl Clone for LentBytes {
    fn clone(&self) -> Self {
        if let Some(memory) = &self.memory {
            // Relaxed: this reader is counted, so the count cannot reach 0 meanwhile.
            memory.state.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            memory: self.memory.clone(),
            at: self.at,
            len: self.len,
        }
    }
}

impl Drop for LentBytes {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            // In a forked child, the registration and the copy of the pages stay until it exits.
            return;
        }
        // `deregister` returns after the last access.
        match self.ctx.deregister(self.stag.load(Ordering::Relaxed)) {
            // SAFETY: the pages are dropped only here, and nothing accesses them any more.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.pages) },
            Err(error) => tracing::warn!(%error, "memory leaked: a request still uses it"),
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::verbs::{Config, Device};

    fn lent(len: usize) -> Arc<LentMemory> {
        let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
        let ctx = Context::open(&device, Config::default()).unwrap();
        LentMemory::new(&ProtectionDomain::new(&ctx), 5, len).unwrap()
    }

    #[test]
    fn memory_with_readers_is_not_lent() {
        let memory = lent(100);
        assert!(memory.take_back(1).is_err(), "it is not lent");
        let first = memory.lend().unwrap();
        assert!(matches!(memory.lend(), Err(Error::Busy)));
        let mut bytes = memory.take_back(60).unwrap();
        assert_eq!(*bytes, [0; 60]);
        assert!(matches!(memory.lend(), Err(Error::Busy)));
        let mut other = bytes.clone();
        bytes.restrict(10, 20);
        assert_eq!((bytes.len(), other.len()), (20, 60));
        assert!(bytes.end().is_none() && bytes.is_empty());
        assert!(bytes.end().is_none(), "a reader ends once");
        drop(bytes);
        assert!(matches!(memory.lend(), Err(Error::Busy)));
        assert!(other.end().is_some());
        let second = memory.lend().unwrap();
        assert_eq!(second, (first & !0xff) | ((first + 1) & 0xff));
        assert_eq!(memory.take_back(usize::MAX).unwrap().len(), 100);
    }

    /// The peer's STag ends when the memory is taken back.
    #[test]
    fn peer_loses_access() {
        let memory = lent(100);
        let table = &memory.ctx.inner.memory;
        let permits = |stag: u32, qp| {
            let accessor = Accessor {
                qp,
                ..memory.accessor
            };
            let write = (Stag(stag), 0, 100);
            table
                .read()
                .permits(write, Access::REMOTE_WRITE, accessor)
                .is_ok()
        };
        let first = memory.lend().unwrap();
        assert!(permits(first, 5));
        assert!(!permits(first, 6), "it was lent to another queue pair");
        drop(memory.take_back(100).unwrap());
        assert!(!permits(first, 5));
        let second = memory.lend().unwrap();
        assert!(permits(second, 5) && !permits(first, 5));
    }
}
