//! What the engine serves: things with a file descriptor or a timer, known by their tokens.

use super::sync::parking::{Mutex, RwLock};
use super::sync::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Something with a file descriptor or a timer.
pub(crate) trait Source: Send + Sync {
    /// The descriptor is ready. `broken`: it has an error, or is closed in both directions, which reading or writing will tell.
    /// Returns `false` if another thread is driving it and will look again. What has only timers is never asked.
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _broken: bool) -> bool {
        true
    }
    /// It is served after a few others. The processor may prefetch its own state meanwhile.
    fn approach(&self) {}
    /// It is served next. The processor may prefetch what its state refers to meanwhile.
    fn come_next(&self) {}
    /// Returns until when application threads drive it, in nanoseconds of the monotonic clock; `None` if they do not, at `now`.
    fn driven_until(&self, _now: u64) -> Option<u64> {
        None
    }
    /// Returns `true` if application threads have driven it lately, and do not any more. Such a thread may be waiting for a
    /// processor.
    fn was_driven(&self, _now: u64) -> bool {
        false
    }
    /// Application threads drive it: [`pause`](super::Engine::pause)s its descriptor until [`resume`](Self::resume). Returns
    /// `false` if it has none, or if they would not notice all that happens to it.
    fn rest(&self) -> bool {
        false
    }
    /// They no longer drive it.
    fn resume(&self) {}
    /// Returns `true` if this timer still has a purpose. If not, no thread is woken for it.
    fn awaits(&self, _: u32) -> bool {
        true
    }
    /// A timer has expired. Timers are not cancelled: the source decides whether it still has a purpose.
    fn timer(self: Arc<Self>, kind: u32);
}

/// Sources by token.
pub(super) type ByToken = HashMap<u64, Arc<dyn Source>, BuildHasherDefault<TokenHasher>>;

/// Tokens count up, and only this file makes them, so one multiplication spreads them well enough.
#[derive(Default)]
pub(super) struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, octets: &[u8]) {
        for &octet in octets {
            self.write_u64(u64::from(octet));
        }
    }

    fn write_u64(&mut self, token: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// The sources of an engine.
pub(super) struct Sources {
    known: RwLock<ByToken>,
    next_token: AtomicU64,
}

impl Sources {
    /// None yet. Tokens begin behind `reserved`.
    pub(super) fn new(reserved: u64) -> Self {
        Self {
            known: RwLock::default(),
            next_token: AtomicU64::new(reserved + 1),
        }
    }

    pub(super) fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn get(&self, token: u64) -> Option<Arc<dyn Source>> {
        self.known.read().get(&token).cloned()
    }

    /// Enters a source. One that had the token before is dropped outside the lock, because it may remove others.
    pub(super) fn insert(&self, token: u64, source: Arc<dyn Source>) {
        let before = self.known.write().insert(token, source);
        drop(before);
    }

    /// Removes a source, and drops it outside the lock.
    pub(super) fn remove(&self, token: u64) {
        let source = self.known.write().remove(&token);
        drop(source);
    }

    /// Calls `look` with the table locked.
    pub(super) fn look<R>(&self, look: impl FnOnce(&ByToken) -> R) -> R {
        look(&self.known.read())
    }
}

/// Sources whose descriptors are paused while application threads drive them. Its lock is not held while a source is called that may
/// wait for its own lock, because a thread that is stuck in a source must leave the others to the thread that takes its place.
#[derive(Default)]
pub(super) struct Resting(Mutex<ByToken>);

impl Resting {
    /// Lets a source rest, if application threads drive it at `now`. Gives it back if not.
    pub(super) fn admit(
        &self,
        token: u64,
        source: Arc<dyn Source>,
        now: u64,
    ) -> Result<(), Arc<dyn Source>> {
        if source.driven_until(now).is_none() || !source.rest() {
            return Err(source);
        }
        self.0.lock().insert(token, source);
        Ok(())
    }

    /// Returns when the first of their leases ends, which may be now. `None` if no source rests.
    pub(super) fn first_end(&self, now: u64) -> Option<u64> {
        let resting = self.0.lock();
        let ends = resting.values();
        ends.map(|source| source.driven_until(now).unwrap_or(now))
            .min()
    }

    /// Watches those again that application threads no longer drive.
    pub(super) fn wake(&self, now: u64) {
        while let Some(source) = self.take_left(now) {
            source.resume();
        }
    }

    /// Takes out one that application threads no longer drive.
    fn take_left(&self, now: u64) -> Option<Arc<dyn Source>> {
        let mut resting = self.0.lock();
        let mut all = resting.iter();
        let (&token, _) = all.find(|(_, source)| source.driven_until(now).is_none())?;
        resting.remove(&token)
    }
}
