//! The event after the end: `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
//!
//! InfiniBand keeps a queue pair's number from being used again for a while, and tells when that is over. iWARP leaves such
//! waiting to TCP, and kernel drivers give no such event. But programs that were written for InfiniBand count on it: tgt frees
//! a connection only then. So it is given here, as late as there, when most programs have long destroyed the identifier.

use super::id::CmIdInner;
use crate::engine::{Engine, Source};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Long enough for a program to be done with everything that it waits for after a disconnect.
const WAIT: Duration = Duration::from_secs(1);

struct Timewait {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
}

/// The identifier's connection has ended, and it has been told so.
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
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        self.engine.forget(self.token);
        if let Some(id) = self.id.upgrade() {
            id.timewait_over();
        }
    }
}
