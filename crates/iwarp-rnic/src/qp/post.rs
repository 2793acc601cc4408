//! Posting of work requests.

use super::{Host, QueuePair, State};
use crate::{PostError, RecvWr, SendWr, WcStatus};

impl QueuePair {
    /// Queues a send work request (`ibv_post_send(3)`). In state ERR it is flushed immediately, or
    /// after earlier requests that still have to be flushed
    /// ([`completions_due`](Self::completions_due)).
    ///
    /// This call does not transmit: see [`wants_tx`](Self::wants_tx). Inline data are copied here;
    /// other local memory is read at transmission and must not change before the request completes.
    #[inline]
    pub fn post_send<H: Host>(&mut self, wr: &SendWr<'_>, host: &mut H) -> Result<(), PostError> {
        if !self.life.starts_requests() {
            return self.post_out_of_operation(wr, host);
        }
        let len = self.sq.check(wr)?;
        self.sq.push(wr, len)
    }

    /// Like [`post_send`](Self::post_send), for a queue pair that is not in RTS with a stream.
    #[cold]
    fn post_out_of_operation<H: Host>(
        &mut self,
        wr: &SendWr<'_>,
        host: &mut H,
    ) -> Result<(), PostError> {
        if !self.life.accepts_sends() {
            return Err(PostError::InvalidState);
        }
        let len = match self.sq.check(wr) {
            // Continuing an unfinished flush frees slots.
            Err(PostError::QueueFull) if self.state() == State::Error => {
                let _ = self.flush(host);
                self.sq.check(wr)?
            }
            checked => checked?,
        };
        self.sq.push(wr, len)?;
        if self.state() == State::Error {
            let _ = self.flush(host);
        }
        Ok(())
    }

    /// Returns `Ok` if all these requests would be accepted in order. If not, returns the index of
    /// the first rejected request, and the reason.
    pub fn check_sends<'a, 'b: 'a>(
        &self,
        wrs: impl ExactSizeIterator<Item = &'a SendWr<'b>>,
    ) -> Result<(), (usize, PostError)> {
        if !self.life.accepts_sends() {
            return Err((0, PostError::InvalidState));
        }
        let number = wrs.len();
        for (i, wr) in wrs.enumerate() {
            self.sq.check(wr).map_err(|e| (i, e))?;
        }
        let room = self.sq.room() as usize;
        // In ERR each request is flushed immediately, which frees its slot for the next one, unless
        // slots are held.
        let makes_room = self.state() == State::Error && !self.config.hold_slots;
        if number > room && !makes_room {
            return Err((room, PostError::QueueFull));
        }
        Ok(())
    }

    /// Returns `true` if the send queue has room for `n` more requests.
    #[inline]
    pub const fn has_send_room(&self, n: usize) -> bool {
        self.sq.room() as usize >= n
    }

    /// Returns `true` if the receive queue has room for `n` more requests.
    #[inline]
    pub const fn has_receive_room(&self, n: usize) -> bool {
        self.rq.room() as usize >= n
    }

    /// Returns how many requests of the send queue have completed or were dropped: the
    /// [position](crate::Cqe::position) of a completion written now.
    pub const fn send_position(&self) -> u32 {
        self.sq.position()
    }

    /// Frees `n` slots of the send queue, oldest first ([`QpConfig::hold_slots`]). `n` is the
    /// increase of the polled completions' [position](crate::Cqe::position).
    ///
    /// [`QpConfig::hold_slots`]: super::QpConfig::hold_slots
    pub fn release_sends(&mut self, n: u32) {
        self.sq.release(n);
    }

    /// Frees `n` slots of the receive queue, one per polled completion.
    pub const fn release_receives(&mut self, n: u32) {
        self.rq.release(n);
    }

    /// Queues a receive (`ibv_post_recv(3)`). In state ERR it is flushed immediately, or after
    /// earlier ones that still have to be flushed ([`completions_due`](Self::completions_due)).
    pub fn post_recv<H: Host>(&mut self, wr: &RecvWr<'_>, host: &mut H) -> Result<(), PostError> {
        if self.config.shared_receive {
            return Err(PostError::UsesSharedReceiveQueue);
        }
        if self.state() == State::Reset {
            return Err(PostError::InvalidState);
        }
        if self.state() == State::Error {
            return self.post_recv_flushed(wr, host);
        }
        self.rq.post(wr)
    }

    #[cold]
    #[inline(never)]
    fn post_recv_flushed<H: Host>(
        &mut self,
        wr: &RecvWr<'_>,
        host: &mut H,
    ) -> Result<(), PostError> {
        if self.rq.is_full()
            && !self.config.hold_slots
            && let Some(oldest) = self.rq.flush_one()
        {
            // Continuing an unfinished flush frees a slot.
            self.complete_receive(oldest, WcStatus::Flushed, host);
        }
        self.rq.post(wr)?;
        let _ = self.flush(host);
        Ok(())
    }

    /// Passes to `fetch` the addresses that the next small message and its response will access, so
    /// that the processor can prefetch them.
    #[inline]
    pub fn prefetch(&self, fetch: impl Fn(*const u8)) {
        self.rq.prefetch(&fetch);
        self.sq.prefetch(&fetch);
    }
}
