//! The progress thread: serves what no application thread drives.
//!
//! It sleeps until a socket is ready, a timer expires, or a lease ends. While an application thread
//! polls a completion queue, the queue's sockets are removed from the set, so that packets wake no
//! thread and cost the sender no access to the set. While application threads drive the whole set,
//! the progress thread ignores it. A thread that gives a lease back before its end, or sets an
//! earlier timer, wakes the progress thread.

use super::core::{BATCH, Engine, WAKE_TOKEN, everything};
use super::policy;
use super::sources::Source;
use super::sync::yield_now;
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use crate::sys::poller::{Events, Interest, Readiness, wait_fd};
use rustix::thread::set_current_timer_slack;
use std::io;
use std::num::NonZeroU64;
use std::time::Duration;

/// Ready sources for which the thread checks whether they were driven lately.
const DRIVEN_CHECKS: usize = 2;
/// Pause after the kernel refused to wait for events.
const REFUSED_PAUSE: Duration = Duration::from_millis(4);

impl Engine {
    /// Runs the progress thread that has `place`. Returns when the watch has given the place to
    /// another thread.
    pub(super) fn run(&self, place: u64) {
        // By default the kernel may let a sleep last 50 µs longer, which is as long as a short
        // lease.
        let _ = set_current_timer_slack(NonZeroU64::new(1));
        let mut events = Events::with_capacity(BATCH);
        let mut place = self.rounds.enter(place);
        let mut contended = 0u32;
        loop {
            if let Err(error) = self.sleep(&mut events, contended) {
                // Only a bug leads here. Without progress nothing would ever complete, so try
                // again.
                tracing::error!(%error, "epoll_wait failed");
                std::thread::sleep(REFUSED_PAUSE);
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

    /// Yields the processor to threads that have driven the ready sources lately. They may be
    /// waiting for this processor, and have the data in their caches.
    fn let_drivers_go_first(&self, events: &Events) {
        let now = now_ns();
        let lately = |event: Readiness| {
            let source = self.sources.get(event.token);
            source.is_some_and(|source| source.was_driven(now))
        };
        if events.iter().take(DRIVEN_CHECKS).any(lately) {
            yield_now();
        }
    }

    /// Serves what is ready and not driven by application threads. Returns `true` if there was
    /// something and other threads drive all of it.
    fn serve(&self, events: &Events, now: u64) -> bool {
        if events.iter().any(|event| event.token == WAKE_TOKEN) {
            self.wake.drain();
        }
        let set_is_driven = everything().end(now).is_some();
        let served = self.dispatch(events, |token, source| {
            let source = self.paused.pause_if_driven(token, source, now).err()?;
            (!set_is_driven).then_some(source)
        });
        !served && events.iter().any(|event| event.token != WAKE_TOKEN)
    }

    /// Waits until there may be something to do. If all work was `contended` this many times in a
    /// row, the thread ignores the set for a while.
    fn sleep(&self, events: &mut Events, contended: u32) -> io::Result<()> {
        // From here on, a thread that changes what is checked below wakes this thread.
        let announced = self.parker.announce();
        let now = now_ns();
        let ignored_until = match everything().end(now) {
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

    /// Returns when the first timer with a purpose expires.
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
