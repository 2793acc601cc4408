//! The queue slots that the program has got back by polling.
//!
//! As with hardware, a slot of a send or receive queue is taken until the completion of its request
//! has been polled, or that of a later request of the queue if it is unsignaled. So the program's
//! own depths bound what it can post, and a completion queue that is large enough for them cannot
//! overflow.
//!
//! The state machine counts the slots in use. It is locked when the program posts, and polling must
//! not wait for that lock. So a completion has its position in its queue, and the number of an
//! account of the completion queue. Who polls notes the position in the account, with the
//! completion queue locked anyway. Who posts looks at the account only when the queue seems full,
//! and gives the state machine as many slots as the position has grown by.
//!
//! Slots of shared receive queues are free as soon as a message has taken their receive, as with
//! siw and rxe.

use super::cq::CompletionQueue as Cq;
use iwarp_rnic::Cqe;
use iwarp_rnic::cq::{CompletionQueue, CqSizeError};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The position of the last completion of a queue that was polled. Wraps.
type Polled = Arc<AtomicU32>;

/// The account of a queue.
#[derive(Debug)]
pub(crate) struct Account {
    polled: Polled,
    /// Its place in the completion queue; never zero.
    pub(crate) index: u32,
}

impl Account {
    /// Returns how far the position has moved since it was `seen`.
    #[inline]
    pub(crate) fn take(&self, seen: &mut u32) -> u32 {
        let now = self.polled.load(Ordering::Relaxed);
        // A queue that was reset has passed what was polled before.
        if (now.wrapping_sub(*seen) as i32) < 0 {
            return 0;
        }
        now.wrapping_sub(std::mem::replace(seen, now))
    }
}

/// The accounts of a queue pair.
pub(crate) struct Slots {
    send: Account,
    /// None if receives come from a shared queue.
    receive: Option<Account>,
    /// Completions of receives that were written. Changed with the state locked.
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

    /// Closes the accounts. The completions have been dropped.
    pub(crate) fn close(&self, send_cq: &Cq, recv_cq: &Cq) {
        send_cq.inner.close_account(&self.send);
        if let Some(receive) = &self.receive {
            recv_cq.inner.close_account(receive);
        }
    }

    /// Names the account in a completion of the send queue, which has its position.
    #[inline]
    pub(crate) const fn sent(&self, cqe: &mut Cqe) {
        cqe.account = self.send.index;
    }

    /// Names position and account in a completion of a receive.
    #[inline]
    pub(crate) fn received(&self, cqe: &mut Cqe) {
        if let Some(receive) = &self.receive {
            cqe.position = self.received.load(Ordering::Relaxed).wrapping_add(1);
            self.received.store(cqe.position, Ordering::Relaxed);
            cqe.account = receive.index;
        }
    }

    /// Returns how many slots of the send queue are free that were not when `seen` was.
    #[inline]
    pub(crate) fn free_sends(&self, seen: &mut SeenSlots) -> u32 {
        self.send.take(&mut seen.send)
    }

    /// Returns how many slots of the receive queue are free that were not when `seen` was.
    #[inline]
    pub(crate) fn free_receives(&self, seen: &mut SeenSlots) -> u32 {
        let receive = self.receive.as_ref();
        receive.map_or(0, |receive| receive.take(&mut seen.receive))
    }

    /// Returns what is seen of a queue pair that was reset: all slots are free, and its completions
    /// are dropped.
    pub(crate) fn all_free(&self, send_position: u32) -> SeenSlots {
        SeenSlots {
            send: send_position,
            receive: self.received.load(Ordering::Relaxed),
        }
    }
}

/// The positions up to which a queue pair knows its slots to be free.
#[derive(Debug, Default)]
pub(crate) struct SeenSlots {
    send: u32,
    receive: u32,
}

/// The completions that wait, and the accounts of the queues that they are from.
#[derive(Debug)]
pub(crate) struct Ring {
    completions: CompletionQueue,
    /// The first place is for completions that free no slot.
    accounts: Vec<Polled>,
    /// Places whose account is closed.
    vacant: Vec<u32>,
    /// Stands where there is no account.
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

    /// Takes up to `out.len()` completions, oldest first, and notes their positions. Returns how
    /// many it has taken.
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

    /// Opens an account for a queue whose completions are written here.
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
        // An account is closed once, and its place may have a new one.
        if Arc::ptr_eq(place, &account.polled) {
            *place = Arc::clone(&self.closed);
            self.vacant.push(account.index);
        }
    }

    /// Closes the accounts of queue pairs that were dropped without being destroyed, once no
    /// completion names them.
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

/// Everything but polling.
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
        // One that frees nothing.
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
        assert_eq!(take(), [0, 0, 0], "once");
    }

    #[test]
    fn positions_wrap() {
        let mut ring = Ring::new(8).unwrap();
        let account = ring.open();
        let mut seen = u32::MAX - 1;
        // What was polled before a reset is behind.
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
    fn closed_places_are_used_again() {
        let mut ring = Ring::new(8).unwrap();
        let old = [0; 3].map(|_| ring.open());
        ring.close(&old[1]);
        ring.close(&old[1]);
        let new = [0; 2].map(|_| ring.open());
        assert_eq!(new.each_ref().map(|a| a.index), [2, 4]);
        // A queue pair that is destroyed twice does not close the account of another.
        ring.close(&old[1]);
        push(&mut ring, &new[0], 5);
        push(&mut ring, &old[2], 1);
        assert_eq!(ring.poll(&mut [Cqe::default(); 2]), 2);
        let taken = [&new[0], &new[1], &old[1], &old[2]].map(|account| account.take(&mut 0));
        assert_eq!(taken, [5, 0, 0, 1]);
    }

    /// A completion of a queue pair that was dropped frees no slot of the next one.
    #[test]
    fn dropped_accounts_wait_for_their_completions() {
        let mut ring = Ring::new(64).unwrap();
        let kept = ring.open();
        let dropped = ring.open();
        let place = dropped.index;
        push(&mut ring, &dropped, 3);
        drop(dropped);
        let mut opened = Vec::new();
        // Each time there is no place left, it looks for abandoned ones.
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
