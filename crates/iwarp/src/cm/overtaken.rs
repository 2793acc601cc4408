//! The event of a connection's end does not overtake the last messages.
//!
//! A program that finds its completion queue empty and then looks for events may find that the peer has gone, although the peer's
//! last message came in between. libfabric's `ofi_rxm` then destroys the queue pair, and with it the completion for which the
//! program waits for ever. Kernels have the same gap, but the event takes longer there than a look at a queue. So it waits here until the
//! program has taken the completions, for a short time: others take none until they hear of the end. Programs whose messages go over other queue
//! pairs than the connection's (`stand_in`) get all of this time: UCX throws away what an end point has received and the program has not asked for.

use super::id::CmIdInner;
use crate::engine::{Engine, Source};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often it looks whether the completions were taken.
const STEP: Duration = Duration::from_millis(1);
/// How long it waits. A thread that polls may lose its processor to others for this long.
const WAIT: Duration = Duration::from_millis(30);

struct Overtaken {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
    deadline: Instant,
    status: Mutex<Option<i32>>,
}

/// The peer has ended the connection of `id` with `status`, and completions of its messages wait. Returns `false` if nothing can wait
/// for them; then the caller gives the event.
pub(super) fn begin(id: Weak<CmIdInner>, status: i32) -> bool {
    let Ok(engine) = Engine::current() else {
        return false;
    };
    let token = engine.token();
    let source = Arc::new(Overtaken {
        id,
        engine: Arc::clone(&engine),
        token,
        deadline: Instant::now() + WAIT,
        status: Mutex::new(Some(status)),
    });
    engine.add_timed(token, source);
    engine.after(STEP, token, 0);
    true
}

impl Source for Overtaken {
    fn timer(self: Arc<Self>, _: u32) {
        let id = self.id.upgrade();
        if let Some(id) = &id
            && Instant::now() < self.deadline
            && id.has_unseen_success()
        {
            self.engine.after(STEP, self.token, 0);
            return;
        }
        self.engine.forget(self.token);
        if let (Some(id), Some(status)) = (id, self.status.lock().take()) {
            id.disconnected(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::id::{CmId, Phase};
    use super::super::{CmEventKind, create_event_channel};
    use super::*;
    use crate::testing::context;

    /// As long as nobody knows whether there are completions, the program has all of the time to take them.
    #[test]
    fn the_end_waits_for_what_was_not_taken() {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&context()));
        id.use_stand_in(1).unwrap();
        id.inner.state.lock().phase = Phase::Disconnected;
        let before = Instant::now();
        assert!(begin(Arc::downgrade(&id.inner), libc::ECONNRESET));
        let event = channel.next(Some(Duration::from_secs(20))).unwrap();
        assert!(before.elapsed() >= WAIT);
        let told = (event.kind, event.status);
        assert_eq!(told, (CmEventKind::Disconnected, libc::ECONNRESET));
        id.destroy();
    }

    /// A connection without a queue pair of the program's: nobody knows whether it has taken all completions.
    #[test]
    fn the_end_is_told_when_all_is_taken_or_after_a_while() {
        let ctx = context();
        let (hour, now) = (Duration::from_secs(3600), Instant::now());
        for (is_leaving, deadline, is_told) in [
            (false, now + hour, false),
            (true, now + hour, true),
            (false, now, true),
        ] {
            let channel = create_event_channel().unwrap();
            let id = CmId::create(&channel, Some(&ctx));
            id.use_stand_in(1).unwrap();
            assert!(id.inner.has_unseen_success());
            {
                let mut s = id.inner.state.lock();
                s.phase = Phase::Disconnected;
                s.leaving = is_leaving;
            }
            assert_eq!(id.inner.has_unseen_success(), !is_leaving);
            let engine = Engine::current().unwrap();
            let overtaken = Arc::new(Overtaken {
                id: Arc::downgrade(&id.inner),
                token: engine.token(),
                engine,
                deadline,
                status: Mutex::new(Some(libc::ECONNRESET)),
            });
            overtaken.timer(0);
            let event = channel.try_next();
            let told = event.map(|event| (event.kind, event.status));
            let wanted = (CmEventKind::Disconnected, libc::ECONNRESET);
            assert_eq!(told, is_told.then_some(wanted));
            id.destroy();
        }
    }
}
