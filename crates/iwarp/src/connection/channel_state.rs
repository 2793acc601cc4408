//! The protocol of channels: the kinds of messages, and what each end may send.
//!
//! docs/wire.md describes the format. The functions here call no code of the program: they return
//! wakers and messages, which the caller calls or drops after unlocking.

use super::large::{
    Announced, ENCODED_SLOT, OwnSlots, PeerSlots, SLOT_LEN, SLOT_LEN_MAX, SLOTS_MAX,
};
use super::receive::Message;
use super::request::HEADER;
use super::waiters::{Place, Ticket, Waiters};
use crate::verbs::LentMemory;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

/// Maximum of the credits that a peer may announce.
pub(super) const MOST_CREDITS: u32 = 1 << 16;
pub(super) const VERSION: u8 = 1;
/// Length of the longest credit message.
pub(super) const CREDIT_MAX: usize = HEADER + ENCODED_SLOT * SLOTS_MAX;

pub(super) mod kind {
    pub(in crate::connection) const HELLO: u8 = 1;
    pub(in crate::connection) const DATA: u8 = 2;
    pub(in crate::connection) const CREDIT: u8 = 3;
    pub(in crate::connection) const FINISH: u8 = 4;
    pub(in crate::connection) const WANT: u8 = 5;
}

pub(super) fn header(kind: u8, version: u8, number: u32) -> [u8; HEADER] {
    let [a, b, c, d] = number.to_be_bytes();
    [kind, version, 0, 0, a, b, c, d]
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Data messages that the peer can receive.
    pub(super) credits: u32,
    /// Credits announced by the peer; 0 before its hello.
    pub(super) window: u32,
    /// Length of the longest message that the peer accepts.
    pub(super) most: usize,
    /// Data messages that the peer may still send.
    pub(super) allowed: u32,
    /// Messages of the peer that the program has dropped, and whose credits were not returned yet.
    pub(super) owed: u32,
    pub(super) inbox: VecDeque<Arrival>,
    /// Memory of the peer for large messages, and of this end.
    pub(super) peer_slots: PeerSlots,
    pub(super) own_slots: OwnSlots,
    pub(super) writers: Waiters,
    /// The writers that need a slot.
    pub(super) slot_writers: Vec<Ticket>,
    pub(super) readers: Waiters,
    pub(super) peer_finished: bool,
    pub(super) finished: bool,
    pub(super) broken: Option<&'static str>,
}

/// A data message that waits for the program.
#[derive(Debug)]
pub(super) enum Arrival {
    /// In a receive buffer, with the header.
    Small(Message),
    /// In a slot.
    Large {
        slot: u8,
        len: usize,
        memory: Arc<LentMemory>,
    },
}

impl State {
    /// Takes the next writer from its list if there is a credit, and a slot if it needs one.
    pub(super) fn next_writer(&mut self) -> Option<Waker> {
        let first = self.writers.first()?;
        let has_slot = self.peer_slots.has_free() || !self.slot_writers.contains(&first);
        match self.credits > 0 && has_slot {
            true => self.writers.next(),
            false => None,
        }
    }

    /// Removes a writer from the lists. Returns what [`Waiters::leave`] does.
    pub(super) fn leave_writers(&mut self, ticket: Option<Ticket>) -> (Place, Option<Waker>) {
        self.slot_writers.retain(|writer| Some(*writer) != ticket);
        self.writers.leave(ticket)
    }

    /// Takes the next reader from its list if there is a message or the end.
    pub(super) fn next_reader(&mut self) -> Option<Waker> {
        match self.inbox.is_empty() && !self.peer_finished {
            true => None,
            false => self.readers.next(),
        }
    }
}

impl State {
    /// Processes a message. Returns it unless its receive buffer contains data for the program.
    pub(super) fn take(&mut self, message: Message) -> Option<Message> {
        if message.is_write_immediate() {
            self.take_large(Announced::decode(message.immediate().unwrap_or_default()));
            return Some(message);
        }
        let Some((&[what, version, 0, 0, a, b, c, d], _)) = message.split_first_chunk() else {
            self.broken = Some("a message of the peer has no header of a channel");
            return Some(message);
        };
        let number = u32::from_be_bytes([a, b, c, d]);
        let greeted = self.window > 0;
        match what {
            kind::HELLO if !greeted => self.greet(&message, version, number),
            kind::DATA if self.may_receive() => {
                self.allowed -= 1;
                self.inbox.push_back(Arrival::Small(message));
                return None;
            }
            kind::CREDIT if greeted && number <= self.window - self.credits => {
                self.credits += number;
                let slots = message.get(HEADER..).unwrap_or_default();
                if !self.peer_slots.add(slots) {
                    self.broken = Some("the peer lends a slot that it has lent already");
                }
            }
            kind::WANT if greeted && self.own_slots.offered => self.own_slots.want(false),
            kind::FINISH if greeted => self.peer_finished = true,
            _ => self.broken = Some("the peer does not keep to the rules of channels"),
        }
        Some(message)
    }

    /// Returns `true` if the peer may send a data message.
    const fn may_receive(&self) -> bool {
        self.window > 0 && !self.peer_finished && self.allowed > 0
    }

    fn take_large(&mut self, announced: Announced) {
        let Announced { slot, len, starved } = announced;
        let allowed = self.may_receive() && len <= SLOT_LEN;
        let Some(memory) = allowed.then(|| self.own_slots.written(slot)).flatten() else {
            self.broken = Some("the peer has written a slot that was not lent");
            return;
        };
        if starved {
            self.own_slots.want(self.inbox.is_empty());
        }
        self.allowed -= 1;
        let len = len as usize;
        self.inbox.push_back(Arrival::Large { slot, len, memory });
    }

    fn greet(&mut self, message: &[u8], version: u8, window: u32) {
        let number = |at: usize| {
            let octets = message.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_be_bytes(octets))
        };
        let size = number(HEADER).unwrap_or(0) as usize;
        let slot = number(HEADER + 4).unwrap_or(0);
        let known = version == VERSION && slot <= SLOT_LEN_MAX;
        match known && (1..=MOST_CREDITS).contains(&window) && size > HEADER {
            true => {
                self.window = window;
                self.credits = window;
                self.most = size - HEADER;
                // An end that offers no slots has no receives for the credits of the peer's.
                if self.own_slots.offered {
                    self.peer_slots.len = slot as usize;
                }
            }
            false => self.broken = Some("the peer's channel is of another version"),
        }
    }
}
