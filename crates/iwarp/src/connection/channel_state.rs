//! The protocol of channels: the kinds of messages, and what each end may send.
//!
//! docs/wire.md describes the format. The functions here call no code of the program: they return
//! wakers and messages, which the caller calls or drops after unlocking.

use super::frames::{self, FRAME};
use super::large::{
    Announced, ENCODED_SLOT, Owed, OwnSlots, PeerSlots, SLOT_LEN, SLOT_LEN_MAX, SLOTS_MAX,
};
use super::receive::Message;
use super::request::HEADER;
use super::tail::FULL;
use super::waiters::{Place, Ticket, Waiters};
use crate::verbs::{LentBytes, LentMemory};
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
        several: bool,
        len: usize,
        memory: Arc<LentMemory>,
    },
    /// In a slot with several messages: this one and those after it.
    Several(u8, LentBytes),
}

/// The bytes of a message for the program.
#[derive(Debug, Clone)]
pub(super) enum Received {
    /// In a receive buffer, without the header.
    Small(Message),
    /// In a slot, whose number this is.
    Large(u8, LentBytes),
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

    /// Returns `true` if the peer's program has much to read: it has not finished with [`FULL`]
    /// bytes, or has not returned half of its places or slots, as it would if it waited. `unsent`
    /// places were taken for messages that are not sent yet, which the peer cannot return.
    pub(super) fn is_peer_busy(&self, unsent: u32) -> bool {
        let places = (self.window - self.credits).saturating_sub(unsent);
        places >= self.window.div_ceil(2)
            || self.peer_slots.are_half_used()
            || self.peer_slots.in_flight() >= FULL
    }

    /// Takes the credits and slots to return to the peer, if half of the `window` credits that this
    /// end has announced, or a quarter of the slots, is owed.
    pub(super) fn take_owed(&mut self, window: u32) -> Option<(u32, Owed)> {
        let waits = self.inbox.is_empty();
        let due = self.owed >= window.div_ceil(2) || self.own_slots.are_due(waits);
        if !due || self.peer_finished {
            return None;
        }
        let credits = std::mem::take(&mut self.owed);
        self.allowed += credits;
        Some((credits, self.own_slots.take_owed()))
    }

    /// Removes a writer from the lists. Returns what [`Waiters::leave`] does.
    pub(super) fn leave_writers(&mut self, ticket: Option<Ticket>) -> (Place, Option<Waker>) {
        self.slot_writers.retain(|writer| Some(*writer) != ticket);
        self.writers.leave(ticket)
    }

    /// Takes the next message of the inbox for the program. The memory of a slot is taken back from
    /// the peer. Fails if the peer has broken this rule.
    pub(super) fn next_message(&mut self) -> Option<Result<Received, &'static str>> {
        Some(match self.inbox.pop_front()? {
            Arrival::Small(mut message) => {
                message.skip(HEADER);
                Ok(Received::Small(message))
            }
            Arrival::Several(slot, bytes) => self.split(slot, bytes),
            Arrival::Large {
                slot,
                several,
                len,
                memory,
            } => match memory.take_back(len) {
                Ok(bytes) if several => self.split(slot, bytes),
                Ok(bytes) => Ok(Received::Large(slot, bytes)),
                Err(error) => {
                    tracing::debug!(%error, "a slot is written after its message");
                    Err("the peer writes a slot that it has returned")
                }
            },
        })
    }

    /// Takes the first message of a slot. The others become the next arrival.
    fn split(&mut self, slot: u8, mut bytes: LentBytes) -> Result<Received, &'static str> {
        let Some(len) = frames::first(&bytes) else {
            return Err("the peer has written a slot that does not consist of messages");
        };
        let mut message = bytes.clone();
        message.restrict(FRAME, len);
        let rest = frames::framed(len);
        if rest < bytes.len() {
            bytes.restrict(rest, bytes.len() - rest);
            self.inbox.push_front(Arrival::Several(slot, bytes));
        }
        Ok(Received::Large(slot, message))
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
        let Announced { slot, len, .. } = announced;
        let allowed = self.may_receive() && len <= SLOT_LEN;
        let Some(memory) = allowed.then(|| self.own_slots.written(slot)).flatten() else {
            self.broken = Some("the peer has written a slot that was not lent");
            return;
        };
        if announced.starved {
            self.own_slots.want(self.inbox.is_empty());
        }
        self.allowed -= 1;
        let len = len as usize;
        self.inbox.push_back(Arrival::Large {
            slot,
            several: announced.several,
            len,
            memory,
        });
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
