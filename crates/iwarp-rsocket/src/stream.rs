//! One end of a connection: its queue pair, its buffers, and the counts of what may be sent.
//!
//! The receive buffer is used in halves. Each half is offered to the peer through an entry of the peer's directory. The peer
//! fills it with RDMA Writes, each announced by a message. When the program has read as many octets as a half has, a half is
//! offered again. Messages are counted, too: the peer may have as many under way as we have receives. `Credit` messages
//! raise both limits.
//!
//! Nothing here waits. The peer is not trusted: its messages are checked against what it was offered.

mod iomap;
mod recv;
mod send;

pub(crate) use iomap::Iomaps;
pub(crate) use send::Gather;

use crate::errno::{Errno, Result};
use crate::settings::Sizes;
use crate::wire::{
    DIRECTORY, Hello, MAPPING_LEN, MESSAGE_LEN, Mapping, Message, WINDOW_LEN, Window,
};
use iwarp::runtime::{
    CompletionQueue, Context, Cqe, QpAttributes, QueuePair, RecvWr, SendFlags, SendOp, SendWr, Sge,
    State, WcStatus,
};
use iwarp::verbs::{MemoryRegion, ProtectionDomain};
use iwarp::{Access, Blame};
use std::collections::VecDeque;

/// Send work requests that data leave free for control messages.
const CONTROL_SLOTS: u32 = 4;
/// Receives of the peer that data leave free for control messages: a kernel's RNIC terminates a connection whose receives
/// have run out, where ours waits.
const CONTROL_CREDITS: u16 = 4;
/// Work request numbers of receives. Those of sends tell how many requests and octets of the buffer they free.
const RECEIVE: u64 = 1 << 63;
/// Most rounds of one look at the completion queue, so that a fast peer cannot keep a call forever.
const ROUNDS: u32 = 4;
const BATCH: usize = 32;

/// One end of a connection.
pub(crate) struct Stream {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pd: ProtectionDomain,
    sizes: Sizes,

    /// The receive buffer.
    rbuf: MemoryRegion,
    /// Position of the next octet to read.
    read_at: u32,
    /// Octets announced and not read.
    unread: u32,
    /// Lengths of the messages that announced them.
    announced: VecDeque<u32>,
    /// Octets offered to the peer and not announced.
    offered: u32,
    /// Octets read and not offered again.
    freed: u32,
    /// The half to offer next: 0 or 1.
    next_half: u32,
    /// Where messages land.
    slots: MemoryRegion,
    /// Slots whose receive has to be posted again.
    idle_slots: Vec<u16>,
    /// Messages about data read to their end, modulo 2^16.
    taken: u16,
    /// Credits are due from this number of them on.
    credit_due: u16,

    /// The peer's directory, where we offer buffers.
    peer: Option<Hello>,
    next_entry: u32,

    sbuf: MemoryRegion,
    /// Position of the next octet, and octets in use.
    write_at: u32,
    in_use: u32,
    /// Send work requests that are free.
    sq_free: u32,
    /// Messages about data that were sent, and the number up to which they may be sent, modulo 2^16.
    sent: u16,
    allowed: u16,
    /// Where the peer offers buffers: its entries, then mapped buffers.
    directory: MemoryRegion,
    /// The entry that the peer fills next.
    expect_entry: u32,
    /// Offers not used up, the oldest first.
    targets: VecDeque<Window>,
    /// A message to send as soon as there is room.
    farewell: Option<Message>,

    pub(crate) iomaps: Iomaps,

    /// The program still reads, and still writes.
    reading: bool,
    writing: bool,
    /// The peer writes no more.
    peer_done: bool,
    /// No more can be sent or received.
    over: bool,
    /// We have sent the farewell.
    said_bye: bool,
    /// An error that will be reported once.
    error: Option<Errno>,
}

impl Stream {
    /// Makes a stream on a device, with all receives posted. Its queue pair has no connection yet.
    ///
    /// # Errors
    /// ENOMEM, EMFILE.
    pub(crate) fn new(ctx: &Context, sizes: Sizes) -> Result<Self> {
        let sizes = sizes.bounded();
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
        let qp = ctx.create_qp(&QpAttributes {
            pd: pd.number(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            unreliable: false,
            max_send_wr: sq,
            max_recv_wr: rq,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: u32::from(sizes.inline).max(MAPPING_LEN as u32),
            signal_all: false,
            // The peer may begin with an RDMA Read of no octets (RFC 6581 section 9).
            max_ird: 4,
            max_ord: 4,
        })?;
        // From here on it accepts receives.
        qp.modify(State::Init)?;
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
            // The first half is offered in the private data.
            offered: half,
            freed: half,
            next_half: 1,
            slots,
            idle_slots: (0..sizes.receive_queue).collect(),
            taken: 0,
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
            targets: VecDeque::with_capacity(DIRECTORY as usize + 1),
            farewell: None,
            iomaps: Iomaps::default(),
            reading: true,
            writing: true,
            peer_done: false,
            over: false,
            said_bye: false,
            error: None,
        };
        stream.post_receives()?;
        Ok(stream)
    }

    /// Returns what to tell the peer.
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

    /// Takes what the peer has told.
    pub(crate) fn greet(&mut self, peer: &Hello) {
        self.peer = Some(*peer);
        self.allowed = peer.credits;
        self.targets.push_back(peer.buffer);
        self.iomaps.set_room(peer.mappings);
    }

    /// Returns the sizes in use.
    pub(crate) const fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    const fn half(&self) -> u32 {
        self.sizes.receive_buffer / 2
    }

    /// Takes completions and acts on them. With `drive` the thread moves octets itself; otherwise it takes only completions that
    /// are there.
    pub(crate) fn process(&mut self, drive: bool) {
        self.settle();
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
        self.settle();
    }

    fn complete(&mut self, cqe: &Cqe) {
        if cqe.status != WcStatus::Success {
            self.lost();
            return;
        }
        if cqe.wr_id & RECEIVE == 0 {
            self.sq_free += (cqe.wr_id >> 32) as u32;
            self.in_use -= cqe.wr_id as u32;
            return;
        }
        let slot = cqe.wr_id as u16;
        let mut octets = [0; MESSAGE_LEN];
        if cqe.byte_len as usize != MESSAGE_LEN
            || self
                .slots
                .read_at(usize::from(slot) * MESSAGE_LEN, &mut octets)
                .is_err()
        {
            self.fail(Errno::PROTO);
            return;
        }
        self.idle_slots.push(slot);
        self.message(Message::decode(octets));
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Data(n) => self.announce(n),
            Message::Credit(upto) => {
                self.allowed = upto;
                self.look_at_directory();
            }
            Message::Mapping(index) => self.look_at_mapping(index),
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

    /// Looks whether the peer has offered another buffer.
    ///
    /// An entry is written before its message, but the next entry may be half-written at this moment. Its length is at its end
    /// and is always that of the first buffer, so an entry with another length is not complete yet; its own message will follow.
    fn look_at_directory(&mut self) {
        let Some(peer) = &self.peer else { return };
        while self.targets.len() < DIRECTORY as usize {
            let at = self.expect_entry as usize * WINDOW_LEN;
            let mut entry = [0; WINDOW_LEN];
            if self.directory.read_at(at, &mut entry).is_err() {
                return;
            }
            let window = Window::from_native(&entry);
            if window.len != peer.buffer.len {
                return;
            }
            let _ = self.directory.write_at(at, &[0; WINDOW_LEN]);
            self.targets.push_back(window);
            self.expect_entry = (self.expect_entry + 1) % DIRECTORY;
        }
    }

    fn look_at_mapping(&mut self, index: u32) {
        if index >= u32::from(self.sizes.mappings) {
            return;
        }
        let at = DIRECTORY as usize * WINDOW_LEN + index as usize * MAPPING_LEN;
        let mut entry = [0; MAPPING_LEN];
        if self.directory.read_at(at, &mut entry).is_ok() {
            self.iomaps.learn(index, Mapping::from_native(&entry));
        }
    }

    /// Sends the messages that are due to the peer: a farewell, an offer, credits.
    fn settle(&mut self) {
        let Some(peer) = self.peer else { return };
        if self.over || self.said_bye {
            return;
        }
        if let Some(message) = self.farewell
            && self.sq_free > 0
        {
            self.farewell = None;
            self.said_bye = message == Message::Disconnect;
            self.post_message(message);
            if self.said_bye {
                return;
            }
        }
        // No more will come.
        if self.peer_done || self.sq_free < 2 {
            return;
        }
        let offer = self.freed >= self.half();
        if !offer && (self.taken.wrapping_sub(self.credit_due) as i16) < 0 {
            return;
        }
        self.credit_due = self.taken.wrapping_add(self.sizes.receive_queue / 2);
        let credit = Message::Credit(self.taken.wrapping_add(self.sizes.receive_queue));
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

    fn post_message(&mut self, message: Message) {
        let octets = message.encode();
        let pieces: [&[u8]; 1] = [&octets];
        self.sq_free -= 1;
        self.post(&[SendWr::inline(1 << 32, &pieces).signaled()]);
    }

    /// Writes a few octets into the peer's memory, and sends the message about them.
    fn post_inline_pair(&mut self, addr: u64, rkey: u32, octets: &[u8], message: Message) {
        let message = message.encode();
        let (data, text): ([&[u8]; 1], [&[u8]; 1]) = ([octets], [&message]);
        let write = SendWr {
            wr_id: 0,
            op: SendOp::Write {
                remote_addr: addr,
                rkey,
            },
            flags: SendFlags::INLINE,
            sges: &[],
            inline: &data,
        };
        self.sq_free -= 2;
        self.post(&[write, SendWr::inline(2 << 32, &text).signaled()]);
    }

    /// Writes octets of the send buffer into the peer's memory, and sends a message about them if there is one.
    fn post_buffered(
        &mut self,
        addr: u64,
        rkey: u32,
        sges: &[Sge],
        len: u32,
        message: Option<Message>,
    ) {
        let write = SendWr::write(0, addr, rkey, sges);
        match message.map(Message::encode) {
            Some(message) => {
                let text: [&[u8]; 1] = [&message];
                self.sq_free -= 2;
                self.post(&[
                    write,
                    SendWr::inline(2 << 32 | u64::from(len), &text).signaled(),
                ]);
            }
            None => {
                self.sq_free -= 1;
                let write = SendWr {
                    wr_id: 1 << 32 | u64::from(len),
                    ..write
                };
                self.post(&[write.signaled()]);
            }
        }
    }

    fn post(&mut self, wrs: &[SendWr<'_>]) {
        if let Err(error) = self.qp.post_send(wrs) {
            tracing::debug!(qp = self.qp.num(), %error, "send work request not taken");
            self.lost();
        }
    }

    fn post_receives(&mut self) -> Result<()> {
        let key = self.slots.lkey();
        let base = self.slots.remote().addr;
        for chunk in self.idle_slots.chunks(BATCH) {
            let mut sges = [Sge::default(); BATCH];
            for (sge, slot) in sges.iter_mut().zip(chunk) {
                let addr = base + u64::from(*slot) * MESSAGE_LEN as u64;
                *sge = Sge {
                    addr,
                    len: MESSAGE_LEN as u32,
                    lkey: key,
                };
            }
            let mut wrs = [RecvWr {
                wr_id: 0,
                sges: &[],
            }; BATCH];
            for ((wr, slot), sge) in wrs.iter_mut().zip(chunk).zip(&sges) {
                *wr = RecvWr {
                    wr_id: RECEIVE | u64::from(*slot),
                    sges: std::slice::from_ref(sge),
                };
            }
            self.qp.post_recv(&wrs[..chunk.len()])?;
        }
        self.idle_slots.clear();
        Ok(())
    }

    /// Sends a message that needs no receive at the peer and no answer. TCP finds out whether the peer is still there.
    pub(crate) fn keep_alive(&mut self) {
        if self.peer.is_some() && !self.over && !self.said_bye && self.sq_free > 0 {
            self.sq_free -= 1;
            self.post(&[SendWr::write(1 << 32, 0, 0, &[]).signaled()]);
        }
    }

    /// Handles the end of the connection, with or without a farewell.
    pub(crate) fn lost(&mut self) {
        if self.over {
            return;
        }
        let error = match self.qp.fault() {
            // It is closed in good order, by us or by a peer that sent no farewell.
            None => None,
            Some(fault) if fault.blame == Blame::Transport => Some(Errno::CONNRESET),
            Some(_) => Some(Errno::IO),
        };
        self.over = true;
        self.peer_done = true;
        if !self.said_bye {
            self.error = self.error.or(error);
        }
    }

    /// Handles a peer that breaks the protocol of rsockets.
    fn fail(&mut self, error: Errno) {
        tracing::debug!(qp = self.qp.num(), %error, "the peer breaks the rsocket protocol");
        self.error = self.error.or(Some(error));
        self.over = true;
        self.peer_done = true;
        self.qp.abort();
    }

    /// The program closes one direction or both. The peer is told behind the data.
    pub(crate) fn shut(&mut self, read: bool, write: bool) {
        let before = (self.reading, self.writing);
        self.reading &= !read;
        self.writing &= !write;
        if self.over || self.said_bye || before == (self.reading, self.writing) {
            return;
        }
        if self.writing {
            // Only reading is closed. The protocol has no message for that.
            return;
        }
        let all = !self.reading || self.peer_done;
        self.farewell = Some(if all {
            Message::Disconnect
        } else {
            Message::Shutdown
        });
        self.settle();
    }

    /// Returns `true` if everything posted has been sent, or never will be.
    pub(crate) fn is_drained(&self) -> bool {
        self.over && !self.said_bye
            || self.farewell.is_none() && self.sq_free == u32::from(self.sizes.send_queue)
            || self.qp.state() == State::Error
    }

    /// Returns how many send work requests are free. The number grows while the peer takes what was sent.
    pub(crate) const fn free_requests(&self) -> u32 {
        self.sq_free
    }

    /// Returns the error that has not been reported.
    pub(crate) const fn take_error(&mut self) -> Option<Errno> {
        self.error.take()
    }

    pub(crate) const fn error(&self) -> Option<Errno> {
        self.error
    }

    /// Returns `true` if no more can be sent or received, except what is in the buffer.
    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }

    /// Ends the connection. Call it before the buffers are freed.
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
mod tests {
    use super::*;
    use crate::settings::Settings;

    /// What an end says last waits until there is a request for it.
    #[test]
    fn a_farewell_waits_for_a_free_request() {
        for (read, last) in [(true, Message::Disconnect), (false, Message::Shutdown)] {
            let device = iwarp::Device::by_address([127, 0, 0, 1].into()).unwrap();
            let ctx = Context::open(&device, iwarp::Config::default()).unwrap();
            let mut stream = Stream::new(&ctx, Settings::get().sizes).unwrap();
            let peer = stream.hello();
            stream.greet(&peer);
            // All are under way, as to a peer that takes nothing for a while.
            let all = std::mem::take(&mut stream.sq_free);
            stream.shut(read, true);
            stream.settle();
            assert_eq!(stream.farewell, Some(last));
            assert!(!stream.is_drained());
            stream.sq_free = all;
            stream.settle();
            assert_eq!(stream.farewell, None);
        }
    }
}
