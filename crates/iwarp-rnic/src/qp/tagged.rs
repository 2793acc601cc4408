//! Tag matching: delivery of messages on a tag-matching shared receive queue, and the Reads of
//! rendezvous (`ibv_post_srq_ops(3)`). `tags` decides which buffer matches a message.
//!
//! Like other messages, a tagged message is first placed in a receive. When it is complete, its
//! headers are copied from the receive, because peer and program may change the receive at any
//! time. If a buffer matches the tag, the payload is copied to the buffer, and the receive is
//! reused. A rendezvous request starts a Read in the send queue. When the Read is answered, a
//! message without payload notifies the sender (`IBV_TMH_FIN`), and the buffer completes.
//!
//! These Reads and messages are internal requests. The send queue has additional slots for them
//! ([`INTERNAL_REQUESTS`]). If all are in use, further rendezvous wait in the list of tags.

use super::admit::Refusal;
use super::place::for_each_part;
use super::rx::Step;
use super::send_queue::Awaited;
use super::{Direction, Env, Host, QueuePair, State};
use crate::memory::{AccessError, Memory, MemoryTable};
use crate::receive_queue::TakenRecv;
use crate::tags::{Arrival, MAX_TAG_SGE, MAX_TAGS, TagDone, TagRead};
use crate::tally::Counted;
use crate::{Access, AllocError, Cqe, RecvWr, SendOp, SendWr, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::{Header, UNTAGGED_HEADER_LEN, UntaggedHeader};
use iwarp_proto::tag_matching::{Operation, Rvh, Tmh};

/// Maximum internal requests in the send queue: each active rendezvous needs a Read and the message
/// after it.
pub(super) const INTERNAL_REQUESTS: u32 = 16;
/// Bytes copied in one step; the buffer is on the stack.
const COPY_STEP: u32 = 256;
/// Length of the tag-matching header and the rendezvous header.
const HEADERS_LEN: usize = Tmh::LEN + Rvh::LEN;

/// Additional state of a queue pair with a tag-matching receive queue.
#[derive(Debug)]
pub(super) struct Tagged {
    /// The buffer that a message has matched, or the sink of a Read.
    buffer: TakenRecv,
    /// Number of unanswered rendezvous Reads.
    reading: u32,
    /// The last receive taken was not needed, and could not be returned to its full queue.
    pub(super) spare: bool,
}

impl Tagged {
    pub(super) fn new(on: bool) -> Result<Self, AllocError> {
        Ok(Self {
            buffer: TakenRecv::new(if on { MAX_TAG_SGE } else { 0 })?,
            reading: 0,
            spare: false,
        })
    }

    pub(super) const fn reset(&mut self) {
        self.reading = 0;
        self.spare = false;
    }
}

type Headers = (Option<Tmh>, Option<Rvh>);

impl QueuePair {
    /// Delivers a complete Send to the buffer that matches its tag, or to its receive.
    #[cold]
    #[inline(never)]
    pub(super) fn deliver_tagged<H: Host>(
        &mut self,
        h: UntaggedHeader,
        byte_len: u32,
        segment_len: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        let cqe = self.send_cqe(h, byte_len);
        let mut octets = [0; HEADERS_LEN];
        let wanted = cqe.byte_len.min(HEADERS_LEN as u32);
        let message = octets.get_mut(..wanted as usize).unwrap_or_default();
        let read = self.read_receive(env.memory, 0, message);
        let headers = (Tmh::parse(message), Rvh::parse(message));
        let payload = cqe.byte_len.saturating_sub(Tmh::LEN as u32);
        let arrival = match read {
            Ok(()) => self.match_tag(headers, payload, env.host),
            Err(e) => return self.refuse_tagged(Refusal::Memory(e), h, segment_len, env.host),
        };
        match arrival {
            Arrival::NoTag => self.finish_receive_as(WcOpcode::TagNone, cqe, env.host),
            Arrival::Unexpected => self.finish_receive_as(WcOpcode::TagRecv, cqe, env.host),
            Arrival::Eager => {
                let wr_id = self.tagged.buffer.wr_id;
                let copied = self.copy_to_buffer(payload, env.memory);
                self.return_receive(env.host);
                if let Err(e) = copied {
                    self.fail_buffer(wr_id, WcStatus::LocalProtection, env.host);
                    return self.refuse_tagged(Refusal::Memory(e), h, segment_len, env.host);
                }
                let valid = WcFlags::TAG_MATCH | WcFlags::TAG_DATA;
                let cqe = matched(cqe, (wr_id, payload), valid, headers.0);
                self.complete_tagged(cqe, env.host);
            }
            Arrival::Rendezvous(wr_id) => {
                self.return_receive(env.host);
                let len = headers.1.map_or(0, |rvh| rvh.len);
                let cqe = matched(cqe, (wr_id, len), WcFlags::TAG_MATCH, headers.0);
                self.complete_tagged(cqe, env.host);
                self.start_reads(env.host);
            }
            Arrival::TooLong(wr_id) => {
                self.return_receive(env.host);
                self.fail_buffer(wr_id, WcStatus::LocalLength, env.host);
                return self.refuse_tagged(Refusal::TooLong, h, segment_len, env.host);
            }
        }
        Step::Next
    }

    /// Decides how a message is processed. If this end cannot send Reads, the program handles
    /// rendezvous requests.
    fn match_tag<H: Host>(&mut self, headers: Headers, payload: u32, host: &mut H) -> Arrival {
        let (qp_num, reads) = (self.config.qp_num, self.sq.ord() > 0);
        let buffer = &mut self.tagged.buffer;
        let arrival = host.with_shared_receive(|queue| {
            let tags = queue.tags()?;
            Some(tags.arrive(qp_num, headers, payload, reads, buffer))
        });
        arrival.flatten().unwrap_or(Arrival::NoTag)
    }

    /// Completes the receive that holds the message.
    fn finish_receive_as<H: Host>(&mut self, opcode: WcOpcode, cqe: Cqe, host: &mut H) {
        self.finish_counted_receive(Cqe { opcode, ..cqe }, host);
    }

    /// Copies octets out of the receive that holds the message.
    fn read_receive<M: Memory>(
        &self,
        memory: &MemoryTable<M>,
        skip: u32,
        mut to: &mut [u8],
    ) -> Result<(), AccessError> {
        let (accessor, len) = (self.accessor(), to.len() as u32);
        for_each_part(self.rx.receive.sges(), skip, len, |stag, addr, len| {
            let (now, later) = core::mem::take(&mut to)
                .split_at_mut_checked(len as usize)
                .unwrap_or_default();
            to = later;
            memory.read((stag, addr, len), Access::empty(), accessor, now)
        })
    }

    /// Copies octets to the matched buffer, from this offset on.
    fn write_buffer<M: Memory>(
        &self,
        memory: &MemoryTable<M>,
        skip: u32,
        mut from: &[u8],
    ) -> Result<(), AccessError> {
        let (accessor, len) = (self.accessor(), from.len() as u32);
        for_each_part(self.tagged.buffer.sges(), skip, len, |stag, addr, len| {
            let (now, later) = from.split_at_checked(len as usize).unwrap_or((from, &[]));
            from = later;
            memory.write((stag, addr), Access::LOCAL_WRITE, accessor, now)
        })
    }

    /// Copies the payload of an eager message, which fits into the matched buffer.
    fn copy_to_buffer<M: Memory>(
        &self,
        payload: u32,
        memory: &MemoryTable<M>,
    ) -> Result<(), AccessError> {
        let mut buffer = [0; COPY_STEP as usize];
        let mut done = 0u32;
        while done < payload {
            let len = payload.wrapping_sub(done).min(COPY_STEP);
            let part = buffer.get_mut(..len as usize).unwrap_or_default();
            self.read_receive(memory, done.wrapping_add(Tmh::LEN as u32), part)?;
            self.write_buffer(memory, done, part)?;
            done = done.wrapping_add(len);
        }
        Ok(())
    }

    /// Posts the receive that held the message again.
    fn return_receive<H: Host>(&mut self, host: &mut H) {
        self.rx.receiving = false;
        let wr = RecvWr {
            wr_id: self.rx.receive.wr_id,
            sges: self.rx.receive.sges(),
        };
        let returned = host.with_shared_receive(|queue| queue.post(&wr).is_ok());
        // If the program has filled the queue meanwhile, the next message of this queue pair uses
        // the receive.
        self.tagged.spare = returned != Some(true);
    }

    /// Completes a buffer with an error. The stream ends as well.
    fn fail_buffer<H: Host>(&mut self, wr_id: u64, status: WcStatus, host: &mut H) {
        self.complete_tagged(
            Cqe {
                wr_id,
                status,
                opcode: WcOpcode::TagRecv,
                qp_num: self.config.qp_num,
                ..Cqe::default()
            },
            host,
        );
    }

    /// Completes a buffer. A rendezvous request also writes a completion, which is not counted as a
    /// receive.
    fn complete_tagged<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        if cqe.status != WcStatus::Success {
            self.sq.tally.add_failed(Counted::Recv);
        } else if cqe.flags.contains(WcFlags::TAG_DATA) {
            self.sq.tally.add(Counted::Recv, cqe.byte_len);
        }
        self.counters.completions = self.counters.completions.wrapping_add(1);
        host.complete(Direction::Recv, cqe);
    }

    fn refuse_tagged<H: Host>(
        &mut self,
        refusal: Refusal,
        h: UntaggedHeader,
        segment_len: u32,
        host: &mut H,
    ) -> Step {
        let ulpdu_len = (UNTAGGED_HEADER_LEN as u32).wrapping_add(segment_len);
        self.refuse_by_header(refusal, Some(Header::Untagged(h)), ulpdu_len as u16, host)
    }

    /// Starts the Reads of waiting rendezvous, as far as the send queue has slots for them.
    pub(super) fn start_reads<H: Host>(&mut self, host: &mut H) {
        // Each rendezvous needs a slot for its Read and one for the message after it.
        while self.state() != State::Error
            && self
                .sq
                .internal_requests()
                .wrapping_add(self.tagged.reading)
                < INTERNAL_REQUESTS - 1
        {
            let Some(read) = self.next_read(host) else {
                return;
            };
            let op = SendOp::Read {
                remote_addr: read.source.va,
                rkey: read.source.rkey,
            };
            let wr_id = u64::from(read.handle);
            let sges = self.tagged.buffer.sges();
            let wr = SendWr::new(wr_id, op, sges);
            if self.sq.push_internal(&wr, read.source.len).is_err() {
                // This would be a bug, because free slots were checked; do not lose the buffer.
                self.end_read(read.handle, WcStatus::General, host);
                return;
            }
            self.tagged.reading = self.tagged.reading.wrapping_add(1);
        }
    }

    /// Returns the next rendezvous of this queue pair that waits for its Read.
    fn next_read<H: Host>(&mut self, host: &mut H) -> Option<TagRead> {
        let qp_num = self.config.qp_num;
        let sink = &mut self.tagged.buffer;
        host.with_shared_receive(|queue| queue.tags()?.next_read(qp_num, sink))?
    }

    /// Handles the response to an internal Read: notifies the sender and completes the buffer. When
    /// the notification is written, more Reads may start.
    #[cold]
    #[inline(never)]
    pub(super) fn finish_internal_read<H: Host>(&mut self, awaited: &Awaited, host: &mut H) {
        let Some(slot) = self.sq.slot(awaited.seq) else {
            return;
        };
        let handle = slot.wr_id as u32;
        self.tagged.reading = self.tagged.reading.saturating_sub(1);
        if let Some(done) = self.end_read(handle, WcStatus::Success, host) {
            let finish = Tmh {
                operation: Operation::Finish,
                ..done.request
            };
            let octets: &[u8] = &finish.octets();
            let pieces = [octets];
            let wr = SendWr::inline(0, &pieces);
            // The slot was reserved with the Read.
            let _ = self.sq.push_internal(&wr, Tmh::LEN as u32);
        }
    }

    /// Ends a rendezvous, and completes its buffer with this status.
    fn end_read<H: Host>(
        &mut self,
        handle: u32,
        status: WcStatus,
        host: &mut H,
    ) -> Option<TagDone> {
        let done = host.with_shared_receive(|queue| queue.tags()?.end_read(handle))??;
        if status == WcStatus::Success {
            let cqe = Cqe {
                wr_id: done.wr_id,
                opcode: WcOpcode::TagRecv,
                byte_len: done.len,
                qp_num: self.config.qp_num,
                flags: WcFlags::TAG_DATA,
                ..Cqe::default()
            };
            self.complete_tagged(cqe, host);
        } else {
            self.fail_buffer(done.wr_id, status, host);
        }
        Some(done)
    }

    /// Ends all rendezvous of a queue pair in error: the failed one, the flushed ones and the
    /// waiting ones.
    #[cold]
    #[inline(never)]
    pub(super) fn flush_reads<H: Host>(&mut self, host: &mut H) {
        self.tagged.reading = 0;
        while let Some((handle, status)) = self.sq.next_flushed() {
            self.end_read(handle, status, host);
        }
        // No more rendezvous can arrive, because nothing is received in this state.
        for _ in 0..MAX_TAGS {
            let Some(read) = self.next_read(host) else {
                break;
            };
            self.end_read(read.handle, WcStatus::Flushed, host);
        }
    }

    #[cold]
    pub(super) fn forget_reads<H: Host>(&mut self, host: &mut H) {
        let qp_num = self.config.qp_num;
        host.with_shared_receive(|queue| queue.tags().map(|tags| tags.forget(qp_num)));
        self.tagged.reset();
    }
}

/// Returns the completion of a buffer, derived from the receive's completion.
fn matched(cqe: Cqe, (wr_id, byte_len): (u64, u32), flags: WcFlags, tmh: Option<Tmh>) -> Cqe {
    let (tag, app_ctx) = tmh.map_or((0, 0), |tmh| (tmh.tag, tmh.app_ctx));
    Cqe {
        wr_id,
        byte_len,
        opcode: WcOpcode::TagRecv,
        flags: cqe.flags | flags,
        vendor_err: app_ctx,
        timestamp_ns: tag,
        ..cqe
    }
}
