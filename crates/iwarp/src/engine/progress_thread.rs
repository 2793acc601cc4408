//! The progress thread: serves what no application thread drives.
//!
//! It sleeps until a socket is ready, a timer expires, or a lease ends. Sockets of a queue that an
//! application thread polls are taken out of the set until the queue's lease ends, so that packets
//! wake no thread and cost the sender no look at the set. While application threads drive the whole
//! set, the progress thread does not look at the set at all. Whoever gives a lease back before its
//! end, or sets an earlier timer, wakes it.

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

/// Ready sources of which the thread asks whether they were driven lately.
const LOOKS: usize = 2;
/// Pause after the kernel has refused to wait for events.
const REFUSED: Duration = Duration::from_millis(4);

impl Engine {
    /// Runs the thread that has this place. Returns when the watch has given the place to another
    /// thread.
    pub(super) fn run(&self, place: u64) {
        // By default the kernel may let a sleep last 50 µs longer, which is as long as a short
        // lease.
        let _ = set_current_timer_slack(NonZeroU64::new(1));
        let mut events = Events::with_capacity(BATCH);
        let mut place = self.turns.enter(place);
        let mut contended = 0u32;
        loop {
            if let Err(error) = self.sleep(&mut events, contended) {
                // Only a programming error leads here; without progress nothing would ever
                // complete.
                tracing::error!(%error, "epoll_wait failed");
                std::thread::sleep(REFUSED);
                continue;
            }
            self.turns.begin(&mut place);
            guarded::keep();
            self.watch.wake();
            self.let_drivers_go_first(&events);
            let now = now_ns();
            self.resting.wake(now);
            contended = match self.serve(&events, now) {
                true => contended.saturating_add(1),
                false => 0,
            };
            self.fire_timers();
            if !self.turns.end(&mut place) {
                return;
            }
        }
    }

    /// Offers the processor to threads that have driven what is ready. They may be waiting for just
    /// this one, and know the data.
    fn let_drivers_go_first(&self, events: &Events) {
        let now = now_ns();
        let lately = |event: Readiness| {
            let source = self.sources.get(event.token);
            source.is_some_and(|source| source.was_driven(now))
        };
        if events.iter().take(LOOKS).any(lately) {
            yield_now();
        }
    }

    /// Serves what is ready and what no application thread drives. Returns `true` if there was
    /// something, but other threads are driving all of it at this moment.
    fn serve(&self, events: &Events, now: u64) -> bool {
        if events.iter().any(|event| event.token == WAKE_TOKEN) {
            self.wake.drain();
        }
        let left = everything().end(now).is_some();
        let served = self.dispatch(events, |token, source| {
            let source = self.resting.admit(token, source, now).err()?;
            (!left).then_some(source)
        });
        !served && events.iter().any(|event| event.token != WAKE_TOKEN)
    }

    /// Waits until there may be something to do. If all work was `contended` this many times in a
    /// row, the thread does not look at the set for a while.
    fn sleep(&self, events: &mut Events, contended: u32) -> io::Result<()> {
        // From here on, whoever changes what is looked at below wakes this thread.
        let announced = self.parker.announce();
        let now = now_ns();
        let aside = match everything().end(now) {
            None if contended > 0 => Some(now + policy::contended_pause(contended)),
            end => end,
        };
        let ends = [self.first_timer(), self.resting.first_end(now), aside];
        let end = ends.into_iter().flatten().min();
        let time = end.map(|end| Duration::from_nanos(end.saturating_sub(now)));
        if aside.is_none() {
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
