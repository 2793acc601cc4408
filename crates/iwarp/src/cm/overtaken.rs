//! Delays the event Disconnected, so that it does not overtake the completions of the peer's last
//! messages.
//!
//! A program may poll an empty completion queue and then poll for events. If the peer's last
//! message and its disconnect arrive in between, the program sees only the event. libfabric's
//! `ofi_rxm` then destroys the queue pair, and loses the completion that it waits for. With kernel
//! drivers this is possible, too, but there the event arrives much later than the completion.
//! Therefore the event is delayed until the program has polled the completions. The delay is
//! limited, because some programs do not poll before they get the event. If the program's messages
//! use other queue pairs than the connection (`placeholder_qp`), the event is always delayed for
//! the full time: UCX discards received messages that the program has not asked for.

use super::id::CmIdInner;
use crate::engine::{Engine, Source};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The interval of checks whether the completions were polled.
const STEP: Duration = Duration::from_millis(1);
/// Maximum delay. The scheduler may suspend a polling thread for this long.
const WAIT: Duration = Duration::from_millis(30);

/// A delayed event Disconnected.
struct Overtaken {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
    deadline: Instant,
    status: Mutex<Option<i32>>,
}

/// Delays the event Disconnected of `id`. Returns `false` if there is no engine; the caller then
/// has to add the event.
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
    use super::super::id::CmId;
    use super::super::phase::Phase;
    use super::super::{CmEventKind, create_event_channel};
    use super::*;
    use crate::testing::context;

    /// With a placeholder queue pair it is unknown whether there are completions, so the event is
    /// delayed for the full time.
    #[test]
    fn disconnected_is_delayed() {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&context()));
        id.use_placeholder_qp(1).unwrap();
        id.inner.state.lock().phase = Phase::Disconnected;
        let before = Instant::now();
        assert!(begin(Arc::downgrade(&id.inner), libc::ECONNRESET));
        let event = channel.next(Some(Duration::from_secs(20))).unwrap();
        assert!(before.elapsed() >= WAIT);
        let found = (event.kind, event.status);
        assert_eq!(found, (CmEventKind::Disconnected, libc::ECONNRESET));
        id.destroy();
    }

    /// The delay ends at the deadline, and immediately if the program itself has disconnected.
    #[test]
    fn delay_is_limited() {
        let ctx = context();
        let (hour, now) = (Duration::from_secs(3600), Instant::now());
        for (is_leaving, deadline, is_notified) in [
            (false, now + hour, false),
            (true, now + hour, true),
            (false, now, true),
        ] {
            let channel = create_event_channel().unwrap();
            let id = CmId::create(&channel, Some(&ctx));
            id.use_placeholder_qp(1).unwrap();
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
            let found = event.map(|event| (event.kind, event.status));
            let wanted = (CmEventKind::Disconnected, libc::ECONNRESET);
            assert_eq!(found, is_notified.then_some(wanted));
            id.destroy();
        }
    }
}
