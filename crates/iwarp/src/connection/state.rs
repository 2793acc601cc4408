//! What a router knows besides the slots of requests: the messages that have arrived, and who waits for messages, room and the end.
//!
//! All of it is locked together, for moments only. The functions here call no code of the program: they return the wakers that the
//! router calls when nothing is locked.

use super::waiters::Waiters;
use crate::verbs::MemoryRegion;
use crate::verbs::MemoryWindow;
use iwarp_rnic::{Cqe, WcFlags, WcOpcode};
use std::collections::VecDeque;
use std::task::Waker;

/// This bit of a work request's number says that it is a receive. The others are the number of its slot.
pub(super) const RECEIVE: u64 = 1 << 63;

/// What an operation leaves behind that gives up: its request uses it until it has completed.
#[derive(Debug)]
#[expect(dead_code, reason = "it is kept, not read")]
pub(super) enum Held {
    One(MemoryRegion),
    Many(Vec<MemoryRegion>),
    Window(MemoryWindow),
}

/// Which requests go first if there is little room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    /// In the order in which they come.
    Normal,
    /// In the order in which they come, and so many places are left for those that go first.
    Leaves(u8),
    /// Before all that wait.
    First,
}

/// Whether a request may be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// Yes: it has this slot.
    Taken(SlotId),
    /// There is no room now, or others wait for it.
    Full,
    /// The connection has ended.
    Ended,
}

/// Whether there is a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inbox {
    /// This one.
    Message(Arrived),
    /// Not now, or others wait for it.
    Empty,
    /// The connection has ended, and all messages are taken.
    Ended,
}

/// A message in a receive buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrived {
    /// Number of the receive buffer.
    pub(super) buffer: u32,
    pub(super) len: u32,
    pub(super) immediate: Option<u32>,
    pub(super) invalidated: Option<u32>,
    /// `true` if it is only the immediate data of an RDMA Write.
    pub(super) of_write: bool,
}

#[derive(Debug)]
pub(super) struct State {
    /// Waits for a slot and places.
    pub(super) room: Waiters,
    pub(super) inbox: VecDeque<Arrived>,
    /// Waits for a message.
    pub(super) readers: Waiters,
    /// Waits for the end of the connection.
    pub(super) mourners: Waiters,
}

/// A place for a request, which is about to be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotId(pub(super) u32);

impl SlotId {
    pub(super) const fn wr_id(self) -> u64 {
        self.0 as u64
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Returns the number of the receive that fills `buffer`.
pub(super) const fn receive_id(buffer: u32) -> u64 {
    RECEIVE | buffer as u64
}

impl State {
    pub(super) fn new(receives: u32) -> Self {
        Self {
            room: Waiters::default(),
            inbox: VecDeque::with_capacity(receives as usize),
            readers: Waiters::default(),
            mourners: Waiters::default(),
        }
    }

    /// Takes the next one off the list that waits for messages, if there are some.
    pub(super) fn more_messages(&mut self) -> Option<Waker> {
        match self.inbox.is_empty() {
            true => None,
            false => self.readers.next(),
        }
    }

    pub(super) fn somebody_waits(&self) -> bool {
        let lists = [&self.room, &self.readers, &self.mourners];
        lists.iter().any(|list| !list.is_empty())
    }

    /// Takes everybody off the lists.
    pub(super) fn wake_all(&mut self, wakers: &mut Vec<Waker>) {
        for list in [&mut self.room, &mut self.readers, &mut self.mourners] {
            while let Some(waker) = list.next() {
                wakers.push(waker);
            }
        }
    }

    /// A message has arrived.
    pub(super) fn arrive(&mut self, cqe: &Cqe, wakers: &mut Vec<Waker>) {
        let value = |flag| cqe.flags.contains(flag).then_some(cqe.imm_or_stag);
        let of_write = cqe.opcode == WcOpcode::RecvWriteImm;
        // The low half of the number is that of the buffer.
        let [.., a, b, c, d] = cqe.wr_id.to_be_bytes();
        self.inbox.push_back(Arrived {
            buffer: u32::from_be_bytes([a, b, c, d]),
            len: if of_write { 0 } else { cqe.byte_len },
            immediate: value(WcFlags::WITH_IMM),
            invalidated: value(WcFlags::WITH_INV),
            of_write,
        });
        wakers.extend(self.more_messages());
    }
}
