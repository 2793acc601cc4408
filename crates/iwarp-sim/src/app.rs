//! The programs of the hosts: they post work requests and poll completions. Also applies the fate
//! of a connection.

use iwarp_rnic::qp::{Events, State};
use iwarp_rnic::{Cqe, PostError, RecvWr, SendFlags, SendWr};

use crate::world::{Ending, Event, Fate, World};

/// Returns a work request identifier: the kind in the highest octet, then the index of the endpoint
/// or node (24 bits), then the index of the request (32 bits).
pub const fn wr_id(kind: u64, owner: usize, index: usize) -> u64 {
    kind << 56 | (owner as u64) << 32 | index as u64
}

/// Kind of a request of the send queue.
pub const SEND: u64 = 1;
/// Kind of a receive of a queue pair's own receive queue.
pub const RECV: u64 = 2;
/// Kind of a receive of a shared receive queue.
pub const SHARED: u64 = 3;

impl World {
    /// Schedules the program of an endpoint to continue soon.
    pub fn schedule_app(&mut self, e: usize) {
        if !self.eps[e].app_due && !self.eps[e].stopped {
            self.eps[e].app_due = true;
            let delay = self.rng.below(30_000);
            self.after(delay, Event::App(e));
        }
    }

    /// Posts the next send work requests.
    pub fn app(&mut self, e: usize) {
        self.eps[e].app_due = false;
        let mut burst = self.rng.range(1, 12);
        while burst > 0 {
            burst -= 1;
            let ep = &self.eps[e];
            if ep.stopped || ep.queue_full || ep.posted >= ep.ops.len() {
                return;
            }
            if ep.qp.state() == State::Error {
                // Post a few more requests, which must be flushed.
                if ep.extra_posts == 0 {
                    self.eps[e].stopped = true;
                    return;
                }
                self.eps[e].extra_posts -= 1;
            } else if ep.received < ep.ops[ep.posted].after_recv {
                return;
            }
            let index = self.eps[e].posted;
            let op = self.eps[e].ops[index].clone();
            // Pass inline data in two pieces, as a program may.
            let inline = op.inline.as_deref().unwrap_or(&[]);
            let (a, b) = inline.split_at(inline.len() / 3);
            let wr = SendWr {
                wr_id: wr_id(SEND, e, index),
                op: op.op,
                flags: op.flags,
                sges: &op.sges,
                inline: &[a, b],
            };
            // Count the request first: its completion may come before the call returns.
            self.eps[e].posted += 1;
            match self.call(e, |c| c.ep.qp.post_send(&wr, &mut c.host)) {
                Ok(()) => {
                    self.log(|| format!("ep {e}: post {index} {:?} {:?}", op.op, op.flags));
                    self.reach.posted(&op.op, op.flags);
                    if op.counter_sink.is_some() {
                        let peer = self.eps[e ^ 1].node;
                        self.nodes[peer].counter_posted += 1;
                    }
                }
                Err(PostError::QueueFull) => {
                    self.eps[e].posted -= 1;
                    if self.eps[e].qp.state() == State::Error {
                        self.fail(|| format!("endpoint {e}: the send queue is full in state ERR"));
                    }
                    self.eps[e].queue_full = true;
                    return;
                }
                Err(error) => {
                    self.fail(|| format!("endpoint {e}: request {index} was refused: {error}"));
                    return;
                }
            }
        }
        self.schedule_app(e);
    }

    /// Posts the next receives of a queue pair's own queue.
    pub fn post_receives(&mut self, e: usize, burst: u64) {
        self.eps[e].recv_due = false;
        for _ in 0..burst {
            let ep = &self.eps[e];
            let index = ep.recv_posted;
            if index >= ep.receives.len() {
                return;
            }
            let sges = ep.receives[index].sges.clone();
            let wr = RecvWr {
                wr_id: wr_id(RECV, e, index),
                sges: &sges,
            };
            self.eps[e].recv_posted += 1;
            match self.call(e, |c| c.ep.qp.post_recv(&wr, &mut c.host)) {
                Ok(()) => self.retry_held(e),
                Err(PostError::QueueFull) => {
                    // Try again after the next completion.
                    self.eps[e].recv_posted -= 1;
                    return;
                }
                Err(error) => {
                    self.fail(|| format!("endpoint {e}: receive {index} was refused: {error}"));
                    return;
                }
            }
        }
        self.schedule_receives(e);
    }

    /// Schedules the posting of more receives.
    pub fn schedule_receives(&mut self, e: usize) {
        let ep = &mut self.eps[e];
        if ep.recv_posted < ep.receives.len() && !ep.recv_due {
            ep.recv_due = true;
            let delay = self.rng.below(200_000);
            self.after(delay, Event::PostReceives(e));
        }
    }

    /// Posts the next receives of a host's shared queue.
    pub fn post_shared(&mut self, n: usize) {
        let burst = self.rng.range(1, 8);
        for _ in 0..burst {
            let Some(srq) = &mut self.nodes[n].srq else {
                return;
            };
            let index = srq.posted;
            let Some(receive) = srq.receives.get(index) else {
                return;
            };
            let wr = RecvWr {
                wr_id: wr_id(SHARED, n, index),
                sges: &receive.sges,
            };
            if let Err(error) = srq.queue.post(&wr) {
                self.fail(|| format!("node {n}: shared receive {index} was refused: {error}"));
                return;
            }
            srq.posted += 1;
            srq.open.insert(index);
            if srq.limits_set == srq.limit_events && index % 5 == 4 {
                let limit = srq.queue.len();
                if srq.queue.set_limit(limit).is_ok() {
                    srq.limits_set += 1;
                }
            }
            for e in 0..self.eps.len() {
                let ep = &self.eps[e];
                if ep.node == n && ep.qp.config().shared_receive {
                    self.retry_held(e);
                }
            }
        }
        let delay = self.rng.below(100_000);
        self.after(delay, Event::PostShared(n));
    }

    /// Polls a completion queue until it is empty, arms it, and polls it again, because no event
    /// reports completions that were written before it was armed.
    pub fn poll(&mut self, n: usize, cq: usize) {
        self.nodes[n].poll_due[cq] = false;
        let mut out = [Cqe::default(); 4];
        for pass in 0..2 {
            if pass == 1 {
                self.nodes[n].cqs[cq].arm(false);
            }
            loop {
                let got = self.nodes[n].cqs[cq].poll(&mut out);
                for cqe in &out[..got] {
                    self.completion(n, cqe);
                }
                if got == 0 || self.failure.is_some() {
                    break;
                }
            }
        }
    }

    fn completion(&mut self, n: usize, cqe: &Cqe) {
        self.log(|| {
            format!(
                "node {n}: {:#x} {:?} {:?} {} octets",
                cqe.wr_id, cqe.opcode, cqe.status, cqe.byte_len
            )
        });
        let e = cqe.qp_num.wrapping_sub(1) as usize;
        if self.eps.get(e).is_none_or(|ep| ep.node != n) {
            self.fail(|| {
                format!(
                    "node {n}: completion for queue pair {}, which does not belong to this node",
                    cqe.qp_num
                )
            });
            return;
        }
        self.reach.completed(cqe.opcode, cqe.status);
        match cqe.wr_id >> 56 {
            SEND => self.check_send(e, cqe),
            RECV | SHARED => self.check_receive(e, cqe),
            _ => self.fail(|| format!("endpoint {e}: unknown wr_id {:#x}", cqe.wr_id)),
        }
        self.schedule_app(e);
        self.schedule_receives(e);
    }

    /// Applies the fate of a connection while its programs are running.
    pub fn apply_fate(&mut self, conn: usize) {
        let fate = self.conns[conn].fate;
        self.log(|| format!("conn {conn}: {fate:?}"));
        self.conns[conn].fate_happened = true;
        match fate {
            Fate::Close(2, _) => {
                self.close(2 * conn);
                self.close(2 * conn + 1);
            }
            Fate::Close(side, _) => self.close(2 * conn + side),
            Fate::Abort(side, _) => self.abort(2 * conn + side),
            Fate::ToError(side, _) => {
                let e = 2 * conn + side;
                let result = self.call(e, |c| c.ep.qp.modify(State::Error, &mut c.host));
                if result.is_err() {
                    self.fail(|| format!("endpoint {e}: modify to ERR failed"));
                }
            }
            Fate::Reset(_) => self.reset_both(conn),
            Fate::Stall(side, _) => self.eps[2 * conn + side].stalled = true,
            _ => {}
        }
    }

    /// Ends a connection whose programs have finished.
    pub fn end(&mut self, conn: usize, end: Ending) {
        self.conns[conn].fate_happened = true;
        match end {
            Ending::Close(2) => {
                self.close(2 * conn);
                self.close(2 * conn + 1);
            }
            Ending::Close(side) => self.close(2 * conn + side),
            Ending::Abort(side) => self.abort(2 * conn + side),
            Ending::Reset => self.reset_both(conn),
            Ending::Forge(side, forgery) => self.forge(2 * conn + side, forgery),
        }
    }

    fn abort(&mut self, e: usize) {
        self.call(e, |c| c.ep.qp.abort(&mut c.host));
    }

    fn close(&mut self, e: usize) {
        let ep = &mut self.eps[e];
        ep.stopped = true;
        if ep.qp.state() == State::Rts && ep.posted_at_close.is_none() {
            ep.posted_at_close = Some(ep.posted);
        }
        self.call(e, |c| c.ep.qp.close(&mut c.host));
    }

    /// Moves a queue pair to SQD to drain its send queue. When the queue pair reports that it is
    /// drained, [`resume`](Self::resume) is scheduled.
    pub fn pause(&mut self, e: usize) {
        if self.eps[e].qp.state() != State::Rts || self.eps[e].stopped {
            return;
        }
        self.log(|| format!("ep {e}: SQD"));
        self.eps[e].sqd = true;
        self.eps[e].events.remove(Events::SQ_DRAINED);
        if self
            .call(e, |c| c.ep.qp.modify(State::Sqd, &mut c.host))
            .is_err()
        {
            self.fail(|| format!("endpoint {e}: modify to SQD failed"));
        }
    }

    /// Moves a drained queue pair back to RTS. See [`pause`](Self::pause).
    pub fn resume(&mut self, e: usize) {
        self.eps[e].sqd = false;
        if self.eps[e].qp.state() != State::Sqd {
            return;
        }
        self.log(|| format!("ep {e}: RTS again"));
        if self
            .call(e, |c| c.ep.qp.modify(State::Rts, &mut c.host))
            .is_err()
        {
            self.fail(|| format!("endpoint {e}: modify to RTS failed"));
        }
    }
}

/// Returns `true` if a request with these flags writes a completion when it succeeds.
pub const fn is_signalled(flags: SendFlags, signal_all: bool) -> bool {
    signal_all || flags.contains(SendFlags::SIGNALED)
}
