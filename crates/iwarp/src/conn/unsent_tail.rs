//! The unsent tail of a stream whose queue pair ends in error: the rest of a plan that the socket
//! has taken in part, and the Terminate that follows it.
//!
//! A program that is notified of an error often destroys its queue pair at once. If the peer reads
//! slowly, the Terminate then still waits for room in the socket. Without the Terminate, the peer
//! would not know what was wrong. So the tail is sent in the background (`linger`). It is copied,
//! because the program may free its memory as soon as the queue pair is destroyed.

use super::drive;
use super::effects::Effects;
use super::link::Socket;
use super::qp::{QpInner, QpState};
use crate::objects::hooks::StreamDirection;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of bytes in the tails of all connections together. When it is reached, further
/// connections end without a tail. A tail is at most a plan and a Terminate, so this is enough for
/// about 50 peers that read nothing.
const TAIL_BYTES_MAX: usize = 16 << 20;

static TAIL_BYTES: AtomicUsize = AtomicUsize::new(0);

fn is_full() -> bool {
    TAIL_BYTES.load(Ordering::Relaxed) >= TAIL_BYTES_MAX
}

#[derive(Debug, Default)]
pub(crate) struct UnsentTail {
    octets: Vec<u8>,
    /// Number of octets that were sent already.
    sent: usize,
}

impl UnsentTail {
    /// Takes the unsent tail of the queue pair. The tail is empty if no Terminate is to be sent.
    /// The caller must make the queue pair give up the stream before it unlocks the state.
    pub(crate) fn take(qp: &Arc<QpInner>, g: &mut QpState, effects: &mut Effects) -> Self {
        if g.link.own_socket().is_none() {
            return Self::default();
        }
        let stalled = g.link.open().and_then(|open| open.stalled.as_ref());
        let has_terminate =
            g.machine.owes_terminate() || stalled.is_some_and(|plan| plan.has_terminate());
        // If there are unwritten octets but no stalled plan, another thread is writing the plan.
        let has_plan = stalled.is_some() || !g.machine.has_unwritten();
        // An injected fault may stall the stream.
        if !has_terminate || !has_plan || !qp.passes(StreamDirection::Out) {
            return Self::default();
        }
        if is_full() {
            tracing::debug!(
                qp = qp.num,
                "too many unsent Terminates; this Terminate is dropped"
            );
            return Self::default();
        }
        let octets = drive::take_unsent_tail(qp, g, effects).unwrap_or_default();
        let flow = g.link.socket().and_then(|socket| socket.flow.as_ref());
        if let Some(flow) = flow {
            // Record the octets now, because the capture of this connection ends with the queue
            // pair.
            flow.sent(&[IoSlice::new(&octets)]);
        }
        Self::new(octets)
    }

    pub(crate) fn new(octets: Vec<u8>) -> Self {
        TAIL_BYTES.fetch_add(octets.len(), Ordering::Relaxed);
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
    /// Returns the socket's error if the connection is broken.
    pub(crate) fn send(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.is_empty() {
            let octets = &self.octets[self.sent..];
            match socket.stream.send(octets) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        // Free the memory now, so that other connections may have tails.
        *self = Self::default();
        Ok(())
    }
}

impl Drop for UnsentTail {
    fn drop(&mut self) {
        TAIL_BYTES.fetch_sub(self.octets.len(), Ordering::Relaxed);
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

    /// Serializes these tests, because the limit applies to the whole process.
    static SERIAL: Mutex<()> = Mutex::new(());

    #[test]
    fn bytes_in_tails_are_limited() {
        let _serial = SERIAL.lock();
        let first = UnsentTail::new(vec![0; TAIL_BYTES_MAX / 2]);
        assert!(!is_full());
        let second = UnsentTail::new(vec![0; TAIL_BYTES_MAX / 2]);
        assert!(is_full());
        drop(first);
        assert!(!is_full());
        drop(second);
    }

    /// A tail that is dropped releases all its bytes, however many were sent.
    #[test]
    fn dropped_tail_frees_its_bytes() {
        let _serial = SERIAL.lock();
        let octets = TAIL_BYTES_MAX / 8;
        for sent in [0, octets / 2, octets] {
            for _ in 0..32 {
                let mut tail = UnsentTail::new(vec![0; octets]);
                tail.sent = sent;
                drop(tail);
            }
            assert!(!is_full(), "{sent} of {octets} octets were sent");
        }
    }

    #[test]
    fn full_socket_delays_the_tail() {
        let _serial = SERIAL.lock();
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        let socket = qp.inner.state.lock().link.socket().cloned().unwrap();
        // The tail is larger than the buffers of both sockets.
        socket
            .stream
            .socket()
            .set_send_buffer_size(64 << 10)
            .unwrap();
        let octets: Vec<u8> = (0..6_000_000_u32).map(|n| (n / 1000) as u8).collect();
        let mut tail = UnsentTail::new(octets.clone());
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
            reader.join().expect("all octets are read");
        });
        assert!(got == octets);
        assert_eq!(tail.octets.capacity(), 0, "the memory is freed");
        drop(peer);
        let start = Instant::now();
        while UnsentTail::new(vec![0; 100]).send(&socket).is_ok() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the connection is not broken"
            );
            std::thread::yield_now();
        }
        qp.destroy();
    }

    /// If another thread is writing a plan, only that thread knows how much of it the socket takes.
    /// The tail is then empty.
    #[test]
    fn tail_is_empty_during_sendmsg() {
        let _serial = SERIAL.lock();
        for is_writing in [false, true] {
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
            let plan = is_writing.then(|| fill_plan(&qp, &mut effects));
            // No message has this opcode.
            let mut octets = testing::EMPTY_SEND;
            octets[3] = 0x4f;
            peer.write_all(&octets).unwrap();
            while !qp.inner.state.lock().machine.owes_terminate() {
                wait();
            }
            let mut g = qp.inner.state.lock();
            assert_eq!(g.machine.has_unwritten(), is_writing);
            let tail = UnsentTail::take(&qp.inner, &mut g, &mut effects);
            assert_eq!(tail.is_empty(), is_writing);
            if !is_writing {
                // The header of a Terminate: the last segment, untagged.
                assert_eq!(tail.octets[2..4], [0x41, 0x47]);
            }
            assert_eq!(g.machine.owes_terminate(), is_writing);
            drop(g);
            drop((plan, baton));
            effects.apply(&qp.inner);
            qp.destroy();
        }
    }

    fn fill_plan(qp: &QueuePair, effects: &mut Effects) -> Box<TxPlan> {
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
