//! The STags whose memory a plan uses until it is written or filled.

use super::AccessError;
use super::access::Accessor;
use super::span::{Memory, Span};
use super::table::MemoryTable;
use crate::Access;
use iwarp_proto::ddp::Stag;

/// STags that a plan is a user of, in storage of fixed size.
#[derive(Debug)]
pub(crate) struct Users<S> {
    stags: S,
    len: usize,
}

impl<S: AsRef<[Stag]> + AsMut<[Stag]>> Users<S> {
    /// Returns an empty list; `stags` is its storage.
    pub(crate) const fn new(stags: S) -> Self {
        Self { stags, len: 0 }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Checks an access like [`MemoryTable::check`], and becomes a user of its memory. Returns
    /// `None` if the list is full.
    pub(crate) fn check<'t, M: Memory>(
        &mut self,
        memory: &'t MemoryTable<M>,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
    ) -> Result<Option<Span<'t, M>>, AccessError> {
        let stags = self.stags.as_mut();
        let last = self.len.checked_sub(1).and_then(|last| stags.get(last));
        if last == Some(&stag) {
            // Adjacent pieces of one message share one use.
            return memory
                .check_as_user((stag, to, len), need, accessor)
                .map(Some);
        }
        let Some(slot) = stags.get_mut(self.len) else {
            return Ok(None);
        };
        let span = memory.check_and_use((stag, to, len), need, accessor)?;
        if !span.is_empty() {
            *slot = stag;
            self.len = self.len.wrapping_add(1);
        }
        Ok(Some(span))
    }

    pub(crate) fn release<M: Memory>(&mut self, memory: &MemoryTable<M>) {
        for stag in self.stags.as_ref().iter().take(self.len) {
            memory.release(*stag);
        }
        self.len = 0;
    }
}
