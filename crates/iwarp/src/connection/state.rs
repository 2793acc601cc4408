//! The locked state of a router: the messages that have arrived, the requests that wait for places
//! of the send queue, and the waiters for messages and the end.
//!
//! It is locked only briefly. The functions here call no code of the program: they return wakers,
//! which the router calls after unlocking.

use super::batch::{Kept, Requests};
use super::farewell::Farewell;
use super::handle::Inner;
use super::request::Request;
use super::waiters::Waiters;
use crate::error::Result;
use crate::verbs::{MemoryRegion, MemoryWindow, WriteAccess};
use iwarp_rnic::{Cqe, SendOp, WcFlags, WcOpcode};
use std::collections::VecDeque;
use std::task::Waker;

/// Bit of a work request's ID that marks a receive. Otherwise the ID is that of a slot.
pub(super) const RECEIVE: u64 = 1 << 63;

/// Memory of a request whose operation was dropped; kept until the request completes.
#[derive(Debug)]
#[expect(dead_code, reason = "kept alive, not read")]
pub(super) enum Held {
    One(MemoryRegion),
    Target(WriteAccess),
    Many(Vec<Kept>),
    Window(MemoryWindow),
    Connection(Farewell),
    Staged(MemoryRegion, Farewell),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// The request may be posted with this slot.
    Taken(SlotId),
    /// The request must be [queued](super::router::Router::queue).
    Full,
    Ended,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Inbox {
    Message(Arrived),
    /// There is no message, or others wait for it.
    Empty,
    /// The connection has ended, and all messages were taken.
    Ended,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Arrived {
    /// Index of the receive buffer.
    pub(super) buffer: u32,
    pub(super) len: u32,
    pub(super) immediate: Option<u32>,
    pub(super) invalidated: Option<u32>,
    /// It is only the immediate data of an RDMA Write.
    pub(super) is_write_immediate: bool,
}

/// A request that waits for places.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) id: SlotId,
    pub(super) places: u32,
    pub(super) request: Unposted,
}

#[derive(Debug)]
pub(super) enum Unposted {
    /// The operation and the data of a work request.
    One(SendOp, Request<'static>),
    Batch(Requests),
}

impl Unposted {
    /// Posts it. An error says that none or, of a batch, not all requests were posted.
    pub(super) fn post(&self, inner: &Inner, id: SlotId) -> Result<()> {
        match self {
            Self::One(op, request) => request.post(inner, id, *op),
            Self::Batch(requests) => requests.post(inner, id).map_err(|(_, error)| error),
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    /// Requests in the order in which they were started.
    pub(super) backlog: VecDeque<Queued>,
    pub(super) inbox: VecDeque<Arrived>,
    pub(super) readers: Waiters,
    pub(super) end_waiters: Waiters,
    /// Enqueues data that was written before and is held back.
    pub(super) holder: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotId(pub(super) u32);

impl SlotId {
    pub(super) const fn wr_id(self) -> u64 {
        self.0 as u64
    }
}

/// Returns the ID of the receive that fills `buffer`.
pub(super) const fn receive_id(buffer: u32) -> u64 {
    RECEIVE | buffer as u64
}

impl State {
    pub(super) fn new(receives: u32) -> Self {
        Self {
            backlog: VecDeque::new(),
            inbox: VecDeque::with_capacity(receives as usize),
            readers: Waiters::default(),
            end_waiters: Waiters::default(),
            holder: None,
        }
    }

    /// Takes the next waiter for messages from the list if there is a message.
    pub(super) fn more_messages(&mut self) -> Option<Waker> {
        match self.inbox.is_empty() {
            true => None,
            false => self.readers.next(),
        }
    }

    pub(super) fn has_waiters(&self) -> bool {
        let lists = [&self.readers, &self.end_waiters];
        !self.backlog.is_empty() || lists.iter().any(|list| !list.is_empty())
    }

    /// Takes all waiters from the lists.
    pub(super) fn wake_all(&mut self, wakers: &mut Vec<Waker>) {
        for list in [&mut self.readers, &mut self.end_waiters] {
            while let Some(waker) = list.next() {
                wakers.push(waker);
            }
        }
    }

    pub(super) fn arrive(&mut self, cqe: &Cqe, wakers: &mut Vec<Waker>) {
        let value = |flag| cqe.flags.contains(flag).then_some(cqe.imm_or_stag);
        let is_write_immediate = cqe.opcode == WcOpcode::RecvWriteImm;
        // The low half of the ID is the index of the buffer.
        let [.., a, b, c, d] = cqe.wr_id.to_be_bytes();
        self.inbox.push_back(Arrived {
            buffer: u32::from_be_bytes([a, b, c, d]),
            len: if is_write_immediate { 0 } else { cqe.byte_len },
            immediate: value(WcFlags::WITH_IMM),
            invalidated: value(WcFlags::WITH_INV),
            is_write_immediate,
        });
        wakers.extend(self.more_messages());
    }
}
