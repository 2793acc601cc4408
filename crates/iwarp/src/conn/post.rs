//! Posting: adds work requests to the queues of a queue pair. The posting thread sends them, unless
//! the cork defers that.

use super::effects::{DriveHost, Due, Effects};
use super::qp::{QpInner, QueuePair, TIMER_SEND_DELAY};
use crate::engine::policy::{CORK_SEND_DELAY, Verdict};
use crate::error::{PostFailed, Result};
use iwarp_rnic::qp::{QueuePair as Machine, RxInterest};
use iwarp_rnic::{PostError, RecvWr, SendOp, SendWr};
use std::sync::Arc;

/// A send work request for one kind of queue pair.
pub(crate) trait Request {
    fn wr(&self) -> &SendWr<'_>;
    fn post(&self, machine: &mut Machine, host: &mut DriveHost<'_>) -> Result<(), PostError>;
    fn with_op(&self, op: SendOp) -> Self;
}

impl Request for SendWr<'_> {
    #[inline]
    fn wr(&self) -> &SendWr<'_> {
        self
    }

    #[inline]
    fn post(&self, machine: &mut Machine, host: &mut DriveHost<'_>) -> Result<(), PostError> {
        machine.post_send(self, host)
    }

    fn with_op(&self, op: SendOp) -> Self {
        Self { op, ..*self }
    }
}

impl QueuePair {
    /// Posts send work requests in order, and starts to send them from this thread
    /// (`ibv_post_send(3)`). Never blocks.
    ///
    /// # Errors
    /// Returns [`PostFailed`] for the first request that is not accepted: the queue is full, a list
    /// or the inline data is too long, or the queue pair is not connected. Completions report wrong
    /// keys and ranges.
    #[inline]
    pub fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailed> {
        self.post_list(wrs)
    }

    /// Does the same as [`post_send`](Self::post_send) for one request of a caller that will poll
    /// before it waits. This need not read the clock each time.
    ///
    /// # Errors
    /// Fails as [`post_send`](Self::post_send) does.
    #[inline]
    pub(crate) fn post_more(&self, wr: &SendWr<'_>) -> Result<()> {
        let mut effects = Effects::default();
        let wrs = std::slice::from_ref(wr);
        let (result, verdict) = self.inner.post::<false, true, _>(wrs, &mut effects);
        self.inner.act_before_sending(&mut effects);
        if verdict != Verdict::Join {
            self.inner.carry_out(verdict);
        }
        // `apply` copies the effects, so check first.
        if !effects.is_quiet() {
            effects.apply(&self.inner);
        }
        result.map_err(|(_, error)| error.into())
    }

    #[inline]
    pub(crate) fn post_list<R: Request>(&self, wrs: &[R]) -> Result<(), PostFailed> {
        self.post_now::<false, R>(wrs)
    }

    /// Does the same as [`post_send`](Self::post_send), but accepts either all requests or none.
    ///
    /// # Errors
    /// Fails as [`post_send`](Self::post_send) does.
    pub fn post_send_all(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailed> {
        self.post_whole_list(wrs)
    }

    pub(crate) fn post_whole_list<R: Request>(&self, wrs: &[R]) -> Result<(), PostFailed> {
        self.post_now::<true, R>(wrs)
    }

    /// Posts requests and sends them. If the queue is full, sends the deferred requests, so that
    /// the program can poll for their completions.
    #[inline]
    fn post_now<const ALL_OR_NONE: bool, R: Request>(&self, wrs: &[R]) -> Result<(), PostFailed> {
        let mut effects = Effects::default();
        let (result, verdict) = self.inner.post::<ALL_OR_NONE, false, R>(wrs, &mut effects);
        self.inner.act_before_sending(&mut effects);
        self.inner.carry_out(verdict);
        effects.apply(&self.inner);
        result.map_err(|(n, e)| PostFailed::new(n, e))
    }

    /// Posts receives, in order (`ibv_post_recv(3)`). Never blocks.
    ///
    /// # Errors
    /// Returns [`PostFailed`] for the first request that is not accepted: the queue is full, a list
    /// is too long, or the state does not allow receives.
    #[inline]
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        let mut effects = Effects::default();
        let mut result = Ok(());
        if self.inner.origin.is_foreign() {
            return Err(PostFailed::new(0, PostError::InvalidState));
        }
        let held = {
            let mut g = self.inner.state.lock();
            if self.inner.is_destroyed() {
                return Err(PostFailed::new(0, PostError::InvalidState));
            }
            g.make_receive_room(&self.inner.slots, wrs.len());
            let mut host = DriveHost::new(&self.inner, &mut effects);
            for (i, wr) in wrs.iter().enumerate() {
                if let Some(faults) = &self.inner.faults
                    && faults.refuses_receive()
                {
                    result = Err(PostFailed::new(i, PostError::QueueFull));
                    break;
                }
                if let Err(e) = g.machine.post_recv(wr, &mut host) {
                    result = Err(PostFailed::new(i, e));
                    break;
                }
            }
            drop(host);
            self.inner.complete_due(&mut g, &mut effects);
            g.machine.rx_interest() == RxInterest::Held
        };
        effects.apply(&self.inner);
        if held {
            self.inner.drive_rx();
        }
        result
    }
}

impl QpInner {
    /// Sends now, or defers sending, as `verdict` demands. With `Join`, earlier requests are
    /// deferred already, so the next poll or the timer sends these requests, too.
    #[inline]
    fn carry_out(self: &Arc<Self>, verdict: Verdict) {
        match verdict {
            Verdict::Send => {
                self.drive_tx();
            }
            Verdict::SendInBurst => {
                self.drive_tx();
                self.state.lock().cork.sent();
            }
            Verdict::Defer => self.defer_sending(),
            Verdict::Join => {}
        }
    }

    /// Adds requests to the send queue. Returns the verdict whether to send now; if the queue is
    /// full, that is `Send`. With `ALL_OR_NONE`, accepts either all requests or none. With `MORE`,
    /// the caller will poll before it waits.
    #[inline]
    pub(super) fn post<const ALL_OR_NONE: bool, const MORE: bool, R: Request>(
        self: &Arc<Self>,
        wrs: &[R],
        effects: &mut Effects,
    ) -> (Result<(), (usize, PostError)>, Verdict) {
        // Check this before locking the state: a thread of the parent may have held the lock at the
        // time of the fork.
        if self.origin.is_foreign() {
            return (Err((0, PostError::InvalidState)), Verdict::Join);
        }
        let mut guard = self.state.lock();
        if self.is_destroyed() {
            return (Err((0, PostError::InvalidState)), Verdict::Send);
        }
        let g = &mut *guard;
        g.make_send_room(&self.slots, wrs.len());
        if ALL_OR_NONE && let Err(e) = g.machine.check_sends(wrs.iter().map(R::wr)) {
            return (Err(e), g.cork.send());
        }
        if ALL_OR_NONE && let Some(i) = self.first_refused(wrs) {
            return (Err((i, PostError::QueueFull)), g.cork.send());
        }
        let mut bytes = 0;
        for (i, wr) in wrs.iter().enumerate() {
            let posted = match &self.faults {
                None => wr.post(&mut g.machine, &mut DriveHost::new(self, effects)),
                Some(faults) => {
                    self.post_faulty::<ALL_OR_NONE, R>(&**faults, wr, &mut g.machine, effects)
                }
            };
            if let Err(e) = posted {
                return (Err((i, e)), g.cork.send());
            }
            // The approximate number of bytes, with framing. Reads and atomics send only a request.
            let wr = wr.wr();
            bytes += if wr.op.has_response() {
                64
            } else {
                wr.sges.iter().map(|s| u64::from(s.len)).sum::<u64>() + 24
            };
        }
        self.peer_answers.record_request();
        // `sends_waiting` does not count Reads that were sent and wait for their responses.
        let has_room = g.machine.sends_waiting() < g.machine.config().max_send_wr / 2;
        // Count the polls of both completion queues, because the program may poll only one of them.
        let polls = self
            .send_cq
            .inner
            .pollers
            .empty_polls()
            .wrapping_add(self.recv_cq.inner.pollers.empty_polls());
        let verdict = match MORE {
            true => g.cork.post_more(polls, bytes, has_room),
            false => g.cork.post(polls, wrs.len(), bytes, has_room),
        };
        if guard.link.is_none() {
            effects.add_if(Due::REQUESTS_WAIT, guard.awaits_peer());
        }
        self.complete_due(&mut guard, effects);
        (Ok(()), verdict)
    }

    /// Defers sending until the next empty poll, or until a timer expires.
    #[cold]
    pub(crate) fn defer_sending(self: &Arc<Self>) {
        self.send_cq.inner.defer(self);
        if !self.recv_cq.is_same(&self.send_cq) {
            self.recv_cq.inner.defer(self);
        }
        let socket = {
            let mut g = self.state.lock();
            // Without a stream no timer is needed: attaching a stream sends the requests.
            let Some(socket) = g.link.socket().cloned() else {
                return;
            };
            if std::mem::replace(&mut g.cork.timer, true) {
                return;
            }
            socket
        };
        socket
            .engine
            .after(CORK_SEND_DELAY, socket.token, TIMER_SEND_DELAY);
    }

    pub(crate) fn send_delay_expired(self: &Arc<Self>) {
        self.state.lock().cork.timer = false;
        self.drive_tx();
    }
}
