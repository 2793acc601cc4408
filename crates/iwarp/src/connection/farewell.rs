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
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a process that exits waits for a peer that takes no data.
const PATIENCE: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(1);

/// What stays for its last messages. A forked child has nothing.
static STAYING: ProcessLock<Staying> =
    ProcessLock::own("connection::farewell::STAYING", Staying::nothing());

#[derive(Debug, Default)]
struct Staying {
    /// Number of [`Farewell`]s, including those whose connection is being closed at the moment.
    count: usize,
    connections: Vec<Weak<Inner>>,
}

impl Staying {
    const fn nothing() -> Self {
        Self {
            count: 0,
            connections: Vec::new(),
        }
    }
}

/// Keeps a connection until the request that holds this has completed.
#[derive(Debug)]
pub(super) struct Farewell(Option<Arc<Inner>>);

impl Farewell {
    pub(super) fn new(connection: Arc<Inner>) -> Self {
        static WAIT: AtExit = AtExit::new(wait_for_farewells);
        WAIT.plan();
        let mut staying = STAYING.lock();
        staying.count += 1;
        let connections = &mut staying.connections;
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(&connection));
        drop(staying);
        Self(Some(connection))
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        // The last handle closes the connection, and the kernel then has the data.
        drop(self.0.take());
        let mut staying = STAYING.lock();
        // In a forked child, the count does not include those of the parent.
        staying.count = staying.count.saturating_sub(1);
    }
}

/// Exit handler: waits until the last messages were sent and acknowledged, or the peers take no
/// data.
fn wait_for_farewells() {
    let (mut remaining, mut since) = (None, Instant::now());
    loop {
        // Do not wait for the lock: a program may exit in a signal handler, on the thread that
        // holds it.
        let staying = STAYING
            .try_lock()
            .map(|staying| (staying.count, staying.connections.clone()));
        let sent = staying.map(|(count, connections)| {
            let sent = |inner: Arc<Inner>| inner.qp().counters().tx_payload;
            let connections = connections.iter().filter_map(Weak::upgrade);
            (count, connections.map(sent).sum::<u64>())
        });
        let now = (sent, unacknowledged_bytes());
        match now {
            (Some((0, _)), Some(0)) => return,
            _ if remaining != Some(now) => (remaining, since) = (Some(now), Instant::now()),
            _ if since.elapsed() >= PATIENCE => return,
            _ => {}
        }
        std::thread::sleep(STEP);
    }
}
