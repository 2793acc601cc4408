//! The RDMA connection of a copy: messages as Sends, data as RDMA Writes into slots that the
//! receiver has granted.
//!
//! Data are copied once between registered memory and a buffer. Hashing and file access need a
//! slice, and safe code must not form a slice of memory that a peer may write to.

use crate::part;
use crate::protocol::{Grant, MAX_MESSAGE, Message};
use crate::transport::{Link, WORKING_INTERVAL};
use iwarp::Access;
use iwarp::verbs::cm::ConnectedId;
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr, QueuePair, RecvWr,
    SendWr, WcOpcode, WcStatus,
};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::rdma::{self, failed_completion};
use iwarp_cli_common::service::{self, Budget, Guest, Share, zeros};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Slots that a receiver grants; fewer if memory is short.
const SLOTS: u16 = 16;
/// Bytes per slot. Larger slots would not fit the caches; smaller slots need more messages. A
/// sender never writes more at once, even if the peer's slots are larger.
const SLOT_SIZE: u32 = 512 << 10;
/// Smallest send buffer in bytes. If not even these fit into memory, the copy fails.
const MIN_SEND_BUFFER: u32 = 16 << 10;
/// Buffers of a sender. It fills one while the others are being written to the peer.
const SEND_BUFFERS: usize = 4;
/// Posted receives, enough for a window of our size. TCP holds back further messages.
const RECVS: usize = 2 * SLOTS as usize + 32;
/// Largest number of queued messages.
const SENDS: usize = 64;
/// How long the peer may be silent. A peer that hashes a large file sends `Working` meanwhile.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
const _: () = assert!(2 * WORKING_INTERVAL.as_secs() <= SILENCE_LIMIT.as_secs());
/// How long the peer may accept no data.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// How long a client may take to prove that it knows the secret, whatever it sends meanwhile.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long closing may take, whatever the peer sends meanwhile.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How often a waiting end checks whether data have moved. Shorter than the time after which a
/// client counts as idle.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// `wr_id` of RDMA Writes.
const WRITE_ID: u64 = 1 << 32;

/// Measures how long no data have moved in either direction. On a slow network, a large request
/// takes long to complete, but data move meanwhile.
struct StallTimer {
    limit: Duration,
    moved: u64,
    since: Instant,
}

impl StallTimer {
    fn new(limit: Duration, moved: u64) -> Self {
        Self {
            limit,
            moved,
            since: Instant::now(),
        }
    }

    /// Takes the number of bytes moved so far. Returns `true` if it has changed since the last
    /// call.
    ///
    /// # Errors
    /// Fails if the number has not changed for longer than the limit.
    fn check(&mut self, moved: u64, now: Instant) -> Result<bool> {
        if moved != self.moved {
            (self.moved, self.since) = (moved, now);
            return Ok(true);
        }
        match now.saturating_duration_since(self.since) >= self.limit {
            true => Err(Error::failed("the peer no longer answers")),
            false => Ok(false),
        }
    }
}

/// The resources that are created before the connection.
pub(super) struct Prepared {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    /// Buffers of the receives, then of the sends. The peer has no access to this region.
    messages: MemoryRegion,
    budget: Arc<Budget>,
    /// Share of the server's memory for `messages` and for the hash buffer.
    _share: Share,
}

impl Prepared {
    /// Creates the resources and posts the receives.
    pub(super) fn new(ctx: &Context, budget: &Arc<Budget>) -> Result<(Self, QueuePair)> {
        let share = budget.take((RECVS + SENDS) * MAX_MESSAGE + part::HASH_CHUNK)?;
        let pd = ProtectionDomain::new(ctx);
        let sends = SENDS + SEND_BUFFERS;
        let cq = ctx
            .create_cq((RECVS + sends) as u32, None)
            .context("completion queue")?;
        let messages = pd
            .reg_mr((RECVS + SENDS) * MAX_MESSAGE, Access::LOCAL_WRITE)
            .context("memory")?;
        // A copy uses no Reads or atomics. The peer-to-peer set-up of RFC 6581 may use an empty
        // Read.
        let qp = pd
            .create_qp(
                &QpInitAttr::new(&cq, &cq)
                    .cap(sends as u32, RECVS as u32)
                    .rd_atomic(1, 1),
            )
            .context("queue pair")?;
        let prepared = Self {
            pd,
            cq,
            messages,
            budget: Arc::clone(budget),
            _share: share,
        };
        for slot in 0..RECVS {
            prepared.receive(&qp, slot)?;
        }
        Ok((prepared, qp))
    }

    /// Adds the connection. `guest` is `Some` on a server.
    pub(super) fn into_link(self, connection: ConnectedId, guest: Option<Guest>) -> RdmaLink {
        RdmaLink {
            prepared: self,
            connection,
            deadline: guest.is_some().then(|| Instant::now() + HANDSHAKE_LIMIT),
            guest,
            inbox: VecDeque::new(),
            closed: false,
            outstanding_sends: 0,
            next_send: 0,
            slots: None,
            send_buffers: None,
            next_send_buffer: 0,
            outstanding_writes: 0,
        }
    }

    /// Creates the slots that the peer writes to. If memory is short, creates fewer, because a slow
    /// copy is better than a refusal.
    fn create_slots(&self) -> Result<(Buffers, u16)> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mut slots = SLOTS;
        loop {
            let is_minimum = slots == 1;
            match Buffers::new(self, usize::from(slots), SLOT_SIZE, access, is_minimum) {
                Err(_) if !is_minimum => slots /= 2,
                buffers => return Ok((buffers?, slots)),
            }
        }
    }

    /// Creates the buffers of a sender. If memory is short, creates smaller buffers.
    fn create_send_buffers(&self) -> Result<Buffers> {
        let mut size = SLOT_SIZE;
        loop {
            let is_minimum = size <= MIN_SEND_BUFFER;
            match Buffers::new(self, SEND_BUFFERS, size, Access::LOCAL_WRITE, is_minimum) {
                Err(_) if !is_minimum => size /= 2,
                buffers => return buffers,
            }
        }
    }

    fn receive(&self, qp: &iwarp::runtime::QueuePair, slot: usize) -> Result<()> {
        let offset = slot * MAX_MESSAGE;
        let range = offset..offset + MAX_MESSAGE;
        let sge = self.messages.sge(range).context("memory")?;
        let wr = RecvWr {
            wr_id: slot as u64,
            sges: &[sge],
        };
        qp.post_recv(&[wr])
            .map_err(iwarp::Error::from)
            .context("receive")
    }
}

/// A connection that copies files.
pub(super) struct RdmaLink {
    prepared: Prepared,
    connection: ConnectedId,
    guest: Option<Guest>,
    /// Limit for the handshake and for closing. While it is set, no wait lasts longer. Data that
    /// move meanwhile do not protect the guest from eviction.
    deadline: Option<Instant>,
    /// Received messages: slot and length. A receive is reposted only after its message was read,
    /// so that a peer cannot make this queue grow.
    inbox: VecDeque<(usize, usize)>,
    /// The peer has closed the connection gracefully.
    closed: bool,
    /// Messages that are posted and not complete. Like the Writes, they complete in the order of
    /// posting.
    outstanding_sends: usize,
    next_send: usize,
    slots: Option<(Buffers, Grant)>,
    send_buffers: Option<Buffers>,
    next_send_buffer: usize,
    outstanding_writes: usize,
}

/// Registered memory in buffers of equal size, and an unregistered buffer of that size for file
/// access.
struct Buffers {
    mr: MemoryRegion,
    size: u32,
    file_buffer: Vec<u8>,
    _share: Share,
}

impl Buffers {
    /// Creates `count` buffers. Unless `is_minimum` is set, fails if they exceed a fair share of
    /// the remaining memory.
    fn new(
        prepared: &Prepared,
        count: usize,
        size: u32,
        access: Access,
        is_minimum: bool,
    ) -> Result<Self> {
        let octets = (count + 1) * size as usize;
        if !is_minimum && !prepared.budget.is_fair(octets) {
            return Err(Error::failed("the memory is reserved for other clients"));
        }
        let share = prepared.budget.take(octets)?;
        Ok(Self {
            mr: prepared
                .pd
                .reg_mr(count * size as usize, access)
                .context("memory")?,
            size,
            file_buffer: zeros(size as usize)?,
            _share: share,
        })
    }
}

impl RdmaLink {
    fn stall_timer(&self, limit: Duration) -> StallTimer {
        StallTimer::new(limit, self.bytes_moved())
    }

    /// Returns the number of bytes that have moved in both directions.
    fn bytes_moved(&self) -> u64 {
        let counters = self.connection.counters();
        counters.tx_bytes.wrapping_add(counters.rx_bytes)
    }

    /// Records that data have moved.
    fn note_data_moved(&self) {
        if let Some(guest) = self.guest.as_ref().filter(|_| self.deadline.is_none()) {
            guest.data_moved();
        }
    }

    /// Processes completions. With a `stall_timer`, waits for at least one.
    fn pump(&mut self, mut stall_timer: Option<&mut StallTimer>) -> Result<()> {
        let mut done = [Cqe::default(); 16];
        let n = loop {
            let end = self.deadline.filter(|_| stall_timer.is_some());
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Error::failed("the peer takes too long"));
            }
            let n = match stall_timer {
                None => self.prepared.cq.poll(&mut done).map_err(iwarp::Error::from),
                Some(_) => self.prepared.cq.wait(&mut done, Some(CHECK_INTERVAL)),
            };
            match (n, stall_timer.as_deref_mut()) {
                (Err(iwarp::Error::TimedOut(_)), Some(stall_timer)) => {
                    if stall_timer.check(self.bytes_moved(), Instant::now())? {
                        self.note_data_moved();
                    }
                }
                (n, _) => break n.context("completion queue")?,
            }
        };
        if let Some(guest) = self.guest.as_ref().filter(|_| n > 0) {
            self.note_data_moved();
            service::check_not_evicted(guest)?;
        }
        for cqe in done.iter().take(n) {
            match cqe.status {
                WcStatus::Success if cqe.opcode == WcOpcode::Recv => {
                    self.inbox
                        .push_back((cqe.wr_id as usize, cqe.byte_len as usize));
                }
                WcStatus::Success if cqe.wr_id == WRITE_ID => self.outstanding_writes -= 1,
                WcStatus::Success => self.outstanding_sends -= 1,
                WcStatus::Flushed if self.connection.fault().is_none() => self.closed = true,
                status => return Err(failed_completion(status, &self.connection)),
            }
        }
        Ok(())
    }

    /// Waits until `done` returns `true` or the peer closes the connection.
    fn wait_until(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> Result<()> {
        let mut stall_timer = self.stall_timer(limit);
        while !done(self) {
            if self.closed {
                return Err(failed_completion(WcStatus::Flushed, &self.connection));
            }
            self.pump(Some(&mut stall_timer))?;
        }
        Ok(())
    }

    fn next_message(&mut self) -> Result<Option<Message>> {
        let Some((slot, len)) = self.inbox.pop_front() else {
            return Ok(None);
        };
        let offset = slot * MAX_MESSAGE;
        let octets = self
            .prepared
            .messages
            .to_vec(offset..offset + len.min(MAX_MESSAGE))
            .context("memory")?;
        // A closed queue pair accepts no receives, but messages that arrived before it was closed
        // are still valid.
        if let Err(e) = self.prepared.receive(&self.connection, slot) {
            tracing::debug!("{e}");
        }
        Message::decode(&octets).map(Some)
    }

    /// Client: converts the error `e` of an unanswered request to [`Error::Busy`] if the server
    /// reset the connection because it needed the place.
    pub(super) fn refusal_to_busy(&self, e: Error) -> Error {
        rdma::busy_if_reset(e, &self.connection)
    }

    /// Returns `true` if TCP has accepted all messages and data.
    const fn has_sent_all(&self) -> bool {
        self.outstanding_sends == 0 && self.outstanding_writes == 0
    }

    /// Closes gracefully: waits until all messages are sent, closes, and waits for the peer to
    /// close.
    pub(super) fn close(mut self) {
        self.deadline = Some(Instant::now() + CLOSE_LIMIT);
        let _ = self.wait_until(CLOSE_LIMIT, Self::has_sent_all);
        if self.connection.disconnect().is_ok() {
            // The data are sent, so a peer that does not close in time loses nothing.
            let _ = self
                .connection
                .wait_disconnected(Some(Duration::from_secs(2)));
        }
    }
}

impl Link for RdmaLink {
    fn send(&mut self, message: &Message) -> Result<()> {
        let octets = message.encode()?;
        // Poll even if a buffer is free: an end that only sends detects here that the peer closed
        // the connection.
        self.pump(None)?;
        if self.closed {
            return Err(failed_completion(WcStatus::Flushed, &self.connection));
        }
        self.wait_until(STALL_LIMIT, |l| l.outstanding_sends < SENDS)?;
        let offset = (RECVS + self.next_send) * MAX_MESSAGE;
        let messages = &self.prepared.messages;
        messages.write_at(offset, &octets).context("memory")?;
        let sge = messages
            .sge(offset..offset + octets.len())
            .context("memory")?;
        self.connection
            .post_send(&[SendWr::send(0, &[sge]).signaled()])
            .map_err(iwarp::Error::from)
            .context("send")?;
        self.next_send = (self.next_send + 1) % SENDS;
        self.outstanding_sends += 1;
        Ok(())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        let mut stall_timer = self.stall_timer(SILENCE_LIMIT);
        loop {
            if let Some(m) = self.next_message()? {
                return Ok(Some(m));
            }
            if self.closed {
                return Ok(None);
            }
            self.pump(Some(&mut stall_timer))?;
        }
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        if self.inbox.is_empty() && !self.closed {
            self.pump(None)?;
        }
        self.next_message()
    }

    fn set_peer_waiting(&mut self, waiting: bool) {
        match &self.guest {
            Some(guest) if waiting => guest.at_work(),
            Some(guest) => guest.touch(),
            None => {}
        }
    }

    fn authenticated(&mut self) {
        self.deadline = None;
        if let Some(guest) = &self.guest {
            guest.advance();
        }
    }

    fn grant(&mut self) -> Result<Grant> {
        if let Some((_, grant)) = &self.slots {
            return Ok(*grant);
        }
        let (buffers, slots) = self.prepared.create_slots()?;
        let grant = Grant {
            stag: buffers.mr.remote().rkey,
            base: buffers.mr.remote().addr,
            slot_size: buffers.size,
            slots,
        };
        self.slots = Some((buffers, grant));
        Ok(grant)
    }

    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let outside = || Error::failed("no such slot");
        let (buffers, grant) = self.slots.as_mut().ok_or_else(outside)?;
        if slot >= grant.slots || len > grant.slot_size {
            return Err(outside());
        }
        let offset = usize::from(slot) * grant.slot_size as usize;
        let data = buffers.file_buffer.get_mut(..len as usize);
        let data = data.ok_or_else(outside)?;
        buffers.mr.read_at(offset, data).context("memory")?;
        f(data)
    }

    fn max_write_len(&mut self, to: &Grant) -> Result<u32> {
        // Created once and independent of the peer's slots, because all copies of this connection
        // use the same buffers.
        let buffers = match self.send_buffers.take() {
            Some(buffers) => buffers,
            None => self.prepared.create_send_buffers()?,
        };
        Ok(self.send_buffers.insert(buffers).size.min(to.slot_size))
    }

    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let outside = || Error::failed("no such slot");
        let target = to.slot_at(slot).ok_or_else(outside)?;
        if len > self.max_write_len(to)? {
            return Err(outside());
        }
        let buffers = self.send_buffers.as_mut().ok_or_else(outside)?;
        let data = buffers.file_buffer.get_mut(..len as usize);
        fill(data.ok_or_else(outside)?)?;
        // Wait only now, so that earlier data are in transit while the file is read.
        self.wait_until(STALL_LIMIT, |l| l.outstanding_writes < SEND_BUFFERS)?;
        let buffers = self.send_buffers.as_ref().ok_or_else(outside)?;
        let offset = self.next_send_buffer * buffers.size as usize;
        let data = buffers.file_buffer.get(..len as usize);
        let data = data.ok_or_else(outside)?;
        buffers.mr.write_at(offset, data).context("memory")?;
        let range = offset..offset + len as usize;
        let sge = buffers.mr.sge(range).context("memory")?;
        self.connection
            .post_send(&[SendWr::write(WRITE_ID, target, to.stag, &[sge]).signaled()])
            .map_err(iwarp::Error::from)
            .context("RDMA Write")?;
        self.next_send_buffer = (self.next_send_buffer + 1) % SEND_BUFFERS;
        self.outstanding_writes += 1;
        Ok(())
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
