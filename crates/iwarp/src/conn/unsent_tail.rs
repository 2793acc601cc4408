//! What a queue pair that ends in error has left to send when it gives its connection up: the
//! messages of a plan that the socket has taken in part, and the Terminate behind them.
//!
//! A program that learns of an error destroys its queue pair, often at once. If the peer reads
//! slowly, the Terminate then still waits for room in the socket, and without it the peer does not
//! learn what was wrong. The octets are copied, because the program may free its memory as soon as
//! the queue pair is destroyed, and `linger` sends them.

use super::drive;
use super::effects::Effects;
use super::link::Socket;
use super::qp::{QpInner, QpState};
use crate::objects::hooks::Way;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Octets that a process keeps for all connections together. Beyond that, connections end where
/// they are, as they do without an error. One has at most a plan and a Terminate, so this is enough
/// for some 50 whose peers read nothing.
const KEPT_MAX: usize = 16 << 20;

/// Octets that are kept.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` if no more are kept.
fn is_full() -> bool {
    KEPT.load(Ordering::Relaxed) >= KEPT_MAX
}

/// Octets that are still to be sent on a connection.
#[derive(Debug, Default)]
pub(crate) struct UnsentTail {
    octets: Vec<u8>,
    sent: usize,
}

impl UnsentTail {
    /// Takes what the queue pair has left to send, if it has a Terminate to send. The caller makes
    /// it leave its connection before it unlocks the state.
    pub(crate) fn take(qp: &Arc<QpInner>, g: &mut QpState, effects: &mut Effects) -> Self {
        if g.link.own_socket().is_none() {
            return Self::default();
        }
        let stalled = g.link.open().and_then(|open| open.stalled.as_ref());
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
        let octets = drive::take_unsent_tail(qp, g, effects).unwrap_or_default();
        let flow = g.link.socket().and_then(|socket| socket.flow.as_ref());
        if let Some(flow) = flow {
            // Recorded now, because the flow ends with the queue pair.
            flow.sent(&[IoSlice::new(&octets)]);
        }
        Self::of(octets)
    }

    pub(crate) fn of(octets: Vec<u8>) -> Self {
        KEPT.fetch_add(octets.len(), Ordering::Relaxed);
        Self { octets, sent: 0 }
    }

    /// Octets that are not sent.
    pub(crate) fn len(&self) -> usize {
        self.octets.len() - self.sent
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn send(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.is_empty() {
            let octets = &self.octets[self.sent..];
            match socket.stream.send(octets) {
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

impl Drop for UnsentTail {
    fn drop(&mut self) {
        KEPT.fetch_sub(self.octets.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::effects::DriveHost;
    use super::*;
    use crate::conn::pool;
    use crate::conn::qp::QueuePair;
    use crate::crc::crc32c;
    use crate::testing;
    use iwarp_rnic::qp::{Env, TxFill, TxPlan};
    use iwarp_rnic::{SendOp, SendWr};
    use parking_lot::Mutex;
    use std::io::{Read as _, Write as _};
    use std::time::{Duration, Instant};

    /// What is kept counts for the whole process, so that these tests take turns.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn what_is_kept_is_limited_and_given_back() {
        let _turn = TURN.lock();
        let first = UnsentTail::of(vec![0; KEPT_MAX / 2]);
        assert!(!is_full());
        let second = UnsentTail::of(vec![0; KEPT_MAX / 2]);
        assert!(is_full());
        drop(first);
        assert!(!is_full());
        drop(second);
    }

    /// It counts until it is sent or given up, however much of it the socket has taken by then.
    #[test]
    fn what_is_sent_leaves_room_for_others() {
        let _turn = TURN.lock();
        let octets = KEPT_MAX / 8;
        for sent in [0, octets / 2, octets] {
            for _ in 0..32 {
                let mut tail = UnsentTail::of(vec![0; octets]);
                tail.sent = sent;
                drop(tail);
            }
            assert!(!is_full(), "after {sent} of {octets}");
        }
    }

    /// A peer may take its time. What it does not take now is sent later, and a connection that is
    /// broken takes nothing.
    #[test]
    fn what_the_socket_does_not_take_is_sent_later() {
        let _turn = TURN.lock();
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        let socket = qp.inner.state.lock().link.socket().cloned().unwrap();
        // More than the sockets keep while nobody reads.
        socket
            .stream
            .socket()
            .set_send_buffer_size(64 << 10)
            .unwrap();
        let octets: Vec<u8> = (0..6_000_000_u32).map(|n| (n / 1000) as u8).collect();
        let mut tail = UnsentTail::of(octets.clone());
        tail.send(&socket).unwrap();
        let left = tail.len();
        assert!(left > 0 && left < octets.len(), "{left}");
        let mut got = vec![0; octets.len()];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| peer.read_exact(&mut got).unwrap());
            let start = Instant::now();
            while !tail.is_empty() {
                assert!(start.elapsed() < Duration::from_secs(30), "{}", tail.len());
                tail.send(&socket).unwrap();
                std::thread::yield_now();
            }
            reader.join().expect("all has come");
        });
        assert!(got == octets);
        assert_eq!(tail.octets.capacity(), 0, "it is given back");
        drop(peer);
        let start = Instant::now();
        while UnsentTail::of(vec![0; 100]).send(&socket).is_ok() {
            assert!(start.elapsed() < Duration::from_secs(20), "nobody takes it");
            std::thread::yield_now();
        }
        qp.destroy();
    }

    /// A thread that is in its system call has the plan, and nobody else knows how much of it the
    /// socket has taken.
    #[test]
    fn what_another_thread_writes_is_not_taken() {
        let _turn = TURN.lock();
        for writes in [false, true] {
            let ctx = testing::context();
            let cq = ctx.create_cq(4, None).unwrap();
            let qp = testing::queue_pair(&ctx, &cq, &cq);
            let mut peer = testing::connected(&qp);
            let mut effects = Effects::default();
            let start = Instant::now();
            let wait = || {
                assert!(start.elapsed() < Duration::from_secs(20));
                std::thread::yield_now();
            };
            let turn = loop {
                match qp.inner.tx.try_take() {
                    Some(turn) => break turn,
                    None => wait(),
                }
            };
            let plan = writes.then(|| begin_to_write(&qp, &mut effects));
            // No message has this operation.
            let mut octets = testing::EMPTY_SEND;
            octets[3] = 0x4f;
            peer.write_all(&octets).unwrap();
            while !qp.inner.state.lock().machine.owes_terminate() {
                wait();
            }
            let mut g = qp.inner.state.lock();
            assert_eq!(g.machine.has_unwritten(), writes);
            let tail = UnsentTail::take(&qp.inner, &mut g, &mut effects);
            assert_eq!(tail.is_empty(), writes);
            if !writes {
                // The last segment of a Terminate, untagged.
                assert_eq!(tail.octets[2..4], [0x41, 0x47]);
            }
            assert_eq!(g.machine.owes_terminate(), writes);
            drop(g);
            drop((plan, turn));
            effects.apply(&qp.inner);
            qp.destroy();
        }
    }

    /// Makes a plan of a Send, as a thread that is about to write.
    fn begin_to_write(qp: &QueuePair, effects: &mut Effects) -> Box<TxPlan> {
        let mut plan = pool::take_tx().unwrap();
        let mut g = qp.inner.state.lock();
        let memory = qp.inner.ctx.memory.read();
        let host = &mut DriveHost::new(&qp.inner, effects);
        let wr = SendWr::new(1, SendOp::Send, &[]);
        g.machine.post_send(&wr, host).unwrap();
        let mut env = Env {
            memory: &memory,
            crc32c: crc32c(),
            host,
        };
        let filled = g.machine.tx_fill(&mut plan, &mut env);
        assert!(matches!(filled, TxFill::Ready));
        plan
    }
}
