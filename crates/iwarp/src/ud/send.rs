//! Sending: one system call sends the datagrams of several requests.
//!
//! This code runs in the thread that holds the send baton. The payload is copied into the thread's
//! buffer. Therefore memory may be deregistered after the copy, and the CRC always matches the sent
//! octets.

use super::address::UdAddress;
use super::group::GROUP_PORT;
use super::local::Local;
use super::queue::UdSendWr;
use super::{UdEffects, UdInner, UdState, with_batch};
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

/// How long requests wait for room in the socket's buffer. After that they are dropped, as a
/// network may do, so that the program gets their completions even if the link is blocked.
const BLOCKED_TIMEOUT: Duration = Duration::from_secs(1);
pub(super) const TIMER_BLOCKED: u32 = 1;
/// The bit of a request's Q_Key that selects the queue pair's own Q_Key.
const OWN_QKEY: u32 = 1 << 31;

impl UdInner {
    /// Sends the pending requests. If another thread is sending, that thread sends them instead.
    pub(super) fn drive_tx(self: &Arc<Self>) -> bool {
        if self.origin.is_foreign() {
            return false;
        }
        self.tx.drive(|| self.send_waiting())
    }

    /// Queues requests. With `all_or_none`, queues either all or none.
    pub(super) fn post(
        self: &Arc<Self>,
        wrs: &[UdSendWr<'_>],
        all_or_none: bool,
    ) -> Result<(), (usize, PostError)> {
        // The device may have got the source address recently. If it cannot be added, the check
        // below fails.
        let mut locals = self.locals.all();
        for wr in wrs {
            if !has_source(&locals, wr) {
                if let Err(error) = self.add_address(wr.to.source) {
                    tracing::debug!(qp = self.num, %error, "cannot send from this address");
                }
                locals = self.locals.all();
            }
        }
        let mut effects = UdEffects::default();
        let result = self.post_locked(wrs, all_or_none, &locals, &mut effects);
        self.apply_effects(effects);
        result
    }

    fn post_locked(
        &self,
        wrs: &[UdSendWr<'_>],
        all_or_none: bool,
        locals: &[Arc<Local>],
        effects: &mut UdEffects,
    ) -> Result<(), (usize, PostError)> {
        let mut g = self.state.lock();
        let accepts = matches!(g.state, State::Rts | State::Sqd | State::Sqe | State::Error);
        if !accepts || self.is_destroyed() {
            return Err((0, PostError::InvalidState));
        }
        let check = |g: &UdState, wr: &UdSendWr<'_>| match g.sends.check(wr) {
            Ok(()) if !has_source(locals, wr) => Err(PostError::InvalidRequest),
            checked => checked,
        };
        if g.sends.room() < wrs.len() {
            let freed = self.slots.free_sends(&mut g.seen_slots);
            g.sends.release(freed);
        }
        if all_or_none {
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
                self.flush_sends(&mut g, effects);
            }
        }
        Ok(())
    }

    fn send_waiting(self: &Arc<Self>) {
        let mut effects = UdEffects::default();
        with_batch(|batch| {
            loop {
                batch.clear();
                let (epoch, local) = self.fill(batch, &mut effects);
                let Some(local) = local.filter(|_| !batch.is_empty()) else {
                    return;
                };
                let sent = local.socket.send(batch);
                if !self.account(epoch, sent, &local, &mut effects) {
                    return;
                }
            }
        });
        self.apply_effects(effects);
    }

    /// Fills the batch with the datagrams of the next requests that have the same source. Returns
    /// the epoch of the send queue, and the source's socket.
    fn fill(&self, batch: &mut Batch, effects: &mut UdEffects) -> (u64, Option<Arc<Local>>) {
        let mut g = self.state.lock();
        let source = g.sends.get(0).map(|wr| wr.to.source);
        let local = source.and_then(|ip| self.locals.find(ip));
        while g.state == State::Rts && batch.len() < BATCH {
            let offset = batch.len();
            if g.sends.get(offset).map(|wr| wr.to.source) != source {
                break;
            }
            match self.add_to_batch(&g, offset, batch) {
                Some(Ok(())) => {}
                Some(Err(status)) if offset == 0 => self.fail_send(&mut g, status, effects),
                // The requests before the failed one are sent first.
                Some(Err(_)) | None => break,
            }
        }
        g.in_flight = batch.len();
        (g.epoch, local)
    }

    /// Adds the request at `offset` from the oldest to the batch. Returns `None` if there is no
    /// such request, or the batch is full.
    fn add_to_batch(
        &self,
        g: &UdState,
        offset: usize,
        batch: &mut Batch,
    ) -> Option<Result<(), WcStatus>> {
        let wr = g.sends.get(offset)?;
        if !wr.fits() {
            return Some(Err(WcStatus::LocalLength));
        }
        let datagram = batch.room(HEADER_LEN + wr.len as usize)?;
        let payload = &mut datagram[HEADER_LEN..];
        let memory = self.ctx.memory.read();
        let copied = g
            .sends
            .copy_payload(offset, &memory, self.accessor(), payload);
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
            sequence: g.sequence.wrapping_add(offset as u32),
        };
        // The destination number that the program has passed may have more than 24 bits.
        if header.seal(crc32c_append, datagram).is_err() {
            return Some(Err(WcStatus::LocalQpOperation));
        }
        batch.commit(to, wr.to.route);
        Some(Ok(()))
    }

    /// Returns the socket address and the queue pair number of a datagram's destination.
    fn destination(&self, to: &UdAddress, remote_qp: u32) -> (SocketAddr, u32) {
        let (port, number) = match to.ip.is_multicast() {
            true => (GROUP_PORT, MULTICAST_QP),
            false => (remote_qp as u16, remote_qp),
        };
        let socket = match to.ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(ip) => {
                // Only link-local addresses need a scope. Datagrams to groups use the device's
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
        effects: &mut UdEffects,
    ) -> bool {
        let mut g = self.state.lock();
        g.in_flight = 0;
        if g.epoch != epoch {
            // The requests were flushed or dropped in the meantime.
            return true;
        }
        let continues = match sent {
            Ok(n) => {
                self.complete_sent(&mut g, n, true, effects);
                true
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.wait_for_room(&mut g, local, effects)
            }
            Err(error) => {
                tracing::debug!(qp = self.num, %error, "cannot send a datagram");
                self.complete_sent(&mut g, 1, false, effects);
                true
            }
        };
        if g.state == State::Sqd && !effects.events.contains(&UdEvent::SqDrained) {
            effects.events.push(UdEvent::SqDrained);
        }
        continues
    }

    /// Completes the oldest `n` requests, which were sent or are dropped.
    fn complete_sent(
        &self,
        g: &mut MutexGuard<'_, UdState>,
        n: usize,
        sent: bool,
        effects: &mut UdEffects,
    ) {
        g.blocked_since = None;
        for _ in 0..n {
            let Some(wr) = g.sends.pop() else { return };
            if sent {
                let counters = &mut g.counters;
                counters.tx_messages += 1;
                counters.tx_fpdus += 1;
                counters.tx_payload += wr.len;
                counters.tx_bytes += wr.len + HEADER_LEN as u64;
            } else {
                g.drops.unsent += 1;
            }
            // A dropped request also consumes a sequence number.
            g.sequence = g.sequence.wrapping_add(1);
            if self.signal_all || wr.flags.contains(SendFlags::SIGNALED) {
                self.complete_send(g, wr.wr_id, WcStatus::Success, effects);
            }
        }
    }

    /// Handles a full socket buffer. If it has been full for too long, drops all requests and
    /// returns `true`.
    fn wait_for_room(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, UdState>,
        local: &Arc<Local>,
        effects: &mut UdEffects,
    ) -> bool {
        let now = now_ns();
        let since = *g.blocked_since.get_or_insert(now);
        let waited = Duration::from_nanos(now.saturating_sub(since));
        if waited >= BLOCKED_TIMEOUT {
            let all = g.sends.len();
            self.complete_sent(g, all, false, effects);
            return true;
        }
        if since == now {
            self.engine
                .after(BLOCKED_TIMEOUT, self.timer, TIMER_BLOCKED);
        }
        self.watch_room(g, Some(local));
        false
    }

    /// Lets the engine watch this socket for room in its send buffer; `None` ends the watch.
    fn watch_room(&self, g: &mut UdState, wanted: Option<&Arc<Local>>) {
        let watched = g.watched_for_room.as_ref().map(|local| local.token);
        if watched == wanted.map(|local| local.token) {
            return;
        }
        if let Some(old) = g.watched_for_room.take() {
            // If this fails, the engine reports room unnecessarily, which is harmless.
            let _ = self.engine.modify(&old.socket, old.token, Interest::READ);
        }
        let Some(local) = wanted else { return };
        self.resume_engine_watch(g);
        let both = Interest {
            readable: true,
            writable: true,
        };
        if self.engine.modify(&local.socket, local.token, both).is_ok() {
            g.watched_for_room = Some(Arc::clone(local));
        }
    }

    /// Tries again to send: the socket's buffer has room, or the time limit has passed.
    pub(super) fn retry_blocked(self: &Arc<Self>) {
        {
            let mut g = self.state.lock();
            // If the buffer is still full, the send below watches it again.
            self.watch_room(&mut g, None);
        }
        self.drive_tx();
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.state.lock().blocked_since.is_some()
    }
}

/// Returns `true` if `locals` contains the request's source address.
fn has_source(locals: &[Arc<Local>], wr: &UdSendWr<'_>) -> bool {
    locals.iter().any(|local| local.ip == wr.to.source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{datagram_queue_pair, post_to_itself};
    use crate::ud::UdQueuePair;
    use std::time::Instant;

    /// Posts signaled datagrams from this address to the queue pair itself.
    fn post(qp: &UdQueuePair, local: &Local, count: usize) {
        post_to_itself(qp, local.ip, SendFlags::SIGNALED, count);
    }

    /// Returns a queue pair with posted requests that are not sent yet, and its first local
    /// address.
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

    fn wait_until_sent(qp: &UdQueuePair, count: u64) {
        let start = Instant::now();
        while qp.counters().tx_messages != count {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the requests are not sent"
            );
            std::thread::yield_now();
        }
        assert!(!qp.inner.is_blocked());
        assert_eq!(qp.drops().unsent, 0);
    }

    #[test]
    fn full_buffer_resumes_with_room() {
        let (qp, local) = waiting(2);
        let mut effects = UdEffects::default();
        // While the lock is held, the engine cannot handle the room that it finds immediately.
        let mut g = qp.inner.state.lock();
        assert!(!qp.inner.wait_for_room(&mut g, &local, &mut effects));
        let watched = g.watched_for_room.as_ref().map(|local| local.token);
        assert_eq!(watched, Some(local.token));
        assert!(g.blocked_since.is_some());
        drop(g);
        wait_until_sent(&qp, 2);
        assert!(qp.inner.state.lock().watched_for_room.is_none());
    }

    /// The engine does not watch the socket, so the timer sends the requests.
    #[test]
    fn full_buffer_is_retried_by_timer() {
        let (qp, local) = waiting(2);
        qp.inner.engine.remove(&local.socket, local.token);
        let epoch = qp.inner.state.lock().epoch;
        let mut effects = UdEffects::default();
        assert!(!qp.inner.account(epoch, full(), &local, &mut effects));
        assert!(qp.inner.is_blocked());
        wait_until_sent(&qp, 2);
    }

    #[test]
    fn overdue_requests_are_dropped() {
        let (qp, local) = waiting(3);
        let (epoch, sequence) = {
            let mut g = qp.inner.state.lock();
            g.blocked_since = Some(now_ns() - BLOCKED_TIMEOUT.as_nanos() as u64);
            (g.epoch, g.sequence)
        };
        let mut effects = UdEffects::default();
        assert!(qp.inner.account(epoch, full(), &local, &mut effects));
        assert_eq!((qp.drops().unsent, qp.counters().tx_messages), (3, 0));
        assert_eq!(qp.sequence(), sequence.wrapping_add(3));
        assert!(!qp.inner.is_blocked());
        qp.inner.apply_effects(effects);
        assert_eq!(qp.inner.send_cq.len(), 3, "completions");
    }

    /// If the state changes to SQD while a batch is being sent, the event follows after the batch.
    #[test]
    fn sqd_waits_for_the_batch() {
        let (qp, local) = waiting(2);
        qp.inner.state.lock().state = State::Sqd;
        let epoch = qp.inner.state.lock().epoch;
        let mut effects = UdEffects::default();
        for _ in 0..2 {
            assert!(qp.inner.account(epoch, Ok(1), &local, &mut effects));
            assert_eq!(effects.events, [UdEvent::SqDrained]);
        }
        assert_eq!(qp.counters().tx_messages, 2);
    }

    /// If a reset drops the requests while their batch is being sent, later requests are not
    /// completed.
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
        let mut effects = UdEffects::default();
        assert!(qp.inner.account(epoch, Ok(2), &local, &mut effects));
        assert_eq!(qp.inner.state.lock().sends.len(), 1);
        assert_eq!(qp.counters().tx_messages, 0);
    }

    /// If the requests are flushed while their batch is being sent, none waits for room.
    #[test]
    fn error_discards_batch_result() {
        let (qp, local) = waiting(2);
        let epoch = qp.inner.state.lock().epoch;
        qp.modify(State::Error).unwrap();
        let mut effects = UdEffects::default();
        assert!(qp.inner.account(epoch, full(), &local, &mut effects));
        assert!(!qp.inner.is_blocked());
        assert!(qp.inner.state.lock().watched_for_room.is_none());
        assert_eq!(qp.drops().unsent, 0);
    }

    /// A batch contains only consecutive requests with the same source.
    #[test]
    fn batch_has_one_source() {
        let (qp, _) = waiting(0);
        let locals = qp.inner.locals.all();
        qp.modify(State::Sqd).unwrap();
        for offset in [0, 0, 1, 0] {
            post(&qp, &locals[offset], 1);
        }
        qp.inner.state.lock().state = State::Rts;
        let mut effects = UdEffects::default();
        for (offset, count) in [(0, 2), (1, 1), (0, 1)] {
            let (epoch, local, len) = with_batch(|batch| {
                let (epoch, local) = qp.inner.fill(batch, &mut effects);
                (epoch, local.unwrap(), batch.len())
            });
            assert_eq!((local.ip, len), (locals[offset].ip, count));
            assert_eq!(qp.inner.state.lock().in_flight, count);
            assert!(qp.inner.account(epoch, Ok(count), &local, &mut effects));
        }
        assert_eq!(qp.counters().tx_messages, 4);
    }
}
