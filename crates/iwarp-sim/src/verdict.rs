//! The checks at the end of a run: the outcome of every connection, and all memory of every host.

use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::WcStatus;
use iwarp_rnic::qp::{Blame, Fault, State};

use crate::check::refused_status;
use crate::world::{Effect, Ending, Expect, Fate, World};

impl World {
    /// Checks everything after all connections have ended.
    pub fn check_end(&mut self) {
        for e in 0..self.eps.len() {
            self.check_completions(e);
            self.check_fault(e);
            self.note_unproven_changes(e);
        }
        for n in 0..self.nodes.len() {
            self.check_shared(n);
            self.check_counter(n);
            self.check_memory(n);
        }
    }

    fn check_completions(&mut self, e: usize) {
        let ep = &self.eps[e];
        let (state, sends, receives) = (
            ep.qp.state(),
            ep.qp.sends_outstanding(),
            ep.qp.receives_posted(),
        );
        if state != State::Error || sends > 0 || receives > 0 {
            self.fail(|| {
                format!(
                    "endpoint {e} ends in {state:?} with {sends} sends and {receives} receives \
                     outstanding"
                )
            });
            return;
        }
        let all = ep.qp.config().signal_all;
        let all_unsignaled = ep.first_error.is_none()
            && ep.ops[ep.next_cqe..ep.posted]
                .iter()
                .all(|op| !crate::app::is_signalled(op.flags, all));
        if ep.next_cqe < ep.posted && !all_unsignaled {
            let (next, posted) = (ep.next_cqe, ep.posted);
            self.fail(|| format!("endpoint {e}: {next} of {posted} requests completed"));
            return;
        }
        for index in ep.next_cqe..ep.posted {
            self.succeeded(e, index);
        }
        let ep = &self.eps[e];
        if !ep.qp.config().shared_receive && ep.recv_cqes != ep.recv_posted {
            let (done, posted) = (ep.recv_cqes, ep.recv_posted);
            self.fail(|| format!("endpoint {e}: {done} of {posted} receives completed"));
            return;
        }
        // A graceful close sends the requests that were posted before it.
        if let (Some(posted), Fate::Close(0 | 1, _)) =
            (self.eps[e].posted_at_close, self.conns[e / 2].fate)
            && self.eps[e].qp.counters().rx_fpdus + u64::from(self.eps[e].stream.initiator) > 0
        {
            let peer = &self.eps[e ^ 1];
            let sent = peer.inbound.iter().filter(|m| m.op < posted).count();
            if peer.received < sent {
                let got = peer.received;
                self.fail(|| {
                    format!(
                        "endpoint {e} closed gracefully, but only {got} of {sent} messages arrived"
                    )
                });
            }
        }
    }

    /// Checks that the endpoint reports the fault that the fate of its connection must cause: who
    /// is blamed, and the Terminate code.
    fn check_fault(&mut self, e: usize) {
        let Some(want) = self.expected_fault(e) else {
            return;
        };
        let (fault, fate) = (self.eps[e].qp.fault(), self.conns[e / 2].fate);
        if fault != want {
            self.fail(|| format!("endpoint {e}: reports {fault:?} instead of {want:?} ({fate:?})"));
            return;
        }
        self.check_first_error(e);
    }

    /// Returns the fault that the endpoint must report: `Some(None)` if it must report none.
    /// Returns `None` if several outcomes are allowed and the actual one is among them.
    fn expected_fault(&self, e: usize) -> Option<Option<Fault>> {
        let got = self.eps[e].qp.fault();
        let lost = got.is_some_and(|fault| fault.blame == Blame::Transport);
        let is_own = |side: usize| side == e & 1;
        // What this endpoint reports if `side` detects a violation by its peer.
        let detected_by = |side, code| {
            let blame = if is_own(side) {
                Blame::Peer
            } else {
                Blame::PeerTerminated
            };
            Fault { blame, code }
        };
        // What this endpoint reports if `side` has a local error.
        let local_error_of = |side| {
            let blame = if is_own(side) {
                Blame::Local
            } else {
                Blame::PeerTerminated
            };
            let code = TerminateCode::RDMAP_LOCAL_CATASTROPHIC;
            Fault { blame, code }
        };
        // If the actual outcome is not allowed, demand that there is no fault.
        let allow_if = |allowed: bool| (!allowed).then_some(None);
        match self.conns[e / 2].fate {
            Fate::Close(..) => Some(None),
            Fate::Clean(Ending::Forge(s, forgery)) => {
                Some(Some(detected_by(s ^ 1, forgery.code())))
            }
            // A clean connection may end by a reset.
            Fate::Clean(_) => allow_if(lost),
            Fate::Abort(..) | Fate::ToError(..) | Fate::Reset(_) | Fate::Stall(..) => {
                allow_if(got.is_none() || lost)
            }
            Fate::Flip(victim) => {
                let codes = [TerminateCode::MPA_CRC, TerminateCode::MPA_MARKER]
                    .map(|code| Some(detected_by(victim, code)));
                allow_if(got.is_none() || lost || codes.contains(&got))
            }
            Fate::Illegal(s) => self.fault_of_illegal(e, s, detected_by, local_error_of),
            Fate::TooLong(s) => Some(Some(detected_by(s, TerminateCode::DDP_UNTAGGED_TOO_LONG))),
            Fate::BadReceive(s) => Some(Some(local_error_of(s))),
            Fate::Starve(s) => Some(Some(detected_by(s, TerminateCode::DDP_UNTAGGED_NO_BUFFER))),
        }
    }

    /// Like [`expected_fault`](Self::expected_fault), for [`Fate::Illegal`].
    fn fault_of_illegal(
        &self,
        e: usize,
        side: usize,
        detected_by: impl Fn(usize, TerminateCode) -> Fault,
        local_error_of: impl Fn(usize) -> Fault,
    ) -> Option<Option<Fault>> {
        let ep = &self.eps[2 * (e / 2) + side];
        let counters = ep.qp.counters();
        let could_not_terminate = counters.rx_fpdus == 0 && counters.terminates_sent == 0;
        Some(Some(match ep.ops[self.conns[e / 2].illegal_op?].expect {
            Expect::Success => return None,
            // A responder executes local requests before it has received the initiator's first
            // FPDU. If one fails then, it must not send a Terminate (RFC 5044 section 7.1.2), and
            // the initiator only detects that the connection ended.
            Expect::Local(_) if e & 1 != side && could_not_terminate => Fault {
                blame: Blame::Transport,
                code: TerminateCode::MPA_CONNECTION_LOST,
            },
            Expect::Local(_) => local_error_of(side),
            Expect::Refused(code) => detected_by(side ^ 1, code),
        }))
    }

    /// Checks the completion of the request or receive that the fate of the connection made fail.
    fn check_first_error(&mut self, e: usize) {
        let conn = &self.conns[e / 2];
        let side = e & 1;
        let ep = &self.eps[e];
        match conn.fate {
            Fate::Illegal(s) if s == side => {
                let Some(index) = conn.illegal_op else { return };
                let op = &ep.ops[index];
                let (status, vendor) = match op.expect {
                    Expect::Local(status) => (status, 0),
                    Expect::Refused(code) if op.op.has_response() => (
                        refused_status(code),
                        u32::from(code.layer) << 12
                            | u32::from(code.etype) << 8
                            | u32::from(code.code),
                    ),
                    _ => return,
                };
                if ep.first_error != Some((index, status, vendor)) {
                    let got = ep.first_error;
                    self.fail(|| {
                        format!(
                            "endpoint {e}: request {index} should fail with {status:?}, but the \
                             first failure is {got:?}"
                        )
                    });
                }
            }
            Fate::TooLong(s) | Fate::BadReceive(s) if s == side => {
                let want = match conn.fate {
                    Fate::TooLong(_) => WcStatus::LocalLength,
                    _ => WcStatus::LocalProtection,
                };
                if ep.first_recv_error != Some(want) {
                    let got = ep.first_recv_error;
                    self.fail(|| {
                        format!(
                            "endpoint {e}: a receive should complete with {want:?}, but completed \
                             with {got:?}"
                        )
                    });
                }
            }
            _ => {}
        }
    }

    /// Records the changes of memory that may have happened, although no completion proves it.
    fn note_unproven_changes(&mut self, e: usize) {
        let (n, peer) = (self.eps[e].node, self.eps[e ^ 1].node);
        let ep = &self.eps[e];
        let all_done = ep.first_error.is_none()
            && ep.posted == ep.ops.len()
            && matches!(self.conns[e / 2].fate, Fate::Clean(_));
        if all_done {
            let upto = ep.posted;
            self.commit(e, upto);
            return;
        }
        let mut theirs: Vec<Effect> = Vec::new();
        let mut ours: Vec<Effect> = Vec::new();
        for op in &ep.ops[ep.committed.min(ep.posted)..ep.posted] {
            theirs.extend(op.remote.iter().cloned());
        }
        let mut sinks = Vec::new();
        let from = ep.first_error.map_or(ep.posted, |b| b.0).min(ep.posted);
        // Requests before the failed one may have been flushed. The peer may have executed them,
        // and their responses may have been placed.
        let from = from.min(ep.first_unsuccessful.unwrap_or(from));
        for op in &ep.ops[from..ep.posted] {
            ours.extend(op.local.iter().cloned());
            sinks.extend(op.counter_sink);
        }
        self.nodes[peer].unproven.extend(theirs);
        self.nodes[n].unproven.extend(ours);
        self.nodes[n].unpredictable.extend(sinks);
    }

    fn check_shared(&mut self, n: usize) {
        let Some(srq) = &self.nodes[n].srq else {
            return;
        };
        let (open, queued) = (srq.open.len(), srq.queue.len());
        let (limits, set) = (srq.limit_events, srq.limits_set);
        if open != queued as usize {
            self.fail(|| {
                format!(
                    "node {n}: {open} receives of the SRQ have not completed, but {queued} are \
                     queued"
                )
            });
        } else if limits > set {
            self.fail(|| format!("node {n}: {limits} limit events for {set} armed limits"));
        }
    }

    /// Checks the counter that all connections increment: each increment returned a different old
    /// value, and the final value is right.
    fn check_counter(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        let (off, ..) = node.counter;
        let mut word = [0; 8];
        node.arena.read(off, &mut word);
        let value = u64::from_ne_bytes(word);
        node.shadow[off..off + 8].copy_from_slice(&word);
        let start = u64::from_ne_bytes(std::array::from_fn(|i| crate::world::pattern(n, off + i)));
        let added = value.wrapping_sub(start);
        let mut olds: Vec<u64> = node
            .counter_olds
            .iter()
            .map(|o| o.wrapping_sub(start))
            .collect();
        olds.sort_unstable();
        let before = olds.len();
        olds.dedup();
        let posted = node.counter_posted;
        let fits = olds.len() == before
            && olds.last().is_none_or(|last| *last < added)
            && (before as u64..=posted).contains(&added);
        if !fits {
            self.fail(|| {
                format!(
                    "node {n}: counter advanced by {added}, {before} increments completed, \
                     {posted} were posted"
                )
            });
        }
    }

    /// Compares a host's memory with the contents that the completions prove. Where a stream broke,
    /// unproven changes are allowed as well.
    fn check_memory(&mut self, n: usize) {
        let node = &self.nodes[n];
        let now = node.arena.copy(0, node.used);
        if now == node.shadow {
            return;
        }
        let mut allowed = vec![false; node.used];
        for effect in &node.unproven {
            for (i, octet) in effect.data.iter().enumerate() {
                allowed[effect.off + i] |= now[effect.off + i] == *octet;
            }
        }
        for &off in &node.unpredictable {
            allowed[off..off + 8].fill(true);
        }
        let wrong = (0..node.used).find(|&i| now[i] != node.shadow[i] && !allowed[i]);
        if let Some(at) = wrong {
            let (is, was) = (now[at], node.shadow[at]);
            self.fail(|| format!("node {n}: octet {at:#x} is {is:#04x} instead of {was:#04x}"));
        }
    }
}
