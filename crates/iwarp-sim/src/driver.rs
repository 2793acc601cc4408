//! Drives a queue pair as a runtime does, with simulated sockets.
//!
//! The driver acts only when the queue pair requests it. If a wake-up is lost, the endpoint stops,
//! and the checks detect that.

use iwarp_rnic::cq::{CompletionQueue, Pushed};
use iwarp_rnic::memory::MemoryTable;
use iwarp_rnic::qp::{
    Direction, Env, Events, Host, RxBuffer, RxInterest, RxPlan, RxStatus, State, StreamWish,
    TxFill, TxPlan,
};
use iwarp_rnic::receive_queue::TakenRecv;
use iwarp_rnic::{Cqe, Time, Work};

use crate::net::Peeked;
use crate::plant::{Plant, Planted};
use crate::raw::{self, SimRange};
use crate::world::{CRC32C, Endpoint, Event, Node, Srq, World};

/// The [`Host`] of one queue pair during one call: the completion queues and the shared receive
/// queue of its node.
pub struct SimHost<'a> {
    cqs: &'a mut [CompletionQueue],
    poll_due: &'a mut [bool],
    srq: Option<&'a mut Srq>,
    send_cq: usize,
    recv_cq: usize,
    planted: &'a mut Planted,
    /// Completion queues that raised an event during the call.
    notified: Vec<usize>,
    overflow: bool,
    /// A completion that a planted bug writes after the next one.
    swapped: Option<(usize, Cqe)>,
}

impl SimHost<'_> {
    fn push(&mut self, cq: usize, cqe: Cqe) {
        match self.cqs[cq].push(cqe) {
            Pushed::Quiet => {}
            Pushed::Notify => {
                if !self.planted.happens(Plant::LoseNotify) && !self.poll_due[cq] {
                    self.poll_due[cq] = true;
                    self.notified.push(cq);
                }
            }
            Pushed::Overflow { .. } => self.overflow = true,
        }
    }
}

impl Host for SimHost<'_> {
    type Memory = SimRange;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        let cq = match direction {
            Direction::Send => self.send_cq,
            Direction::Recv => self.recv_cq,
        };
        if self.planted.happens(Plant::DropCompletion) {
            return;
        }
        if self.planted.happens(Plant::SwapCompletions) {
            self.swapped = Some((cq, cqe));
            return;
        }
        self.push(cq, cqe);
        if self.planted.happens(Plant::RepeatCompletion) {
            self.push(cq, cqe);
        }
        if self.swapped.is_some_and(|(c, _)| c == cq)
            && let Some((cq, cqe)) = self.swapped.take()
        {
            self.push(cq, cqe);
        }
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        let Some(srq) = &mut self.srq else {
            return false;
        };
        let (got, limit) = srq.queue.take(taken);
        srq.limit_events += u32::from(limit);
        got
    }
}

/// An endpoint and the parts of its node, borrowed separately for one call.
pub struct Call<'a> {
    /// The endpoint.
    pub ep: &'a mut Endpoint,
    /// The STag table.
    pub table: &'a mut MemoryTable<SimRange>,
    /// The queues that completions go to.
    pub host: SimHost<'a>,
}

impl Call<'_> {
    fn fill(&mut self, plan: &mut TxPlan) -> TxFill {
        self.ep.qp.tx_fill(
            plan,
            &mut Env {
                memory: self.table,
                crc32c: CRC32C,
                host: &mut self.host,
            },
        )
    }
}

impl World {
    /// Calls `f` with an endpoint, then performs what its queue pair requests.
    pub fn call<R>(&mut self, e: usize, f: impl FnOnce(&mut Call<'_>) -> R) -> R {
        let ep = &mut self.eps[e];
        let node_index = ep.node;
        let Node {
            table,
            cqs,
            poll_due,
            srq,
            ..
        } = &mut self.nodes[node_index];
        let shared = ep.qp.config().shared_receive;
        let mut call = Call {
            host: SimHost {
                cqs,
                poll_due,
                srq: srq.as_mut().filter(|_| shared),
                send_cq: ep.send_cq,
                recv_cq: ep.recv_cq,
                planted: &mut self.planted,
                notified: Vec::new(),
                overflow: false,
                swapped: None,
            },
            ep,
            table,
        };
        let result = f(&mut call);
        let due = call.ep.qp.completions_due() && !std::mem::replace(&mut call.ep.completing, true);
        if let Some((cq, cqe)) = call.host.swapped.take() {
            call.host.push(cq, cqe);
        }
        let overflow = call.host.overflow;
        for cq in call.host.notified {
            let delay = self.rng.below(20_000);
            self.after(delay, Event::Poll(node_index, cq));
        }
        if due {
            let delay = self.rng.below(1_000);
            self.after(delay, Event::Complete(e));
        }
        if overflow {
            self.fail(|| format!("endpoint {e}: a completion queue overflowed, but had room"));
        }
        self.serve_requests(e);
        result
    }

    /// Writes pending completions. Anything may have happened since they became pending.
    pub fn complete(&mut self, e: usize) {
        self.eps[e].completing = false;
        self.call(e, |c| {
            let work = c.ep.qp.complete_due(&mut c.host);
            assert_eq!(work == Work::More, c.ep.qp.completions_due());
        });
    }

    /// Performs what the queue pair requests: schedules sending and polling, and shuts down or
    /// closes the stream.
    fn serve_requests(&mut self, e: usize) {
        let ep = &mut self.eps[e];
        let events = ep.qp.take_events();
        ep.events |= events;
        self.reach.state(e, &ep.qp);
        self.reach.events(events);
        if ep.gone {
            return;
        }
        if ep.qp.wants_tx() && !ep.tx_blocked && !ep.tx_due {
            ep.tx_due = true;
            if !self.planted.happens(Plant::LoseWakeup) {
                let delay = self.rng.below(3_000);
                self.after(delay, Event::Transmit(e));
            }
        }
        let ep = &mut self.eps[e];
        if ep.queue_full && ep.qp.sends_outstanding() < ep.qp.config().max_send_wr {
            ep.queue_full = false;
            self.schedule_app(e);
        }
        let ep = &mut self.eps[e];
        if events.contains(Events::SQ_DRAINED) && ep.sqd {
            let delay = self.rng.below(50_000);
            self.after(delay, Event::Resume(e));
        }
        let ep = &mut self.eps[e];
        if let Some(at) = ep.qp.poll_at()
            && ep.timer.is_none_or(|timer| at < timer)
        {
            ep.timer = Some(at);
            self.at(at.as_nanos(), Event::Time(e));
        }
        match self.eps[e].qp.stream_wish() {
            StreamWish::Keep => {}
            StreamWish::ShutdownWrite => {
                self.log(|| format!("ep {e}: shutdown"));
                let at = self.pipes[e].shutdown(self.now);
                self.at(at, Event::Readable(e ^ 1));
                self.eps[e].fin_sent = true;
                self.call(e, |c| c.ep.qp.shutdown_done(&mut c.host));
                // From now on the queue pair reads and discards, even octets that it would have
                // refused before.
                let now = self.now;
                self.at(now, Event::Readable(e));
            }
            // A runtime would keep the stream open until `not_before`. No check depends on that.
            StreamWish::Leave { cut: false, .. } => {
                self.log(|| format!("ep {e}: close"));
                let at = self.pipes[e].shutdown(self.now);
                self.at(at, Event::Readable(e ^ 1));
                // Octets that the peer writes are discarded without limit.
                self.pipes[e ^ 1].reset(self.now);
                let now = self.now;
                self.at(now, Event::Writable(e ^ 1));
                self.close_socket(e);
            }
            StreamWish::Abort | StreamWish::Leave { cut: true, .. } => {
                self.log(|| format!("ep {e}: abort"));
                self.send_reset(e, self.now + 10_000);
                self.close_socket(e);
            }
        }
        let ep = &self.eps[e];
        if !ep.gone && ep.fin_sent && ep.qp.rx_interest() == RxInterest::None {
            self.close_socket(e);
        }
    }

    /// Endpoint `e` resets its stream. The reset arrives at the peer at `at`.
    fn send_reset(&mut self, e: usize, at: u64) {
        self.pipes[e].reset(at);
        self.at(at, Event::Readable(e ^ 1));
        // Octets that the peer writes from now on are lost.
        self.pipes[e ^ 1].reset(self.now);
    }

    /// Closes the socket, and returns the plan and the buffer to the pool.
    fn close_socket(&mut self, e: usize) {
        self.eps[e].gone = true;
        self.call(e, |c| c.ep.qp.stream_gone(&mut c.host));
        let ep = &mut self.eps[e];
        ep.unaccepted.clear();
        if let Some(mut plan) = ep.plan.take() {
            plan.clear();
            self.pool.plans.push(plan);
        }
        if let Some(mut buffer) = ep.buffer.take() {
            buffer.clear();
            self.pool.buffers.push(buffer);
        }
    }

    /// Resets both directions, as a network does.
    pub fn reset_both(&mut self, conn: usize) {
        for e in [2 * conn, 2 * conn + 1] {
            let at = self.now + self.rng.below(1_000);
            self.pipes[e].reset(at);
            self.at(at, Event::Readable(e ^ 1));
        }
    }

    /// Writes until the queue pair has nothing more to send or the stream is full.
    pub fn transmit(&mut self, e: usize) {
        let mut plan = match self.eps[e].plan.take() {
            Some(plan) => plan,
            None => self.pool.plan(),
        };
        while !self.eps[e].gone && self.failure.is_none() {
            let progressed = match plan.is_done() {
                true => self.fill(e, &mut plan),
                false => self.write(e, &mut plan),
            };
            if !progressed {
                break;
            }
        }
        if plan.is_done() || self.eps[e].gone {
            plan.clear();
            self.pool.plans.push(plan);
        } else {
            self.eps[e].plan = Some(plan);
        }
        self.serve_requests(e);
    }

    /// Refills a plan that is written completely. Returns `false` if there is nothing to send.
    fn fill(&mut self, e: usize, plan: &mut TxPlan) -> bool {
        if !self.eps[e].qp.wants_tx() {
            return false;
        }
        // While the plan is being filled, do not schedule another transmission for this endpoint.
        let was_due = std::mem::replace(&mut self.eps[e].tx_due, true);
        let fill = self.call(e, |c| {
            let fill = c.fill(plan);
            if fill == TxFill::Memory {
                c.ep.qp.tx_memory(c.table, &mut c.host);
            }
            fill
        });
        self.eps[e].tx_due = was_due;
        self.reach.fill(fill);
        if fill == TxFill::Idle && self.eps[e].qp.wants_tx() {
            self.fail(|| format!("endpoint {e} wants to send, but has nothing to send"));
        }
        fill != TxFill::Idle
    }

    /// Writes a part of a plan. Returns `false` if the stream is full or has ended.
    fn write(&mut self, e: usize, plan: &mut TxPlan) -> bool {
        let max_len = match self.eps[e].rng.below(4) {
            0 => self.eps[e].rng.range(1, 64) as usize,
            1 => self.eps[e].rng.range(1, 3000) as usize,
            _ => 65536,
        };
        let mut octets = std::mem::take(&mut self.pool.octets);
        octets.resize(max_len, 0);
        let ep = &self.eps[e];
        let accessor = ep.qp.accessor();
        let copied = plan.copy_to(&self.nodes[ep.node].table, accessor, &mut octets);
        let Ok(n) = copied else {
            self.pool.octets = octets;
            self.log(|| format!("ep {e}: memory of a request was deregistered"));
            self.call(e, |c| c.ep.qp.abort(&mut c.host));
            return false;
        };
        let mut arrivals = Vec::new();
        let written = self.pipes[e].write(self.now, &octets[..n], |at| arrivals.push(at));
        self.pool.octets = octets;
        for at in arrivals {
            self.at(at, Event::Readable(e ^ 1));
        }
        if self.planted.happens(Plant::StrayWrite) {
            let arena = &self.nodes[self.eps[e].node].arena;
            // Offset 7 is outside all regions.
            arena.write(7, &[!arena.copy(7, 1)[0]]);
        }
        let was_due = std::mem::replace(&mut self.eps[e].tx_due, true);
        self.call(e, |c| c.ep.qp.tx_written(plan, written, &mut c.host));
        self.eps[e].tx_due = was_due;
        self.eps[e].tx_blocked |= written < n;
        written == n
    }

    /// Reads octets that have arrived, until the queue pair wants no more.
    pub fn receive(&mut self, e: usize) {
        loop {
            let ep = &self.eps[e];
            if ep.gone || ep.stalled || self.failure.is_some() {
                return;
            }
            let interest = ep.qp.rx_interest();
            let found = self.pipes[e ^ 1].peek(self.now);
            if found == Peeked::Reset {
                self.log(|| format!("ep {e}: reset by peer"));
                self.eps[e].gone = true;
                self.call(e, |c| c.ep.qp.stream_failed(&mut c.host));
                self.close_socket(e);
                return;
            }
            match (interest, found) {
                (RxInterest::None | RxInterest::Held | RxInterest::Waits, _)
                | (_, Peeked::Nothing) => return,
                (_, Peeked::Fin) => {
                    self.log(|| format!("ep {e}: end of stream"));
                    let mut buffer = match self.eps[e].buffer.take() {
                        Some(buffer) => buffer,
                        None => self.pool.buffer(),
                    };
                    self.call(e, |c| c.ep.qp.rx_eof(&mut buffer, &mut c.host));
                    buffer.clear();
                    self.pool.buffers.push(buffer);
                }
                (RxInterest::Discard, Peeked::Octets(n)) => {
                    self.eps[e].unaccepted.clear();
                    let mut octets = std::mem::take(&mut self.pool.octets);
                    self.pipes[e ^ 1].read(self.now, n, &mut octets);
                    self.pool.octets = octets;
                    self.schedule_writable(e ^ 1);
                }
                (RxInterest::Read, Peeked::Octets(n)) => {
                    self.read_octets(e, n);
                    self.schedule_writable(e ^ 1);
                }
                (_, Peeked::Reset) => return,
            }
        }
    }

    /// Schedules more writing for an endpoint whose full stream has room again.
    fn schedule_writable(&mut self, e: usize) {
        if self.eps[e].tx_blocked {
            let delay = self.rng.range(100, 5_000);
            self.after(delay, Event::Writable(e));
        }
    }

    fn read_octets(&mut self, e: usize, available: usize) {
        let mut buffer = match self.eps[e].buffer.take() {
            Some(buffer) => buffer,
            None => self.pool.buffer(),
        };
        let mut octets = std::mem::take(&mut self.pool.octets);
        if self.eps[e].rng.chance(60) {
            self.read_as_planned(e, available, &mut buffer, &mut octets);
        } else {
            let n = available.min(60_000);
            self.pipes[e ^ 1].read(self.now, n, &mut octets);
            self.eps[e].unaccepted.extend_from_slice(&octets);
            self.offer(e, &mut buffer);
        }
        self.pool.octets = octets;
        self.keep_buffer(e, buffer);
    }

    /// Passes octets to the queue pair that were read into the driver's own memory. While a Send is
    /// held, the queue pair accepts only a part of them. The others are passed again later.
    fn offer(&mut self, e: usize, buffer: &mut RxBuffer) {
        let mut octets = std::mem::take(&mut self.eps[e].unaccepted);
        loop {
            let (n, status) = self.call(e, |c| {
                let mut env = Env {
                    memory: c.table,
                    crc32c: CRC32C,
                    host: &mut c.host,
                };
                c.ep.qp.rx_input(&octets, buffer, &mut env)
            });
            octets.drain(..n);
            self.check_status(e, status);
            if matches!(status, RxStatus::Ok | RxStatus::Failed) && !octets.is_empty() {
                self.fail(|| {
                    format!("endpoint {e} returned {status:?}, but did not accept all octets")
                });
            }
            if status != RxStatus::More {
                break;
            }
        }
        self.eps[e].unaccepted = octets;
    }

    /// Reads directly to the destinations of a receive plan, as `recvmsg` does.
    fn read_as_planned(
        &mut self,
        e: usize,
        available: usize,
        buffer: &mut RxBuffer,
        octets: &mut Vec<u8>,
    ) {
        let runs = self.eps[e].rng.pick(&[1, 2, 3, 16]);
        let mut plan = RxPlan::new(if runs < 16 { runs } else { 64 });
        let mut runs = Vec::new();
        let ep = &self.eps[e];
        let node = &self.nodes[ep.node];
        ep.qp
            .rx_plan(buffer, &node.table, &mut plan, |run| runs.push(run));
        let room = plan.room();
        self.pipes[e ^ 1].read(self.now, available.min(room), octets);
        let direct = runs.len() > 1;
        // SAFETY: the plan was made above. Since then, neither the table nor the buffer has been
        // changed.
        #[allow(unsafe_code)]
        let written = unsafe { raw::read_into(&runs, octets) };
        if !written {
            self.log(|| format!("ep {e}: memory to read into was unmapped"));
            buffer.clear();
            self.call(e, |c| c.ep.qp.rx_unwritable(&mut c.host));
            return;
        }
        if direct && !octets.is_empty() && self.planted.happens(Plant::CorruptPlacement) {
            octets[0] ^= 1;
            // SAFETY: as above: nothing has changed since. This writes the first octet again.
            #[allow(unsafe_code)]
            unsafe {
                raw::read_into(&runs, &octets[..1]);
            }
        }
        let mut n = octets.len();
        loop {
            let status = self.call(e, |c| {
                let mut env = Env {
                    memory: c.table,
                    crc32c: CRC32C,
                    host: &mut c.host,
                };
                c.ep.qp.rx_filled(buffer, &mut plan, n, &mut env)
            });
            self.check_status(e, status);
            if status != RxStatus::More {
                break;
            }
            n = 0;
        }
        if room == 0 {
            self.fail(|| format!("endpoint {e} wants to read, but offers no room"));
        }
    }

    /// Passes the time to a queue pair whose timer may have expired.
    pub fn advance_time(&mut self, e: usize) {
        self.eps[e].timer = None;
        if self.eps[e].gone {
            return;
        }
        let (now, before) = (Time::from_nanos(self.now), self.eps[e].qp.rx_interest());
        self.call(e, |c| c.ep.qp.on_time(now, &mut c.host));
        let ep = &self.eps[e];
        if ep.qp.poll_at().is_some_and(|next| next <= now) {
            self.fail(|| format!("endpoint {e}: its timer is still pending after {now:?}"));
        }
        if before == RxInterest::Held && self.eps[e].qp.rx_interest() != RxInterest::Held {
            self.log(|| format!("ep {e}: no receive was posted in time"));
            self.receive(e);
        }
    }

    /// Processes the held octets of an endpoint after a receive was posted.
    pub fn retry_held(&mut self, e: usize) {
        if self.eps[e].qp.rx_interest() != RxInterest::Held
            || self.planted.happens(Plant::ForgetHeld)
        {
            return;
        }
        let mut buffer = match self.eps[e].buffer.take() {
            Some(buffer) => buffer,
            None if self.eps[e].unaccepted.is_empty() => {
                self.fail(|| format!("endpoint {e} holds a Send, but has no buffer"));
                return;
            }
            None => self.pool.buffer(),
        };
        self.offer(e, &mut buffer);
        self.keep_buffer(e, buffer);
        self.receive(e);
    }

    fn keep_buffer(&mut self, e: usize, mut buffer: Box<RxBuffer>) {
        if buffer.is_empty() || self.eps[e].gone {
            buffer.clear();
            self.pool.buffers.push(buffer);
        } else {
            self.eps[e].buffer = Some(buffer);
        }
    }

    /// Checks that a receive status is consistent with the state of the queue pair.
    fn check_status(&mut self, e: usize, status: RxStatus) {
        self.reach.receive(status);
        let qp = &self.eps[e].qp;
        let (held, state) = (qp.rx_interest() == RxInterest::Held, qp.state());
        let is_consistent = match status {
            RxStatus::Ok => !held,
            RxStatus::More => !held,
            // The program's close may have shut down the sending side after the call.
            RxStatus::Held => held && state != State::Error || qp.is_shut_down(),
            // No other thread uses memory here.
            RxStatus::Waits => false,
            RxStatus::Failed => state == State::Error,
        };
        if !is_consistent {
            self.fail(|| {
                format!(
                    "endpoint {e}: the receive side returned {status:?} in state {state:?}, \
                     held: {held}"
                )
            });
        }
    }
}
