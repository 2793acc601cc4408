//! Collects the effects of each call of the state machine, and ends connections and queue pairs.

use super::effects::{DriveHost, Due, Effects, Lost};
use super::linger::{self, Closing, StreamEnd};
use super::link::{Link, Socket};
use super::liveness::Reach;
use super::qp::{QpInner, QpState, QueuePair, TIMER_LINGER};
use super::unsent_tail::UnsentTail;
use crate::objects::hooks::StreamDirection;
use crate::sys::poller::Interest;
use iwarp_rnic::qp::{Events, RxInterest, State, StreamWish};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const YIELDS_MAX: u32 = 1000;
const RETRY_PAUSE: Duration = Duration::from_micros(200);
/// How long a thread waits for the thread that drives. That thread may be stuck in a page fault on
/// the program's memory. It may even be the waiting thread itself, inside a waker that driving has
/// called.
const DRIVE_WAIT_MAX: Duration = Duration::from_millis(500);

/// Calls `drive` until it returns `true`, for at most [`DRIVE_WAIT_MAX`]. `drive` returns `false`
/// while another thread drives the direction. Driving does not block, so this only waits until the
/// other thread was scheduled.
fn drive_or_wait(drive: impl Fn() -> bool) {
    let mut yields = 0;
    let start = Instant::now();
    while !drive() && start.elapsed() < DRIVE_WAIT_MAX {
        if yields < YIELDS_MAX {
            yields += 1;
            std::thread::yield_now();
        } else {
            std::thread::sleep(RETRY_PAUSE);
        }
    }
}

impl QpInner {
    /// Carries out what the state machine requests after a change. Collects in `effects` what must
    /// wait until the locks are released.
    pub(crate) fn collect_effects(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
    ) {
        self.update_timer(g, effects);
        let events = g.machine.take_events();
        if !events.is_empty() {
            g.link.report_mut().established |= events.contains(Events::ESTABLISHED);
            effects.events |= events;
            effects.fault = g.machine.fault();
            effects.report = g.link.report().clone();
            if events.contains(Events::FATAL) {
                effects.lost = Some(Box::new(Lost {
                    fault: effects.fault,
                    ends: g.stream_ends,
                    errno: g.stream_errno,
                }));
            }
        }
        self.carry_out_wish(g, effects);
        if g.machine.peer_has_closed() && !g.machine.wants_tx() {
            self.end_link(g, effects, StreamEnd::Close);
        }
        // A peer that neither reads nor closes must not keep the connection forever.
        if g.machine.is_ending() && g.link.ending_mut().is_none() {
            self.begin_ending(g);
        }
        effects.add_if(Due::WAIT_FOR_MEMORY, g.machine.waits_for_memory());
        self.update_interest(g);
        // This must be last, because it releases the lock temporarily.
        self.complete_due(g, effects);
    }

    fn carry_out_wish(self: &Arc<Self>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
        match g.machine.stream_wish() {
            StreamWish::Keep => {}
            //= rfc5040 section 7
            //# For a specific LLP connection, when all Streams are either gracefully torn
            //# down or are labeled as erroneous Streams, the LLP connection MUST be torn
            //# down.
            //= rfc5041 section 3
            //# 10. For a specific LLP Connection, when all LLP Streams are either
            //# gracefully torn down or are labeled as erroneous LLP Streams, the LLP
            //# Connection MUST be torn down.
            StreamWish::ShutdownWrite => {
                if let Some(socket) = g.link.own_socket() {
                    let _ = socket.stream.shutdown_write();
                    if let Some(flow) = &socket.flow {
                        flow.closed(false);
                    }
                }
                g.machine.shutdown_done(&mut DriveHost::new(self, effects));
                effects.due |= Due::CLOSED_BY_US;
                // Another driver may have taken events and not reported them yet, so report the
                // same state.
                effects.fault = g.machine.fault();
                effects.report = g.link.report().clone();
            }
            StreamWish::Leave { cut, not_before } => {
                let end = StreamEnd::new(cut, not_before, UnsentTail::default());
                self.give_up_stream(g, effects, end, cut);
            }
            StreamWish::Abort => {
                if let Some(socket) = g.link.own_socket() {
                    socket.stream.abort();
                }
                self.give_up_stream(g, effects, StreamEnd::Close, true);
            }
        }
    }

    /// Starts the linger timer. If the peer's TCP has acknowledged nothing when the timer expires,
    /// the stream is given up.
    #[cold]
    fn begin_ending(&self, g: &mut QpState) {
        let Some(socket) = g.link.socket() else {
            return;
        };
        let acknowledged = linger::acknowledged(&g.machine, socket);
        socket
            .engine
            .after(self.ctx.config.linger, socket.token, TIMER_LINGER);
        g.link.begin_ending(acknowledged);
    }

    /// Writes the completions that are due, in steps, and lets other threads lock the state between
    /// two steps.
    #[inline]
    pub(crate) fn complete_due(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
    ) {
        while g.machine.completions_due() && !self.is_destroyed() {
            let _ = g
                .machine
                .complete_due(&mut DriveHost::new(self, &mut *effects));
            // The send queue may now be drained.
            effects.events |= g.machine.take_events();
            MutexGuard::bump(g);
        }
    }

    /// Ends the stream, and notifies the connection manager. `reset` tells the capture whether the
    /// stream ends with a reset.
    fn give_up_stream(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
        end: StreamEnd,
        reset: bool,
    ) {
        let socket = g.link.own_socket();
        if let Some(flow) = socket.and_then(|socket| socket.flow.as_ref()) {
            flow.closed(reset);
        }
        effects.events |= Events::DISCONNECTED;
        effects.report = g.link.report().clone();
        self.end_link(g, effects, end);
    }

    /// Detaches the stream. `end` determines how it is closed.
    pub(crate) fn end_link(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
        end: StreamEnd,
    ) {
        if let Some(socket) = g.detach() {
            effects.closing = Some(Closing { socket, end });
        }
        g.machine.stream_gone(&mut DriveHost::new(self, effects));
    }

    pub(crate) fn update_interest(&self, g: &mut MutexGuard<'_, QpState>) {
        let g = &mut **g;
        if g.link.is_read_to_end() {
            return;
        }
        let readable = self.passes(StreamDirection::In)
            && matches!(
                g.machine.rx_interest(),
                RxInterest::Read | RxInterest::Discard
            );
        let Some(open) = g.link.open() else {
            return;
        };
        let want = Interest {
            readable,
            writable: open.stalled.is_some() && self.passes(StreamDirection::Out),
        };
        if want != open.interest {
            watch_for(&mut g.link, want);
        }
    }

    pub(crate) fn destroy(self: &Arc<Self>) {
        if self.origin.is_foreign() {
            return;
        }
        self.finish_by_number(false);
        let mut effects = Effects::default();
        let (cm, is_ours) = {
            let mut g = self.state.lock();
            // From here on, completions of this queue pair are dropped, so they cannot overflow a
            // completion queue that other queue pairs use.
            if self.destroyed.swap(true, Ordering::AcqRel) {
                return;
            }
            g.machine.close(&mut DriveHost::new(self, &mut effects));
            let is_open = g.link.is_open();
            // The manager is notified only once, of the end: see below.
            let cm = g.link.report_mut().cm.take().filter(|_| is_open);
            (cm, g.link.own_socket().is_some())
        };
        // Before the stream is detached, send as much as the socket takes. If another thread is
        // sending, wait for it.
        if is_ours {
            drive_or_wait(|| self.drive_tx());
        }
        let closing = self.take_stream(&mut effects);
        self.send_cq.inner.detach(self);
        self.recv_cq.inner.detach(self);
        self.slots.close(&self.send_cq, &self.recv_cq);
        if let Some(target) = &self.xrc {
            target.forget(self);
        }
        let counters = self.counters();
        self.ctx.remove_qp(self.num, &counters);
        self.forget_events();
        if effects.due.contains(Due::MEMORY_UNUSED) {
            self.ctx.memory_unused();
        }
        if let Some(closing) = closing {
            closing.run(self);
        }
        // A program may wait for this event although it has destroyed the queue pair.
        if let Some(cm) = cm.and_then(|cm| cm.upgrade()) {
            cm.qp_event(Events::DISCONNECTED, None);
        }
    }

    fn take_stream(self: &Arc<Self>, effects: &mut Effects) -> Option<Closing> {
        let mut g = self.state.lock();
        let g = &mut *g;
        let tail = UnsentTail::take(self, g, effects);
        // Another thread, for which the wait was too short, may still be writing a plan.
        g.machine.leave(&mut DriveHost::new(self, effects));
        let end = match g.machine.stream_wish() {
            StreamWish::Leave { cut, not_before } => StreamEnd::new(cut, not_before, tail),
            // No plan could be allocated, so the last FPDU may be cut. After a FIN, the peer might
            // take it for complete.
            StreamWish::Abort => StreamEnd::Reset,
            StreamWish::Keep | StreamWish::ShutdownWrite => {
                StreamEnd::new(false, None, UnsentTail::default())
            }
        };
        g.machine.stream_gone(&mut DriveHost::new(self, effects));
        g.detach().map(|socket| Closing { socket, end })
    }

    /// Prepares a queue pair that is connected by number for the end of its connection: reads the
    /// data that has arrived, which may answer requests, and acknowledges it. Does nothing for
    /// other queue pairs. With `then_silent`, no further request is sent.
    fn finish_by_number(self: &Arc<Self>, then_silent: bool) {
        let ends_by_number = {
            let g = self.state.lock();
            let is_ours = g.link.own_socket().is_some();
            is_ours && g.machine.is_by_number()
        };
        if !ends_by_number {
            return;
        }
        drive_or_wait(|| self.drive_rx());
        if self.state.lock().machine.say_farewell(then_silent) {
            drive_or_wait(|| self.drive_tx());
        }
    }

    pub(crate) fn prepare_for(self: &Arc<Self>, to: State) {
        if matches!(to, State::Reset | State::Error) {
            self.finish_by_number(true);
        }
        if to == State::Reset {
            self.send_terminate();
        }
    }

    /// Sends as much of a pending Terminate as the socket takes. If another thread is sending,
    /// waits for it, because that thread's plan cannot become part of the [`UnsentTail`].
    fn send_terminate(self: &Arc<Self>) {
        let is_due = {
            let g = self.state.lock();
            let is_ours = g.link.own_socket().is_some();
            is_ours && g.machine.is_ending()
        };
        if is_due {
            drive_or_wait(|| self.drive_tx());
        }
    }

    /// Gives up the stream if the peer's TCP has acknowledged nothing since the linger timer was
    /// set.
    pub(crate) fn linger_timer_expired(self: &Arc<Self>) {
        let mut effects = Effects::default();
        let mut g = self.state.lock();
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        let acknowledged = linger::acknowledged(&g.machine, &socket);
        let Some(ending) = g.link.ending_mut() else {
            return;
        };
        if ending.acknowledged != acknowledged {
            // The peer is still receiving data that was queued before the end.
            ending.acknowledged = acknowledged;
            socket
                .engine
                .after(self.ctx.config.linger, socket.token, TIMER_LINGER);
            return;
        }
        tracing::debug!(qp = self.num, "the peer did not close in time");
        if g.machine.is_shut_down() && socket.reach(self.ctx.config.linger) == Reach::Answers {
            // The peer has received all data, or does not read. The kernel finishes the connection.
            self.end_link(&mut g, &mut effects, StreamEnd::Close);
        } else {
            g.machine.leave(&mut DriveHost::new(self, &mut effects));
        }
        self.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.apply(self);
    }

    /// Drops pending asynchronous events about the queue pair. An event holds a reference to the
    /// queue pair, and so would keep it and the device alive.
    pub(crate) fn forget_events(self: &Arc<Self>) {
        self.ctx.async_events.retain(|event| {
            let qp = event.kind.queue_pair();
            qp.is_none_or(|qp| !qp.is(self))
        });
    }
}

/// Has the engine watch the socket for `want`, unless application threads drive the socket.
#[cold]
fn watch_for(link: &mut Link, want: Interest) {
    let ended_behind_held = link.watch_again();
    let Some(open) = link.open_mut() else {
        return;
    };
    let Socket {
        engine,
        stream,
        token,
        ..
    } = &*open.socket;
    let changed = if ended_behind_held {
        // The held Send has its receive, so the rest of the stream can be read.
        engine.resume(stream, *token, want)
    } else if !open.driven_by_app {
        engine.modify(stream, *token, want)
    } else if want.readable {
        // The new interest takes effect when the engine watches the socket again. Until then, the
        // driving thread reads and writes.
        Ok(())
    } else {
        // The driving thread does not read now, and would miss the end of the stream.
        open.driven_by_app = false;
        engine.resume(stream, *token, want)
    };
    if changed.is_ok() {
        open.interest = want;
    }
}

impl QueuePair {
    /// Ends the connection gracefully. Sends as many queued requests as the socket takes, and
    /// flushes the others.
    pub fn disconnect(&self) {
        let mut effects = Effects::default();
        {
            let mut g = self.inner.state.lock();
            let is_gone = g.link.is_peer_gone();
            let mut host = DriveHost::new(&self.inner, &mut effects);
            match is_gone {
                // No peer would receive the queued requests.
                true => g.machine.leave(&mut host),
                false => g.machine.close(&mut host),
            }
            drop(host);
            self.inner.collect_effects(&mut g, &mut effects);
        }
        effects.apply(&self.inner);
        self.inner.drive_tx();
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // The program has dropped the queue pair without `destroy`.
        if !self.is_destroyed() && !self.origin.is_foreign() {
            let counters = *self.state.get_mut().machine.counters();
            self.ctx.remove_qp(self.num, &counters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// On an idle machine, yields return at once, so the wait must last for a time, and not for a
    /// number of yields.
    #[test]
    fn waits_for_unscheduled_driver() {
        let (start, driven) = (Instant::now(), Cell::new(false));
        drive_or_wait(|| {
            driven.set(start.elapsed() > Duration::from_millis(300));
            driven.get()
        });
        assert!(driven.get());
    }

    #[test]
    fn wait_for_stuck_driver_ends() {
        let start = Instant::now();
        drive_or_wait(|| false);
        assert!(start.elapsed() >= DRIVE_WAIT_MAX);
    }
}

#[cfg(test)]
#[path = "closing_tests.rs"]
mod closing_tests;
