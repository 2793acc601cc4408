//! The event `RDMA_CM_EVENT_TIMEWAIT_EXIT` after the end of a connection.
//!
//! On InfiniBand a queue pair's number is not reused for a while, and this event marks the end of
//! that time. With iWARP, TCP has TIME-WAIT instead, and kernel drivers do not report the event.
//! Some programs that were written for InfiniBand need it; for example, tgt frees a connection only
//! after the event. Here the event follows after a time in which most programs have destroyed the
//! identifier.

use super::id::CmIdInner;
use crate::engine::{Engine, Source};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Most programs have destroyed the identifier after this time.
const WAIT: Duration = Duration::from_secs(1);

struct Timewait {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
}

/// Starts the timer after the event Disconnected.
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
