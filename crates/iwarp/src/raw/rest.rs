//! What a queue pair that ends in error has left to send when it gives its connection up: the messages of a plan that the socket has taken in
//! part, and the Terminate behind them.
//!
//! A program that learns of an error destroys its queue pair, often at once. If the peer reads slowly, the Terminate then still waits for room in
//! the socket, and without it the peer does not learn what was wrong. The octets are copied, because the program may free its memory as soon as
//! the queue pair is destroyed, and `linger` sends them.

use super::after::After;
use super::drive;
use super::inject::Way;
use super::qp::{Guarded, Link, QpInner};
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Octets that a process keeps for all connections together. Beyond that, connections end where they are, as they do without an error. One has
/// at most a plan and a Terminate, so this is enough for some 50 whose peers read nothing.
const KEPT_MAX: usize = 16 << 20;

/// Octets that are kept.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` if no more are kept.
fn is_full() -> bool {
    KEPT.load(Ordering::Relaxed) >= KEPT_MAX
}

/// Octets that are still to be sent on a connection.
#[derive(Debug, Default)]
pub(super) struct Rest {
    octets: Vec<u8>,
    sent: usize,
}

impl Rest {
    /// Takes what the queue pair has left to send, if it has a Terminate to send. The caller makes it leave its connection before it unlocks
    /// the state.
    pub(super) fn take(qp: &Arc<QpInner>, g: &mut Guarded, after: &mut After) -> Self {
        let is_foreign = |link: &Arc<Link>| link.engine.is_foreign();
        if g.link.as_ref().is_none_or(is_foreign) {
            return Self::default();
        }
        let stalled = g.conn.stalled.as_ref();
        let has_terminate =
            g.machine.owes_terminate() || stalled.is_some_and(|plan| plan.has_terminate());
        // A plan that is neither written nor here is in the hands of another thread.
        let is_here = stalled.is_some() || !g.machine.has_unwritten();
        // An injected fault may hold the stream back.
        if !has_terminate || !is_here || !qp.passes(Way::Out) {
            return Self::default();
        }
        if is_full() {
            tracing::debug!(qp = qp.num, "too many Terminates wait: this one is dropped");
            return Self::default();
        }
        let octets = drive::take_rest(qp, g, after).unwrap_or_default();
        let flow = g.link.as_ref().and_then(|link| link.flow.as_ref());
        if let Some(flow) = flow.filter(|_| !octets.is_empty()) {
            // Recorded now, because the flow ends with the queue pair.
            flow.sent(&[IoSlice::new(&octets)]);
        }
        Self::of(octets)
    }

    pub(super) fn of(octets: Vec<u8>) -> Self {
        KEPT.fetch_add(octets.len(), Ordering::Relaxed);
        Self { octets, sent: 0 }
    }

    /// Octets that are not sent.
    pub(super) fn len(&self) -> usize {
        self.octets.len() - self.sent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// The connection is broken.
    pub(super) fn send(&mut self, link: &Link) -> io::Result<()> {
        while !self.is_empty() {
            let octets = &self.octets[self.sent..];
            match link.stream.send(octets) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        // Others may keep as much now.
        *self = Self::default();
        Ok(())
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        KEPT.fetch_sub(self.octets.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_limited_and_given_back() {
        let first = Rest::of(vec![0; KEPT_MAX / 2]);
        assert!(!is_full());
        let second = Rest::of(vec![0; KEPT_MAX / 2]);
        assert!(is_full());
        drop(first);
        assert!(!is_full());
        drop(second);
    }
}
