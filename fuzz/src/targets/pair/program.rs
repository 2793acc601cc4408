//! The program at one endpoint: its posted requests and receives in order, and the expected
//! contents of its memory.

use std::collections::VecDeque;

use iwarp_rnic::{Cqe, WcFlags, WcOpcode, WcStatus};

use super::arena::template;
use super::end::{RECEIVES, SINKS, SLOT, SLOTS};

/// A posted request that has not completed.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) opcode: WcOpcode,
    pub(super) byte_len: u32,
    /// The slot in which the response is placed, and its expected content.
    pub(super) answer: Option<(usize, Vec<u8>)>,
}

/// A message that the peer has posted and this endpoint has not received.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) data: Vec<u8>,
    pub(super) imm: Option<u32>,
    pub(super) opcode: WcOpcode,
    pub(super) byte_len: u32,
}

/// The program of one end.
#[derive(Debug)]
pub(super) struct Program {
    /// Requests, oldest first.
    pub(super) requests: VecDeque<Request>,
    /// Posted receives, oldest first: `wr_id` and slot.
    pub(super) receives: VecDeque<(u64, usize)>,
    /// Expected messages, oldest first.
    pub(super) inbound: VecDeque<Message>,
    /// The expected contents of this endpoint's memory.
    pub(super) model: Vec<u8>,
    free_sinks: Vec<usize>,
    free_receives: Vec<usize>,
    next: u64,
    send_failed: bool,
    receive_failed: bool,
}

impl Program {
    pub(super) fn new() -> Self {
        Self {
            requests: VecDeque::new(),
            receives: VecDeque::new(),
            inbound: VecDeque::new(),
            model: template().to_vec(),
            free_sinks: (0..SLOTS).collect(),
            free_receives: (0..SLOTS).collect(),
            next: 0,
            send_failed: false,
            receive_failed: false,
        }
    }

    /// Returns a new `wr_id`.
    pub(super) const fn next_wr_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns a free slot for a response. [`Self::use_sink`] marks it as used.
    pub(super) fn sink(&self) -> Option<usize> {
        self.free_sinks.last().copied()
    }

    /// Marks the slot that [`Self::sink`] returns as used.
    pub(super) fn use_sink(&mut self) {
        self.free_sinks.pop();
    }

    /// Returns a free slot for a receive. [`Self::use_receive`] marks it as used.
    pub(super) fn receive(&self) -> Option<usize> {
        self.free_receives.last().copied()
    }

    /// Marks the slot that [`Self::receive`] returns as used.
    pub(super) fn use_receive(&mut self) {
        self.free_receives.pop();
    }

    fn store(&mut self, at: usize, data: &[u8]) {
        self.model[at..at + data.len()].copy_from_slice(data);
    }

    /// Checks a completion of the send queue: each signaled request completes once and in order.
    /// `octets` reads this endpoint's memory. Returns `false` if the completion has an error
    /// status.
    pub(super) fn check_send_completion(
        &mut self,
        cqe: &Cqe,
        octets: impl Fn(usize, usize) -> Vec<u8>,
    ) -> bool {
        let ok = cqe.status == WcStatus::Success;
        loop {
            let request = self.requests.pop_front();
            let request = request.expect("a completion of a request that was not posted");
            let is_completed = request.wr_id == cqe.wr_id;
            assert!(
                is_completed || !request.signaled,
                "{request:?} has no completion"
            );
            assert!(!ok || !self.send_failed, "success after an error");
            if let Some((slot, data)) = request.answer {
                // The responses of requests before a failed one may or may not have arrived.
                if ok {
                    let at = SINKS.0 + slot * SLOT;
                    assert_eq!(octets(at, data.len()), data, "wrong response");
                    self.store(at, &data);
                }
                self.free_sinks.push(slot);
            }
            if is_completed {
                if ok {
                    assert!(
                        request.signaled,
                        "an unsignaled request completes successfully"
                    );
                    assert_eq!(
                        (cqe.opcode, cqe.byte_len),
                        (request.opcode, request.byte_len)
                    );
                } else {
                    let flushed = cqe.status == WcStatus::Flushed;
                    assert!(flushed || !self.send_failed, "a second error: {cqe:?}");
                    self.send_failed |= !flushed;
                }
                return ok;
            }
        }
    }

    /// Checks a completion of the receive queue: each receive completes once and in order, with the
    /// next message. Returns `false` if the completion has an error status.
    pub(super) fn check_receive_completion(
        &mut self,
        cqe: &Cqe,
        octets: impl Fn(usize, usize) -> Vec<u8>,
    ) -> bool {
        let receive = self.receives.pop_front();
        let (wr_id, slot) = receive.expect("a completion of a receive that was not posted");
        assert_eq!(wr_id, cqe.wr_id, "receives complete out of order");
        self.free_receives.push(slot);
        if cqe.status != WcStatus::Success {
            self.receive_failed = true;
            return false;
        }
        assert!(!self.receive_failed, "success after an error");
        let message = self
            .inbound
            .pop_front()
            .expect("a receive completes without a message");
        assert_eq!(
            (cqe.opcode, cqe.byte_len),
            (message.opcode, message.byte_len)
        );
        assert_eq!(cqe.flags.contains(WcFlags::WITH_IMM), message.imm.is_some());
        assert!(message.imm.is_none_or(|imm| imm == cqe.imm_or_stag));
        let at = RECEIVES.0 + slot * SLOT;
        assert_eq!(
            octets(at, message.data.len()),
            message.data,
            "wrong message"
        );
        self.store(at, &message.data);
        true
    }
}
