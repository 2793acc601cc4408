//! The state of an STag, in one atomic word.
//!
//! A table entry has an STag, and is *valid* or not. Each access to the memory of a
//! fast-registration region or of a window is a *user* of the entry while it lasts, and so is each
//! plan that refers to memory. Fast registrations, invalidations and accesses may run concurrently.
//! This word synchronizes them:
//!
//! * An access becomes a user by the same compare-exchange that finds the STag valid. It is
//!   therefore counted before an invalidation, or refused after it.
//! * An invalidation makes the STag invalid immediately. It completes when the last user is gone.
//! * A registration marks an entry *busy* (neither valid nor in use), changes its fields, and makes
//!   it valid. Nobody reads the fields while they change, so no access sees a mix of two
//!   registrations.
//!
//! A caller that has to wait for users sets a flag. The last user clears the flag and reports that
//! it was set.

use super::MemoryError;
use core::sync::atomic::{AtomicU64, Ordering};
use iwarp_proto::ddp::Stag;

const USERS: u64 = (1 << 29) - 1;
/// Someone waits for the last user. Never set together with `VALID`.
const WANTED: u64 = 1 << 29;
const BUSY: u64 = 1 << 30;
/// Directly below the STag, so that one comparison checks the STag and its validity.
const VALID: u64 = 1 << 31;
/// Position of the STag (index and key, 32 bits).
const STAG: u32 = 32;

/// STag, validity and users of an entry. An entry without an STag (index zero) is never valid.
#[derive(Debug)]
pub(super) struct State(AtomicU64);

impl State {
    pub(super) const fn free() -> Self {
        Self::new(false, Stag(0))
    }

    pub(super) const fn new(valid: bool, stag: Stag) -> Self {
        Self(AtomicU64::new(word(valid, stag)))
    }

    /// Changes STag and validity, and keeps the users.
    pub(super) fn set(&mut self, valid: bool, stag: Stag) {
        let old = self.0.get_mut();
        *old = word(valid, stag) | *old & USERS;
    }

    #[inline]
    pub(super) fn stag(&self) -> Stag {
        Stag((self.0.load(Ordering::Relaxed) >> STAG) as u32)
    }

    #[inline]
    pub(super) fn is_valid(&self) -> bool {
        self.0.load(Ordering::Acquire) & VALID != 0
    }

    #[inline]
    pub(super) fn is(&self, stag: Stag) -> bool {
        matches(self.0.load(Ordering::Acquire), stag)
    }

    pub(super) fn check_unused(&self) -> Result<(), MemoryError> {
        match self.0.load(Ordering::Acquire) & USERS {
            0 => Ok(()),
            _ => Err(MemoryError::InUse),
        }
    }

    /// Replaces the word by the result of `f`, unless that is `None`. Returns the previous word.
    /// The loop is lock-free: if an exchange fails, another processor has made progress.
    #[inline]
    fn update(&self, f: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, f)
            .ok()
    }

    /// Adds a user. Returns `false` if the entry is not valid with this STag.
    pub(super) fn add_user(&self, stag: Stag) -> bool {
        let with_user = |word: u64| {
            (matches(word, stag) && word & USERS != USERS).then_some(word.wrapping_add(1))
        };
        self.update(with_user).is_some()
    }

    /// Removes a user. Returns `true` if it was the last one, and an invalidation or a registration
    /// waits for it.
    pub(super) fn remove_user(&self) -> bool {
        let without_user = |word: u64| match word & USERS {
            0 => None,
            1 => Some(word.wrapping_sub(1) & !WANTED),
            _ => Some(word.wrapping_sub(1)),
        };
        debug_assert!(
            self.check_unused().is_err(),
            "more users removed than added"
        );
        self.update(without_user)
            .is_some_and(|previous| previous & WANTED != 0 && previous & USERS == 1)
    }

    /// Makes the entry invalid. Returns `None` if it is not valid with this STag, `Some(true)` if
    /// it has no users, and `Some(false)` if the removal of the last user will be reported.
    pub(super) fn invalidate(&self, stag: Stag) -> Option<bool> {
        let invalid = |word: u64| {
            let wanted = if word & USERS == 0 { 0 } else { WANTED };
            matches(word, stag).then_some(word & !VALID | wanted)
        };
        self.update(invalid).map(|previous| previous & USERS == 0)
    }

    /// Returns `true` if there are no users. If there are, marks the entry, so that the removal of
    /// the last user is reported.
    pub(super) fn is_unused_or_wanted(&self) -> bool {
        let wanted = |word: u64| (word & USERS != 0 && word & VALID == 0).then_some(word | WANTED);
        self.update(wanted).is_none()
    }

    /// Starts a registration. Only the caller may change the entry until it calls
    /// [`finish`](Self::finish) or [`cancel`](Self::cancel).
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

    /// Ends a registration and makes the entry valid.
    pub(super) fn finish(&self, stag: Stag) {
        self.0.store(word(true, stag), Ordering::Release);
    }

    /// Cancels a registration; the entry stays invalid.
    pub(super) fn cancel(&self) {
        self.0.fetch_and(!BUSY, Ordering::Release);
    }
}

const fn word(valid: bool, stag: Stag) -> u64 {
    let valid = if valid { VALID } else { 0 };
    (stag.0 as u64) << STAG | valid
}

/// Returns `true` if `word` is the word of an entry that is valid with this STag.
#[inline]
const fn matches(word: u64, stag: Stag) -> bool {
    word & !(VALID - 1) == self::word(true, stag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalidation_waits_for_users() {
        let state = State::new(true, Stag(7));
        assert!(!state.add_user(Stag(8)));
        assert!(state.add_user(Stag(7)) && state.add_user(Stag(7)));
        assert_eq!(state.invalidate(Stag(8)), None);
        assert_eq!(state.invalidate(Stag(7)), Some(false));
        assert_eq!(state.invalidate(Stag(7)), None);
        assert!(!state.add_user(Stag(7)) && !state.is(Stag(7)));
        assert_eq!(state.begin(), Err(MemoryError::InUse));
        assert!(!state.remove_user());
        assert!(!state.is_unused_or_wanted());
        assert!(state.remove_user());
        assert!(state.is_unused_or_wanted());
        assert_eq!(state.begin(), Ok(()));
        assert_eq!(state.begin(), Err(MemoryError::StillValid));
        assert!(!state.add_user(Stag(7)));
        state.cancel();
        assert_eq!(state.begin(), Ok(()));
        state.finish(Stag(9));
        assert!(state.is(Stag(9)) && !state.is(Stag(7)));
        assert_eq!(state.begin(), Err(MemoryError::StillValid));
        assert_eq!(state.invalidate(Stag(9)), Some(true));
        state.finish(Stag(9));
        assert!(state.add_user(Stag(9)));
        assert!(!state.remove_user());
    }

    #[test]
    fn waiter_is_notified_once() {
        let mut state = State::new(true, Stag(7));
        assert!(state.is_valid() && state.add_user(Stag(7)));
        // While the entry is valid, nobody waits.
        assert!(state.is_unused_or_wanted());
        assert_eq!(state.check_unused(), Err(MemoryError::InUse));
        state.set(false, Stag(9));
        assert!(!state.is_valid());
        assert_eq!(state.stag(), Stag(9));
        assert_eq!(state.check_unused(), Err(MemoryError::InUse));
        assert!(!state.is_unused_or_wanted());
        assert!(!state.is_unused_or_wanted());
        assert!(state.remove_user());
        assert_eq!(state.check_unused(), Ok(()));
        // The flag is cleared, and nothing else has changed.
        assert_eq!(state.stag(), Stag(9));
        state.finish(Stag(9));
        assert!(state.add_user(Stag(9)) && !state.remove_user());
    }

    #[test]
    fn user_count_does_not_overflow() {
        let state = State(AtomicU64::new(word(true, Stag(7)) | USERS));
        assert!(!state.add_user(Stag(7)));
        assert!(state.is(Stag(7)));
        assert!(!state.remove_user());
        assert!(state.add_user(Stag(7)) && !state.add_user(Stag(7)));
        assert_eq!(state.invalidate(Stag(7)), Some(false));
        assert_eq!(state.stag(), Stag(7));
    }
}
