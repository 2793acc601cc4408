//! What a router knows: the slots of requests, the room of the send queue, the messages that have arrived, and who waits for what.
//!
//! All of it is locked together, for moments only. The functions here call no code of the program: they return the wakers and the
//! memory that the router calls and frees when nothing is locked.

use super::waiters::Waiters;
use super::window::BoundWindow;
use crate::memory::MemoryRegion;
use iwarp_rnic::{Cqe, WcFlags, WcOpcode, WcStatus};
use std::collections::VecDeque;
use std::task::Waker;

/// This bit of a work request's number says that it is a receive. The others are the number of its slot.
const RECEIVE: u64 = 1 << 63;
/// What a request keeps until it has completed.
#[derive(Debug, Default)]
pub(super) enum Held {
    #[default]
    Nothing,
    One(#[expect(dead_code, reason = "it is kept, not read")] MemoryRegion),
    Many(Vec<MemoryRegion>),
    Window(BoundWindow),
}

#[derive(Debug, Default)]
pub(super) enum Stage {
    #[default]
    Free,
    /// Posted; nobody has asked to be woken.
    Posted,
    Waiting(Waker),
    /// Posted, and its operation is gone.
    Abandoned,
    Done(WcStatus),
}

#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) stage: Stage,
    /// Places of the send queue that it takes.
    pub(super) places: u32,
    pub(super) held: Held,
}

/// Which requests go first if there is little room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    /// In the order in which they come.
    Normal,
    /// In the order in which they come, and so many places are left for those that go first.
    Leaves(u32),
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
    pub(super) slots: Vec<Slot>,
    pub(super) free: Vec<u32>,
    /// Places of the send queue that are free.
    pub(super) places: u32,
    /// Waits for a slot and places.
    pub(super) room: Waiters,
    pub(super) inbox: VecDeque<Arrived>,
    /// Waits for a message.
    pub(super) readers: Waiters,
    /// Waits for the end of the connection.
    pub(super) mourners: Waiters,
    /// Requests in [`Stage::Waiting`].
    pub(super) sleeping: usize,
    /// The connection has ended: nothing is posted any more, and no message arrives.
    pub(super) ended: bool,
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
    /// Frees a slot; returns what it kept.
    #[inline]
    pub(super) fn release(&mut self, id: u32) -> Held {
        let Some(slot) = self.slots.get_mut(id as usize) else {
            return Held::Nothing;
        };
        slot.stage = Stage::Free;
        slot.places = 0;
        let held = std::mem::take(&mut slot.held);
        self.free.push(id);
        held
    }

    /// Takes the next one off the list that waits for room, if there is some.
    #[inline]
    pub(super) fn spare(&mut self) -> Option<Waker> {
        match self.places > 0 && !self.free.is_empty() {
            true => self.room.next(),
            false => None,
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
        self.sleeping > 0 || lists.iter().any(|list| !list.is_empty())
    }

    pub(super) fn end(&mut self, wakers: &mut Vec<Waker>) {
        self.ended = true;
        for list in [&mut self.room, &mut self.readers, &mut self.mourners] {
            while let Some(waker) = list.next() {
                wakers.push(waker);
            }
        }
    }

    pub(super) fn take(&mut self, cqe: &Cqe, wakers: &mut Vec<Waker>, freed: &mut Vec<Held>) {
        if cqe.status != WcStatus::Success {
            self.end(wakers);
        }
        match cqe.wr_id & RECEIVE {
            0 => self.finish(cqe, wakers, freed),
            _ => self.arrive(cqe, wakers),
        }
    }

    /// A request has ended. A batch that fails has several completions, of which the first counts.
    fn finish(&mut self, cqe: &Cqe, wakers: &mut Vec<Waker>, freed: &mut Vec<Held>) {
        let Some((id, slot)) = u32::try_from(cqe.wr_id)
            .ok()
            .and_then(|id| Some((id, self.slots.get_mut(id as usize)?)))
        else {
            return;
        };
        if matches!(slot.stage, Stage::Free | Stage::Done(_)) {
            return;
        }
        self.places += slot.places;
        let status = cqe.status;
        match std::mem::replace(&mut slot.stage, Stage::Done(status)) {
            Stage::Waiting(waker) => {
                self.sleeping -= 1;
                wakers.push(waker);
            }
            Stage::Abandoned => {
                let held = self.release(id);
                freed.push(held);
            }
            _ => {}
        }
        wakers.extend(self.spare());
    }

    fn arrive(&mut self, cqe: &Cqe, wakers: &mut Vec<Waker>) {
        if cqe.status != WcStatus::Success {
            return;
        }
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
