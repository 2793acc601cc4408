//! Tasks and threads that wait for the same thing, in the order in which they came.
//!
//! Each has a ticket. Whoever gives something back takes the first waiter off the list and wakes it. A waiter that is woken in
//! vain goes to the front again. A waiter that gives up after it was woken passes that on, so nothing that was given back is
//! forgotten. The list is part of a locked state: wakers are cloned, called and dropped without the lock, because they are code
//! of the program.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::task::Waker;

/// The number of somebody in a list.
pub(super) type Ticket = NonZeroU64;

/// The waiters for one thing.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    list: VecDeque<(Ticket, Waker)>,
    last: u64,
}

/// Whether a waiter was in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It was taken off.
    Waiting,
    /// It has been woken, or never waited.
    Woken,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn position(&self, ticket: Ticket) -> Option<usize> {
        self.list.iter().position(|(t, _)| *t == ticket)
    }

    /// Puts a waiter into the list: at the end if it has no ticket yet; where it is, with this waker, if it is there; and else at
    /// the front, because it was woken in vain. Returns a waker for the caller to drop when nothing is locked.
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

    /// Returns `true` if `ticket` may take what there is: it is the first one, it was woken, or nobody waits.
    #[inline]
    pub(super) fn may_take(&self, ticket: Option<Ticket>) -> bool {
        match (self.list.front(), ticket) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some((first, _)), Some(mine)) => *first == mine || self.position(mine).is_none(),
        }
    }

    /// Takes the first waiter off the list. The caller wakes it when nothing is locked.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Waker> {
        self.list.pop_front().map(|(_, waker)| waker)
    }

    /// Takes a waiter off that needs to wait no longer. Returns its waker, for the caller to drop when nothing is locked.
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
    fn first_come_first_served_and_a_vain_call_costs_no_place() {
        let mut waiters = Waiters::default();
        let mut tickets = [None; 3];
        for ticket in &mut tickets {
            assert!(waiters.may_take(None) == waiters.is_empty());
            waiters.wait(ticket, waker());
        }
        let [first, second, third] = tickets;
        assert!(waiters.may_take(first) && !waiters.may_take(second) && !waiters.may_take(None));
        assert!(waiters.next().is_some());
        // The first one was woken, and so may take; the second is the first of the list now.
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
