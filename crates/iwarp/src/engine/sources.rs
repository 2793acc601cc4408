//! The sources that the engine serves. A source has a file descriptor, timers, or both, and is
//! identified by a token.

use super::sync::parking::{Mutex, RwLock};
use super::sync::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// An object with a file descriptor or timers that the engine serves.
pub(crate) trait Source: Send + Sync {
    /// Serves the descriptor, which is ready. `broken` is `true` if the descriptor has an error or
    /// is closed in both directions; reading or writing then returns the reason. Returns `false` if
    /// another thread drives the source, and will check for work again. Not called for a source
    /// that has only timers.
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _broken: bool) -> bool {
        true
    }
    /// Prefetches the source itself. Called some sources before this one is served.
    fn prefetch_object(&self) {}
    /// Prefetches the state that the source points to. Called just before the source is served.
    fn prefetch_state(&self) {}
    /// Returns until when application threads drive the source, in nanoseconds of the monotonic
    /// clock; `None` if they do not drive it at `now`.
    fn driven_until(&self, _now: u64) -> Option<u64> {
        None
    }
    /// Returns `true` if application threads have driven the source lately, but do not at `now`.
    /// They may be waiting for a processor.
    fn was_driven(&self, _now: u64) -> bool {
        false
    }
    /// Stops watching the descriptor ([`Engine::pause`](super::Engine::pause)) until
    /// [`resume_watch`](Self::resume_watch), because application threads drive the source. Returns
    /// `false` if the source has no descriptor, or if those threads would miss some of its events.
    fn pause_watch(&self) -> bool {
        false
    }
    /// Watches the descriptor again, because application threads no longer drive the source.
    fn resume_watch(&self) {}
    /// Returns `true` if the source still needs its timer of this kind. If not, no thread is woken
    /// for it.
    fn awaits(&self, _kind: u32) -> bool {
        true
    }
    /// Handles an expired timer. Timers cannot be cancelled, so the source may not need it any
    /// more.
    fn timer(self: Arc<Self>, kind: u32);
}

pub(super) type ByToken = HashMap<u64, Arc<dyn Source>, BuildHasherDefault<TokenHasher>>;

/// Tokens are consecutive numbers, so one multiplication spreads them well enough.
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

pub(super) struct Sources {
    known: RwLock<ByToken>,
    next_token: AtomicU64,
}

impl Sources {
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

    /// Adds a source, or replaces the source of this token. The old source is dropped after the
    /// lock is released, because its drop may remove other sources.
    pub(super) fn insert(&self, token: u64, source: Arc<dyn Source>) {
        let replaced = self.known.write().insert(token, source);
        drop(replaced);
    }

    /// Removes a source. It is dropped after the lock is released.
    pub(super) fn remove(&self, token: u64) {
        let source = self.known.write().remove(&token);
        drop(source);
    }

    pub(super) fn with_table<R>(&self, f: impl FnOnce(&ByToken) -> R) -> R {
        f(&self.known.read())
    }
}

/// Sources whose descriptors are paused while application threads drive them. The lock is not held
/// during calls that may take a lock of the source: a thread that is stuck in such a call must not
/// block the thread that replaces it.
#[derive(Default)]
pub(super) struct PausedSources(Mutex<ByToken>);

impl PausedSources {
    /// Pauses a source if application threads drive it at `now`. If they do not, or if it cannot be
    /// paused, returns the source as the error.
    pub(super) fn pause_if_driven(
        &self,
        token: u64,
        source: Arc<dyn Source>,
        now: u64,
    ) -> Result<(), Arc<dyn Source>> {
        if source.driven_until(now).is_none() || !source.pause_watch() {
            return Err(source);
        }
        self.0.lock().insert(token, source);
        Ok(())
    }

    /// Returns when the first lease of a paused source ends, at the earliest `now`; `None` if no
    /// source is paused.
    pub(super) fn first_end(&self, now: u64) -> Option<u64> {
        let paused = self.0.lock();
        let ends = paused.values();
        ends.map(|source| source.driven_until(now).unwrap_or(now))
            .min()
    }

    pub(super) fn resume_undriven(&self, now: u64) {
        while let Some(source) = self.take_undriven(now) {
            source.resume_watch();
        }
    }

    fn take_undriven(&self, now: u64) -> Option<Arc<dyn Source>> {
        let mut paused = self.0.lock();
        let mut all = paused.iter();
        let (&token, _) = all.find(|(_, source)| source.driven_until(now).is_none())?;
        paused.remove(&token)
    }
}
