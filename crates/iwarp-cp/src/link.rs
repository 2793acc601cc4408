//! The RDMA connection of a copy: messages as Sends, data as RDMA Writes into slots that the
//! receiver has granted.
//!
//! Data are copied once between registered memory and a buffer. Hashing and file access need a
//! slice, and safe code must not form a slice of memory that a peer may write to.

use crate::part;
use crate::protocol::{Grant, MAX_MESSAGE, Message};
use crate::transport::{Link, STILL_THERE};
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
/// Bytes per slot: enough that the messages cost little, few enough for the caches. A sender never
/// writes more at once, even if the peer's slots are larger.
const SLOT_SIZE: u32 = 512 << 10;
/// Fewest bytes that a sender writes at once. With less memory the copy fails.
const MIN_CHUNK: u32 = 16 << 10;
/// Buffers of a sender. It fills one while the others are being written to the peer.
const STAGES: usize = 4;
/// Posted receives, enough for a window of our size. TCP holds back further messages.
const RECVS: usize = 2 * SLOTS as usize + 32;
/// Largest number of queued messages.
const SENDS: usize = 64;
/// How long the peer may be silent. A peer that hashes a large file sends `Working` meanwhile.
const SILENCE: Duration = Duration::from_secs(30);
const _: () = assert!(2 * STILL_THERE.as_secs() <= SILENCE.as_secs());
/// How long the peer may accept no data.
const STALL: Duration = Duration::from_secs(30);

/// How long a client may take to prove that it knows the secret, whatever it sends meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long closing may take, whatever the peer sends meanwhile.
const CLOSE: Duration = Duration::from_secs(5);

/// Interval of checks for moving data. Shorter than the time after which a client counts as idle.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

const WRITE: u64 = 1 << 32;

/// Measures how long no data have moved in either direction. On a slow network a large request
/// takes long to complete, but the peer is not silent meanwhile.
struct Patience {
    limit: Duration,
    moved: u64,
    since: Instant,
}

impl Patience {
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
    /// Fails if it has not changed for longer than the limit.
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
pub(super) struct Half {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    /// Buffers of the receives, then of the sends. The peer has no access to this region.
    messages: MemoryRegion,
    budget: Arc<Budget>,
    /// Share of the server's memory for `messages` and for the hash buffer.
    _share: Share,
}

impl Half {
    /// Creates the resources and posts the receives.
    pub(super) fn new(ctx: &Context, budget: &Arc<Budget>) -> Result<(Self, QueuePair)> {
        let share = budget.take((RECVS + SENDS) * MAX_MESSAGE + part::CHUNK)?;
        let pd = ProtectionDomain::new(ctx);
        let sends = SENDS + STAGES;
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
        let half = Self {
            pd,
            cq,
            messages,
            budget: Arc::clone(budget),
            _share: share,
        };
        for slot in 0..RECVS {
            half.receive(&qp, slot)?;
        }
        Ok((half, qp))
    }

    /// Adds the connection. `guest` is `Some` on a server.
    pub(super) fn connected(self, connection: ConnectedId, guest: Option<Guest>) -> RdmaLink {
        RdmaLink {
            half: self,
            connection,
            deadline: guest.is_some().then(|| Instant::now() + HANDSHAKE),
            guest,
            inbox: VecDeque::new(),
            closed: false,
            sends: 0,
            next_send: 0,
            slots: None,
            stage: None,
            next_stage: 0,
            writes: 0,
        }
    }

    /// Creates the slots that the peer writes to. If memory is short, grants fewer, because a slow
    /// copy is better than a refusal.
    fn ring(&self) -> Result<(Room, u16)> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mut slots = SLOTS;
        loop {
            let least = slots == 1;
            match Room::new(self, usize::from(slots), SLOT_SIZE, access, least) {
                Err(_) if !least => slots /= 2,
                room => return Ok((room?, slots)),
            }
        }
    }

    /// Creates the buffers of a sender; smaller ones if memory is short.
    fn stages(&self) -> Result<Room> {
        let mut chunk = SLOT_SIZE;
        loop {
            let least = chunk <= MIN_CHUNK;
            match Room::new(self, STAGES, chunk, Access::LOCAL_WRITE, least) {
                Err(_) if !least => chunk /= 2,
                room => return room,
            }
        }
    }

    fn receive(&self, qp: &iwarp::runtime::QueuePair, slot: usize) -> Result<()> {
        let at = slot * MAX_MESSAGE;
        let sge = self.messages.sge(at..at + MAX_MESSAGE).context("memory")?;
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
    half: Half,
    connection: ConnectedId,
    guest: Option<Guest>,
    /// Limit for the handshake and for closing. While it is set, no wait lasts longer, and moving
    /// data are no progress of the guest, which can be evicted.
    deadline: Option<Instant>,
    /// Received messages: slot and length. A receive is reposted only after its message was read,
    /// so that a peer cannot make this queue grow. cannot make this queue grow.
    inbox: VecDeque<(usize, usize)>,
    /// The peer has closed the connection in order.
    closed: bool,
    /// Messages that are posted and not complete; `writes` counts RDMA Writes in the same way. All
    /// complete in the order of posting.
    sends: usize,
    next_send: usize,
    slots: Option<(Room, Grant)>,
    stage: Option<Room>,
    next_stage: usize,
    writes: usize,
}

/// Registered memory in equal parts, and a buffer of one part's size for file access.
struct Room {
    mr: MemoryRegion,
    part: u32,
    buffer: Vec<u8>,
    _share: Share,
}

impl Room {
    /// Creates a room. Unless `least` is set, it must be a fair share of the remaining memory.
    fn new(half: &Half, parts: usize, part: u32, access: Access, least: bool) -> Result<Self> {
        let octets = (parts + 1) * part as usize;
        if !least && !half.budget.is_fair(octets) {
            return Err(Error::failed("the memory is reserved for other clients"));
        }
        let share = half.budget.take(octets)?;
        Ok(Self {
            mr: half
                .pd
                .reg_mr(parts * part as usize, access)
                .context("memory")?,
            part,
            buffer: zeros(part as usize)?,
            _share: share,
        })
    }
}

impl RdmaLink {
    fn patience(&self, limit: Duration) -> Patience {
        Patience::new(limit, self.moved())
    }

    /// Returns the number of bytes that have moved in both directions.
    fn moved(&self) -> u64 {
        let counters = self.connection.counters();
        counters.tx_bytes.wrapping_add(counters.rx_bytes)
    }

    /// Records that data have moved.
    fn progress(&self) {
        if let Some(guest) = self.guest.as_ref().filter(|_| self.deadline.is_none()) {
            guest.data_moved();
        }
    }

    /// Processes completions. With `retry`, waits for at least one.
    fn pump(&mut self, mut patience: Option<&mut Patience>) -> Result<()> {
        let mut done = [Cqe::default(); 16];
        let n = loop {
            let end = self.deadline.filter(|_| patience.is_some());
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Error::failed("the peer takes too long"));
            }
            let n = match patience {
                None => self.half.cq.poll(&mut done).map_err(iwarp::Error::from),
                Some(_) => self.half.cq.wait(&mut done, Some(CHECK_INTERVAL)),
            };
            match (n, patience.as_deref_mut()) {
                (Err(iwarp::Error::TimedOut(_)), Some(patience)) => {
                    if patience.check(self.moved(), Instant::now())? {
                        self.progress();
                    }
                }
                (n, _) => break n.context("completion queue")?,
            }
        };
        if let Some(guest) = self.guest.as_ref().filter(|_| n > 0) {
            self.progress();
            service::check_not_evicted(guest)?;
        }
        for cqe in done.iter().take(n) {
            match cqe.status {
                WcStatus::Success if cqe.opcode == WcOpcode::Recv => {
                    self.inbox
                        .push_back((cqe.wr_id as usize, cqe.byte_len as usize));
                }
                WcStatus::Success if cqe.wr_id == WRITE => self.writes -= 1,
                WcStatus::Success => self.sends -= 1,
                WcStatus::Flushed if self.connection.fault().is_none() => self.closed = true,
                status => return Err(failed_completion(status, &self.connection)),
            }
        }
        Ok(())
    }

    /// Waits until `done` returns `true` or the peer closes the connection.
    fn until(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> Result<()> {
        let mut patience = self.patience(limit);
        while !done(self) {
            if self.closed {
                return Err(failed_completion(WcStatus::Flushed, &self.connection));
            }
            self.pump(Some(&mut patience))?;
        }
        Ok(())
    }

    fn next_message(&mut self) -> Result<Option<Message>> {
        let Some((slot, len)) = self.inbox.pop_front() else {
            return Ok(None);
        };
        let at = slot * MAX_MESSAGE;
        let octets = self
            .half
            .messages
            .to_vec(at..at + len.min(MAX_MESSAGE))
            .context("memory")?;
        // A closed queue pair accepts no receive, but messages that arrived before are still valid.
        if let Err(e) = self.half.receive(&self.connection, slot) {
            tracing::debug!("{e}");
        }
        Message::decode(&octets).map(Some)
    }

    /// Client: converts the error `e` of an unanswered request to [`Error::Busy`] if the server had
    /// no place for this client after all.
    pub(super) fn busy_if_refused(&self, e: Error) -> Error {
        rdma::busy_if_reset(e, &self.connection)
    }

    /// Returns `true` if TCP has accepted all messages and data.
    const fn has_sent_all(&self) -> bool {
        self.sends == 0 && self.writes == 0
    }

    /// Closes in order: waits until all messages are sent, closes, and waits for the peer to close.
    pub(super) fn close(mut self) {
        self.deadline = Some(Instant::now() + CLOSE);
        let _ = self.until(CLOSE, Self::has_sent_all);
        if self.connection.disconnect().is_ok() {
            // If the peer does not close in time, no data are lost.
            let _ = self
                .connection
                .wait_disconnected(Some(Duration::from_secs(2)));
        }
    }
}

impl Link for RdmaLink {
    fn send(&mut self, message: &Message) -> Result<()> {
        let octets = message.encode()?;
        // Poll even if there is room: an end that only sends notices here that the peer has gone.
        self.pump(None)?;
        if self.closed {
            return Err(failed_completion(WcStatus::Flushed, &self.connection));
        }
        self.until(STALL, |l| l.sends < SENDS)?;
        let at = (RECVS + self.next_send) * MAX_MESSAGE;
        self.half.messages.write_at(at, &octets).context("memory")?;
        let sge = self
            .half
            .messages
            .sge(at..at + octets.len())
            .context("memory")?;
        self.connection
            .post_send(&[SendWr::send(0, &[sge]).signaled()])
            .map_err(iwarp::Error::from)
            .context("send")?;
        self.next_send = (self.next_send + 1) % SENDS;
        self.sends += 1;
        Ok(())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        let mut patience = self.patience(SILENCE);
        loop {
            if let Some(m) = self.next_message()? {
                return Ok(Some(m));
            }
            if self.closed {
                return Ok(None);
            }
            self.pump(Some(&mut patience))?;
        }
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        if self.inbox.is_empty() && !self.closed {
            self.pump(None)?;
        }
        self.next_message()
    }

    fn peer_waits(&mut self, yes: bool) {
        match &self.guest {
            Some(guest) if yes => guest.at_work(),
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
        let (room, slots) = self.half.ring()?;
        let grant = Grant {
            stag: room.mr.remote().rkey,
            base: room.mr.remote().addr,
            slot_size: room.part,
            slots,
        };
        self.slots = Some((room, grant));
        Ok(grant)
    }

    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let outside = || Error::failed("no such slot");
        let (room, grant) = self.slots.as_mut().ok_or_else(outside)?;
        if slot >= grant.slots || len > grant.slot_size {
            return Err(outside());
        }
        let at = usize::from(slot) * grant.slot_size as usize;
        let data = room.buffer.get_mut(..len as usize).ok_or_else(outside)?;
        room.mr.read_at(at, data).context("memory")?;
        f(data)
    }

    fn chunk(&mut self, to: &Grant) -> Result<u32> {
        // Created once, and independent of the peer's slots: all copies of this connection use
        // them.
        let stage = match self.stage.take() {
            Some(stage) => stage,
            None => self.half.stages()?,
        };
        Ok(self.stage.insert(stage).part.min(to.slot_size))
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
        if len > self.chunk(to)? {
            return Err(outside());
        }
        let stage = self.stage.as_mut().ok_or_else(outside)?;
        fill(stage.buffer.get_mut(..len as usize).ok_or_else(outside)?)?;
        // Wait only now: earlier data are in transit while the file is read.
        self.until(STALL, |l| l.writes < STAGES)?;
        let stage = self.stage.as_ref().ok_or_else(outside)?;
        let at = self.next_stage * stage.part as usize;
        let data = stage.buffer.get(..len as usize).ok_or_else(outside)?;
        stage.mr.write_at(at, data).context("memory")?;
        let sge = stage.mr.sge(at..at + len as usize).context("memory")?;
        self.connection
            .post_send(&[SendWr::write(WRITE, target, to.stag, &[sge]).signaled()])
            .map_err(iwarp::Error::from)
            .context("RDMA Write")?;
        self.next_stage = (self.next_stage + 1) % STAGES;
        self.writes += 1;
        Ok(())
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
