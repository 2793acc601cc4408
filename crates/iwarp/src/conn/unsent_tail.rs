//! What a queue pair that ends in error has left to send when it gives up its stream: the rest of a
//! plan that the socket took in part, and the Terminate after it.
//!
//! A program that learns of an error destroys its queue pair, often at once. If the peer reads
//! slowly, the Terminate then still waits for room in the socket, and without it the peer does not
//! learn what was wrong. So the tail is sent in the background (`linger`). It is copied, because
//! the program may free its memory as soon as the queue pair is destroyed.

use super::drive;
use super::effects::Effects;
use super::link::Socket;
use super::qp::{QpInner, QpState};
use crate::objects::hooks::StreamDirection;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a process keeps for all connections together. When it is full, connections end
/// without a tail. A tail is at most a plan and a Terminate, so this is enough for about 50 peers
/// that read nothing.
const KEPT_MAX: usize = 16 << 20;

/// Bytes kept now.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` if no further tail may be kept.
fn is_full() -> bool {
    KEPT.load(Ordering::Relaxed) >= KEPT_MAX
}

/// Bytes that are still to be sent on a stream.
#[derive(Debug, Default)]
pub(crate) struct UnsentTail {
    octets: Vec<u8>,
    sent: usize,
}

impl UnsentTail {
    /// Takes what the queue pair has left to send, if it has a Terminate to send. The caller must
    /// have the queue pair give up the stream before it unlocks the state.
    pub(crate) fn take(qp: &Arc<QpInner>, g: &mut QpState, effects: &mut Effects) -> Self {
        if g.link.own_socket().is_none() {
            return Self::default();
        }
        let stalled = g.link.open().and_then(|open| open.stalled.as_ref());
        let has_terminate =
            g.machine.owes_terminate() || stalled.is_some_and(|plan| plan.has_terminate());
        // If there are unwritten octets and the plan is not here, another thread is writing it.
        let is_here = stalled.is_some() || !g.machine.has_unwritten();
        // An injected fault may hold the stream back.
        if !has_terminate || !is_here || !qp.passes(StreamDirection::Out) {
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
        // Free the memory now, so that other tails may be kept.
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

    /// Serializes these tests: the limit is that of the whole process.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn kept_bytes_are_limited() {
        let _turn = TURN.lock();
        let first = UnsentTail::of(vec![0; KEPT_MAX / 2]);
        assert!(!is_full());
        let second = UnsentTail::of(vec![0; KEPT_MAX / 2]);
        assert!(is_full());
        drop(first);
        assert!(!is_full());
        drop(second);
    }

    /// A tail counts whole until it is sent or given up.
    #[test]
    fn dropped_tail_frees_its_bytes() {
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

    /// The tail is sent as the peer reads, and fails on a broken connection.
    #[test]
    fn full_socket_delays_the_tail() {
        let _turn = TURN.lock();
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        let socket = qp.inner.state.lock().link.socket().cloned().unwrap();
        // More than both sockets buffer.
        socket
            .stream
            .socket()
            .set_send_buffer_size(64 << 10)
            .unwrap();
        let octets: Vec<u8> = (0..6_000_000_u32).map(|n| (n / 1000) as u8).collect();
        let mut tail = UnsentTail::of(octets.clone());
        tail.send(&socket).unwrap();
        let remaining = tail.len();
        assert!(remaining > 0 && remaining < octets.len(), "{remaining}");
        let mut got = vec![0; octets.len()];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| peer.read_exact(&mut got).unwrap());
            let start = Instant::now();
            while !tail.is_empty() {
                assert!(start.elapsed() < Duration::from_secs(30), "{}", tail.len());
                tail.send(&socket).unwrap();
                std::thread::yield_now();
            }
            reader.join().expect("everything is read");
        });
        assert!(got == octets);
        assert_eq!(tail.octets.capacity(), 0, "the memory is freed");
        drop(peer);
        let start = Instant::now();
        while UnsentTail::of(vec![0; 100]).send(&socket).is_ok() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the connection is not broken"
            );
            std::thread::yield_now();
        }
        qp.destroy();
    }

    /// A thread inside `sendmsg` has the plan, and no other thread knows how much of it the socket
    /// took.
    #[test]
    fn foreign_plan_is_not_taken() {
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
            let baton = loop {
                match qp.inner.tx.try_take() {
                    Some(baton) => break baton,
                    None => wait(),
                }
            };
            let plan = writes.then(|| begin_to_write(&qp, &mut effects));
            // An opcode that no message has.
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
            drop((plan, baton));
            effects.apply(&qp.inner);
            qp.destroy();
        }
    }

    /// Posts a Send and fills a plan with it, as a thread does that is about to write.
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
