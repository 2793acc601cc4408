//! The protocol of channels: the kinds of messages, and what each end may send.
//!
//! docs/wire.md describes the format. The functions here call no code of the program: they return
//! wakers and messages, which the caller calls or drops after unlocking.

use super::operation::HEADER;
use super::receive::Message;
use super::waiters::Waiters;
use std::collections::VecDeque;
use std::task::Waker;

/// Maximum of the credits that a peer may announce.
pub(super) const MOST_CREDITS: u32 = 1 << 16;
pub(super) const VERSION: u8 = 1;
/// Length of a hello: the header, and the message size.
pub(super) const HELLO: usize = HEADER + 4;

pub(super) mod kind {
    pub(in crate::connection) const HELLO: u8 = 1;
    pub(in crate::connection) const DATA: u8 = 2;
    pub(in crate::connection) const CREDIT: u8 = 3;
    pub(in crate::connection) const FINISH: u8 = 4;
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
    pub(super) inbox: VecDeque<Message>,
    pub(super) writers: Waiters,
    pub(super) readers: Waiters,
    pub(super) peer_finished: bool,
    pub(super) finished: bool,
    pub(super) broken: Option<&'static str>,
}

impl State {
    /// Takes the next writer from its list if there is a credit.
    pub(super) fn next_writer(&mut self) -> Option<Waker> {
        match self.credits > 0 {
            true => self.writers.next(),
            false => None,
        }
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
    /// Processes a message. Returns it unless it is data, which is put into the inbox.
    pub(super) fn take(&mut self, message: Message) -> Option<Message> {
        let Some((&[what, version, 0, 0, a, b, c, d], _)) = message.split_first_chunk() else {
            self.broken = Some("a message of the peer has no header of a channel");
            return Some(message);
        };
        let number = u32::from_be_bytes([a, b, c, d]);
        let greeted = self.window > 0;
        match what {
            kind::HELLO if !greeted => self.greet(&message, version, number),
            kind::DATA if greeted && !self.peer_finished && self.allowed > 0 => {
                self.allowed -= 1;
                self.inbox.push_back(message);
                return None;
            }
            kind::CREDIT if greeted && number <= self.window - self.credits => {
                self.credits += number;
            }
            kind::FINISH if greeted => self.peer_finished = true,
            _ => self.broken = Some("the peer does not keep to the rules of channels"),
        }
        Some(message)
    }

    fn greet(&mut self, message: &[u8], version: u8, window: u32) {
        let size = message.get(HEADER..HELLO).and_then(|s| s.try_into().ok());
        let size = size.map_or(0, u32::from_be_bytes) as usize;
        match version == VERSION && (1..=MOST_CREDITS).contains(&window) && size > HEADER {
            true => {
                self.window = window;
                self.credits = window;
                self.most = size - HEADER;
            }
            false => self.broken = Some("the peer's channel is of another version"),
        }
    }
}
