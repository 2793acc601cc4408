//! Queue pairs connected by GID and number: features of InfiniBand for which iWARP has no messages.
//! These are an absent peer, a receiver that is not ready, and a queue pair that is its own peer.
//!
//! On InfiniBand, each attempt to send to a receiver that is not ready is answered by an error. The
//! sender retries `rnr_retry` times (seven means forever), each time after the interval that the
//! receiver has set (`min_rnr_timer`). On iWARP, the receiver holds the Send, and reads nothing
//! after it. Two notes give programs the same results as on InfiniBand:
//!
//! * Before its first request, a sender with a finite limit sends its number of retries. The
//!   receiver then knows how long to hold a Send.
//! * A receiver that holds a Send reports its sequence number. The requests before this Send then
//!   complete, although the probe after it is not answered.
//!
//! A third note is the farewell of an end that closes the stream (see `farewell`). A fourth one
//! belongs to extended reliable connections (`xrc`), which may also be connected in other ways.
//!
//! A note is a zero-length RDMA Write whose tagged offset holds its content. A zero-length Write is
//! never refused (RFC 5040 section 7.2), and peers that do not know notes ignore it.

use super::acknowledge::{Examined, Search};
use super::admit::Refusal;
use super::fpdu::{Out, Wire};
use super::headers::empty_write_header;
use super::plan::TxPlan;
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
/// Interval at which the driver checks whether the sender of a Send that is held forever has
/// closed.
const CLOSED_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// `rnr_retry` of a sender without a limit.
pub(super) const FOREVER: u8 = 7;

/// State for Sends that find no receive (receiver not ready).
#[derive(Debug, Clone, Copy)]
pub(super) struct Rnr {
    /// Number of retries of our Sends.
    own_retries: u8,
    /// The number of retries of our Sends that the peer was notified of.
    notified_retries: u8,
    /// Number of retries of the peer's Sends.
    peer_retries: u8,
    /// How long the peer waits before each retry.
    timer: Duration,
    /// Sequence number of a held Send of which the peer was not notified yet.
    hold_to_report: Option<u32>,
    /// Sequence number of the last of our Sends that the peer reported as held.
    held: u32,
    /// Sends are held forever, on a connection that is not by number.
    hold_for_ever: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// The number of retries of our Sends.
    Retries(u8),
    /// The message on queue 0 with this sequence number waits for a receive.
    Held(u32),
    /// The next messages are for the shared receive queue with this number.
    Queue(u32),
    /// We close after processing this many of the peer's messages.
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

    const fn parse(tagged_offset: u64) -> Option<Self> {
        let content = tagged_offset as u32;
        match (tagged_offset >> 32) as u32 {
            RETRIES if content <= FOREVER as u32 => Some(Self::Retries(content as u8)),
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
            own_retries: FOREVER,
            notified_retries: FOREVER,
            peer_retries: FOREVER,
            timer: Duration::ZERO,
            hold_to_report: None,
            held: 0,
            hold_for_ever: false,
        }
    }
}

impl Rnr {
    /// Starts a new stream, on which neither side has sent a note.
    pub(super) const fn start(&mut self) {
        self.notified_retries = FOREVER;
        self.peer_retries = FOREVER;
        self.hold_to_report = None;
        self.held = 0;
        self.hold_for_ever = false;
    }
}

impl QueuePair {
    /// Sets how often a Send that finds no receive is retried (`rnr_retry` of `ibv_modify_qp(3)`):
    /// 7 or more means forever. Applies to requests that start later.
    pub const fn set_rnr_retry(&mut self, count: u8) {
        self.acknowledge.rnr.own_retries = match count {
            0..FOREVER => count,
            _ => FOREVER,
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
    /// request will complete with [`WcStatus::TransportRetryExceeded`]. Has no effect after an
    /// earlier error.
    pub fn blame_absent_peer(&mut self) {
        if let Some(seq) = self.sq.first_not_done()
            && self.state() != State::Error
        {
            self.sq.fail(seq, WcStatus::TransportRetryExceeded, 0);
        }
    }

    /// Returns the policy for a Send that finds no receive.
    pub(super) fn receiver_not_ready(&self) -> ReceiverNotReady {
        if !self.is_by_number() || self.drops_messages() {
            return match self.config.receiver_not_ready {
                ReceiverNotReady::Drop => ReceiverNotReady::Drop,
                _ if self.acknowledge.rnr.hold_for_ever => ReceiverNotReady::Hold {
                    limit: Duration::MAX,
                    after_close: CLOSED_CHECK_INTERVAL,
                },
                configured => configured,
            };
        }
        let Rnr {
            peer_retries,
            timer,
            ..
        } = self.acknowledge.rnr;
        match peer_retries {
            0 => ReceiverNotReady::Terminate,
            FOREVER => ReceiverNotReady::Hold {
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

    /// Records that this message is held because no receive is posted.
    pub(super) const fn record_hold(&mut self, msn: u32) {
        if self.is_by_number() {
            self.acknowledge.rnr.hold_to_report = Some(msn);
        }
    }

    /// Returns the note that is due: now, or before `request` is sent.
    #[inline]
    pub(super) const fn note(&self, request: Option<&Slot>) -> Option<Note> {
        let Rnr {
            own_retries,
            notified_retries,
            hold_to_report,
            ..
        } = self.acknowledge.rnr;
        match hold_to_report {
            Some(msn) if !self.acknowledge.own_peer => Some(Note::Held(msn)),
            _ => match request {
                Some(_) if own_retries != notified_retries && self.is_by_number() => {
                    Some(Note::Retries(own_retries))
                }
                Some(slot) => match self.queue_to_announce(slot) {
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
            Note::Retries(count) => self.acknowledge.rnr.notified_retries = count,
            Note::Held(_) => self.acknowledge.rnr.hold_to_report = None,
            Note::Queue(number) => self.xrc.note_sent(number),
            Note::Done(_) => self.record_farewell(),
        }
        let header = empty_write_header(note.tagged_offset());
        let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
        let Ok(()) = out.append::<Infallible>(&header, 0, |_| Ok(()));
    }

    /// Handles a zero-length Write, which may be a note. Fails if this queue pair does not accept
    /// the note.
    #[cold]
    #[inline(never)]
    pub(super) fn process_note<H: Host>(
        &mut self,
        h: TaggedHeader,
        host: &mut H,
    ) -> Result<(), Refusal> {
        match Note::parse(h.to) {
            Some(Note::Queue(number)) => return self.select_queue(number, host),
            _ if !self.is_by_number() => {}
            Some(Note::Retries(count)) => self.acknowledge.rnr.peer_retries = count,
            Some(Note::Held(msn)) => self.peer_holds_message(msn, host),
            Some(Note::Done(arrived)) => self.process_farewell(arrived, host),
            None => {}
        }
        Ok(())
    }

    /// If the queue pair is its own peer, applies the report of a held message directly. A note
    /// would have to wait behind the held message.
    pub(super) fn apply_own_hold<H: Host>(&mut self, host: &mut H) {
        if self.acknowledge.own_peer
            && let Some(msn) = self.acknowledge.rnr.hold_to_report.take()
        {
            self.peer_holds_message(msn, host);
        }
    }

    /// Handles the report that our message `msn` waits for a receive: the peer has processed the
    /// requests before it.
    fn peer_holds_message<H: Host>(&mut self, msn: u32, host: &mut H) {
        // Look up each message only once, even if the peer repeats its report.
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
