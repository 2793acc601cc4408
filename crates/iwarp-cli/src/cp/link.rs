//! The RDMA connection under a copy: messages by Send, data by RDMA Write into the slots that the receiver has granted.
//!
//! Octets are copied once between registered memory and the buffer that is hashed and written: the file and the hash need
//! a slice, and safe code forms none into memory that a peer may write to.

use super::protocol::{Grant, MAX_MESSAGE, MAX_SLOT_SIZE, MAX_SLOTS, Message};
use super::session;
use crate::error::{Context as _, Error, Result};
use crate::rdma::failed_completion;
use iwarp::cm::Connection;
use iwarp::{
    Access, CompletionQueue, Context, Cqe, MemoryRegion, ProtectionDomain, QueuePair, RecvWr,
    SendWr, WcOpcode, WcStatus,
};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Slots that a receiver grants.
const SLOTS: u16 = 16;
/// Their size: large enough that messages cost nothing, small enough for the caches.
const SLOT_SIZE: u32 = 512 << 10;
/// Buffers that are filled while earlier ones are on their way.
const STAGES: usize = 4;
/// Receives, enough for a window of our own size; a peer that has more to say is held by TCP.
const RECVS: usize = 2 * SLOTS as usize + 32;
/// Messages that may wait to be sent.
const SENDS: usize = 64;
/// How long the peer may stay silent: it may have a large file to hash before it can resume.
const SILENCE: Duration = Duration::from_secs(600);
/// How long the peer may refuse to take data.
const STALL: Duration = Duration::from_secs(60);

const WRITE: u64 = 1 << 32;

/// What is made before the connection is there.
pub(super) struct Half {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    /// Receives, then sends.
    messages: MemoryRegion,
}

impl Half {
    /// Makes everything, with receives posted.
    pub(super) fn new(ctx: &Context) -> Result<(Self, QueuePair)> {
        let pd = ProtectionDomain::new(ctx);
        let sends = SENDS + STAGES;
        let cq = ctx
            .create_cq((RECVS + sends) as u32, None)
            .context("completion queue")?;
        let messages = pd
            .allocate((RECVS + SENDS) * MAX_MESSAGE, Access::LOCAL_WRITE)
            .context("memory")?;
        // Nobody reads or does atomics here; the peer-to-peer set-up of RFC 6581 may still use a Read of nothing.
        let qp = pd
            .queue_pair()
            .depth(sends as u32, RECVS as u32)
            .reads(1, 1)
            .build(&cq, &cq)
            .context("queue pair")?;
        let half = Self { pd, cq, messages };
        for slot in 0..RECVS {
            half.receive(&qp, slot)?;
        }
        Ok((half, qp))
    }

    /// The connection is there.
    pub(super) fn connected(self, connection: Connection) -> RdmaLink {
        RdmaLink {
            half: self,
            connection,
            inbox: VecDeque::new(),
            closed: false,
            sends: 0,
            next_send: 0,
            slots: None,
            stage: None,
            next_stage: 0,
            writes: 0,
            buffer: Vec::new(),
        }
    }

    fn receive(&self, qp: &iwarp::raw::QueuePair, slot: usize) -> Result<()> {
        let at = slot * MAX_MESSAGE;
        let sge = self.messages.sge(at..at + MAX_MESSAGE).context("memory")?;
        let wr = RecvWr {
            wr_id: slot as u64,
            sges: &[sge],
        };
        qp.post_recv(&[wr]).map_err(|(_, e)| e).context("receive")
    }
}

/// A connection for copies.
pub(super) struct RdmaLink {
    half: Half,
    connection: Connection,
    /// Messages that came: slot and length. Their receive is posted again when they are looked at, so that a peer cannot
    /// make this grow.
    inbox: VecDeque<(usize, usize)>,
    /// The peer has ended the connection in order.
    closed: bool,
    /// Messages and writes on their way. They end in the order in which they were posted.
    sends: usize,
    next_send: usize,
    slots: Option<(MemoryRegion, Grant)>,
    stage: Option<MemoryRegion>,
    next_stage: usize,
    writes: usize,
    /// What is filled from, or written to, the file.
    buffer: Vec<u8>,
}

impl RdmaLink {
    /// Takes completions; waits for at least one until the deadline.
    fn pump(&mut self, deadline: Option<Instant>) -> Result<()> {
        let mut done = [Cqe::default(); 16];
        let n = match deadline {
            None => self.half.cq.poll(&mut done).map_err(iwarp::Error::from),
            Some(d) => {
                let left = d.saturating_duration_since(Instant::now());
                self.half.cq.wait(&mut done, Some(left))
            }
        };
        let n = match n {
            Ok(n) => n,
            Err(iwarp::Error::TimedOut(_)) => {
                return Err(Error::failed("the peer does not answer any more"));
            }
            Err(e) => return Err(e).context("completion queue"),
        };
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

    /// Waits until `done` says so, or the peer closes.
    fn until(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !done(self) {
            if self.closed {
                return Err(failed_completion(WcStatus::Flushed, &self.connection));
            }
            self.pump(Some(deadline))?;
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
        // A queue pair that has ended takes no receive, but the messages before its end still count.
        if let Err(e) = self.half.receive(&self.connection, slot) {
            tracing::debug!("{e}");
        }
        Message::decode(&octets).map(Some)
    }

    /// Ends in order: what was said is sent, then the connection is closed from both sides.
    pub(super) fn close(mut self) {
        let _ = self.until(Duration::from_secs(5), |l| l.sends == 0 && l.writes == 0);
        if self.connection.disconnect().is_ok() {
            // A peer that does not close loses nothing any more.
            let _ = self
                .connection
                .wait_disconnected(Some(Duration::from_secs(2)));
        }
    }
}

impl session::Link for RdmaLink {
    fn send(&mut self, message: &Message) -> Result<()> {
        let octets = message.encode()?;
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
            .map_err(|(_, e)| e)
            .context("send")?;
        self.next_send = (self.next_send + 1) % SENDS;
        self.sends += 1;
        Ok(())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        let deadline = Instant::now() + SILENCE;
        loop {
            if let Some(m) = self.next_message()? {
                return Ok(Some(m));
            }
            if self.closed {
                return Ok(None);
            }
            self.pump(Some(deadline))?;
        }
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        if self.inbox.is_empty() && !self.closed {
            self.pump(None)?;
        }
        self.next_message()
    }

    fn grant(&mut self) -> Result<Grant> {
        if let Some((_, grant)) = &self.slots {
            return Ok(*grant);
        }
        let len = usize::from(SLOTS) * SLOT_SIZE as usize;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = self.half.pd.allocate(len, access).context("memory")?;
        let grant = Grant {
            stag: mr.remote().rkey,
            base: mr.remote().addr,
            slot_size: SLOT_SIZE,
            slots: SLOTS,
        };
        self.slots = Some((mr, grant));
        Ok(grant)
    }

    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let outside = || Error::failed("no such slot");
        let (mr, grant) = self.slots.as_ref().ok_or_else(outside)?;
        if slot >= grant.slots || len > grant.slot_size {
            return Err(outside());
        }
        let at = usize::from(slot) * grant.slot_size as usize;
        self.buffer.resize(grant.slot_size as usize, 0);
        let data = self.buffer.get_mut(..len as usize).ok_or_else(outside)?;
        mr.read_at(at, data).context("memory")?;
        f(data)
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
        if len > to.slot_size || to.slot_size > MAX_SLOT_SIZE || to.slots > MAX_SLOTS {
            return Err(outside());
        }
        self.buffer.resize(to.slot_size as usize, 0);
        fill(self.buffer.get_mut(..len as usize).ok_or_else(outside)?)?;
        // Only now, so that the network works while the file is read.
        self.until(STALL, |l| l.writes < STAGES)?;
        let size = to.slot_size as usize;
        let stage = match &self.stage {
            Some(mr) if mr.len() >= STAGES * size => mr,
            _ => {
                // Peers grant one size; another one means that all writes of the earlier copy are over, or wait for it.
                self.until(STALL, |l| l.writes == 0)?;
                let mr = self.half.pd.allocate(STAGES * size, Access::LOCAL_WRITE);
                self.stage.insert(mr.context("memory")?)
            }
        };
        let at = self.next_stage * size;
        let data = self.buffer.get(..len as usize).ok_or_else(outside)?;
        stage.write_at(at, data).context("memory")?;
        let sge = stage.sge(at..at + len as usize).context("memory")?;
        self.connection
            .post_send(&[SendWr::write(WRITE, target, to.stag, &[sge]).signaled()])
            .map_err(|(_, e)| e)
            .context("RDMA Write")?;
        self.next_stage = (self.next_stage + 1) % STAGES;
        self.writes += 1;
        Ok(())
    }
}
