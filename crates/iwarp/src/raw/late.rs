//! Receives that complete while a system call sends.
//!
//! What is being sent completes when the call has returned. The peer may be faster: its answer comes, and another thread
//! reads it. Programs count on the order of cause and effect (tgt takes a command that overtakes the completion of its login
//! response for a violation), so what is received meanwhile completes after what was sent.

use super::after::{After, DriveHost};
use super::qp::QpInner;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::{Direction, Host as _};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Of one queue pair. Used under the lock of its state only.
#[derive(Default)]
pub(super) struct Late {
    sending: AtomicBool,
    receives: Mutex<Vec<Cqe>>,
}

impl Late {
    /// A system call begins.
    pub(super) fn begin(&self) {
        self.sending.store(true, Ordering::Relaxed);
    }

    /// Is there such a call now?
    #[inline]
    pub(super) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Relaxed)
    }

    /// Keeps the completion of a receive until the call has returned.
    pub(super) fn keep(&self, cqe: Cqe) {
        self.receives.lock().push(cqe);
    }
}

/// The call has returned, and what it has sent is complete.
#[inline]
pub(super) fn deliver(qp: &Arc<QpInner>, after: &mut After) {
    qp.late.sending.store(false, Ordering::Relaxed);
    let mut receives = qp.late.receives.lock();
    if !receives.is_empty() {
        let mut host = DriveHost::new(qp, after);
        for cqe in receives.drain(..) {
            host.complete(Direction::Recv, cqe);
        }
    }
}
