//! The progress thread: serves the sources that no application thread drives.
//!
//! It sleeps until a socket is ready, a timer expires, or a lease ends. While an application thread
//! polls a completion queue, the queue's sockets are not in the `epoll` set, so that arriving
//! packets wake no thread. While application threads drive the whole process, the progress thread
//! ignores the set. A thread that gives a lease back before its end, or sets an earlier timer,
//! wakes the progress thread.

use super::core::{BATCH, Engine, WAKE_TOKEN, whole_process_lease};
use super::policy;
use super::sources::Source;
use super::sync::yield_now;
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use crate::sys::poller::{Events, Interest, Readiness, wait_fd};
use crate::sys::thread::{request_precise_sleeps, request_time_slice};
use std::io;
use std::time::Duration;

/// Number of ready sources for which the thread checks whether they were driven lately.
const DRIVEN_CHECKS: usize = 2;
/// The shortest time slice that Linux grants. With a longer one, the thread waits behind a thread
/// that computes or polls, on a processor that both want, for up to 4 ms.
const TIME_SLICE_NS: u64 = 100_000;
const EPOLL_RETRY_PAUSE: Duration = Duration::from_millis(4);

impl Engine {
    /// Runs the progress thread in `place`. Returns when the watch has given the place to another
    /// thread.
    pub(super) fn run(&self, place: u64) {
        // The usual delay of a sleep is as long as a short lease.
        request_precise_sleeps();
        request_time_slice(TIME_SLICE_NS);
        let mut events = Events::with_capacity(BATCH);
        let mut place = self.rounds.enter(place);
        let mut contended = 0u32;
        loop {
            if let Err(error) = self.sleep(&mut events, contended) {
                // Only a bug can cause this. Try again: without this thread, no request might ever
                // complete.
                tracing::error!(%error, "epoll_wait failed; trying again");
                std::thread::sleep(EPOLL_RETRY_PAUSE);
                continue;
            }
            self.rounds.begin(&mut place);
            guarded::keep_regularly(now_ns());
            self.watch.wake();
            self.let_drivers_go_first(&events);
            let now = now_ns();
            self.paused.resume_undriven(now);
            contended = match self.serve(&events, now) {
                true => contended.saturating_add(1),
                false => 0,
            };
            self.fire_timers();
            if !self.rounds.end(&mut place) {
                return;
            }
        }
    }

    /// Yields the processor to threads that have driven the ready sources lately. Such a thread may
    /// be waiting for this processor, and drives faster because its cache is warm.
    fn let_drivers_go_first(&self, events: &Events) {
        let now = now_ns();
        let was_driven = |event: Readiness| {
            let source = self.sources.get(event.token);
            source.is_some_and(|source| source.was_driven(now))
        };
        if events.iter().take(DRIVEN_CHECKS).any(was_driven) {
            yield_now();
        }
    }

    /// Serves the ready sources that application threads do not drive. Returns `true` if sources
    /// were ready, and other threads drive all of them.
    fn serve(&self, events: &Events, now: u64) -> bool {
        if events.iter().any(|event| event.token == WAKE_TOKEN) {
            self.wake.drain();
        }
        let process_is_driven = whole_process_lease().end(now).is_some();
        let served = self.dispatch(events, |token, source| {
            let source = self.paused.pause_if_driven(token, source, now).err()?;
            (!process_is_driven).then_some(source)
        });
        !served && events.iter().any(|event| event.token != WAKE_TOKEN)
    }

    /// Waits until there may be work. `contended` is how many times in a row other threads drove
    /// all ready sources; if it is not zero, the thread ignores the set for a while.
    fn sleep(&self, events: &mut Events, contended: u32) -> io::Result<()> {
        // From here on, a thread that gives a lease back or sets a timer wakes this thread.
        let announced = self.parker.announce();
        let now = now_ns();
        let ignored_until = match whole_process_lease().end(now) {
            None if contended > 0 => Some(now + policy::contended_pause(contended)),
            end => end,
        };
        let ends = [
            self.first_timer(),
            self.paused.first_end(now),
            ignored_until,
        ];
        let end = ends.into_iter().flatten().min();
        let time = end.map(|end| Duration::from_nanos(end.saturating_sub(now)));
        if ignored_until.is_none() {
            return self.poller.wait(events, time).map(drop);
        }
        wait_fd(&self.wake, Interest::READ, time)?;
        drop(announced);
        self.poller.wait_zero(events).map(drop)
    }

    /// Returns when the first timer expires that its source still awaits.
    pub(super) fn first_timer(&self) -> Option<u64> {
        self.timers.first(|(_, token, kind)| {
            let source = self.sources.get(*token);
            source.is_some_and(|source| source.awaits(*kind))
        })
    }

    pub(super) fn fire_timers(&self) {
        while let Some((_, token, kind)) = self.timers.take_due(now_ns()) {
            if let Some(source) = self.sources.get(token) {
                Source::timer(source, kind);
            }
        }
    }
}
