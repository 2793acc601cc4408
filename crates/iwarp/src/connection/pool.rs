//! Pools of equal buffers in a few registered blocks.
//!
//! A pool grows by blocks, each with one registration. It keeps an object for each buffer, so in
//! the steady state taking and returning a buffer allocates nothing. Buffers are returned by the
//! drop of their last handle, which may be that of a request: so nothing is called under the lock.

use super::region::{REMOTE, Region};
use super::waiters::{Ticket, Waiters};
use crate::error::{Error, Result};
use crate::failure::Refusal;
use crate::objects::wait::with_thread_waker;
use crate::sys::fork::Origin;
use crate::verbs::{Buffer, MemoryRegion, ProtectionDomain, TakeBack};
use bytemuck::Pod;
use iwarp_rnic::Access;
use parking_lot::Mutex;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Buffers of the first block, if the limit allows that. Each further block doubles the pool.
const FIRST_BLOCK: usize = 16;
/// Buffers begin at multiples of this, so that no two share a cache line.
const CACHE_LINE: usize = 64;

#[derive(Debug, Default)]
struct State {
    buffers: Vec<Buffer>,
    /// Indexes of the buffers that nothing uses. The one that was used last is taken first, because
    /// it is most likely in a cache.
    free: Vec<usize>,
    waiters: Waiters,
}

impl State {
    fn take(&mut self) -> Option<MemoryRegion> {
        let index = self.free.pop()?;
        self.buffers.get(index).map(Buffer::lend)
    }

    /// Takes the next waiter from the list if there is a buffer.
    fn next_waiter(&mut self) -> Option<Waker> {
        match self.free.is_empty() {
            true => None,
            false => self.waiters.next(),
        }
    }
}

#[derive(Debug)]
struct Inner {
    pd: ProtectionDomain,
    access: Access,
    /// Length of a buffer in bytes.
    octets: usize,
    /// Distance of the buffers of a block, in bytes.
    stride: usize,
    most: usize,
    origin: Origin,
    state: Mutex<State>,
    /// Held while the pool grows: the number of buffers. Registering takes other locks, so it must
    /// not be done under that of the state.
    growing: Mutex<usize>,
    this: Weak<Self>,
}

impl TakeBack for Inner {
    fn take_back(&self, index: usize) {
        let mut state = self.state.lock();
        // Does not allocate: there is room for all buffers.
        state.free.push(index);
        let waker = state.next_waiter();
        drop(state);
        wake(waker);
    }
}

/// Calls a waker of the program. No lock may be held.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Inner {
    fn check_process(&self) -> Result<()> {
        match self.origin.is_foreign() {
            true => Err(Error::Refused(Refusal::Forked)),
            false => Ok(()),
        }
    }

    /// Takes a free buffer if the caller's turn has come.
    fn take(&self, ticket: &mut Option<Ticket>) -> Option<MemoryRegion> {
        let mut state = self.state.lock();
        if !state.waiters.may_take(*ticket) {
            return None;
        }
        let taken = state.take()?;
        let gone = state.waiters.leave(ticket.take()).1;
        let next = state.next_waiter();
        drop(state);
        drop(gone);
        wake(next);
        Some(taken)
    }

    /// Takes a buffer, from a new block if necessary. Returns `None` if all are in use.
    fn take_or_grow(&self, ticket: &mut Option<Ticket>) -> Result<Option<MemoryRegion>> {
        self.check_process()?;
        loop {
            if let Some(taken) = self.take(ticket) {
                return Ok(Some(taken));
            }
            if !self.grow()? {
                return Ok(None);
            }
        }
    }

    /// Adds a block. Returns `false` if there is no free buffer, and the pool has reached its
    /// limit.
    fn grow(&self) -> Result<bool> {
        let mut buffers = self.growing.lock();
        let state = self.state.lock();
        if !state.free.is_empty() {
            // Another thread has added a block, or there are waiters in front of the caller.
            return Ok(state.waiters.is_empty());
        }
        drop(state);
        let count = (*buffers).max(FIRST_BLOCK).min(self.most - *buffers);
        if count == 0 {
            return Ok(false);
        }
        let octets = self.stride.checked_mul(count).ok_or(Error::OutOfMemory)?;
        let block = self.pd.reg_mr(octets, self.access)?;
        let first = *buffers;
        let added: Vec<Buffer> = (0..count)
            .map(|i| {
                let pool: Weak<dyn TakeBack> = self.this.clone();
                Buffer::new(&block, i * self.stride, self.octets, pool, first + i)
            })
            .collect();
        *buffers += count;
        let mut state = self.state.lock();
        state.buffers.extend(added);
        // So that returning a buffer never allocates.
        let missing = *buffers - state.free.len();
        state.free.reserve_exact(missing);
        state.free.extend((first..first + count).rev());
        let waker = state.next_waiter();
        drop(state);
        wake(waker);
        Ok(true)
    }

    fn wait(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let replaced = self.state.lock().waiters.wait(ticket, waker);
        drop(replaced);
    }

    /// Removes a waiter. If it was woken and has taken nothing, wakes the next one.
    fn leave(&self, ticket: Option<Ticket>) {
        if ticket.is_none() || self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let gone = state.waiters.leave(ticket).1;
        let next = state.next_waiter();
        drop(state);
        drop(gone);
        wake(next);
    }
}

/// Equal buffers of registered memory, which are reused. A clone refers to the same pool. Created
/// by [`Endpoint::pool`](super::Endpoint::pool).
///
/// A buffer is a [`Region`], so all requests take it. When its last handle is dropped, it returns
/// to the pool: the program may drop it while a request uses it. Buffers stay usable if the pool is
/// dropped, and are freed when all buffers of their block are unused.
///
/// The pool registers memory in blocks, each as large as all previous ones together, up to its
/// limit, and keeps them. Once it has grown, taking and returning a buffer neither registers memory
/// nor allocates.
///
/// ```
/// use iwarp::{Access, Connection, Endpoint, Region, RemoteRegion};
///
/// /// Writes each line to the peer. A buffer is reused as soon as its Write has completed.
/// fn write_lines(lines: &[&str], connection: &Connection, to: &RemoteRegion<u8>)
/// -> iwarp::Result<()> {
///     let pool = connection.endpoint().pool::<u8>(4096, 8, Access::empty())?;
///     let mut last = None;
///     for line in lines {
///         let buffer = pool.take().wait()?; // waits if all 8 are in use
///         buffer.write_at(0, line.as_bytes())?;
///         let write = connection.write(buffer.slice(..line.len())?, to);
///         last = Some(write.started()); // drops the previous operation, but not its request
///     }
///     last.map_or(Ok(()), |write| write.wait())
/// }
/// # fn main() -> iwarp::Result<()> {
/// # let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
/// # let file: Region<u8> = endpoint.share(4096, Access::REMOTE_WRITE)?;
/// # let listener = endpoint.listen("127.0.0.1:0").private_data(file.remote().to_bytes()).bind()?;
/// # let address = listener.local_addr();
/// # let server = std::thread::spawn(move || listener.accept().wait()?.closed().wait());
/// # let connection = iwarp::connect(address).wait()?;
/// # let there = RemoteRegion::<u8>::from_bytes(connection.private_data())?;
/// # write_lines(&["a line"; 100], &connection, &there)?;
/// # connection.shutdown().wait()?;
/// # server.join().unwrap()?;
/// # assert_eq!(file.slice(..6)?.to_vec()?, b"a line");
/// # Ok(())
/// # }
/// ```
pub struct Pool<T> {
    inner: Arc<Inner>,
    /// Elements of a buffer.
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            len: self.len,
            elements: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("octets", &self.inner.octets)
            .field("most", &self.inner.most)
            .finish_non_exhaustive()
    }
}

impl<T: Pod> Pool<T> {
    pub(super) fn new(
        pd: &ProtectionDomain,
        len: usize,
        most: usize,
        shared: Access,
    ) -> Result<Self> {
        let access = Region::<T>::access(shared)?;
        let too_long = Error::InvalidArgument("the buffers of the pool are too long");
        let octets = len.checked_mul(size_of::<T>());
        let stride = octets
            .and_then(|octets| octets.max(1).checked_next_multiple_of(CACHE_LINE))
            .and_then(|octets| octets.checked_next_multiple_of(align_of::<T>()));
        let (Some(octets), Some(stride)) = (octets, stride) else {
            return Err(too_long);
        };
        if most == 0 {
            return Err(Error::InvalidArgument("a pool has at least one buffer"));
        }
        let inner = Arc::new_cyclic(|this| Inner {
            pd: pd.clone(),
            access,
            octets,
            stride,
            most,
            origin: Origin::current_process(),
            state: Mutex::default(),
            growing: Mutex::default(),
            this: this.clone(),
        });
        Ok(Self {
            inner,
            len,
            elements: PhantomData,
        })
    }

    /// Takes a buffer: await the result, or [`wait`](Take::wait) for it. If all buffers of a pool
    /// that has reached its limit are in use, waits for one, in order. Cancel safe.
    ///
    /// The contents are arbitrary: zeros, or those of the previous use. No peer can read them
    /// unless the pool is shared, or a request sends them.
    ///
    /// # Errors
    /// See [`Endpoint::allocate`](super::Endpoint::allocate), if the pool has to grow;
    /// [`Refusal::Forked`].
    pub fn take(&self) -> Take<T> {
        Take {
            pool: self.clone(),
            ticket: None,
        }
    }

    /// Returns the length of a buffer in elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if its buffers have no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the rights of peers.
    pub fn shared(&self) -> Access {
        self.inner.access & REMOTE
    }

    /// Returns how many buffers are registered.
    pub fn buffers(&self) -> usize {
        self.inner.state.lock().buffers.len()
    }

    /// Returns how many of them are in use.
    pub fn in_use(&self) -> usize {
        let state = self.inner.state.lock();
        state.buffers.len() - state.free.len()
    }

    /// Returns how many buffers it may have at most.
    pub fn limit(&self) -> usize {
        self.inner.most
    }

    fn region(&self, memory: MemoryRegion) -> Region<T> {
        Region::part(memory, 0, self.len)
    }
}

/// Waits for a buffer; see [`Pool::take`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Take<T: Pod> {
    pool: Pool<T>,
    ticket: Option<Ticket>,
}

impl<T: Pod> Take<T> {
    /// Returns a buffer if one is free or the pool can grow. Does not wait.
    ///
    /// # Errors
    /// See [`Pool::take`].
    pub fn now(mut self) -> Result<Option<Region<T>>> {
        let taken = self.pool.inner.take_or_grow(&mut self.ticket)?;
        Ok(taken.map(|memory| self.pool.region(memory)))
    }

    /// Blocks until there is a buffer.
    ///
    /// # Errors
    /// See [`Pool::take`].
    pub fn wait(mut self) -> Result<Region<T>> {
        self.block(None)
    }

    /// Blocks until there is a buffer, for at most `limit`.
    ///
    /// # Errors
    /// See [`Pool::take`]; [`Error::TimedOut`].
    pub fn wait_for(mut self, limit: Duration) -> Result<Region<T>> {
        self.block(Instant::now().checked_add(limit))
    }

    fn poll_with(&mut self, waker: &Waker) -> Poll<Result<Region<T>>> {
        let inner = &self.pool.inner;
        let mut taken = inner.take_or_grow(&mut self.ticket)?;
        if taken.is_none() {
            inner.wait(&mut self.ticket, waker);
            // One may have been returned before the waker was registered.
            taken = inner.take_or_grow(&mut self.ticket)?;
        }
        match taken {
            Some(memory) => Poll::Ready(Ok(self.pool.region(memory))),
            None => Poll::Pending,
        }
    }

    fn block(&mut self, deadline: Option<Instant>) -> Result<Region<T>> {
        loop {
            if let Poll::Ready(done) = with_thread_waker(|waker| self.poll_with(waker)) {
                return done;
            }
            match deadline.map(|end| end.saturating_duration_since(Instant::now())) {
                None => std::thread::park(),
                Some(Duration::ZERO) => return Err(Error::TimedOut("all buffers are in use")),
                Some(left) => std::thread::park_timeout(left),
            }
        }
    }
}

impl<T: Pod> Future for Take<T> {
    type Output = Result<Region<T>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().poll_with(cx.waker())
    }
}

impl<T: Pod> Drop for Take<T> {
    fn drop(&mut self) {
        self.pool.inner.leave(self.ticket);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "pool_tests.rs"]
mod tests;
