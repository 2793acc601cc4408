//! Sending: several requests become datagrams of one system call.
//!
//! This runs in the thread that holds the direction's baton. The payload is copied into the
//! thread's buffer. Therefore memory may be deregistered after the copy, and the octets that are
//! sent are those over which the CRC was computed.

use super::address::UdAddress;
use super::group::GROUP_PORT;
use super::local::Local;
use super::queue::UdSendWr;
use super::{Due, UdInner, UdState, with_room};
use crate::crc::crc32c_append;
use crate::objects::events::UdEvent;
use crate::sys::clock::now_ns;
use crate::sys::datagram::{BATCH, Batch};
use crate::sys::poller::Interest;
use iwarp_proto::datagram::{HEADER_LEN, Header, MULTICAST_QP};
use iwarp_rnic::qp::State;
use iwarp_rnic::{PostError, SendFlags, WcStatus};
use parking_lot::MutexGuard;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

/// How long requests wait for room in the socket's buffer. Then they are dropped, as the network
/// might do, so that a blocked link does not withhold completions from the program.
const PATIENCE: Duration = Duration::from_secs(1);
pub(super) const TIMER_BLOCKED: u32 = 1;
/// The bit of a request's Q_Key that stands for the queue pair's own key.
const OWN_QKEY: u32 = 1 << 31;

impl UdInner {
    /// Sends the pending requests, or leaves them to the thread that is sending.
    pub(super) fn drive_tx(self: &Arc<Self>) -> bool {
        if self.origin.is_foreign() {
            return false;
        }
        self.tx.drive(|| self.send_waiting())
    }

    /// Queues requests; with `whole`, all of them or none.
    pub(super) fn post(
        self: &Arc<Self>,
        wrs: &[UdSendWr<'_>],
        whole: bool,
    ) -> Result<(), (usize, PostError)> {
        // The source address may be new. If it is unusable, the check below fails.
        let mut locals = self.locals.all();
        for wr in wrs {
            if !is_among(&locals, wr) {
                if let Err(error) = self.reach_at(wr.to.source) {
                    tracing::debug!(qp = self.num, %error, "no datagrams from this address");
                }
                locals = self.locals.all();
            }
        }
        let mut due = Due::default();
        let result = self.post_locked(wrs, whole, &locals, &mut due);
        self.raise_due(due);
        result
    }

    fn post_locked(
        &self,
        wrs: &[UdSendWr<'_>],
        whole: bool,
        locals: &[Arc<Local>],
        due: &mut Due,
    ) -> Result<(), (usize, PostError)> {
        let mut g = self.state.lock();
        let takes = matches!(g.state, State::Rts | State::Sqd | State::Sqe | State::Error);
        if !takes || self.is_destroyed() {
            return Err((0, PostError::InvalidState));
        }
        let check = |g: &UdState, wr: &UdSendWr<'_>| match g.sends.check(wr) {
            Ok(()) if !is_among(locals, wr) => Err(PostError::InvalidRequest),
            checked => checked,
        };
        if g.sends.room() < wrs.len() {
            let freed = self.slots.free_sends(&mut g.seen_slots);
            g.sends.release(freed);
        }
        if whole {
            for (i, wr) in wrs.iter().enumerate() {
                check(&g, wr).map_err(|e| (i, e))?;
            }
            if wrs.len() > g.sends.room() {
                return Err((g.sends.room(), PostError::QueueFull));
            }
        }
        let flushes = matches!(g.state, State::Sqe | State::Error);
        for (i, wr) in wrs.iter().enumerate() {
            check(&g, wr).map_err(|e| (i, e))?;
            let qkey = match wr.remote_qkey & OWN_QKEY {
                0 => wr.remote_qkey,
                _ => g.qkey,
            };
            g.sends.push(wr, qkey).map_err(|e| (i, e))?;
            if flushes {
                self.flush_sends(&mut g, due);
            }
        }
        Ok(())
    }

    fn send_waiting(self: &Arc<Self>) {
        let mut due = Due::default();
        with_room(|batch| {
            loop {
                batch.clear();
                let (epoch, local) = self.fill(batch, &mut due);
                let Some(local) = local.filter(|_| !batch.is_empty()) else {
                    return;
                };
                let sent = local.socket.send(batch);
                if !self.account(epoch, sent, &local, &mut due) {
                    return;
                }
            }
        });
        self.raise_due(due);
    }

    /// Builds datagrams of the next requests with the same socket. Returns the epoch of the send
    /// queue, and the socket.
    fn fill(&self, batch: &mut Batch, due: &mut Due) -> (u64, Option<Arc<Local>>) {
        let mut g = self.state.lock();
        let source = g.sends.get(0).map(|wr| wr.to.source);
        let local = source.and_then(|ip| self.locals.at(ip));
        while g.state == State::Rts && batch.len() < BATCH {
            let at = batch.len();
            if g.sends.get(at).map(|wr| wr.to.source) != source {
                break;
            }
            match self.make(&g, at, batch) {
                Some(Ok(())) => {}
                Some(Err(status)) if at == 0 => self.fail_send(&mut g, status, due),
                // The requests before the bad one are sent first.
                Some(Err(_)) | None => break,
            }
        }
        g.in_flight = batch.len();
        (g.epoch, local)
    }

    /// Adds the request at offset `at` from the oldest to the batch. Returns `None` if there is
    /// none.
    fn make(&self, g: &UdState, at: usize, batch: &mut Batch) -> Option<Result<(), WcStatus>> {
        let wr = g.sends.get(at)?;
        if !wr.fits() {
            return Some(Err(WcStatus::LocalLength));
        }
        let datagram = batch.room(HEADER_LEN + wr.len as usize)?;
        let payload = &mut datagram[HEADER_LEN..];
        let memory = self.ctx.memory.read();
        let copied = g.sends.copy_payload(at, &memory, self.accessor(), payload);
        drop(memory);
        if let Err(status) = copied {
            return Some(Err(status));
        }
        let (to, destination) = self.destination(&wr.to, wr.remote_qp);
        let header = Header {
            destination,
            source: self.num,
            qkey: wr.qkey,
            immediate: wr.immediate,
            solicited: wr.flags.contains(SendFlags::SOLICITED),
            sequence: g.sequence.wrapping_add(at as u32),
        };
        // The program's number of the destination may have more bits than are valid.
        if header.seal(crc32c_append, datagram).is_err() {
            return Some(Err(WcStatus::LocalQpOperation));
        }
        batch.commit(to, wr.to.route);
        Some(Ok(()))
    }

    /// Returns a datagram's destination: socket address and number.
    fn destination(&self, to: &UdAddress, remote_qp: u32) -> (SocketAddr, u32) {
        let (port, number) = match to.ip.is_multicast() {
            true => (GROUP_PORT, MULTICAST_QP),
            false => (remote_qp as u16, remote_qp),
        };
        let socket = match to.ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(ip) => {
                // Only for addresses that need a scope: datagrams to groups use the device's
                // interface anyway.
                let scope = match ip.is_unicast_link_local() {
                    true => self.interface,
                    false => 0,
                };
                SocketAddrV6::new(ip, port, 0, scope).into()
            }
        };
        (socket, number)
    }

    /// Handles the result of sending a batch. Returns `true` if there may be more to send.
    fn account(
        self: &Arc<Self>,
        epoch: u64,
        sent: std::io::Result<usize>,
        local: &Arc<Local>,
        due: &mut Due,
    ) -> bool {
        let mut g = self.state.lock();
        g.in_flight = 0;
        if g.epoch != epoch {
            // The requests were flushed meanwhile.
            return true;
        }
        let goes_on = match sent {
            Ok(n) => {
                self.complete_sent(&mut g, n, true, due);
                true
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => self.wait_for_room(&mut g, local, due),
            Err(error) => {
                tracing::debug!(qp = self.num, %error, "a datagram is not sent");
                self.complete_sent(&mut g, 1, false, due);
                true
            }
        };
        if g.state == State::Sqd && !due.events.contains(&UdEvent::SqDrained) {
            due.events.push(UdEvent::SqDrained);
        }
        goes_on
    }

    /// Completes the oldest `n` requests, which were sent or are given up.
    fn complete_sent(
        &self,
        g: &mut MutexGuard<'_, UdState>,
        n: usize,
        were_sent: bool,
        due: &mut Due,
    ) {
        g.blocked_since = None;
        for _ in 0..n {
            let Some(wr) = g.sends.pop() else { return };
            if were_sent {
                let counters = &mut g.counters;
                counters.tx_messages += 1;
                counters.tx_fpdus += 1;
                counters.tx_payload += wr.len;
                counters.tx_bytes += wr.len + HEADER_LEN as u64;
            } else {
                g.drops.unsent += 1;
            }
            // Its sequence number is used up, whether or not it was sent.
            g.sequence = g.sequence.wrapping_add(1);
            if self.signal_all || wr.flags.contains(SendFlags::SIGNALED) {
                self.complete_send(g, wr.wr_id, WcStatus::Success, due);
            }
        }
    }

    /// Handles a full socket buffer. Returns `true` if requests were dropped, because it has been
    /// full for too long.
    fn wait_for_room(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, UdState>,
        local: &Arc<Local>,
        due: &mut Due,
    ) -> bool {
        let now = now_ns();
        let since = *g.blocked_since.get_or_insert(now);
        let waited = Duration::from_nanos(now.saturating_sub(since));
        if waited >= PATIENCE {
            let all = g.sends.len();
            self.complete_sent(g, all, false, due);
            return true;
        }
        if since == now {
            self.engine.after(PATIENCE, self.timer, TIMER_BLOCKED);
        }
        self.watch_room(g, Some(local));
        false
    }

    /// Has the engine watch for room in the buffer of this socket, or stop watching.
    fn watch_room(&self, g: &mut UdState, wanted: Option<&Arc<Local>>) {
        let watched = g.watches_room.as_ref().map(|local| local.token);
        if watched == wanted.map(|local| local.token) {
            return;
        }
        if let Some(old) = g.watches_room.take() {
            // If this fails, the engine reports room once more than needed.
            let _ = self.engine.modify(&old.socket, old.token, Interest::READ);
        }
        let Some(local) = wanted else { return };
        self.wake(g);
        let both = Interest {
            readable: true,
            writable: true,
        };
        if self.engine.modify(&local.socket, local.token, both).is_ok() {
            g.watches_room = Some(Arc::clone(local));
        }
    }

    /// Sends again: the socket has room, or the time limit is over.
    pub(super) fn room_or_late(self: &Arc<Self>) {
        {
            let mut g = self.state.lock();
            // If the buffer is still full, it is watched again.
            self.watch_room(&mut g, None);
        }
        self.drive_tx();
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.state.lock().blocked_since.is_some()
    }
}

/// Returns `true` if the source of a request is one of these addresses.
fn is_among(locals: &[Arc<Local>], wr: &UdSendWr<'_>) -> bool {
    locals.iter().any(|local| local.ip == wr.to.source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{datagram_queue_pair, post_to_itself};
    use crate::ud::UdQueuePair;
    use std::time::Instant;

    /// Posts signaled datagrams to itself from this address.
    fn post(qp: &UdQueuePair, local: &Local, count: usize) {
        post_to_itself(qp, local.ip, SendFlags::SIGNALED, count);
    }

    /// Returns a queue pair whose datagrams wait as if the socket's buffer had been full when they
    /// were posted, and that socket.
    fn waiting(count: usize) -> (UdQueuePair, Arc<Local>) {
        let qp = datagram_queue_pair();
        let local = Arc::clone(&qp.inner.locals.all()[0]);
        qp.modify(State::Sqd).unwrap();
        post(&qp, &local, count);
        qp.inner.state.lock().state = State::Rts;
        (qp, local)
    }

    fn full() -> std::io::Result<usize> {
        Err(ErrorKind::WouldBlock.into())
    }

    fn are_sent(qp: &UdQueuePair, count: u64) {
        let start = Instant::now();
        while qp.counters().tx_messages != count {
            assert!(start.elapsed() < Duration::from_secs(20), "they wait");
            std::thread::yield_now();
        }
        assert!(!qp.inner.is_blocked());
        assert_eq!(qp.drops().unsent, 0);
    }

    #[test]
    fn full_buffer_resumes_with_room() {
        let (qp, local) = waiting(2);
        let mut due = Due::default();
        // The lock stops the engine, which finds room immediately.
        let mut g = qp.inner.state.lock();
        assert!(!qp.inner.wait_for_room(&mut g, &local, &mut due));
        let watched = g.watches_room.as_ref().map(|local| local.token);
        assert_eq!(watched, Some(local.token));
        assert!(g.blocked_since.is_some());
        drop(g);
        are_sent(&qp, 2);
        assert!(qp.inner.state.lock().watches_room.is_none());
    }

    /// Room is not reported, so the requests wait until the time limit.
    #[test]
    fn full_buffer_is_retried_by_timer() {
        let (qp, local) = waiting(2);
        qp.inner.engine.remove(&local.socket, local.token);
        let epoch = qp.inner.state.lock().epoch;
        let mut due = Due::default();
        assert!(!qp.inner.account(epoch, full(), &local, &mut due));
        assert!(qp.inner.is_blocked());
        are_sent(&qp, 2);
    }

    #[test]
    fn overdue_requests_are_dropped() {
        let (qp, local) = waiting(3);
        let (epoch, sequence) = {
            let mut g = qp.inner.state.lock();
            g.blocked_since = Some(now_ns() - PATIENCE.as_nanos() as u64);
            (g.epoch, g.sequence)
        };
        let mut due = Due::default();
        assert!(qp.inner.account(epoch, full(), &local, &mut due));
        assert_eq!((qp.drops().unsent, qp.counters().tx_messages), (3, 0));
        assert_eq!(qp.sequence(), sequence.wrapping_add(3));
        assert!(!qp.inner.is_blocked());
        qp.inner.raise_due(due);
        assert_eq!(qp.inner.send_cq.len(), 3, "completions");
    }

    /// The program changes the state to SQD while a batch is being sent.
    #[test]
    fn sqd_waits_for_the_batch() {
        let (qp, local) = waiting(2);
        qp.inner.state.lock().state = State::Sqd;
        let epoch = qp.inner.state.lock().epoch;
        let mut due = Due::default();
        for _ in 0..2 {
            assert!(qp.inner.account(epoch, Ok(1), &local, &mut due));
            assert_eq!(due.events, [UdEvent::SqDrained]);
        }
        assert_eq!(qp.counters().tx_messages, 2);
    }

    /// The requests of a batch are dropped while it is being sent, and others are posted.
    #[test]
    fn reset_discards_batch_result() {
        let (qp, local) = waiting(2);
        let epoch = qp.inner.state.lock().epoch;
        for to in [
            State::Reset,
            State::Init,
            State::Rtr,
            State::Rts,
            State::Sqd,
        ] {
            qp.modify(to).unwrap();
        }
        post(&qp, &local, 1);
        let mut due = Due::default();
        assert!(qp.inner.account(epoch, Ok(2), &local, &mut due));
        assert_eq!(qp.inner.state.lock().sends.len(), 1);
        assert_eq!(qp.counters().tx_messages, 0);
    }

    /// The requests of a batch are flushed while it is being sent, so none waits for room.
    #[test]
    fn error_discards_batch_result() {
        let (qp, local) = waiting(2);
        let epoch = qp.inner.state.lock().epoch;
        qp.modify(State::Error).unwrap();
        let mut due = Due::default();
        assert!(qp.inner.account(epoch, full(), &local, &mut due));
        assert!(!qp.inner.is_blocked());
        assert!(qp.inner.state.lock().watches_room.is_none());
        assert_eq!(qp.drops().unsent, 0);
    }

    /// Requests with the same socket are sent in one system call. Later ones with another socket
    /// are not.
    #[test]
    fn batch_has_one_source() {
        let (qp, _) = waiting(0);
        let locals = qp.inner.locals.all();
        qp.modify(State::Sqd).unwrap();
        for at in [0, 0, 1, 0] {
            post(&qp, &locals[at], 1);
        }
        qp.inner.state.lock().state = State::Rts;
        let mut due = Due::default();
        for (at, count) in [(0, 2), (1, 1), (0, 1)] {
            let (epoch, local, len) = with_room(|batch| {
                let (epoch, local) = qp.inner.fill(batch, &mut due);
                (epoch, local.unwrap(), batch.len())
            });
            assert_eq!((local.ip, len), (locals[at].ip, count));
            assert_eq!(qp.inner.state.lock().in_flight, count);
            assert!(qp.inner.account(epoch, Ok(count), &local, &mut due));
        }
        assert_eq!(qp.counters().tx_messages, 4);
    }
}
