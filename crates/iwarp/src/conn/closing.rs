//! How the driver follows the state machine after a change, and how connections and queue pairs end.

use super::effects::{DriveHost, Due, Effects};
use super::linger::{self, Closing, StreamEnd};
use super::link::{Link, Socket};
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

/// How often a thread that ends a connection yields to the thread that reads or writes for it,
/// before it sleeps between two looks.
const TURNS: u32 = 1000;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(200);
/// It waits no longer: the other thread may be stuck in a page fault on the program's memory, or
/// may be this one, which has called a waker of the program.
const PATIENCE: Duration = Duration::from_millis(500);

/// Drives a direction of a socket, which returns `false` while another thread does. Reading and
/// writing never block, so this waits only for the other thread's turn on a processor, which comes
/// late on a busy machine.
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
    /// Does what the state machine asks for after it has changed, and collects in `effects` what
    /// must wait until the locks are dropped.
    pub(crate) fn collect_effects(
        self: &Arc<Self>,
        g: &mut MutexGuard<'_, QpState>,
        effects: &mut Effects,
    ) {
        self.follow_time(g, effects);
        let events = g.machine.take_events();
        if !events.is_empty() {
            g.link.report_mut().established |= events.contains(Events::ESTABLISHED);
            effects.events |= events;
            effects.fault = g.machine.fault();
            effects.report = g.link.report().clone();
        }
        self.grant_wish(g, effects);
        if g.machine.peer_has_closed() && !g.machine.wants_tx() {
            self.end_link(g, effects, StreamEnd::Close);
        }
        // In any case, a peer that neither reads nor closes does not keep the connection forever.
        if g.machine.is_ending() && g.link.ending_mut().is_none() {
            self.begin_ending(g);
        }
        effects.note_if(Due::WAIT_FOR_MEMORY, g.machine.waits_for_memory());
        self.update_interest(g);
        // The last step, because other threads may have the queue pair meanwhile.
        self.complete_due(g, effects);
    }

    /// Does with the stream what the state machine wants.
    fn grant_wish(self: &Arc<Self>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
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
                // This may be reported before the events that another driver has taken.
                effects.fault = g.machine.fault();
                effects.report = g.link.report().clone();
                if g.machine.peer_has_closed() {
                    self.end_link(g, effects, StreamEnd::Close);
                }
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

    /// The stream is being ended: sets the timer after which a peer that takes nothing is given up.
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

    /// Writes the completions that are due, a limited number at a time. In between, other threads
    /// may have the queue pair.
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

    /// The queue pair is done with the stream, and the connection manager is notified. `reset`: the
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

    /// The stream cannot be used any more, and ends in this way.
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
        let readable = self.passes(Way::In)
            && matches!(
                g.machine.rx_interest(),
                RxInterest::Read | RxInterest::Discard
            );
        let Some(open) = g.link.open() else {
            return;
        };
        let want = Interest {
            readable,
            writable: open.stalled.is_some() && self.passes(Way::Out),
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
            // From here on completions go nowhere: a queue shared with others must not overflow
            // from these.
            if self.destroyed.swap(true, Ordering::AcqRel) {
                return;
            }
            g.machine.close(&mut DriveHost::new(self, &mut effects));
            let is_open = g.link.is_open();
            // Of what happens from here on, only the end is reported.
            let cm = g.link.report_mut().cm.take().filter(|_| is_open);
            (cm, g.link.own_socket().is_some())
        };
        // Queued octets are still sent, as many as the socket takes, by this thread or by the one
        // that is sending: this must be done before the stream is taken away from it. Sending never
        // blocks, so this waits only for the other thread's turn on a processor.
        if is_ours {
            in_turn(|| self.drive_tx());
        }
        let closing = self.take_stream(&mut effects);
        self.send_cq.inner.detach(self);
        self.recv_cq.inner.detach(self);
        self.slots.close(&self.send_cq, &self.recv_cq);
        if let Some(target) = &self.xrc {
            target.leave(self);
        }
        let counters = self.counters();
        self.ctx.leave_qp(self.num, &counters);
        self.forget_events();
        if effects.due.contains(Due::MEMORY_UNUSED) {
            self.ctx.memory_unused();
        }
        if let Some(closing) = closing {
            closing.run(self);
        }
        // A program that disconnects and destroys at once waits for this event. It is not given
        // twice.
        if let Some(cm) = cm.and_then(|cm| cm.upgrade()) {
            cm.qp_event(Events::DISCONNECTED, None);
        }
    }

    /// Takes the stream of a queue pair that is being destroyed.
    fn take_stream(self: &Arc<Self>, effects: &mut Effects) -> Option<Closing> {
        let mut g = self.state.lock();
        let g = &mut *g;
        let tail = UnsentTail::take(self, g, effects);
        // A plan that is not written to its end may be in the hands of the thread that was waited
        // for in vain.
        g.machine.leave(&mut DriveHost::new(self, effects));
        let end = match g.machine.stream_wish() {
            StreamWish::Leave { cut, not_before } => StreamEnd::new(cut, not_before, tail),
            // There was no memory for a plan, and the last FPDU may be cut. A FIN would make it
            // look whole.
            StreamWish::Abort => StreamEnd::Reset,
            StreamWish::Keep | StreamWish::ShutdownWrite => {
                StreamEnd::new(false, None, UnsentTail::default())
            }
        };
        g.machine.stream_gone(&mut DriveHost::new(self, effects));
        g.detach().map(|socket| Closing { socket, end })
    }

    /// Prepares a queue pair whose peer is known by number for the end of its connection, which a
    /// change of state or its destruction is about to bring: it takes what has arrived, which may
    /// be the answers to its requests, and tells the peer which messages have arrived. Does nothing
    /// to other queue pairs. If `then_silent`, no request starts afterwards.
    fn finish_by_number(self: &Arc<Self>, then_silent: bool) {
        let ends_by_number = {
            let g = self.state.lock();
            let ours = g.link.own_socket().is_some();
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

    /// The state is about to be changed by the program. Says what has to be said before the
    /// connection ends by that.
    pub(crate) fn prepare_for(self: &Arc<Self>, to: State) {
        if matches!(to, State::Reset | State::Error) {
            self.finish_by_number(true);
        }
        if to == State::Reset {
            self.send_terminate();
        }
    }

    /// Sends a Terminate that waits, as far as the socket takes it, and waits for the thread that
    /// is sending it: what that has in its hands cannot be taken over ([`UnsentTail`]).
    fn send_terminate(self: &Arc<Self>) {
        let is_due = {
            let g = self.state.lock();
            let ours = g.link.own_socket().is_some();
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
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        let acknowledged = linger::acknowledged(&g.machine, &socket);
        let Some(ending) = g.link.ending_mut() else {
            return;
        };
        if ending.acknowledged != acknowledged {
            // The peer still takes what was queued before the end.
            ending.acknowledged = acknowledged;
            socket
                .engine
                .after(self.ctx.config.linger, socket.token, TIMER_LINGER);
            return;
        }
        tracing::debug!(qp = self.num, "peer did not close in time");
        if g.machine.is_shut_down() && socket.reach(self.ctx.config.linger) == Reach::Answers {
            // The peer has everything, or reads nothing. The kernel goes on alone.
            self.end_link(&mut g, &mut effects, StreamEnd::Close);
        } else {
            g.machine.leave(&mut DriveHost::new(self, &mut effects));
        }
        self.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.apply(self);
    }

    /// Drops asynchronous events about it that no thread has taken: they would keep it, and through
    /// it the device, forever.
    pub(crate) fn forget_events(self: &Arc<Self>) {
        self.ctx.async_events.retain(|event| {
            let qp = event.kind.queue_pair();
            qp.is_none_or(|qp| !qp.is(self))
        });
    }
}

/// Has the engine watch the socket for this, unless application threads do.
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
        // The held Send has its receive: what is behind it is read, to the end.
        engine.resume(stream, *token, want)
    } else if !open.driven_by_app {
        engine.modify(stream, *token, want)
    } else if want.readable {
        // Kept until it is watched again. A driving thread writes, too.
        Ok(())
    } else {
        // The driving thread does not read now, and would not notice the end of the stream.
        open.driven_by_app = false;
        engine.resume(stream, *token, want)
    };
    if changed.is_ok() {
        open.interest = want;
    }
}

impl QueuePair {
    /// Begins the graceful end of the connection: queued requests that TCP takes are sent, the
    /// others are flushed.
    pub fn disconnect(&self) {
        let mut effects = Effects::default();
        {
            let mut g = self.inner.state.lock();
            let is_gone = g.link.takes_nothing();
            let mut host = DriveHost::new(&self.inner, &mut effects);
            match is_gone {
                // Nobody takes what is queued.
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

    /// Where no other thread wants this processor, yields end at once, however long the other one
    /// waits for its own.
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
