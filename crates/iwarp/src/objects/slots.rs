//! Queue slots that polling has returned to the program.
//!
//! As with hardware, a slot of a send or receive queue is in use until its completion has been
//! polled. The slot of an unsignaled request is in use until the completion of a later request of
//! the queue has been polled. So the program's own queue depths limit what it can post, and a
//! completion queue that is large enough for them cannot overflow.
//!
//! The state machine counts the slots in use. It is locked while the program posts, and polling
//! must not wait for that lock. So each completion holds its position in its queue, and the index
//! of an *account* in the completion queue. Polling stores the position in the account, with the
//! completion queue locked anyway. Posting reads the account only if the queue seems full, and
//! releases as many slots as the position has advanced.
//!
//! Slots of shared receive queues are free as soon as a message has taken their receive, as in siw
//! and rxe.

use super::cq::CompletionQueue as Cq;
use iwarp_rnic::Cqe;
use iwarp_rnic::cq::{CompletionQueue, CqSizeError};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The position of the last polled completion of a queue. It wraps.
type Polled = Arc<AtomicU32>;

#[derive(Debug)]
pub(crate) struct Account {
    polled: Polled,
    /// Index in the completion queue's list of accounts; never zero.
    pub(crate) index: u32,
}

impl Account {
    /// Returns how far the position has advanced since `seen`, and updates `seen`.
    #[inline]
    pub(crate) fn take(&self, seen: &mut u32) -> u32 {
        let now = self.polled.load(Ordering::Relaxed);
        // After a reset, `seen` is ahead of what was polled before.
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
    /// Number of receive completions written. Changed with the state locked.
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

    /// Closes the accounts. Their completions have been dropped.
    pub(crate) fn close(&self, send_cq: &Cq, recv_cq: &Cq) {
        send_cq.inner.close_account(&self.send);
        if let Some(receive) = &self.receive {
            recv_cq.inner.close_account(receive);
        }
    }

    /// Sets the account of a completion of the send queue. Its position is already set.
    #[inline]
    pub(crate) const fn sent(&self, cqe: &mut Cqe) {
        cqe.account = self.send.index;
    }

    /// Sets position and account of a completion of a receive.
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
        self.send.take(&mut seen.send)
    }

    /// Returns how many slots of the receive queue were freed since `seen`.
    #[inline]
    pub(crate) fn free_receives(&self, seen: &mut SeenSlots) -> u32 {
        let receive = self.receive.as_ref();
        receive.map_or(0, |receive| receive.take(&mut seen.receive))
    }

    /// Returns the state of a queue pair that was reset: all slots are free, and its completions
    /// are dropped.
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

/// The completions of a completion queue, and the accounts of the queues that write to it.
#[derive(Debug)]
pub(crate) struct Ring {
    completions: CompletionQueue,
    /// The first entry is for completions that free no slot.
    accounts: Vec<Polled>,
    vacant: Vec<u32>,
    /// Used in place of a closed account.
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

    pub(crate) fn open(&mut self) -> Account {
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
    pub(crate) fn close(&mut self, account: &Account) {
        let place = &mut self.accounts[account.index as usize];
        // The account may have been closed already, and its index reused.
        if Arc::ptr_eq(place, &account.polled) {
            *place = Arc::clone(&self.closed);
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

/// All operations except polling.
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
    fn positions_go_to_their_account() {
        let mut ring = Ring::new(8).unwrap();
        let accounts = [0; 3].map(|_| ring.open());
        let mut seen = [0; 3];
        for (account, position) in [(0, 1), (1, 4), (0, 3), (2, 1), (1, 5)] {
            push(&mut ring, &accounts[account], position);
        }
        // This completion frees no slot.
        let _ = ring.push(Cqe::default());
        let mut take = || {
            let taken = accounts.iter().zip(&mut seen);
            taken.map(|(a, seen)| a.take(seen)).collect::<Vec<_>>()
        };
        assert_eq!(take(), [0, 0, 0], "nothing was polled");
        assert_eq!(ring.poll(&mut [Cqe::default(); 2]), 2);
        assert_eq!(take(), [1, 4, 0]);
        assert_eq!(ring.poll(&mut [Cqe::default(); 9]), 4);
        assert_eq!(take(), [2, 1, 1]);
        assert_eq!(take(), [0, 0, 0], "already taken");
    }

    #[test]
    fn positions_wrap() {
        let mut ring = Ring::new(8).unwrap();
        let account = ring.open();
        let mut seen = u32::MAX - 1;
        // Positions from before a reset are behind `seen`.
        assert_eq!(account.take(&mut seen), 2);
        seen = 5;
        push(&mut ring, &account, 3);
        push(&mut ring, &account, 7);
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!((account.take(&mut seen), seen), (0, 5));
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!((account.take(&mut seen), seen), (2, 7));
    }

    #[test]
    fn closed_indices_are_reused() {
        let mut ring = Ring::new(8).unwrap();
        let old = [0; 3].map(|_| ring.open());
        ring.close(&old[1]);
        ring.close(&old[1]);
        let new = [0; 2].map(|_| ring.open());
        assert_eq!(new.each_ref().map(|a| a.index), [2, 4]);
        // Closing it twice must not close the account that has its index now.
        ring.close(&old[1]);
        push(&mut ring, &new[0], 5);
        push(&mut ring, &old[2], 1);
        assert_eq!(ring.poll(&mut [Cqe::default(); 2]), 2);
        let taken = [&new[0], &new[1], &old[1], &old[2]].map(|account| account.take(&mut 0));
        assert_eq!(taken, [5, 0, 0, 1]);
    }

    /// If the account were reused at once, a completion of the dropped queue pair could free a slot
    /// of another queue pair.
    #[test]
    fn dropped_account_waits_for_its_completions() {
        let mut ring = Ring::new(64).unwrap();
        let kept = ring.open();
        let dropped = ring.open();
        let place = dropped.index;
        push(&mut ring, &dropped, 3);
        drop(dropped);
        let mut opened = Vec::new();
        // Each time the list is full, abandoned accounts are closed.
        let mut reused = |ring: &mut Ring| {
            for _ in 0..=ring.accounts.capacity() {
                opened.push(ring.open());
            }
            opened.iter().any(|account| account.index == place)
        };
        assert!(!reused(&mut ring));
        assert_eq!(ring.poll(&mut [Cqe::default()]), 1);
        assert_eq!(kept.take(&mut 0), 0);
        assert!(reused(&mut ring));
    }
}
