//! What has to be done after a change of the state machine, and the end of connections and queue pairs.

use super::effects::{DriveHost, Effects};
use super::linger::{self, StreamEnd};
use super::liveness::Reach;
use super::qp::{QpInner, QpState, QueuePair, TIMER_LINGER};
use super::unsent_tail::UnsentTail;
use crate::objects::hooks::Way;
use crate::sys::poller::Interest;
use iwarp_rnic::qp::{Events, RxInterest, State, StreamWish};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often a thread that ends a connection yields to the thread that reads or writes for it, before it sleeps between two looks.
const TURNS: u32 = 1000;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(200);
/// It waits no longer: the other thread may be stuck in a page fault on the program's memory, or may be this one, which has called a waker of the
/// program.
const PATIENCE: Duration = Duration::from_millis(500);

/// Drives a direction of a socket, which returns `false` while another thread does. Reading and writing never block, so this waits only for the
/// other thread's turn on a processor, which comes late on a busy machine.
fn in_turn(drive: impl Fn() -> bool) {
    let mut turns = 0;
    let begin = Instant::now();
    while !drive() && begin.elapsed() < PATIENCE {
        if turns < TURNS {
            turns += 1;
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
}

impl QpInner {
    /// Does what the state machine asks for after it has changed. The rest is left in `effects`.
    pub(crate) fn collect_effects(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
    ) {
        self.follow_time(g, effects);
        let events = g.machine.take_events();
        if !events.is_empty() {
            g.conn.established |= events.contains(Events::ESTABLISHED);
            effects.events |= events;
            effects.fault = g.machine.fault();
            effects.cm = g.conn.cm.clone();
        }
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
                if let Some(link) = g.link.as_ref().filter(|l| !l.engine.is_foreign()) {
                    let _ = link.stream.shutdown_write();
                    if let Some(flow) = &link.flow {
                        flow.closed(false);
                    }
                }
                g.machine.shutdown_done(&mut DriveHost::new(self, effects));
                effects.closed_by_us = true;
                // This may be reported before the events that another driver has taken.
                effects.fault = g.machine.fault();
                effects.cm = g.conn.cm.clone();
                if g.conn.eof {
                    self.drop_link(g, effects);
                }
            }
            StreamWish::Leave { cut, not_before } => {
                effects.stream_end = Some(StreamEnd {
                    cut,
                    not_before,
                    tail: UnsentTail::default(),
                });
                self.end_link(g, effects, cut);
            }
            StreamWish::Abort => {
                if let Some(link) = g.link.as_ref().filter(|l| !l.engine.is_foreign()) {
                    link.stream.abort();
                }
                self.end_link(g, effects, true);
            }
        }
        if g.conn.eof && !g.machine.wants_tx() {
            self.drop_link(g, effects);
        }
        // In any case, a peer that neither reads nor closes does not keep the connection forever.
        if let (true, None, Some(link)) = (g.machine.is_ending(), g.conn.ending, &g.link) {
            link.engine
                .after(self.ctx.config.linger, link.token, TIMER_LINGER);
            g.conn.ending = Some(linger::acknowledged(&g.machine, link));
        }
        effects.established |= g.conn.established;
        effects.waits |= g.machine.waits_for_memory();
        self.update_interest(g);
        // The last step, because other threads may have the queue pair meanwhile.
        self.complete_due(g, effects);
    }

    /// Writes the completions that are due, a limited number at a time. In between, other threads may have the queue pair.
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
            // The send queue may be drained by that.
            effects.events |= g.machine.take_events();
            MutexGuard::bump(g);
        }
    }

    /// The queue pair is done with the stream, and the connection's owner is told.
    fn end_link(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
        reset: bool,
    ) {
        let link = g.link.as_ref().filter(|l| !l.engine.is_foreign());
        if let Some(flow) = link.and_then(|link| link.flow.as_ref()) {
            flow.closed(reset);
        }
        effects.events |= Events::DISCONNECTED;
        effects.cm = g.conn.cm.clone();
        self.drop_link(g, effects);
    }

    /// The stream cannot be used any more.
    pub(crate) fn drop_link(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
    ) {
        if let Some(link) = g.link.take() {
            // Outside the lock: removing it drops the engine's handle to this queue pair.
            effects.dropped = Some(link);
        }
        g.end_hold();
        g.conn.end();
        g.machine.stream_gone(&mut DriveHost::new(self, effects));
    }

    pub(crate) fn update_interest(&self, g: &mut MutexGuard<'_, QpState>) {
        let g = &mut **g;
        let Some(link) = g.link.as_ref().filter(|_| !g.conn.left.rx) else {
            return;
        };
        let readable = !g.conn.eof
            && self.passes(Way::In)
            && matches!(
                g.machine.rx_interest(),
                RxInterest::Read | RxInterest::Discard
            );
        let want = Interest {
            readable,
            writable: g.conn.stalled.is_some() && self.passes(Way::Out),
        };
        if want == g.conn.interest {
            return;
        }
        let changed = if std::mem::take(&mut g.conn.left.unwatched) {
            // The held Send has its receive: what is behind it is read, to the end.
            link.engine.resume(&link.stream, link.token, want)
        } else if !g.conn.driven_by_app {
            link.engine.modify(&link.stream, link.token, want)
        } else if readable {
            // Kept until it is watched again. A driving thread writes, too.
            Ok(())
        } else {
            // The driving thread does not read now, and would not notice the end of the stream.
            g.conn.driven_by_app = false;
            link.engine.resume(&link.stream, link.token, want)
        };
        if changed.is_ok() {
            g.conn.interest = want;
        }
    }

    pub(crate) fn destroy(self: &Arc<Self>) {
        if self.origin.is_foreign() {
            return;
        }
        self.finish_by_number(false);
        let mut effects = Effects::default();
        let (cm, link) = {
            let mut g = self.state.lock();
            // From here on completions go nowhere: a queue shared with others must not overflow from these.
            if self.destroyed.swap(true, Ordering::AcqRel) {
                return;
            }
            g.machine.close(&mut DriveHost::new(self, &mut effects));
            let ours = g.link.as_ref().is_some_and(|l| !l.engine.is_foreign());
            // Of what happens from here on, only the end is reported.
            (g.conn.cm.take().filter(|_| g.link.is_some()), ours)
        };
        // Queued octets are still sent, as many as the socket takes, by this thread or by the one that is sending: this must be done
        // before the stream is taken away from it. Sending never blocks, so this waits only for the other thread's turn on a processor.
        if link {
            in_turn(|| self.drive_tx());
        }
        let link = {
            let mut g = self.state.lock();
            let g = &mut *g;
            let tail = UnsentTail::take(self, g, &mut effects);
            g.conn.stalled = None;
            // A plan that is not written to its end may be in the hands of the thread that was waited for in vain.
            g.machine.leave(&mut DriveHost::new(self, &mut effects));
            let stream_end = match g.machine.stream_wish() {
                StreamWish::Leave { cut, not_before } => StreamEnd {
                    cut,
                    not_before,
                    tail,
                },
                // There was no memory for a plan, and the last FPDU may be cut. A FIN would make it look whole.
                StreamWish::Abort => StreamEnd {
                    cut: true,
                    ..StreamEnd::default()
                },
                StreamWish::Keep | StreamWish::ShutdownWrite => StreamEnd::default(),
            };
            g.machine
                .stream_gone(&mut DriveHost::new(self, &mut effects));
            g.link.take().map(|link| (link, stream_end))
        };
        self.send_cq.inner.detach(self);
        self.recv_cq.inner.detach(self);
        self.slots.close(&self.send_cq, &self.recv_cq);
        if let Some(target) = &self.xrc {
            target.leave(self);
        }
        let counters = self.counters();
        self.ctx.leave_qp(self.num, &counters);
        self.forget_events();
        if effects.unused {
            self.ctx.memory_unused();
        }
        if let Some((link, stream_end)) = link {
            linger::end_in_background(self, &link, stream_end);
        }
        // A program that disconnects and destroys at once waits for this event. It is not given twice.
        if let Some(cm) = cm.and_then(|cm| cm.upgrade()) {
            cm.qp_event(Events::DISCONNECTED, None);
        }
    }

    /// Prepares a queue pair whose peer is known by number for the end of its connection, which a change of state or its destruction is
    /// about to bring: it takes what has arrived, which may be the answers to its requests, and tells the peer which messages have
    /// arrived. Does nothing to other queue pairs. If `then_silent`, no request starts afterwards.
    fn finish_by_number(self: &Arc<Self>, then_silent: bool) {
        let ends_by_number = {
            let g = self.state.lock();
            let ours = g.link.as_ref().is_some_and(|l| !l.engine.is_foreign());
            ours && g.machine.is_connectionless()
        };
        if !ends_by_number {
            return;
        }
        in_turn(|| self.drive_rx());
        if self.state.lock().machine.say_farewell(then_silent) {
            in_turn(|| self.drive_tx());
        }
    }

    /// The state is about to be changed by the program. Says what has to be said before the connection ends by that.
    pub(crate) fn prepare_for(self: &Arc<Self>, to: State) {
        if matches!(to, State::Reset | State::Error) {
            self.finish_by_number(true);
        }
        if to == State::Reset {
            self.send_terminate();
        }
    }

    /// Sends a Terminate that waits, as far as the socket takes it, and waits for the thread that is sending it: what that has in its hands
    /// cannot be taken over ([`UnsentTail`]).
    fn send_terminate(self: &Arc<Self>) {
        let is_due = {
            let g = self.state.lock();
            let ours = g.link.as_ref().is_some_and(|l| !l.engine.is_foreign());
            ours && g.machine.is_ending()
        };
        if is_due {
            in_turn(|| self.drive_tx());
        }
    }

    /// The stream is being ended, and some time has passed.
    pub(crate) fn linger_timer_expired(self: &Arc<Self>) {
        let mut effects = Effects::default();
        let mut g = self.state.lock();
        let (Some(before), Some(link)) = (g.conn.ending, g.link.clone()) else {
            return;
        };
        let acknowledged = linger::acknowledged(&g.machine, &link);
        if acknowledged != before {
            // The peer still takes what was queued before the end.
            g.conn.ending = Some(acknowledged);
            link.engine
                .after(self.ctx.config.linger, link.token, TIMER_LINGER);
            return;
        }
        tracing::debug!(qp = self.num, "peer did not close in time");
        if g.machine.is_shut_down() && link.reach(self.ctx.config.linger) == Reach::Answers {
            // The peer has everything, or reads nothing. The kernel goes on alone.
            self.drop_link(&mut g, &mut effects);
        } else {
            g.machine.leave(&mut DriveHost::new(self, &mut effects));
        }
        self.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.run(self);
    }

    /// Drops asynchronous events about it that no thread has taken: they would keep it, and through it the device, forever.
    pub(crate) fn forget_events(self: &Arc<Self>) {
        self.ctx.async_events.retain(|event| {
            let qp = event.kind.queue_pair();
            qp.is_none_or(|qp| !qp.is(self))
        });
    }
}

impl QueuePair {
    /// Begins the graceful end of the connection: queued requests that TCP takes are sent, the
    /// others are flushed.
    pub fn disconnect(&self) {
        let mut effects = Effects::default();
        {
            let mut g = self.inner.state.lock();
            let is_gone = g.conn.left.rx || g.conn.left.tx;
            let mut host = DriveHost::new(&self.inner, &mut effects);
            match is_gone {
                // Nobody takes what is queued.
                true => g.machine.leave(&mut host),
                false => g.machine.close(&mut host),
            }
            drop(host);
            self.inner.collect_effects(&mut g, &mut effects);
        }
        effects.run(&self.inner);
        self.inner.drive_tx();
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // Dropped without `destroy`: its number is free again.
        if !self.is_destroyed() && !self.origin.is_foreign() {
            let counters = *self.state.get_mut().machine.counters();
            self.ctx.leave_qp(self.num, &counters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Where no other thread wants this processor, yields end at once, however long the other one waits for its own.
    #[test]
    fn a_thread_that_has_no_processor_is_waited_for() {
        let (begin, driven) = (Instant::now(), Cell::new(false));
        in_turn(|| {
            driven.set(begin.elapsed() > Duration::from_millis(300));
            driven.get()
        });
        assert!(driven.get());
    }

    #[test]
    fn a_thread_that_never_comes_back_is_not_waited_for() {
        let begin = Instant::now();
        in_turn(|| false);
        assert!(begin.elapsed() >= PATIENCE);
    }
}

#[cfg(test)]
#[path = "closing_tests.rs"]
mod closing_tests;
