//! Receives that complete while another thread is inside `sendmsg`. Their completions are held
//! back.
//!
//! A request completes when the `sendmsg` that sends it has returned. The peer may be faster: its
//! answer arrives before that, and another thread reads it. But programs expect the completion of
//! the request before that of the answer. For example, tgt treats a command that arrives before the
//! completion of its login response as a protocol violation. So receives that complete during the
//! call are reported after the sent requests.

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
    pub(crate) fn begin_send(&self) {
        self.sending.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Relaxed)
    }

    pub(crate) fn hold(&self, cqe: Cqe) {
        self.receives.lock().push(cqe);
    }

    pub(crate) fn clear(&self) {
        self.receives.lock().clear();
    }
}

/// Writes the held completions. Called after `sendmsg` has returned and its requests have
/// completed.
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

    /// A peer may receive the request and close before `sendmsg` has returned. The request has
    /// succeeded and must not be flushed.
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
            qp.inner.held_receives.begin_send();
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
        // `sendmsg` returns.
        let mut effects = Effects::default();
        deliver(&qp.inner, &mut effects);
        qp.inner.drive_rx();
        while qp.state() != State::Error {
            // Another thread may be handling the end.
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
        let [send_cq, recv_cq] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
        let qp = testing::queue_pair(&ctx, &send_cq, &recv_cq);
        let mut out = [Cqe::default(); 2];
        for sending in [false, true] {
            qp.modify(State::Init).unwrap();
            let wr = RecvWr {
                wr_id: 1,
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            if sending {
                qp.inner.held_receives.begin_send();
            }
            qp.modify(State::Error).unwrap();
            qp.modify(State::Reset).unwrap();
            // `sendmsg` returns.
            let mut effects = Effects::default();
            deliver(&qp.inner, &mut effects);
            assert_eq!(recv_cq.poll(&mut out), Ok(0), "{:?}", out[0]);
        }
        qp.destroy();
    }

    #[test]
    fn held_receives_keep_their_order() {
        let ctx = testing::context();
        let cqs = [0; 2].map(|_| ctx.create_cq(8, None).unwrap());
        let qp = testing::queue_pair(&ctx, &cqs[0], &cqs[1]);
        for round in 0..2 {
            qp.inner.held_receives.begin_send();
            let mut effects = Effects::default();
            let wr_ids = [3, 1, 4, 1, 5].map(|n| 10 * round + n);
            for wr_id in wr_ids {
                let cqe = Cqe {
                    wr_id,
                    ..Cqe::default()
                };
                DriveHost::new(&qp.inner, &mut effects).complete(Direction::Recv, cqe);
            }
            assert!(cqs[1].is_empty(), "`sendmsg` has not returned");
            deliver(&qp.inner, &mut effects);
            let mut out = [Cqe::default(); 8];
            assert_eq!(cqs[1].take_ready(&mut out), Ok(wr_ids.len()));
            assert!(out.iter().map(|cqe| cqe.wr_id).take(5).eq(wr_ids));
        }
        qp.destroy();
    }
}
