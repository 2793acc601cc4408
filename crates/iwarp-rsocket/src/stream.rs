//! One end of a connection: its queue pair, buffers and credits.
//!
//! The receive buffer has two halves. Each half is offered to the peer through an entry of the
//! peer's directory. The peer fills it with RDMA Writes and announces each Write by a message. When
//! the program has read as many bytes as a half has, that half is offered again. The number of
//! messages in flight is limited by the number of receives. `Credit` messages raise both limits.
//!
//! No function here blocks. The peer is not trusted: its messages are checked against the offers.

mod iomap;
mod post;
mod recv;
mod send;
mod tail;

pub(crate) use iomap::Iomaps;
pub(crate) use send::Gather;

use crate::errno::{Errno, Result};
use crate::settings::Sizes;
use crate::wire::{
    DIRECTORY, Hello, MAPPING_LEN, MESSAGE_LEN, Mapping, Message, WINDOW_LEN, Window,
};
use iwarp::runtime::{
    CompletionQueue, Context, Cqe, QpAttributes, QueuePair, SendWr, State, WcStatus,
};
use iwarp::verbs::{MemoryRegion, ProtectionDomain};
use iwarp::{Access, Blame};
use std::collections::VecDeque;

/// Send work requests reserved for control messages.
const CONTROL_SLOTS: u32 = 4;
/// Receives of the peer reserved for control messages. A kernel RNIC terminates a connection that
/// runs out of receives, whereas this RNIC waits.
const CONTROL_CREDITS: u16 = 4;
/// Flag in the `wr_id` of receives. The `wr_id` of a send contains the numbers of requests and of
/// buffer bytes that its completion frees.
const RECEIVE: u64 = 1 << 63;
/// Maximum polls of the completion queue per call, so that a fast peer cannot keep a call busy.
const ROUNDS: u32 = 4;
const BATCH: usize = 32;
/// Maximum bytes per transfer, so that the peer reads a transfer while the next is in flight. Each
/// transfer costs the peer a wake-up, and a system call at each end.
const TRANSFER_MAX: u32 = 384 * 1024;

pub(crate) struct Stream {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pd: ProtectionDomain,
    sizes: Sizes,

    rbuf: MemoryRegion,
    read_at: u32,
    /// Bytes announced by the peer but not read by the program.
    unread: u32,
    announced: VecDeque<u32>,
    /// Bytes offered to the peer but not announced by it.
    offered: u32,
    /// Bytes read by the program but not offered again.
    freed: u32,
    /// The half to offer next: 0 or 1.
    next_half: u32,
    /// Memory for incoming messages.
    slots: MemoryRegion,
    /// Slots whose receive must be posted again.
    idle_slots: Vec<u16>,
    /// Data messages read completely, modulo 2^16.
    consumed: u16,
    /// A `Credit` message is due when `consumed` reaches this number.
    credit_due: u16,

    /// The peer's parameters, among them its directory, in which this end offers buffers.
    peer: Option<Hello>,
    next_entry: u32,

    sbuf: MemoryRegion,
    /// Position of the next byte in the send buffer, and bytes in use.
    write_at: u32,
    in_use: u32,
    /// Free send work requests.
    sq_free: u32,
    /// Data messages sent, and the limit for sending, modulo 2^16.
    sent: u16,
    allowed: u16,
    /// Memory in which the peer offers buffers: receive buffers, then mapped buffers.
    directory: MemoryRegion,
    /// The entry that the peer fills next.
    expect_entry: u32,
    /// Unused offers, the oldest first.
    offers: VecDeque<Window>,
    /// The peer has offered both halves of its buffer for the first time.
    both_offered: bool,
    /// Bytes sent to halves that the peer has not offered again.
    in_flight: u64,
    tail: Option<tail::Tail>,
    /// The socket is woken by the next completion, to send the tail.
    pub(crate) is_tail_watched: bool,
    /// The service thread checks the tail.
    pub(crate) is_tail_timed: bool,
    /// Number of checks without a tail.
    idle_checks: u32,
    /// A farewell message to send as soon as a work request is free.
    farewell: Option<Message>,

    pub(crate) iomaps: Iomaps,

    /// The program has not shut down reading, and writing.
    reading: bool,
    writing: bool,
    /// The peer has stopped writing.
    peer_done: bool,
    /// Nothing can be sent or received any more.
    over: bool,
    /// The farewell was sent.
    farewell_sent: bool,
    /// An error to report once.
    error: Option<Errno>,
}

/// Creates a queue pair that accepts receives.
fn create_queue_pair(
    ctx: &Context,
    sizes: &Sizes,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
) -> Result<QueuePair> {
    let qp = ctx.create_qp(&QpAttributes {
        pd: pd.number(),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        unreliable: false,
        max_send_wr: sizes.send_queue.into(),
        max_recv_wr: sizes.receive_queue.into(),
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline: u32::from(sizes.inline).max(MAPPING_LEN as u32),
        signal_all: false,
        // The peer may begin with an RDMA Read of zero bytes (RFC 6581 section 9).
        max_ird: 4,
        max_ord: 4,
    })?;
    qp.modify(State::Init)?;
    Ok(qp)
}

impl Stream {
    /// Creates a stream that is not connected yet, with all receives posted. Fails with ENOMEM or
    /// EMFILE.
    pub(crate) fn new(ctx: &Context, sizes: Sizes) -> Result<Self> {
        let sizes = sizes.clamped();
        let (sq, rq) = (u32::from(sizes.send_queue), u32::from(sizes.receive_queue));
        let pd = ProtectionDomain::new(ctx);
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let rbuf = pd.reg_mr(sizes.receive_buffer as usize, remote)?;
        let directory_len =
            DIRECTORY as usize * WINDOW_LEN + usize::from(sizes.mappings) * MAPPING_LEN;
        let directory = pd.reg_mr(directory_len, remote)?;
        let slots = pd.reg_mr(rq as usize * MESSAGE_LEN, Access::LOCAL_WRITE)?;
        let sbuf = pd.reg_mr(sizes.send_buffer as usize, Access::empty())?;
        let cq = ctx.create_cq(sq + rq, None)?;
        let qp = create_queue_pair(ctx, &sizes, &pd, &cq)?;
        let half = sizes.receive_buffer / 2;
        let mut stream = Self {
            qp,
            cq,
            pd,
            sizes,
            rbuf,
            read_at: 0,
            unread: 0,
            announced: VecDeque::with_capacity(rq as usize),
            // The private data offers the first half.
            offered: half,
            freed: half,
            next_half: 1,
            slots,
            idle_slots: (0..sizes.receive_queue).collect(),
            consumed: 0,
            credit_due: sizes.receive_queue / 2,
            peer: None,
            next_entry: 1,
            sbuf,
            write_at: 0,
            in_use: 0,
            sq_free: sq,
            sent: 0,
            allowed: 0,
            directory,
            expect_entry: 1,
            offers: VecDeque::with_capacity(DIRECTORY as usize + 1),
            both_offered: false,
            in_flight: 0,
            tail: None,
            is_tail_watched: false,
            is_tail_timed: false,
            idle_checks: 0,
            farewell: None,
            iomaps: Iomaps::default(),
            reading: true,
            writing: true,
            peer_done: false,
            over: false,
            farewell_sent: false,
            error: None,
        };
        stream.post_receives()?;
        Ok(stream)
    }

    pub(crate) fn hello(&self) -> Hello {
        let (rbuf, directory) = (self.rbuf.remote(), self.directory.remote());
        Hello {
            credits: self.sizes.receive_queue,
            mappings: self.sizes.mappings,
            directory: Window {
                addr: directory.addr,
                key: directory.rkey,
                len: DIRECTORY,
            },
            buffer: Window {
                addr: rbuf.addr,
                key: rbuf.rkey,
                len: self.half(),
            },
        }
    }

    pub(crate) fn set_peer(&mut self, peer: &Hello) {
        self.peer = Some(*peer);
        self.allowed = peer.credits;
        self.offers.push_back(peer.buffer);
        self.iomaps.set_peer_entries(peer.mappings);
    }

    pub(crate) const fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    const fn half(&self) -> u32 {
        self.sizes.receive_buffer / 2
    }

    /// Processes completions. With `drive`, also drives the connection.
    pub(crate) fn process(&mut self, drive: bool) {
        self.send_due();
        let mut batch = [Cqe::default(); BATCH];
        let mut rounds = 0;
        loop {
            let got = if drive {
                self.cq.poll(&mut batch)
            } else {
                self.cq.take_ready(&mut batch)
            };
            let n = match got {
                Ok(0) => break,
                Ok(n) => n,
                Err(_) => {
                    self.fail(Errno::IO);
                    break;
                }
            };
            for cqe in &batch[..n] {
                self.complete(cqe);
            }
            if self.post_receives().is_err() {
                self.lost();
            }
            rounds += 1;
            if drive && rounds == ROUNDS {
                break;
            }
        }
        self.send_due_tail();
        self.send_due();
    }

    fn complete(&mut self, cqe: &Cqe) {
        if cqe.status != WcStatus::Success {
            self.lost();
            return;
        }
        if cqe.wr_id & RECEIVE == 0 {
            self.sq_free += (cqe.wr_id >> 32) as u32;
            self.in_use -= cqe.wr_id as u32;
            if self.in_use == 0 {
                // The beginning of the buffer is in the processor's caches.
                self.write_at = 0;
            }
            return;
        }
        let slot = cqe.wr_id as u16;
        let mut message = [0; MESSAGE_LEN];
        if cqe.byte_len as usize != MESSAGE_LEN
            || self
                .slots
                .read_at(usize::from(slot) * MESSAGE_LEN, &mut message)
                .is_err()
        {
            self.fail(Errno::PROTO);
            return;
        }
        self.idle_slots.push(slot);
        self.message(Message::decode(message));
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Data(n) => self.on_data_message(n),
            Message::Credit(upto) => {
                self.allowed = upto;
                self.check_directory();
            }
            Message::Mapping(index) => self.check_mapping(index),
            Message::Shutdown => {
                self.peer_done = true;
                if !self.writing {
                    self.over = true;
                }
            }
            Message::Disconnect => {
                self.peer_done = true;
                self.over = true;
            }
            Message::Keepalive | Message::Unknown(_) => {}
        }
    }

    /// Checks for a new offer from the peer.
    ///
    /// The peer writes an entry before it sends the entry's message, but it may be writing the next
    /// entry right now. All offers have the length of the first buffer, and the length is the last
    /// field. So an entry with another length is incomplete, and its own message will follow.
    fn check_directory(&mut self) {
        let Some(peer) = &self.peer else { return };
        while self.offers.len() < DIRECTORY as usize {
            let offset = self.expect_entry as usize * WINDOW_LEN;
            let mut entry = [0; WINDOW_LEN];
            if self.directory.read_at(offset, &mut entry).is_err() {
                return;
            }
            let window = Window::from_native(&entry);
            if window.len != peer.buffer.len {
                return;
            }
            let _ = self.directory.write_at(offset, &[0; WINDOW_LEN]);
            self.offers.push_back(window);
            if std::mem::replace(&mut self.both_offered, true) {
                self.in_flight = self.in_flight.saturating_sub(u64::from(window.len));
            }
            self.expect_entry = (self.expect_entry + 1) % DIRECTORY;
        }
    }

    fn check_mapping(&mut self, index: u32) {
        if index >= u32::from(self.sizes.mappings) {
            return;
        }
        let offset = DIRECTORY as usize * WINDOW_LEN + index as usize * MAPPING_LEN;
        let mut entry = [0; MAPPING_LEN];
        if self.directory.read_at(offset, &mut entry).is_ok() {
            self.iomaps
                .set_peer_mapping(index, Mapping::from_native(&entry));
        }
    }

    /// Sends due control messages: a farewell, an offer, credits.
    fn send_due(&mut self) {
        let Some(peer) = self.peer else { return };
        if self.over || self.farewell_sent {
            return;
        }
        if let Some(message) = self.farewell
            && self.sq_free > 0
        {
            self.farewell = None;
            self.farewell_sent = message == Message::Disconnect;
            self.post_message(message);
            if self.farewell_sent {
                return;
            }
        }
        // The peer sends no more data, so it needs no offers.
        if self.peer_done || self.sq_free < 2 {
            return;
        }
        let offer = self.freed >= self.half();
        if !offer && (self.consumed.wrapping_sub(self.credit_due) as i16) < 0 {
            return;
        }
        self.credit_due = self.consumed.wrapping_add(self.sizes.receive_queue / 2);
        let credit = Message::Credit(self.consumed.wrapping_add(self.sizes.receive_queue));
        if !offer {
            self.post_message(credit);
            return;
        }
        let rbuf = self.rbuf.remote();
        let window = Window {
            addr: rbuf.addr + u64::from(self.next_half * self.half()),
            key: rbuf.rkey,
            len: self.half(),
        };
        let entry = peer
            .directory
            .addr
            .wrapping_add(u64::from(self.next_entry) * WINDOW_LEN as u64);
        self.post_inline_pair(entry, peer.directory.key, &window.to_native(), credit);
        self.freed -= self.half();
        self.offered += self.half();
        self.next_half ^= 1;
        self.next_entry = (self.next_entry + 1) % peer.directory.len;
    }

    /// Sends a Write of zero bytes, which needs no receive at the peer. TCP detects a dead peer.
    pub(crate) fn keep_alive(&mut self) {
        if self.peer.is_some() && !self.over && !self.farewell_sent && self.sq_free > 0 {
            self.sq_free -= 1;
            self.post(&[SendWr::write(1 << 32, 0, 0, &[]).signaled()]);
        }
    }

    /// Handles the loss of the connection.
    pub(crate) fn lost(&mut self) {
        if self.over {
            return;
        }
        let error = match self.qp.fault() {
            // Closed gracefully, by this end or by a peer that sent no farewell.
            None => None,
            Some(fault) if fault.blame == Blame::Transport => Some(Errno::CONNRESET),
            Some(_) => Some(Errno::IO),
        };
        self.over = true;
        self.peer_done = true;
        if !self.farewell_sent {
            self.error = self.error.or(error);
        }
    }

    /// Aborts the connection because the peer violated the protocol.
    fn fail(&mut self, error: Errno) {
        tracing::debug!(qp = self.qp.num(), %error, "the peer violated the rsocket protocol");
        self.error = self.error.or(Some(error));
        self.over = true;
        self.peer_done = true;
        self.qp.abort();
    }

    /// Shuts down one or both directions. The message to the peer follows the data.
    pub(crate) fn shut_down(&mut self, read: bool, write: bool) {
        let before = (self.reading, self.writing);
        self.reading &= !read;
        self.writing &= !write;
        if self.over || self.farewell_sent || before == (self.reading, self.writing) {
            return;
        }
        if self.writing {
            // The protocol has no message for the end of reading alone.
            return;
        }
        self.send_tail();
        let all = !self.reading || self.peer_done;
        self.farewell = Some(if all {
            Message::Disconnect
        } else {
            Message::Shutdown
        });
        self.send_due();
    }

    /// Returns `true` if everything posted has been sent, or cannot be sent any more.
    pub(crate) fn is_drained(&self) -> bool {
        self.over && !self.farewell_sent
            || self.farewell.is_none() && self.sq_free == u32::from(self.sizes.send_queue)
            || self.qp.state() == State::Error
    }

    /// Returns the number of free send work requests. It grows while the peer accepts data.
    pub(crate) const fn free_requests(&self) -> u32 {
        self.sq_free
    }

    pub(crate) const fn take_error(&mut self) -> Option<Errno> {
        self.error.take()
    }

    pub(crate) const fn error(&self) -> Option<Errno> {
        self.error
    }

    /// Returns `true` if nothing can be sent or received any more. Received data may still be
    /// unread.
    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }

    /// Ends the connection. Must be called before the buffers are freed.
    pub(crate) fn destroy(&mut self, abort: bool) {
        if abort {
            self.qp.abort();
        }
        self.over = true;
        self.qp.destroy();
        self.iomaps.clear(self.pd.context());
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.destroy(false);
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
