//! Batches: requests that are posted together and share one completion.

use super::handle::{Connection, Inner};
use super::payload::{Carried, Payload};
use super::region::Region;
use super::remote::RemoteRegion;
use super::router::{Entry, Failure, Held, Router, SlotId, Unposted};
use super::wait::{Wait, impl_future_and_wait};
use crate::device::LIMITS;
use crate::error::{Error, Result};
use crate::failure::{Refusal, RequestKind};
use crate::verbs::{MemoryRegion, WriteAccess};
use bytemuck::Pod;
use iwarp_rnic::{Access, PostError, SendFlags, SendOp, SendWr, Sge, WcStatus};
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

const CHUNK: usize = 16;

#[derive(Debug)]
enum Local {
    Region(Sge),
    /// A range of the batch's copied bytes.
    Copied(Range<usize>),
}

#[derive(Debug)]
struct Entered {
    op: SendOp,
    local: Local,
}

/// Memory that a batch uses.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    Source(MemoryRegion),
    Target(WriteAccess),
}

impl Kept {
    /// Returns `true` if keeping `self` makes `other` superfluous.
    fn includes(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Source(a), Self::Source(b)) => a.is_same(b),
            (Self::Target(a), Self::Source(b)) => a.memory().is_same(b),
            (Self::Target(a), Self::Target(b)) => a.memory().is_same(b.memory()),
            (Self::Source(_), Self::Target(_)) => false,
        }
    }
}

/// The requests of a batch, and what they use.
#[derive(Debug, Default)]
pub(super) struct Requests {
    entries: Vec<Entered>,
    copies: Vec<u8>,
    held: Vec<Kept>,
    octets: u64,
}

/// Requests that complete together. Only the last one is signaled, so they cost less than single
/// operations.
///
/// A batch can be reused without allocating: [`submit`](Self::submit) empties it. Its requests
/// start when it is submitted, in the order in which they were added.
#[derive(Debug)]
pub struct Batch {
    connection: Connection,
    requests: Requests,
}

impl Batch {
    pub(super) fn new(connection: &Connection) -> Self {
        Self {
            connection: connection.clone(),
            requests: Requests::default(),
        }
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.requests.entries.len()
    }

    /// Returns `true` if it has no requests.
    pub fn is_empty(&self) -> bool {
        self.requests.entries.is_empty()
    }

    /// Removes all requests.
    pub fn clear(&mut self) {
        self.requests.clear();
    }

    fn enter<T: Pod>(&mut self, op: SendOp, payload: Payload<'_, T>) -> Result<()> {
        let inner = &self.connection.inner;
        let (count, room) = (self.len() + 1, inner.send_depth as usize);
        if count > room {
            let requests = count;
            return Err(Error::Refused(Refusal::BatchTooLong { requests, room }));
        }
        // Checked here, because on a later error the requests before it would already be posted.
        if payload.octets() > u64::from(LIMITS.max_message) {
            return Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)));
        }
        let most = inner.max_inline as usize;
        let requests = &mut self.requests;
        let octets = payload.octets();
        let local = match payload.0 {
            Carried::Copied(elements) => {
                let octets: &[u8] = bytemuck::cast_slice(elements);
                if octets.len() > most {
                    let octets = octets.len();
                    return Err(Error::Refused(Refusal::TooLongToCopy { octets, most }));
                }
                requests.copy(octets)
            }
            Carried::Owned(owned) if owned.octets().len() <= most => requests.copy(owned.octets()),
            Carried::Owned(owned) => {
                let memory = inner.register(owned.into_pages())?;
                let sge = memory.sge(..)?;
                requests.hold(Kept::Source(memory));
                Local::Region(sge)
            }
            Carried::Region(region) => {
                inner.check_own(&region).map_err(|error| *error)?;
                let sge = region.sge()?;
                requests.hold(Kept::Source(region.memory));
                Local::Region(sge)
            }
        };
        requests.octets = requests.octets.saturating_add(octets);
        requests.entries.push(Entered { op, local });
        Ok(())
    }

    /// Adds a message; see [`Connection::send`]. Data of the program is limited to
    /// [`Options::max_inline`](super::Options::max_inline).
    ///
    /// # Errors
    /// [`Error::Refused`]: invalid or too long. The batch is unchanged.
    pub fn send<'p>(&mut self, payload: impl Into<Payload<'p, u8>>) -> Result<()> {
        self.enter(SendOp::Send, payload.into())
    }

    /// Adds a Write; see [`Connection::write`]. Data of the program is limited as in
    /// [`send`](Self::send).
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub fn write<'p, T: Pod>(
        &mut self,
        payload: impl Into<Payload<'p, T>>,
        to: &RemoteRegion<T>,
    ) -> Result<()> {
        let payload = payload.into();
        to.check(Access::REMOTE_WRITE, payload.octets())
            .map_err(|error| *error)?;
        self.enter(to.target().write(), payload)
    }

    /// Adds a Read of all elements of the peer's region; see [`Connection::read_into`]. From now on
    /// until the batch completes or is cleared, the region cannot be [viewed](Region::view).
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub fn read_into<T: Pod>(
        &mut self,
        into: impl Into<Region<T>>,
        from: &RemoteRegion<T>,
    ) -> Result<()> {
        let into = into.into();
        let (octets, room) = (from.octets(), into.octets() as u64);
        if octets > room {
            return Err(Error::Refused(Refusal::TooLong { octets, room }));
        }
        from.check(Access::REMOTE_READ, octets)
            .map_err(|error| *error)?;
        let into = into.slice(..from.len())?;
        // Counted first, so that the batch is unchanged if the region is being viewed.
        let writes = into.write_access()?;
        self.enter(from.target().read(), Payload::from(into))?;
        self.requests.hold(Kept::Target(writes));
        Ok(())
    }

    /// Posts all requests, and waits until all have completed. The batch is empty afterwards; an
    /// empty batch completes immediately.
    pub const fn submit(&mut self) -> Submit<'_> {
        Submit {
            batch: self,
            stage: Stage::New,
            held: Vec::new(),
        }
    }
}

impl Requests {
    fn clear(&mut self) {
        self.entries.clear();
        self.copies.clear();
        self.held.clear();
        self.octets = 0;
    }

    /// Copies data of the program.
    fn copy(&mut self, octets: &[u8]) -> Local {
        let start = self.copies.len();
        self.copies.extend_from_slice(octets);
        Local::Copied(start..self.copies.len())
    }

    /// Holds memory until the batch completes. Successive requests often use the same memory.
    fn hold(&mut self, memory: Kept) {
        match self.held.last_mut() {
            Some(last) if last.includes(&memory) => {}
            Some(last) if memory.includes(last) => *last = memory,
            _ => self.held.push(memory),
        }
    }

    /// Posts all requests. An error includes how many were posted.
    pub(super) fn post(&self, inner: &Inner, id: SlotId) -> Result<(), (usize, Error)> {
        let count = self.entries.len();
        for (n, chunk) in self.entries.chunks(CHUNK).enumerate() {
            let first = n * CHUNK;
            let mut sges = [[Sge::default()]; CHUNK];
            let mut copies = [[[].as_slice()]; CHUNK];
            for ((entry, sge), copy) in chunk.iter().zip(&mut sges).zip(&mut copies) {
                match &entry.local {
                    Local::Region(element) => *sge = [*element],
                    Local::Copied(range) => {
                        *copy = [self.copies.get(range.clone()).unwrap_or_default()];
                    }
                }
            }
            let mut wrs = [SendWr::new(id.wr_id(), SendOp::Send, &[]); CHUNK];
            for (i, (entry, wr)) in chunk.iter().zip(&mut wrs).enumerate() {
                wr.op = entry.op;
                match entry.local {
                    Local::Region(_) => wr.sges = sges.get(i).map_or(&[], |sge| sge.as_slice()),
                    Local::Copied(_) => {
                        wr.inline = copies.get(i).map_or(&[], |copy| copy.as_slice());
                        wr.flags = SendFlags::INLINE;
                    }
                }
                if first + i + 1 == count {
                    wr.flags |= SendFlags::SIGNALED;
                }
            }
            let wrs = wrs.get(..chunk.len()).unwrap_or_default();
            let posted = inner.qp().post_send(wrs);
            posted.map_err(|failed| (first + failed.accepted(), failed.into()))?;
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Stage {
    New,
    Posted(SlotId),
    /// In the backlog, or posted from it.
    Queued(SlotId),
    Over,
}

/// Waits for a batch; see [`Batch::submit`]. Dropping it before it is posted keeps the requests in
/// the batch; afterwards they are still executed. If it is forgotten ([`std::mem::forget`]) then,
/// its regions are never freed.
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Submit<'b> {
    batch: &'b mut Batch,
    stage: Stage,
    /// Memory of the requests while they are posted or queued.
    pub(super) held: Vec<Kept>,
}

impl_future_and_wait!(['b] Submit<'b> => ());

impl Submit<'_> {
    fn failure(&self, status: WcStatus) -> Error {
        let inner = &self.batch.connection.inner;
        inner.failure(RequestKind::Batch, self.batch.requests.octets, status)
    }

    fn refusal(&self, error: Error) -> Error {
        match error {
            Error::Post(PostError::InvalidState) => self.failure(WcStatus::Flushed),
            Error::Post(error) => Error::Refused(Refusal::Post(error)),
            error => error,
        }
    }

    fn start(&mut self) -> Result<()> {
        let inner = Arc::clone(&self.batch.connection.inner);
        let places = u32::try_from(self.batch.len()).unwrap_or(u32::MAX);
        let id = match inner.router.enter(places) {
            Entry::Taken(id) => id,
            Entry::Full => return self.queue(&inner, places),
            Entry::Ended => return Err(self.failure(WcStatus::Flushed)),
        };
        // Moved out of the batch, which may be cleared if this value is forgotten.
        self.held = std::mem::take(&mut self.batch.requests.held);
        match self.batch.requests.post(&inner, id) {
            Ok(()) => {
                self.stage = Stage::Posted(id);
                Ok(())
            }
            Err((0, error)) => {
                inner.router.withdraw(id);
                self.batch.requests.held = std::mem::take(&mut self.held);
                Err(self.refusal(error))
            }
            // The requests before it are in flight, and keep their memory.
            Err(_) => {
                self.abandon(id);
                Err(self.failure(WcStatus::Flushed))
            }
        }
    }

    #[cold]
    fn queue(&mut self, inner: &Inner, places: u32) -> Result<()> {
        let requests = std::mem::take(&mut self.batch.requests);
        // Also for `failure`.
        self.batch.requests.octets = requests.octets;
        self.held.clone_from(&requests.held);
        match inner.router.queue(places, Unposted::Batch(requests)) {
            Ok(id) => {
                self.stage = Stage::Queued(id);
                Ok(())
            }
            Err(refused) => {
                let (error, unposted) = *refused;
                self.restore(unposted);
                Err(self.refusal(error))
            }
        }
    }

    /// Puts requests that were not posted back into the batch.
    fn restore(&mut self, unposted: Unposted) {
        self.held.clear();
        if let Unposted::Batch(requests) = unposted {
            self.batch.requests = requests;
        }
    }

    fn abandon(&mut self, id: SlotId) {
        let held = Held::Many(std::mem::take(&mut self.held));
        let router = &self.batch.connection.inner.router;
        router.abandon(id, Some(held));
    }
}

impl Wait for Submit<'_> {
    type Output = ();

    fn poll_now(&mut self) -> Poll<Result<()>> {
        if self.batch.is_empty() && matches!(self.stage, Stage::New) {
            self.stage = Stage::Over;
            return Poll::Ready(Ok(()));
        }
        if matches!(self.stage, Stage::New)
            && let Err(error) = self.start()
        {
            self.stage = Stage::Over;
            return Poll::Ready(Err(error));
        }
        let (Stage::Posted(id) | Stage::Queued(id)) = self.stage else {
            return Poll::Ready(Err(Error::InvalidState("the batch has ended already")));
        };
        let Some(result) = self.router().collect(id) else {
            return Poll::Pending;
        };
        self.stage = Stage::Over;
        // Keep the allocation for the next use.
        self.batch.requests.held = std::mem::take(&mut self.held);
        let result = result.map_err(|failure| match failure {
            Failure::Completed(status) => self.failure(status),
            Failure::Refused(error) => self.refusal(error),
        });
        self.batch.clear();
        Poll::Ready(result)
    }

    fn is_likely_ready(&self) -> bool {
        match self.stage {
            Stage::Posted(id) | Stage::Queued(id) => self.router().outcome(id).is_some(),
            Stage::New | Stage::Over => false,
        }
    }

    fn register(&mut self, waker: &Waker) {
        if let Stage::Posted(id) | Stage::Queued(id) = self.stage {
            self.router().wait_for_end_of(id, waker);
        }
    }

    fn has_begun(&self) -> bool {
        matches!(self.stage, Stage::Posted(_) | Stage::Queued(_))
    }

    fn router(&self) -> &Router {
        &self.batch.connection.inner.router
    }
}

impl Drop for Submit<'_> {
    fn drop(&mut self) {
        if self.router().origin.is_foreign() {
            return;
        }
        match self.stage {
            Stage::Posted(id) => {
                self.abandon(id);
                self.batch.clear();
            }
            Stage::Queued(id) => match self.router().cancel(id) {
                Some(unposted) => self.restore(unposted),
                None => {
                    self.abandon(id);
                    self.batch.clear();
                }
            },
            Stage::New | Stage::Over => {}
        }
    }
}

#[cfg(all(test, not(miri)))]
#[path = "batch_tests.rs"]
mod tests;
