//! Checks each completion when it is polled, and all endpoints when no event is pending.

use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::qp::{RxInterest, State};
use iwarp_rnic::{Cqe, WcFlags, WcStatus};

use crate::app::{SHARED, is_signalled};
use crate::world::{Effect, Expect, Fate, Message, World};

/// Returns the completion status of a request that the peer refuses with this Terminate code.
pub const fn refused_status(code: TerminateCode) -> WcStatus {
    match (code.layer, code.etype, code.code) {
        (0 | 1, 1, _) => WcStatus::RemoteAccess,
        (0, 2, 7) | (1, 2, _) => WcStatus::RemoteInvalidRequest,
        (0, 2, _) => WcStatus::RemoteOperation,
        _ => WcStatus::Fatal,
    }
}

impl World {
    /// Checks a completion of a send queue: order, status, opcode and length. Records that the
    /// unsignaled requests before it succeeded.
    pub fn check_send(&mut self, e: usize, cqe: &Cqe) {
        let index = cqe.wr_id as u32 as usize;
        let owner = (cqe.wr_id >> 32) as usize & 0xff_ffff;
        let ep = &self.eps[e];
        if owner != e || index >= ep.posted {
            self.fail(|| {
                format!(
                    "endpoint {e}: completion of wr_id {:#x}, which was not posted",
                    cqe.wr_id
                )
            });
            return;
        }
        if index < ep.next_cqe {
            self.fail(|| format!("endpoint {e}: request {index} completed twice or out of order"));
            return;
        }
        let all = ep.qp.config().signal_all;
        for skipped in ep.next_cqe..index {
            let ep = &self.eps[e];
            if ep.first_error.is_some() || is_signalled(ep.ops[skipped].flags, all) {
                self.fail(|| format!("endpoint {e}: request {skipped} did not complete"));
                return;
            }
            self.succeeded(e, skipped);
        }
        let ep = &mut self.eps[e];
        ep.next_cqe = index + 1;
        let op = &ep.ops[index];
        if cqe.status != WcStatus::Success {
            ep.first_unsuccessful = ep.first_unsuccessful.or(Some(index));
            if ep.first_error.is_none() {
                ep.first_error = Some((index, cqe.status, cqe.vendor_err));
            } else if cqe.status != WcStatus::Flushed
                && ep.first_error.map(|b| b.1) != Some(WcStatus::Flushed)
            {
                self.fail(|| {
                    format!(
                        "endpoint {e}: request {index} failed, although an earlier one had failed"
                    )
                });
                return;
            } else if cqe.status != WcStatus::Flushed {
                // Earlier requests were flushed because this one failed.
                ep.first_error = Some((index, cqe.status, cqe.vendor_err));
            }
            if !self.error_allowed(e) {
                self.fail(|| {
                    format!(
                        "endpoint {e}: request {index} unexpectedly completed with {:?}",
                        cqe.status
                    )
                });
            }
            return;
        }
        let failed = ep.first_error.is_some();
        let signalled = is_signalled(op.flags, all);
        let (opcode, byte_len) = (op.op.wc_opcode(), op.byte_len);
        if failed || !signalled || cqe.opcode != opcode || cqe.byte_len != byte_len {
            self.fail(|| {
                format!(
                    "endpoint {e}: request {index} ({opcode:?}, {byte_len} octets) completed as \
                     {cqe:?}"
                )
            });
            return;
        }
        self.succeeded(e, index);
    }

    /// Records that a request has succeeded, and checks the octets in its sink. If the request has
    /// a response, the peer has executed it and all requests before it.
    pub fn succeeded(&mut self, e: usize, index: usize) {
        let n = self.eps[e].node;
        let op = self.eps[e].ops[index].clone();
        if op.expect != Expect::Success && op.op.has_response() {
            self.fail(|| format!("endpoint {e}: illegal request {index} succeeded"));
            return;
        }
        if let Some(off) = op.counter_sink {
            let mut old = [0; 8];
            let node = &mut self.nodes[n];
            node.arena.read(off, &mut old);
            node.shadow[off..off + 8].copy_from_slice(&old);
            let old = u64::from_ne_bytes(old);
            let peer = self.eps[e ^ 1].node;
            self.nodes[peer].counter_olds.push(old);
        }
        for effect in &op.local {
            if self.nodes[n].arena.copy(effect.off, effect.data.len()) != effect.data {
                let (off, len) = (effect.off, effect.data.len());
                self.fail(|| {
                    format!("endpoint {e}: request {index}: wrong data in {len} octets at {off:#x}")
                });
                return;
            }
            self.apply_to_shadow(n, effect);
        }
        if op.op.has_response() {
            self.commit(e, index + 1);
        }
    }

    fn apply_to_shadow(&mut self, n: usize, effect: &Effect) {
        self.nodes[n].shadow[effect.off..effect.off + effect.data.len()]
            .copy_from_slice(&effect.data);
    }

    /// Records that the first `upto` requests of an endpoint have changed its peer's memory.
    pub fn commit(&mut self, e: usize, upto: usize) {
        let n = self.eps[e ^ 1].node;
        for index in self.eps[e].committed..upto {
            let op = &self.eps[e].ops[index];
            let (exclusive, remote) = (op.exclusive, op.remote.clone());
            for effect in &remote {
                if exclusive
                    && self.nodes[n].arena.copy(effect.off, effect.data.len()) != effect.data
                {
                    self.fail(|| {
                        format!(
                            "endpoint {e}: request {index} is complete, but its data is not in the \
                             peer's memory"
                        )
                    });
                    return;
                }
                self.apply_to_shadow(n, effect);
            }
        }
        self.eps[e].committed = self.eps[e].committed.max(upto);
    }

    /// Checks a completion of a receive.
    pub fn check_receive(&mut self, e: usize, cqe: &Cqe) {
        let index = cqe.wr_id as u32 as usize;
        let owner = (cqe.wr_id >> 32) as usize & 0xff_ffff;
        let n = self.eps[e].node;
        let shared = cqe.wr_id >> 56 == SHARED;
        let fits = if shared {
            let srq = self.nodes[n].srq.as_mut();
            owner == n && srq.is_some_and(|s| s.open.remove(&index))
        } else {
            let ep = &mut self.eps[e];
            let next = ep.recv_cqes;
            ep.recv_cqes += 1;
            owner == e && index == next && index < ep.recv_posted
        };
        if !fits || shared != self.eps[e].qp.config().shared_receive {
            self.fail(|| format!("endpoint {e}: unexpected completion of receive {index}"));
            return;
        }
        let next = self.eps[e].received;
        let message = self.eps[e].inbound.get(next).cloned();
        if cqe.status != WcStatus::Success {
            self.receive_failed(e, shared, index, message, cqe.status);
            return;
        }
        let failed = self.eps[e].first_recv_error.is_some();
        let Some(m) = message.filter(|_| !failed) else {
            self.fail(|| format!("endpoint {e}: receive {index} got a message that was not sent"));
            return;
        };
        let flags = WcFlags::WITH_IMM | WcFlags::WITH_INV | WcFlags::SOLICITED;
        if cqe.opcode != m.opcode
            || cqe.byte_len != m.byte_len
            || cqe.flags & flags != m.flags
            || m.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV)
                && cqe.imm_or_stag != m.imm_or_stag
        {
            self.fail(|| format!("endpoint {e}: message {next}: got {cqe:?}, expected {m:?}"));
            return;
        }
        for effect in self.placement(e, shared, index, &m) {
            if self.nodes[n].arena.copy(effect.off, effect.data.len()) != effect.data {
                self.fail(|| format!("endpoint {e}: message {next} has wrong data"));
                return;
            }
            self.apply_to_shadow(n, &effect);
        }
        self.eps[e].received += 1;
        self.commit(e ^ 1, m.op + 1);
    }

    /// Returns the expected contents of a receive's memory after a message.
    fn placement(&self, e: usize, shared: bool, index: usize, message: &Message) -> Vec<Effect> {
        let ep = &self.eps[e];
        let receive = if shared {
            let srq = self.nodes[ep.node].srq.as_ref();
            srq.and_then(|s| s.receives.get(index))
        } else {
            ep.receives.get(index)
        };
        let mut rest = &message.data[..];
        let mut effects = Vec::new();
        for &(off, len) in receive.map_or(&[][..], |r| &r.parts) {
            let (now, later) = rest.split_at(len.min(rest.len()));
            rest = later;
            let data = now.to_vec();
            effects.push(Effect { off, data });
        }
        effects
    }

    fn receive_failed(
        &mut self,
        e: usize,
        shared: bool,
        index: usize,
        message: Option<Message>,
        status: WcStatus,
    ) {
        if !self.error_allowed(e) {
            self.fail(|| {
                format!("endpoint {e}: receive {index} unexpectedly completed with {status:?}")
            });
            return;
        }
        if self.eps[e].first_recv_error.is_some() {
            if status != WcStatus::Flushed {
                self.fail(|| {
                    format!(
                        "endpoint {e}: receive {index} failed, although an earlier one had failed"
                    )
                });
            }
            return;
        }
        self.eps[e].first_recv_error = Some(status);
        // A part of the message may have been placed.
        if let Some(m) = message {
            let n = self.eps[e].node;
            let placement = self.placement(e, shared, index, &m);
            self.nodes[n].unproven.extend(placement);
        }
    }

    /// Returns `true` if an error is expected on this endpoint's connection.
    fn error_allowed(&self, e: usize) -> bool {
        let conn = &self.conns[e / 2];
        conn.fate_happened
            || match conn.fate {
                Fate::Clean(_) => false,
                Fate::Flip(side) => self.pipes[2 * (e / 2) + (side ^ 1)].flip_was_read(),
                Fate::Illegal(_) => conn.illegal_op.is_some(),
                Fate::TooLong(_) | Fate::BadReceive(_) | Fate::Starve(_) => true,
                _ => false,
            }
    }

    /// Called when no event is pending. Checks that every program has finished, unless the fate of
    /// its connection prevents that.
    pub fn check_idle(&mut self) {
        for e in 0..self.eps.len() {
            let conn = e / 2;
            let fate = self.conns[conn].fate;
            let ep = &self.eps[e];
            let peer = &self.eps[e ^ 1];
            if ep.qp.wants_tx() && !ep.tx_blocked && !ep.gone {
                self.fail(|| format!("endpoint {e} is stuck: it wants to send, but was not woken"));
                return;
            }
            let waits = match fate {
                // If the flipped bit changes a length field, the receiver waits for octets that
                // never come.
                Fate::Flip(side) => self.pipes[2 * conn + (side ^ 1)].flip_was_read(),
                Fate::Stall(..) => true,
                _ => false,
            };
            let accepted = match fate {
                // A receiver that does not accept the FPDU ends the stream or keeps the FPDU in its
                // buffer.
                Fate::Flip(side) => {
                    waits
                        && side == e % 2
                        && !ep.gone
                        && ep.buffer.is_none()
                        && ep.unaccepted.is_empty()
                }
                _ => false,
            };
            if accepted {
                self.fail(|| format!("endpoint {e} accepted an FPDU with a flipped bit"));
                return;
            }
            let broken = ep.gone && peer.gone;
            if broken || waits {
                continue;
            }
            if ep.gone || peer.gone || ep.fin_sent || ep.qp.state() == State::Error {
                let (a, b) = (ep.qp.state(), peer.qp.state());
                self.fail(|| format!("endpoint {e} is stuck while closing: {a:?} and {b:?}"));
                return;
            }
            let problem = if ep.qp.state() == State::Sqd {
                "in SQD, without the event that it is drained"
            } else if ep.posted < ep.ops.len() {
                "with requests that it could not post"
            } else if ep.qp.sends_outstanding() > 0 {
                "with requests that did not complete"
            } else if ep.qp.rx_interest() == RxInterest::Held {
                "holding a Send"
            } else if ep.received < ep.inbound.len() {
                "waiting for a message that was sent"
            } else if !self.pipes[e].is_empty() {
                "with octets that the peer did not read"
            } else {
                match fate {
                    Fate::Clean(_) | Fate::Flip(_) => continue,
                    // Any other fate must have ended the connection, even if it happened after the
                    // programs had finished.
                    _ => "although the fate should have ended the connection",
                }
            };
            self.fail(|| format!("endpoint {e} is stuck {problem} ({fate:?})"));
            return;
        }
    }
}
