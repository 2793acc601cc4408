//! The RDMA connection of a copy. Messages go by Send, data by RDMA Write into the slots that the receiver has granted.
//!
//! Data are copied once between registered memory and a buffer. Hashing and file access need a slice, and safe code must not form
//! a slice of memory that a peer may write to.

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

/// Slots that a receiver grants. If memory is short, it grants fewer.
const SLOTS: u16 = 16;
/// Octets in a slot: many enough that the messages cost little, few enough for the caches. It is also the most that a sender
/// writes at once, even if the peer's slots are larger.
const SLOT_SIZE: u32 = 512 << 10;
/// Fewest octets that a sender with little memory writes at once. If there is less memory, the copy fails.
const MIN_CHUNK: u32 = 16 << 10;
/// Buffers of a sender. It fills one while the others are being written to the peer.
const STAGES: usize = 4;
/// Posted receives, enough for a window of the size of ours. If the peer sends more messages, TCP holds them back.
const RECVS: usize = 2 * SLOTS as usize + 32;
/// Most messages that may wait to be sent.
const SENDS: usize = 64;
/// How long the peer may stay silent. A peer that hashes a large file sends `Working` every few seconds.
const SILENCE: Duration = Duration::from_secs(30);
const _: () = assert!(2 * STILL_THERE.as_secs() <= SILENCE.as_secs());
/// How long the peer may refuse to take data.
const STALL: Duration = Duration::from_secs(30);

/// How long a client may take until it has proved that it knows the secret, whatever it sends meanwhile.
const GREETING: Duration = Duration::from_secs(10);
/// How long the last messages may take when this end closes, whatever the peer sends meanwhile.
const CLOSE: Duration = Duration::from_secs(5);

/// How often to look whether octets move while no request completes. It is shorter than the time after which a client is idle.
const LOOK: Duration = Duration::from_millis(500);

const WRITE: u64 = 1 << 32;

/// Measures for how long no octet has moved in either direction. On a slow network a large request takes long to complete, but
/// its octets move, so the peer is not silent.
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

    /// Takes the number of octets that have moved until now. Returns `true` if some have moved since the last look.
    ///
    /// # Errors
    /// If none have moved for longer than the limit.
    fn look(&mut self, moved: u64, now: Instant) -> Result<bool> {
        if moved != self.moved {
            (self.moved, self.since) = (moved, now);
            return Ok(true);
        }
        match now.saturating_duration_since(self.since) >= self.limit {
            true => Err(Error::failed("the peer does not answer any more")),
            false => Ok(false),
        }
    }
}

/// The resources that are made before the connection is set up.
pub(super) struct Half {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    /// The buffers of the receives, then those of the sends. The peer has no access to this region.
    messages: MemoryRegion,
    budget: Arc<Budget>,
    /// The share of the server's memory for `messages` and for the buffer in which a file is hashed.
    _share: Share,
}

impl Half {
    /// Makes the resources and posts the receives.
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
        // A copy uses no Read and no atomic. The peer-to-peer set-up of RFC 6581 may still use a Read of zero octets.
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

    /// Joins the resources with the connection. On a server the client is a guest, so `guest` is `Some`.
    pub(super) fn connected(self, connection: ConnectedId, guest: Option<Guest>) -> RdmaLink {
        RdmaLink {
            half: self,
            connection,
            deadline: guest.is_some().then(|| Instant::now() + GREETING),
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

    /// Makes the slots that the peer writes to. If memory is short, these are fewer. The copy is then slower, which is better than
    /// a refusal.
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

    /// Makes the buffers of a sender. If memory is short, these are smaller.
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
    /// The end of the greeting or of closing. While it is set, no wait lasts longer, and octets that move are no progress of the
    /// guest, so that it can be evicted.
    deadline: Option<Instant>,
    /// Messages that came: the slot and the length. A receive is posted again only after its message was read, so that a peer
    /// cannot make this queue grow.
    inbox: VecDeque<(usize, usize)>,
    /// `true` if the peer has ended the connection in order.
    closed: bool,
    /// Messages that have been posted and not completed; `writes` counts data writes in the same way. All complete in the order in
    /// which they were posted.
    sends: usize,
    next_send: usize,
    slots: Option<(Room, Grant)>,
    stage: Option<Room>,
    next_stage: usize,
    writes: usize,
}

/// Registered memory in equal parts, and a buffer of one part's size that is filled from the file or written to it.
struct Room {
    mr: MemoryRegion,
    part: u32,
    buffer: Vec<u8>,
    _share: Share,
}

impl Room {
    /// Makes a room. If it is not the least that works, it must also be a fair share of the memory that is left.
    fn new(half: &Half, parts: usize, part: u32, access: Access, least: bool) -> Result<Self> {
        let octets = (parts + 1) * part as usize;
        if !least && !half.budget.is_fair(octets) {
            return Err(Error::failed("other clients need memory, too"));
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

    /// Returns the number of octets that have moved in both directions.
    fn moved(&self) -> u64 {
        let counters = self.connection.counters();
        counters.tx_bytes.wrapping_add(counters.rx_bytes)
    }

    /// Notes that octets have moved.
    fn progress(&self) {
        if let Some(guest) = self.guest.as_ref().filter(|_| self.deadline.is_none()) {
            guest.moves();
        }
    }

    /// Takes completions. With `patience` it waits for at least one.
    fn pump(&mut self, mut patience: Option<&mut Patience>) -> Result<()> {
        let mut done = [Cqe::default(); 16];
        let n = loop {
            let end = self.deadline.filter(|_| patience.is_some());
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Error::failed("the peer takes too long"));
            }
            let n = match patience {
                None => self.half.cq.poll(&mut done).map_err(iwarp::Error::from),
                Some(_) => self.half.cq.wait(&mut done, Some(LOOK)),
            };
            match (n, patience.as_deref_mut()) {
                (Err(iwarp::Error::TimedOut(_)), Some(patience)) => {
                    if patience.look(self.moved(), Instant::now())? {
                        self.progress();
                    }
                }
                (n, _) => break n.context("completion queue")?,
            }
        };
        if let Some(guest) = self.guest.as_ref().filter(|_| n > 0) {
            self.progress();
            service::still_welcome(guest)?;
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

    /// Waits until `done` returns `true`, or the peer closes.
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
        // A queue pair that has ended takes no receive, but messages that came before its end are still valid.
        if let Err(e) = self.half.receive(&self.connection, slot) {
            tracing::debug!("{e}");
        }
        Message::decode(&octets).map(Some)
    }

    /// Client: returns the error `e` of a request that was not answered, or [`Error::Busy`] if the server had no place for this client
    /// after all.
    pub(super) fn turned_away(&self, e: Error) -> Error {
        rdma::before_the_first_answer(e, &self.connection)
    }

    /// Returns `true` if TCP has taken all messages and data.
    const fn has_sent_all(&self) -> bool {
        self.sends == 0 && self.writes == 0
    }

    /// Ends in order: waits until all messages are sent, then closes the connection and waits for the peer to close.
    pub(super) fn close(mut self) {
        self.deadline = Some(Instant::now() + CLOSE);
        let _ = self.until(CLOSE, Self::has_sent_all);
        if self.connection.disconnect().is_ok() {
            // The result does not matter: if the peer does not close in time, no data are lost.
            let _ = self
                .connection
                .wait_disconnected(Some(Duration::from_secs(2)));
        }
    }
}

impl Link for RdmaLink {
    fn send(&mut self, message: &Message) -> Result<()> {
        let octets = message.encode()?;
        // Take completions, also if there is room for the message: a peer that has gone is noticed here if this end only sends.
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

    fn welcomed(&mut self) {
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
        // The buffers are made once. They do not depend on the peer's slots, so all copies of this connection use them.
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
        // Wait only now, so that the network carries earlier data while the file is read.
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
