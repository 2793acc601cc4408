//! Which slots of send and receive queues are free again, because their completions were polled.
//!
//! As with hardware, a slot of a send or receive queue is in use until its completion has been
//! polled. The slot of an unsignaled request is in use until the completion of a later request of
//! the queue has been polled. So the queue depths limit what a program can post, and a completion
//! queue that is large enough for these depths cannot overflow.
//!
//! The state machine counts the slots in use. It is locked while the program posts, and polling
//! must not wait for that lock. So each completion contains its position in its queue, and the
//! index of an *account* in the completion queue. Polling stores the position in the account; it
//! holds the completion queue's lock anyway. Posting reads the account only if the queue seems
//! full, and releases as many slots as the position has advanced.
//!
//! A slot of a shared receive queue is free as soon as a message has taken its receive, as in siw
//! and rxe.

use super::cq::CompletionQueue as Cq;
use iwarp_rnic::Cqe;
use iwarp_rnic::cq::{CompletionQueue, CqSizeError};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The position of the last polled completion of a queue. It wraps around.
type Polled = Arc<AtomicU32>;

/// Where polling stores the position of one queue.
#[derive(Debug)]
pub(crate) struct Account {
    polled: Polled,
    pub(crate) index: u32,
}

impl Account {
    /// Returns how far the position has advanced since `seen`, and updates `seen`.
    #[inline]
    pub(crate) fn advance(&self, seen: &mut u32) -> u32 {
        let now = self.polled.load(Ordering::Relaxed);
        // After a reset, `seen` is ahead of the positions that were polled before.
        if (now.wrapping_sub(*seen) as i32) < 0 {
            return 0;
        }
        now.wrapping_sub(std::mem::replace(seen, now))
    }
}

pub(crate) struct Slots {
    send: Account,
    /// `None` if receives come from a shared queue.
    receive: Option<Account>,
    /// Number of receive completions written. Changed only with the queue pair's state locked.
    received: AtomicU32,
}

impl Slots {
    pub(crate) fn new(send_cq: &Cq, recv_cq: &Cq, shared: bool) -> Self {
        Self {
            send: send_cq.inner.open_account(),
            receive: (!shared).then(|| recv_cq.inner.open_account()),
            received: AtomicU32::new(0),
        }
    }

    pub(crate) fn close(&self, send_cq: &Cq, recv_cq: &Cq) {
        send_cq.inner.close_account(&self.send);
        if let Some(receive) = &self.receive {
            recv_cq.inner.close_account(receive);
        }
    }

    /// Sets the account of a completion of the send queue. The state machine has set the position.
    #[inline]
    pub(crate) const fn sent(&self, cqe: &mut Cqe) {
        cqe.account = self.send.index;
    }

    /// Sets the position and the account of a completion of the receive queue.
    #[inline]
    pub(crate) fn received(&self, cqe: &mut Cqe) {
        if let Some(receive) = &self.receive {
            cqe.position = self.received.load(Ordering::Relaxed).wrapping_add(1);
            self.received.store(cqe.position, Ordering::Relaxed);
            cqe.account = receive.index;
        }
    }

    /// Returns how many slots of the send queue were freed since `seen`.
    #[inline]
    pub(crate) fn free_sends(&self, seen: &mut SeenSlots) -> u32 {
        self.send.advance(&mut seen.send)
    }

    /// Returns how many slots of the receive queue were freed since `seen`.
    #[inline]
    pub(crate) fn free_receives(&self, seen: &mut SeenSlots) -> u32 {
        let receive = self.receive.as_ref();
        receive.map_or(0, |receive| receive.advance(&mut seen.receive))
    }

    /// Returns the positions for a queue pair that was reset: all slots are free, and its
    /// completions were dropped.
    pub(crate) fn all_free(&self, send_position: u32) -> SeenSlots {
        SeenSlots {
            send: send_position,
            receive: self.received.load(Ordering::Relaxed),
        }
    }
}

/// Positions up to which a queue pair knows its slots to be free.
#[derive(Debug, Default)]
pub(crate) struct SeenSlots {
    send: u32,
    receive: u32,
}

#[derive(Debug)]
pub(crate) struct Ring {
    completions: CompletionQueue,
    /// Entry 0 is for completions that free no slot.
    accounts: Vec<Polled>,
    /// Indices of closed accounts.
    vacant: Vec<u32>,
    /// The entry of `accounts` that replaces a closed account.
    closed: Polled,
}

impl Ring {
    pub(crate) fn new(capacity: u32) -> Result<Self, CqSizeError> {
        Ok(Self {
            completions: CompletionQueue::new(capacity)?,
            accounts: Vec::new(),
            vacant: Vec::new(),
            closed: Polled::default(),
        })
    }

    /// Takes up to `out.len()` completions, oldest first, and stores their positions in the
    /// accounts. Returns the number taken.
    #[inline]
    pub(crate) fn poll(&mut self, out: &mut [Cqe]) -> usize {
        let n = self.completions.poll(out);
        for cqe in &out[..n] {
            if let Some(polled) = self.accounts.get(cqe.account as usize) {
                polled.store(cqe.position, Ordering::Relaxed);
            }
        }
        n
    }

    pub(crate) fn open_account(&mut self) -> Account {
        if self.accounts.is_empty() {
            self.accounts.push(Arc::clone(&self.closed));
        }
        if self.vacant.is_empty() && self.accounts.len() == self.accounts.capacity() {
            self.close_abandoned();
        }
        let polled = Polled::default();
        let index = match self.vacant.pop() {
            Some(index) => {
                self.accounts[index as usize] = Arc::clone(&polled);
                index
            }
            None => {
                self.accounts.push(Arc::clone(&polled));
                self.accounts.len() as u32 - 1
            }
        };
        Account { polled, index }
    }

    /// Closes the account of a queue pair that is destroyed and whose completions were dropped.
    pub(crate) fn close_account(&mut self, account: &Account) {
        let entry = &mut self.accounts[account.index as usize];
        // The account may have been closed already, and its index reused.
        if Arc::ptr_eq(entry, &account.polled) {
            *entry = Arc::clone(&self.closed);
            self.vacant.push(account.index);
        }
    }

    /// Closes the accounts of queue pairs that were dropped without being destroyed, if no
    /// completion refers to them.
    #[cold]
    fn close_abandoned(&mut self) {
        let mut abandoned: Vec<bool> = (self.accounts.iter())
            .map(|polled| Arc::strong_count(polled) == 1)
            .collect();
        for cqe in self.completions.waiting() {
            if let Some(abandoned) = abandoned.get_mut(cqe.account as usize) {
                *abandoned = false;
            }
        }
        for (index, _) in abandoned.iter().enumerate().filter(|(_, gone)| **gone) {
            self.accounts[index] = Arc::clone(&self.closed);
            self.vacant.push(index as u32);
        }
    }
}

impl Deref for Ring {
    type Target = CompletionQueue;

    fn deref(&self) -> &CompletionQueue {
        &self.completions
    }
}

impl DerefMut for Ring {
    fn deref_mut(&mut self) -> &mut CompletionQueue {
        &mut self.completions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(ring: &mut Ring, account: &Account, position: u32) {
        let cqe = Cqe {
            position,
            account: account.index,
            ..Cqe::default()
        };
        let _ = ring.push(cqe);
    }

    #[test]
    fn polling_updates_accounts() {
        let mut ring = Ring::new(8).unwrap();
        let accounts = [0; 3].map(|_| ring.open_account());
        let mut seen = [0; 3];
        for (account, position) in [(0, 1), (1, 4), (0, 3), (2, 1), (1, 5)] {
            push(&mut ring, &accounts[account], position);
        }
        // This completion frees no slot.
        let _ = ring.push(Cqe::default());
        let mut advances = || {
            let pairs = accounts.iter().zip(&mut seen);
            pairs.map(|(a, seen)| a.advance(seen)).collect::<Vec<_>>()
        };
        assert_eq!(advances(), [0, 0, 0], "nothing was polled");
        assert_eq!(ring.poll(&mut [Cqe::default(); 2]), 2);
        assert_eq!(advances(), [1, 4, 0]);
        assert_eq!(ring.poll(&mut [Cqe::default(); 9]), 4);
        assert_eq!(advances(), [2, 1, 1]);
        assert_eq!(advances(), [0, 0, 0], "nothing was polled since");
    }

    #[test]
    fn positions_wrap() {
        let mut ring = Ring::new(8).unwrap();
        let account = ring.open_account();
        let mut seen = u32::MAX - 1;
        assert_eq!(account.advance(&mut seen), 2);
        // After a reset, `seen` is ahead of the position polled next.
        seen = 5;
        push(&mut ring, &account, 3);
        push(&mut ring, &account, 7);
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!((account.advance(&mut seen), seen), (0, 5));
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!((account.advance(&mut seen), seen), (2, 7));
    }

    #[test]
    fn closed_indices_are_reused() {
        let mut ring = Ring::new(8).unwrap();
        let old = [0; 3].map(|_| ring.open_account());
        ring.close_account(&old[1]);
        ring.close_account(&old[1]);
        let new = [0; 2].map(|_| ring.open_account());
        assert_eq!(new.each_ref().map(|a| a.index), [2, 4]);
        // Closing the old account again must not close the new account with the same index.
        ring.close_account(&old[1]);
        push(&mut ring, &new[0], 5);
        push(&mut ring, &old[2], 1);
        assert_eq!(ring.poll(&mut [Cqe::default(); 2]), 2);
        let advances = [&new[0], &new[1], &old[1], &old[2]].map(|account| account.advance(&mut 0));
        assert_eq!(advances, [5, 0, 0, 1]);
    }

    /// The index of a dropped account is not reused while completions refer to it. Otherwise such a
    /// completion could free a slot of another queue pair.
    #[test]
    fn dropped_account_waits_for_its_completions() {
        let mut ring = Ring::new(64).unwrap();
        let kept = ring.open_account();
        let dropped = ring.open_account();
        let index = dropped.index;
        push(&mut ring, &dropped, 3);
        drop(dropped);
        let mut opened = Vec::new();
        // The ring closes abandoned accounts each time its list is full.
        let mut reused = |ring: &mut Ring| {
            for _ in 0..=ring.accounts.capacity() {
                opened.push(ring.open_account());
            }
            opened.iter().any(|account| account.index == index)
        };
        assert!(!reused(&mut ring));
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!(kept.advance(&mut 0), 0);
        assert!(reused(&mut ring));
    }
}
