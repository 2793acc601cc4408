//! Tasks and threads that wait for the same thing, in order of arrival.
//!
//! Each has a ticket. A thread that returns a resource takes the first waiter from the list and
//! wakes it. A waiter that was woken but found nothing returns to the front. A waiter that gives up
//! after being woken passes the wake-up on, so no resource is forgotten. The list is part of a
//! locked state. Wakers are code of the program, so they are cloned, called and dropped without the
//! lock.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::task::Waker;

pub(super) type Ticket = NonZeroU64;

#[derive(Debug, Default)]
pub(super) struct Waiters {
    list: VecDeque<(Ticket, Waker)>,
    last: u64,
}

/// State of a waiter that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It was still in the list.
    Waiting,
    /// It was woken, or never waited.
    Woken,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the ticket of the first waiter.
    pub(super) fn first(&self) -> Option<Ticket> {
        self.list.front().map(|(ticket, _)| *ticket)
    }

    fn position(&self, ticket: Ticket) -> Option<usize> {
        self.list.iter().position(|(t, _)| *t == ticket)
    }

    /// Adds a waiter: at the end if it has no ticket yet; at the front if it was woken and found
    /// nothing. If it is still in the list, replaces its waker. Returns a waker to drop after
    /// unlocking.
    pub(super) fn wait(&mut self, ticket: &mut Option<Ticket>, waker: Waker) -> Option<Waker> {
        let Some(ticket) = *ticket else {
            self.last += 1;
            let new = Ticket::MIN.saturating_add(self.last);
            *ticket = Some(new);
            self.list.push_back((new, waker));
            return None;
        };
        match self.position(ticket) {
            Some(at) => self
                .list
                .get_mut(at)
                .map(|(_, old)| std::mem::replace(old, waker)),
            None => {
                self.list.push_front((ticket, waker));
                None
            }
        }
    }

    /// Returns `true` if `ticket` may take the resource: it is the first one, it was woken, or
    /// there are no waiters.
    #[inline]
    pub(super) fn may_take(&self, ticket: Option<Ticket>) -> bool {
        match (self.list.front(), ticket) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some((first, _)), Some(mine)) => *first == mine || self.position(mine).is_none(),
        }
    }

    /// Takes the first waiter from the list. The caller wakes it after unlocking.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Waker> {
        self.list.pop_front().map(|(_, waker)| waker)
    }

    /// Removes a waiter. Returns its waker, to drop after unlocking.
    #[inline]
    pub(super) fn leave(&mut self, ticket: Option<Ticket>) -> (Place, Option<Waker>) {
        let Some(at) = ticket.and_then(|ticket| self.position(ticket)) else {
            return (Place::Woken, None);
        };
        let gone = self.list.remove(at).map(|(_, waker)| waker);
        (Place::Waiting, gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waker() -> Waker {
        Waker::noop().clone()
    }

    #[test]
    fn waiters_are_served_in_order() {
        let mut waiters = Waiters::default();
        let mut tickets = [None; 3];
        for ticket in &mut tickets {
            assert!(waiters.may_take(None) == waiters.is_empty());
            waiters.wait(ticket, waker());
        }
        let [first, second, third] = tickets;
        assert!(waiters.may_take(first) && !waiters.may_take(second) && !waiters.may_take(None));
        assert!(waiters.next().is_some());
        // The first one was woken, so it may take; the second one is the head of the list now.
        assert!(waiters.may_take(first) && waiters.may_take(second) && !waiters.may_take(third));
        let mut again = first;
        waiters.wait(&mut again, waker());
        assert!(again == first && waiters.may_take(first) && !waiters.may_take(second));
        // A second registration of the same waiter replaces its waker.
        assert!(waiters.wait(&mut again, waker()).is_some());
        assert_eq!(waiters.list.len(), 3);
        assert_eq!(waiters.leave(second).0, Place::Waiting);
        assert_eq!(waiters.leave(second).0, Place::Woken);
        assert_eq!(waiters.leave(None).0, Place::Woken);
        assert_eq!(waiters.list.len(), 2);
    }
}
