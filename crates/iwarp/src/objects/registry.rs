//! Per-device tables of the rooms above this one, whose types this room does not name.

use super::context::ContextInner;
use std::any::Any;
use std::sync::Arc;

/// A table that a room above this one keeps for a device. It is created on first use, and dropped
/// with the device.
pub(crate) trait Registry: Any + Send + Sync {
    fn destroyed(&self, _num: u32) {}

    /// Called without locks when the queue pair `num` was reset or has failed, and so has given up
    /// its peer.
    fn gave_up_peer(&self, _num: u32) {}

    /// Called without locks when requests of the queue pair `num` wait because its peer has not
    /// connected.
    fn requests_wait(&self, _num: u32) {}

    fn closed(&self) {}
}

impl ContextInner {
    pub(crate) fn registry<T: Registry + Default>(&self) -> Arc<T> {
        let mut all = self.registries.lock();
        let found = all.iter().find_map(|registry| {
            let any: Arc<dyn Any + Send + Sync> = Arc::clone(registry) as _;
            any.downcast().ok()
        });
        found.unwrap_or_else(|| {
            let new = Arc::<T>::default();
            all.push(Arc::clone(&new) as _);
            new
        })
    }

    /// Calls `f` with each registry. The list is not locked during the calls.
    pub(super) fn each_registry(&self, f: impl FnMut(&Arc<dyn Registry>)) {
        let all = self.registries.lock().clone();
        all.iter().for_each(f);
    }

    pub(crate) fn requests_wait(&self, num: u32) {
        self.each_registry(|registry| registry.requests_wait(num));
    }

    pub(crate) fn gave_up_peer(&self, num: u32) {
        self.each_registry(|registry| registry.gave_up_peer(num));
    }
}
