//! Counts the references to memory, and those who may write it: a lock that never waits.
//!
//! References and writers exclude each other. A writer is a request that places data in the memory,
//! from its creation until its end, a memory window with rights to write, or a call that copies
//! data in. Readers that are not references, such as a Send, do not count.

use std::sync::atomic::{AtomicU64, Ordering};

/// One writer. The number of references is in the bits below.
const WRITER: u64 = 1 << 32;

/// The references to memory, or its writers.
#[derive(Debug, Default)]
pub(crate) struct Borrows(AtomicU64);

impl Borrows {
    fn change(&self, to: impl Fn(u64) -> Option<u64>) -> bool {
        // Acquire: what previous writers wrote is visible to references, and previous references
        // have ended their accesses before a writer begins.
        self.0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, to)
            .is_ok()
    }

    /// Counts a reference. Returns `false` if there are writers.
    pub(crate) fn try_refer(&self) -> bool {
        self.change(|n| (n < WRITER - 1).then(|| n + 1))
    }

    pub(crate) fn end_reference(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Counts a writer. Returns `false` if there are references.
    pub(crate) fn try_write(&self) -> bool {
        self.change(|n| match n % WRITER {
            0 => n.checked_add(WRITER),
            _ => None,
        })
    }

    pub(crate) fn end_write(&self) {
        self.0.fetch_sub(WRITER, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_and_writers_exclude_each_other() {
        let borrows = Borrows::default();
        assert!(borrows.try_refer() && borrows.try_refer());
        assert!(!borrows.try_write());
        borrows.end_reference();
        assert!(!borrows.try_write(), "one reference is left");
        borrows.end_reference();
        assert!(borrows.try_write() && borrows.try_write());
        assert!(!borrows.try_refer());
        borrows.end_write();
        assert!(!borrows.try_refer(), "one writer is left");
        borrows.end_write();
        assert!(borrows.try_refer());
    }

    /// Forgotten references must not overflow into the count of writers.
    #[test]
    fn counts_do_not_overflow() {
        let borrows = Borrows(AtomicU64::new(WRITER - 1));
        assert!(!borrows.try_refer() && !borrows.try_write());
        let borrows = Borrows(AtomicU64::new(WRITER * u64::from(u32::MAX)));
        assert!(!borrows.try_refer() && !borrows.try_write());
    }
}
