//! Channels that were dropped before their last messages were sent.
//!
//! The connection stays until the peer has been told that no more messages follow; that message is
//! the last one. A process that exits waits for this, and until the peer's TCP has acknowledged all
//! data: the kernel resets a connection whose socket is closed with unread data, such as credits,
//! and discards what it has not sent yet. The process waits as long as the peer takes data.

use super::handle::Inner;
use crate::runtime::unacknowledged_bytes;
use crate::sys::exit::AtExit;
use crate::sys::process_lock::ProcessLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a process that exits waits for a peer that takes no data.
const PATIENCE: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(1);

/// The connections that stay for their last messages. A forked child has none.
static STAYING: ProcessLock<Vec<Weak<Inner>>> =
    ProcessLock::own("connection::farewell::STAYING", Vec::new());

/// Number of [`Farewell`]s. It includes those whose connection is being closed at the moment.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps a connection until the request that holds this has completed.
#[derive(Debug)]
pub(super) struct Farewell(Option<Arc<Inner>>);

impl Farewell {
    pub(super) fn new(connection: Arc<Inner>) -> Self {
        static WAIT: AtExit = AtExit::new(wait_for_farewells);
        WAIT.plan();
        COUNT.fetch_add(1, Ordering::AcqRel);
        let mut staying = STAYING.lock();
        staying.retain(|connection| connection.strong_count() > 0);
        staying.push(Arc::downgrade(&connection));
        drop(staying);
        Self(Some(connection))
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        // The last handle closes the connection, and the kernel then has the data.
        drop(self.0.take());
        COUNT.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Exit handler: waits until the last messages were sent and acknowledged, or the peers take no
/// data.
fn wait_for_farewells() {
    let (mut remaining, mut since) = (None, Instant::now());
    loop {
        let count = COUNT.load(Ordering::Acquire);
        // Do not wait for the lock: a program may exit in a signal handler, on the thread that
        // holds it.
        let sent = STAYING.try_lock().map(|all| {
            let sent = |inner: Arc<Inner>| inner.qp().counters().tx_payload;
            all.iter().filter_map(Weak::upgrade).map(sent).sum::<u64>()
        });
        let now = (count, sent, unacknowledged_bytes());
        match now {
            (0, _, Some(0)) => return,
            _ if remaining != Some(now) => (remaining, since) = (Some(now), Instant::now()),
            _ if since.elapsed() >= PATIENCE => return,
            _ => {}
        }
        std::thread::sleep(STEP);
    }
}
