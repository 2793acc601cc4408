//! Receives that complete while a system call sends.
//!
//! A request that is being sent completes when the call has returned. The peer may be faster: its
//! answer arrives, and another thread reads it. Programs rely on the order of cause and effect: tgt
//! treats a command that arrives before the completion of its login response as a violation. So
//! receives that complete during the call are reported after the sent requests.

use super::effects::{DriveHost, Effects};
use super::qp::QpInner;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::{Direction, Host as _};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Per queue pair; protected by the state lock.
#[derive(Default)]
pub(crate) struct HeldReceives {
    sending: AtomicBool,
    receives: Mutex<Vec<Cqe>>,
}

impl HeldReceives {
    pub(crate) fn begin(&self) {
        self.sending.store(true, Ordering::Relaxed);
    }

    /// Returns `true` during such a call.
    #[inline]
    pub(crate) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Relaxed)
    }

    pub(crate) fn keep(&self, cqe: Cqe) {
        self.receives.lock().push(cqe);
    }

    pub(crate) fn forget(&self) {
        self.receives.lock().clear();
    }
}

/// Writes the kept completions after the call has returned and its requests have completed.
#[inline]
pub(crate) fn deliver(qp: &Arc<QpInner>, effects: &mut Effects) {
    qp.held_receives.sending.store(false, Ordering::Relaxed);
    let mut receives = qp.held_receives.receives.lock();
    if !receives.is_empty() {
        let mut host = DriveHost::new(qp, effects);
        for cqe in receives.drain(..) {
            host.complete(Direction::Recv, cqe);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use iwarp_rnic::RecvWr;
    use iwarp_rnic::qp::State;

    /// A peer that has everything may close before the system call has returned. The request is
    /// done and must not be flushed.
    #[test]
    fn end_of_stream_waits_for_sendmsg() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let peer = testing::connected(&qp);
        let wr = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        qp.post_recv(&[wr]).unwrap();
        {
            let g = qp.inner.state.lock();
            qp.inner.held_receives.begin();
            drop(g);
        }
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let mut out = [Cqe::default(); 2];
        let socket = qp.inner.state.lock().link.socket().cloned().unwrap();
        let start = std::time::Instant::now();
        while !socket.stream.peer_closed() {
            assert!(start.elapsed().as_secs() < 20);
            std::thread::yield_now();
        }
        qp.inner.drive_rx();
        assert_eq!((qp.state(), cq.poll(&mut out)), (State::Rts, Ok(0)));
        // The system call returns.
        let mut effects = Effects::default();
        deliver(&qp.inner, &mut effects);
        qp.inner.drive_rx();
        while qp.state() != State::Error {
            // Another thread is handling the end.
            assert!(start.elapsed().as_secs() < 20);
            std::thread::yield_now();
        }
        assert_eq!(cq.poll(&mut out), Ok(1));
        assert_eq!(out[0].status, iwarp_rnic::WcStatus::Flushed);
        qp.destroy();
    }

    #[test]
    fn reset_drops_held_receives() {
        let ctx = testing::context();
        let (send, cq) = (
            ctx.create_cq(4, None).unwrap(),
            ctx.create_cq(4, None).unwrap(),
        );
        let qp = testing::queue_pair(&ctx, &send, &cq);
        let mut out = [Cqe::default(); 2];
        for sending in [false, true] {
            qp.modify(State::Init).unwrap();
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            if sending {
                qp.inner.held_receives.begin();
            }
            qp.modify(State::Error).unwrap();
            qp.modify(State::Reset).unwrap();
            // The system call returns.
            let mut effects = Effects::default();
            deliver(&qp.inner, &mut effects);
            assert_eq!(cq.poll(&mut out), Ok(0), "{:?}", out[0]);
        }
        qp.destroy();
    }

    #[test]
    fn held_receives_keep_their_order() {
        let ctx = testing::context();
        let cqs = [0; 2].map(|_| ctx.create_cq(8, None).unwrap());
        let qp = testing::queue_pair(&ctx, &cqs[0], &cqs[1]);
        for round in 0..2 {
            qp.inner.held_receives.begin();
            let mut effects = Effects::default();
            let numbers = [3, 1, 4, 1, 5].map(|n| 10 * round + n);
            for wr_id in numbers {
                let cqe = Cqe {
                    wr_id,
                    ..Cqe::default()
                };
                DriveHost::new(&qp.inner, &mut effects).complete(Direction::Recv, cqe);
            }
            assert!(cqs[1].is_empty(), "the call has not returned");
            deliver(&qp.inner, &mut effects);
            let mut out = [Cqe::default(); 8];
            assert_eq!(cqs[1].take_ready(&mut out), Ok(numbers.len()));
            assert!(out.iter().map(|cqe| cqe.wr_id).take(5).eq(numbers));
        }
        qp.destroy();
    }
}
