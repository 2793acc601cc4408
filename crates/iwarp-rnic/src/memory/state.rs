//! The life of an STag, in one atomic word.
//!
//! An entry of the table is *valid*, with a key, or it is not. Each access to the memory of a fast-registration region or of a window,
//! and each plan that names memory, is a *user* of its entry for as long as it lasts. Fast registrations and invalidations
//! share the table with all accesses. This word orders them:
//!
//! * An access becomes a user by the same compare-exchange that finds the STag valid. So it is a user before an invalidation, and
//!   then the invalidation knows of it, or it is refused.
//! * An invalidation ends the validity at once. It is complete when the last user has left.
//! * A registration makes an entry *busy*, which is neither valid nor has users, changes its fields, and makes it valid. So
//!   nobody reads the fields while they change, and no access sees some fields of one registration and some of another.
//!
//! Whoever finds users and has to wait leaves a mark. The last user that leaves takes the mark away and tells that it was there.

use super::MemoryError;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bits that count users.
const USERS: u64 = 0xffff_ffff;
/// Where the key begins: eight bits.
const KEY: u32 = 32;
const VALID: u64 = 1 << 40;
const BUSY: u64 = 1 << 41;
/// Somebody waits until there are no users. Never together with `VALID`.
const WANTED: u64 = 1 << 42;

/// Validity, key and users of an entry.
#[derive(Debug)]
pub(super) struct State(AtomicU64);

impl State {
    /// Makes the state of an entry without users.
    pub(super) const fn new(valid: bool, key: u8) -> Self {
        let valid = if valid { VALID } else { 0 };
        Self(AtomicU64::new(valid | (key as u64) << KEY))
    }

    /// Changes key and validity while nobody else has the table.
    pub(super) fn set(&mut self, valid: bool, key: u8) {
        let users = *self.0.get_mut() & USERS;
        let Self(word) = Self::new(valid, key);
        *self.0.get_mut() = word.into_inner() | users;
    }

    #[inline]
    pub(super) fn key(&self) -> u8 {
        (self.0.load(Ordering::Relaxed) >> KEY) as u8
    }

    #[inline]
    pub(super) fn is_valid(&self) -> bool {
        self.0.load(Ordering::Acquire) & VALID != 0
    }

    /// Returns `true` if the entry is valid with this key.
    #[inline]
    pub(super) fn is(&self, key: u8) -> bool {
        matches(self.0.load(Ordering::Acquire), key)
    }

    /// Returns `true` if there are users.
    pub(super) fn is_used(&self) -> bool {
        self.0.load(Ordering::Acquire) & USERS != 0
    }

    /// Changes the word by `f`, unless that returns `None`. Returns the word before. The loop ends: a failed exchange means that
    /// another processor made progress.
    #[inline]
    fn update(&self, f: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, f)
            .ok()
    }

    /// Counts one more user. Returns `false` if the entry is not valid with this key.
    pub(super) fn enter(&self, key: u8) -> bool {
        let more = |word| (matches(word, key) && word & USERS != USERS).then_some(word + 1);
        self.update(more).is_some()
    }

    /// Counts one user less. Returns `true` if it was the last one and somebody waits for that.
    pub(super) fn leave(&self) -> bool {
        let less = |word: u64| match word & USERS {
            0 => None,
            1 => Some((word - 1) & !WANTED),
            _ => Some(word - 1),
        };
        debug_assert!(self.is_used(), "left more often than entered");
        self.update(less)
            .is_some_and(|before| before & WANTED != 0 && before & USERS == 1)
    }

    /// Ends the validity. Returns `None` if the entry is not valid with this key, and otherwise whether it is complete: if not, there
    /// are users, and the last one will tell.
    pub(super) fn invalidate(&self, key: u8) -> Option<bool> {
        let end = |word: u64| {
            let mark = if word & USERS == 0 { 0 } else { WANTED };
            matches(word, key).then_some(word & !VALID | mark)
        };
        self.update(end).map(|before| before & USERS == 0)
    }

    /// Returns `true` if there are no users. If there are, the last one will tell.
    pub(super) fn is_unused_or_wanted(&self) -> bool {
        let mark = |word: u64| (word & USERS != 0 && word & VALID == 0).then_some(word | WANTED);
        self.update(mark).is_none()
    }

    /// Begins a registration. Only the caller may change the entry until it calls [`finish`](Self::finish) or
    /// [`cancel`](Self::cancel).
    pub(super) fn begin(&self) -> Result<(), MemoryError> {
        let begin = |word: u64| (word & (VALID | BUSY | USERS) == 0).then_some(word | BUSY);
        match self.update(begin) {
            Some(_) => Ok(()),
            None if self.0.load(Ordering::Acquire) & (VALID | BUSY) != 0 => {
                Err(MemoryError::StillValid)
            }
            None => Err(MemoryError::InUse),
        }
    }

    /// Ends a registration: the entry is valid.
    pub(super) fn finish(&self, key: u8) {
        let Self(word) = Self::new(true, key);
        self.0.store(word.into_inner(), Ordering::Release);
    }

    /// Ends a registration that was refused: the entry stays invalid.
    pub(super) fn cancel(&self) {
        self.0.fetch_and(!BUSY, Ordering::Release);
    }
}

#[inline]
const fn matches(word: u64, key: u8) -> bool {
    word >> KEY == (VALID >> KEY) | key as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalidation_waits_for_users() {
        let state = State::new(true, 7);
        assert!(!state.enter(8));
        assert!(state.enter(7) && state.enter(7));
        assert_eq!(state.invalidate(8), None);
        assert_eq!(state.invalidate(7), Some(false));
        assert_eq!(state.invalidate(7), None);
        assert!(!state.enter(7) && !state.is(7));
        assert_eq!(state.begin(), Err(MemoryError::InUse));
        assert!(!state.leave());
        assert!(!state.is_unused_or_wanted());
        assert!(state.leave());
        assert!(state.is_unused_or_wanted());
        assert_eq!(state.begin(), Ok(()));
        assert_eq!(state.begin(), Err(MemoryError::StillValid));
        assert!(!state.enter(7));
        state.cancel();
        assert_eq!(state.begin(), Ok(()));
        state.finish(9);
        assert!(state.is(9) && !state.is(7));
        assert_eq!(state.begin(), Err(MemoryError::StillValid));
        assert_eq!(state.invalidate(9), Some(true));
        // Nobody waits any more, so nobody is told.
        state.finish(9);
        assert!(state.enter(9));
        assert!(!state.leave());
    }
}
