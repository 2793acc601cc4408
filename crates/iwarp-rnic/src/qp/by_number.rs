//! What InfiniBand's verbs promise for queue pairs connected by GID and number, and iWARP has no
//! messages for: an absent peer, a receiver that is not ready, and a queue pair that is its own
//! peer.
//!
//! On InfiniBand a sender learns from each attempt that no receive is posted. It retries
//! `rnr_retry` times (seven means forever), and waits each time for the interval that the receiver
//! has set (`min_rnr_timer`). Here the receiver holds the Send, and reads nothing after it. Two
//! notes make this look the same to programs:
//!
//! * Before its first request, a sender with a finite limit sends its number of retries. The
//!   receiver then knows how long to hold a Send.
//! * A receiver that holds a Send reports which one. The requests before it complete, although the
//!   probe after it is not answered.
//!
//! A third note is the farewell of an end that leaves (see `farewell`). A fourth one belongs to
//! extended reliable connections (`xrc`), which may also be connected in other ways.
//!
//! A note is a zero-length RDMA Write whose tagged offset holds its content. A zero-length Write is
//! never refused (RFC 5040 section 7.2), and peers that do not know notes ignore it.

use super::acknowledge::{Examined, Search};
use super::admit::Refusal;
use super::headers::empty_write_header;
use super::plan::TxPlan;
use super::segment::{Out, Wire};
use super::send_queue::Slot;
use super::{Host, QueuePair, ReceiverNotReady, State};
use crate::WcStatus;
use crate::memory::Memory;
use core::convert::Infallible;
use core::time::Duration;
use iwarp_proto::ddp::TaggedHeader;

/// The upper halves of the tagged offsets of notes.
const RETRIES: u32 = u32::from_be_bytes(*b"rnr#");
const HELD: u32 = u32::from_be_bytes(*b"held");
const QUEUE: u32 = u32::from_be_bytes(*b"xsrq");
const DONE: u32 = u32::from_be_bytes(*b"done");
/// How often the driver checks whether the sender of an indefinitely held Send has closed.
const CLOSED_LOOK: Duration = Duration::from_millis(200);
/// `rnr_retry` of a sender without a limit.
pub(super) const FOR_EVER: u8 = 7;

/// Retries while receivers are not ready.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rnr {
    /// Number of retries of our Sends.
    ours: u8,
    /// The number that the peer was notified of.
    notified: u8,
    /// Number of retries of the peer's Sends.
    peers: u8,
    /// How long the peer waits before each retry.
    timer: Duration,
    /// The held message that the peer is still to be notified of.
    holds: Option<u32>,
    /// The last of our messages that the peer reported as held.
    held: u32,
    /// Sends of a connection that is not by number are held forever.
    hold_for_ever: bool,
}

/// A note to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// The number of retries of our Sends.
    Retries(u8),
    /// This message on queue 0 waits for a receive.
    Held(u32),
    /// The next messages are for the shared receive queue with this number.
    Queue(u32),
    /// We leave after processing this many of the peer's messages.
    Done(u32),
}

impl Note {
    const fn tagged_offset(self) -> u64 {
        let (kind, content) = match self {
            Self::Retries(count) => (RETRIES, count as u32),
            Self::Held(msn) => (HELD, msn),
            Self::Queue(number) => (QUEUE, number),
            Self::Done(messages) => (DONE, messages),
        };
        (kind as u64) << 32 | content as u64
    }

    const fn of(tagged_offset: u64) -> Option<Self> {
        let content = tagged_offset as u32;
        match (tagged_offset >> 32) as u32 {
            RETRIES if content <= FOR_EVER as u32 => Some(Self::Retries(content as u8)),
            HELD => Some(Self::Held(content)),
            QUEUE => Some(Self::Queue(content)),
            DONE => Some(Self::Done(content)),
            _ => None,
        }
    }
}

impl Default for Rnr {
    fn default() -> Self {
        Self {
            ours: FOR_EVER,
            notified: FOR_EVER,
            peers: FOR_EVER,
            timer: Duration::ZERO,
            holds: None,
            held: 0,
            hold_for_ever: false,
        }
    }
}

impl Rnr {
    /// Starts a new stream: neither side has sent a note.
    pub(super) const fn start(&mut self) {
        self.notified = FOR_EVER;
        self.peers = FOR_EVER;
        self.holds = None;
        self.held = 0;
        self.hold_for_ever = false;
    }
}

impl QueuePair {
    /// Sets how often a Send that finds no receive is retried (`rnr_retry` of `ibv_modify_qp(3)`):
    /// 7 or more means forever. Applies to requests that start later.
    pub const fn set_rnr_retry(&mut self, count: u8) {
        self.acknowledge.rnr.ours = match count {
            0..FOR_EVER => count,
            _ => FOR_EVER,
        };
    }

    /// Lets Sends of the current stream wait for a receive forever, regardless of
    /// [`QpConfig::receiver_not_ready`]: `rnr_retry` 7 of a connection that is not by number.
    /// Unreliable connections drop such Sends nevertheless.
    ///
    /// [`QpConfig::receiver_not_ready`]: super::QpConfig::receiver_not_ready
    pub const fn hold_for_ever(&mut self) {
        self.acknowledge.rnr.hold_for_ever = true;
    }

    /// Sets how long the peer has to wait before it retries a Send that found no receive
    /// (`min_rnr_timer` of `ibv_modify_qp(3)`).
    pub const fn set_min_rnr_timer(&mut self, timer: Duration) {
        self.acknowledge.rnr.timer = timer;
    }

    /// Sets whether the stream is connected to this queue pair itself.
    pub const fn set_own_peer(&mut self, is_own_peer: bool) {
        self.acknowledge.own_peer = is_own_peer;
    }

    /// Handles a peer that has not responded within the program's limit: the oldest incomplete
    /// request completes with [`WcStatus::TransportRetryExceeded`], the later ones are flushed, and
    /// a stream is reset.
    pub fn fail_absent_peer<H: Host>(&mut self, host: &mut H) {
        self.blame_absent_peer();
        self.abort(host);
    }

    /// Prepares for an end of the stream because the peer does not respond: the oldest incomplete
    /// request will get [`WcStatus::TransportRetryExceeded`]. An earlier error stays.
    pub fn blame_absent_peer(&mut self) {
        if let Some(seq) = self.sq.first_not_done()
            && self.state() != State::Error
        {
            self.sq.fail(seq, WcStatus::TransportRetryExceeded, 0);
        }
    }

    /// Returns the policy for a Send that finds no receive.
    pub(super) fn receiver_not_ready(&self) -> ReceiverNotReady {
        if !self.is_by_number() || self.drops() {
            return match self.config.receiver_not_ready {
                ReceiverNotReady::Drop => ReceiverNotReady::Drop,
                _ if self.acknowledge.rnr.hold_for_ever => ReceiverNotReady::Hold {
                    limit: Duration::MAX,
                    after_close: CLOSED_LOOK,
                },
                configured => configured,
            };
        }
        let Rnr { peers, timer, .. } = self.acknowledge.rnr;
        match peers {
            0 => ReceiverNotReady::Terminate,
            FOR_EVER => ReceiverNotReady::Hold {
                limit: Duration::MAX,
                after_close: Duration::MAX,
            },
            count => {
                let limit = timer.saturating_mul(u32::from(count));
                ReceiverNotReady::Hold {
                    limit,
                    after_close: limit,
                }
            }
        }
    }

    /// Records that this message finds no receive and is held.
    pub(super) const fn holds(&mut self, msn: u32) {
        if self.is_by_number() {
            self.acknowledge.rnr.holds = Some(msn);
        }
    }

    /// Returns the note that is due now, or before `request`.
    #[inline]
    pub(super) const fn note(&self, request: Option<&Slot>) -> Option<Note> {
        let Rnr {
            ours,
            notified,
            holds,
            ..
        } = self.acknowledge.rnr;
        match holds {
            Some(msn) if !self.acknowledge.own_peer => Some(Note::Held(msn)),
            _ => match request {
                Some(_) if ours != notified && self.is_by_number() => Some(Note::Retries(ours)),
                Some(slot) => match self.queue_to_note(slot) {
                    Some(number) => Some(Note::Queue(number)),
                    None => None,
                },
                None => None,
            },
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit_note(&mut self, note: Note, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        match note {
            Note::Retries(count) => self.acknowledge.rnr.notified = count,
            Note::Held(_) => self.acknowledge.rnr.holds = None,
            Note::Queue(number) => self.xrc.note_sent(number),
            Note::Done(_) => self.farewell_said(),
        }
        let header = empty_write_header(note.tagged_offset());
        let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
        let Ok(()) = out.append::<Infallible>(&header, 0, |_| Ok(()));
    }

    /// Handles a zero-length Write, which may be a note. Fails if the note is not allowed here.
    #[cold]
    #[inline(never)]
    pub(super) fn process_note<H: Host>(
        &mut self,
        h: TaggedHeader,
        host: &mut H,
    ) -> Result<(), Refusal> {
        match Note::of(h.to) {
            Some(Note::Queue(number)) => return self.is_named(number, host),
            _ if !self.is_by_number() => {}
            Some(Note::Retries(count)) => self.acknowledge.rnr.peers = count,
            Some(Note::Held(msn)) => self.is_held(msn, host),
            Some(Note::Done(arrived)) => self.peer_says_farewell(arrived, host),
            None => {}
        }
        Ok(())
    }

    /// Applies a note about a held message directly if the queue pair is its own peer; sent as a
    /// note it would queue behind that message.
    pub(super) fn apply_own_hold<H: Host>(&mut self, host: &mut H) {
        if self.acknowledge.own_peer
            && let Some(msn) = self.acknowledge.rnr.holds.take()
        {
            self.is_held(msn, host);
        }
    }

    /// Handles a message of ours that waits for a receive: the peer has processed the requests
    /// before it.
    fn is_held<H: Host>(&mut self, msn: u32, host: &mut H) {
        // Each message is looked up once, whatever the peer sends.
        let is_new = (msn.wrapping_sub(self.acknowledge.rnr.held) as i32) > 0;
        if !is_new {
            return;
        }
        self.acknowledge.rnr.held = msn;
        let mut search = Search::message(msn, self.next_send_msn());
        loop {
            match self.examine(&mut search) {
                Examined::Other => {}
                Examined::End => return,
                Examined::Found(seq) => return self.complete_before(seq, host),
            }
        }
    }
}
