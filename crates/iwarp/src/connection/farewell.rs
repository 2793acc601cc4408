//! Channels that were dropped before their last messages were sent, and messages that were copied.
//!
//! The connection stays until the peer has been told that no more messages follow; that message is
//! the last one. A process that exits sends what is [gathered](super::tail). It waits until all is
//! sent, and until the peer's TCP has acknowledged all data: the kernel resets a connection whose
//! socket is closed with unread data, such as credits, and discards what it has not sent yet. The
//! process waits as long as the peer takes data.

use super::channel::Shared;
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
    /// Channels that have ever copied messages.
    channels: Vec<Weak<Shared>>,
}

impl Staying {
    const fn nothing() -> Self {
        Self {
            count: 0,
            connections: Vec::new(),
            channels: Vec::new(),
        }
    }
}

/// Keeps a connection until the request that holds this has completed.
#[derive(Debug)]
pub(super) struct Farewell(Option<Arc<Inner>>);

impl Farewell {
    /// Keeps the connection of a dropped channel.
    pub(super) fn new(connection: Arc<Inner>) -> Self {
        add(&mut STAYING.lock().connections, Arc::downgrade(&connection));
        Self::of_copied(connection)
    }

    /// Keeps the connection of copied messages. The channel was [remembered](remember).
    pub(super) fn of_copied(connection: Arc<Inner>) -> Self {
        static WAIT: AtExit = AtExit::new(wait_for_farewells);
        WAIT.plan();
        STAYING.lock().count += 1;
        Self(Some(connection))
    }
}

/// Remembers a channel that may have copied messages when the process exits.
pub(super) fn remember(channel: &Arc<Shared>) {
    add(&mut STAYING.lock().channels, Arc::downgrade(channel));
}

/// Adds to a list. Before it grows, those that are gone are removed.
fn add<T>(list: &mut Vec<Weak<T>>, new: Weak<T>) {
    if list.len() == list.capacity() {
        list.retain(|weak| weak.strong_count() > 0);
    }
    list.push(new);
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
        let now = (unsent(), unacknowledged_bytes());
        match now {
            (Some((0, _)), Some(0)) => return,
            _ if remaining != Some(now) => (remaining, since) = (Some(now), Instant::now()),
            _ if since.elapsed() >= PATIENCE => return,
            _ => {}
        }
        std::thread::sleep(STEP);
    }
}

/// Sends copied messages. Returns the number of farewells, and how much their connections have
/// sent.
///
/// Returns `None` if the list is locked: a program may exit in a signal handler, on the thread that
/// holds the lock.
fn unsent() -> Option<(usize, u64)> {
    let (count, connections, channels) = {
        let staying = STAYING.try_lock()?;
        let upgrade = |list: &[Weak<_>]| list.iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        let channels = staying.channels.iter().filter_map(Weak::upgrade);
        (
            staying.count,
            upgrade(&staying.connections),
            channels.collect::<Vec<_>>(),
        )
    };
    channels
        .iter()
        .for_each(|channel| channel.send_tail_at_exit());
    let channels = channels.iter().map(|channel| &channel.connection.inner);
    let sent = |inner: &Arc<Inner>| inner.qp().counters().tx_payload;
    Some((count, connections.iter().chain(channels).map(sent).sum()))
}
