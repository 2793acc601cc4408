//! The event after the end: `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
//!
//! On InfiniBand a queue pair's number is not used again for a while, and an event tells when that time is over. With iWARP TCP
//! waits instead, and kernel drivers give no such event. But some programs that were written for InfiniBand need it: tgt frees
//! a connection only then. So it is given here after the same time, when most programs have destroyed the identifier long ago.

use super::id::CmIdInner;
use crate::engine::{Engine, Source};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A program has finished everything that follows a disconnect by then.
const WAIT: Duration = Duration::from_secs(1);

struct Timewait {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
}

/// The identifier's connection has ended, and the event for that was given.
pub(super) fn begin(id: Weak<CmIdInner>) {
    let Ok(engine) = Engine::current() else {
        return;
    };
    let token = engine.token();
    let source = Arc::new(Timewait {
        id,
        engine: Arc::clone(&engine),
        token,
    });
    engine.add_timed(token, source);
    engine.after(WAIT, token, 0);
}

impl Source for Timewait {
    fn timer(self: Arc<Self>, _: u32) {
        self.engine.forget(self.token);
        if let Some(id) = self.id.upgrade() {
            id.timewait_over();
        }
    }
}
