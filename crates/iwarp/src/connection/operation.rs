//! A request: its kind, when it is posted, and its result.

#![allow(
    private_interfaces,
    reason = "the trait is sealed: programs name the types, but cannot call its functions"
)]

use super::farewell::Farewell;
use super::handle::{Connection, Inner};
use super::owned::Owned;
use super::payload::{Carried, Checked, Payload};
use super::region::Region;
use super::remote::RemoteRegion;
use super::router::{Entry, Failure, Held, NotQueued, Router, SlotId, Unposted};
use super::wait::{Wait, block, poll};
use super::window::Window;
use crate::error::{Error, Result};
use crate::failure::{Refusal, RequestKind};
use crate::verbs::{MemoryRegion, MemoryWindow, WriteAccess};
use bytemuck::Pod;
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{Access, PostError, SendFlags, SendOp, SendWr, Sge, WcStatus};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Send,
    SendImmediate(u32),
    SendInvalidate(u32),
    Write(Target),
    WriteImmediate(Target, u32),
    Read(Target),
    FetchAdd(Target, u64),
    CompareSwap(Target, u64, u64),
    /// The tagged offset and the rights to grant.
    Bind(u64, Access),
    Invalidate,
    /// Completes when all earlier requests are visible in the peer's memory.
    Flush,
}

/// A location in the peer's memory. Packed, so that an operation fits into two cache lines.
#[derive(Debug, Clone, Copy)]
#[repr(Rust, packed(4))]
pub(super) struct Target {
    pub(super) addr: u64,
    pub(super) rkey: u32,
}

impl Op {
    const fn kind(self) -> RequestKind {
        match self {
            Self::Send | Self::SendImmediate(_) | Self::SendInvalidate(_) => RequestKind::Send,
            Self::Write(_) | Self::WriteImmediate(..) => RequestKind::Write,
            Self::Read(_) | Self::Flush => RequestKind::Read,
            Self::FetchAdd(..) => RequestKind::FetchAdd,
            Self::CompareSwap(..) => RequestKind::CompareSwap,
            Self::Bind(..) => RequestKind::Bind,
            Self::Invalidate => RequestKind::Invalidate,
        }
    }

    /// Returns the operation for the queue pair. `window` is that of a bind or invalidation.
    #[inline]
    fn of_verbs(self, local: &Local<'_>, octets: u64) -> SendOp {
        let window = match local {
            Local::Window(window) => Some(window),
            _ => None,
        };
        match (self, window) {
            (Self::SendImmediate(value), _) => SendOp::SendImm(value),
            (Self::SendInvalidate(stag), _) => SendOp::SendInv(stag),
            (Self::Write(to), _) => to.write(),
            (Self::WriteImmediate(to, imm), _) => SendOp::WriteImm {
                remote_addr: to.addr,
                rkey: to.rkey,
                imm,
            },
            (Self::Read(from), _) => from.read(),
            (Self::FetchAdd(word, add), _) => SendOp::FetchAdd {
                remote_addr: word.addr,
                rkey: word.rkey,
                add,
                mask: 0,
            },
            (Self::CompareSwap(word, compare, swap), _) => SendOp::CmpSwap {
                remote_addr: word.addr,
                rkey: word.rkey,
                compare,
                swap,
                compare_mask: u64::MAX,
                swap_mask: u64::MAX,
            },
            (Self::Bind(at, access), Some(window)) => {
                SendOp::Bind(window.bind_at(at, octets, access))
            }
            (Self::Invalidate, Some(window)) => SendOp::LocalInvalidate {
                stag: Stag(window.rkey()),
            },
            (Self::Flush, _) => SendOp::Flush {
                remote_addr: 0,
                rkey: 0,
            },
            // Unreachable: binds and invalidations have a window.
            (Self::Send | Self::Bind(..) | Self::Invalidate, _) => SendOp::Send,
        }
    }
}

impl Target {
    pub(super) const fn write(self) -> SendOp {
        SendOp::Write {
            remote_addr: self.addr,
            rkey: self.rkey,
        }
    }

    pub(super) const fn read(self) -> SendOp {
        SendOp::Read {
            remote_addr: self.addr,
            rkey: self.rkey,
        }
    }
}

#[derive(Debug)]
pub(super) enum Local<'a> {
    None,
    /// Copied when the request is posted: into the request or into the slot's staging memory.
    Copied(&'a [u8]),
    /// Copied, too, unless it is longer than the staging memory of a slot.
    Owned(Owned),
    /// A region from which data is sent, and the offset in bytes.
    Region(MemoryRegion, usize),
    /// A region into which data is placed, and the offset in bytes.
    Target(WriteAccess, usize),
    /// The answer is placed in the slot's staging memory.
    Answer,
    /// The window to bind or invalidate.
    Window(MemoryWindow),
    /// Nothing, but the connection stays until the request has completed.
    Farewell(Arc<Inner>),
    /// Memory of a channel to which data was copied, from its beginning on.
    Staged(MemoryRegion, Farewell),
}

impl<'a> Local<'a> {
    #[inline]
    pub(super) fn of<T: Pod>(payload: Payload<'a, T>) -> Self {
        match payload.0 {
            Carried::Copied(elements) => Local::Copied(bytemuck::cast_slice(elements)),
            Carried::Owned(owned) => Local::Owned(owned),
            Carried::Region(region) => Local::Region(region.memory, region.at),
        }
    }

    fn into_held(self) -> Option<Held> {
        match self {
            Local::Region(memory, _) => Some(Held::One(memory)),
            Local::Target(writes, _) => Some(Held::Target(writes)),
            Local::Window(window) => Some(Held::Window(window)),
            Local::Farewell(connection) => Some(Held::Connection(Farewell::new(connection))),
            Local::Staged(memory, farewell) => Some(Held::Staged(memory, farewell)),
            Local::None | Local::Copied(_) | Local::Owned(_) | Local::Answer => None,
        }
    }

    /// Returns the data to copy when the request is posted.
    fn copied(&self) -> Option<&[u8]> {
        match self {
            Local::Copied(octets) => Some(octets),
            Local::Owned(owned) => Some(owned.octets()),
            _ => None,
        }
    }

    /// Returns what a request of the backlog needs when it is posted. The operation keeps windows
    /// and regions.
    fn queued(&mut self) -> Local<'static> {
        match self {
            Local::Copied(octets) => Local::Owned(Owned::new(octets.to_vec())),
            Local::Owned(_) => match std::mem::replace(self, Local::None) {
                Local::Owned(owned) => Local::Owned(owned),
                _ => Local::None,
            },
            Local::Region(memory, at) => Local::Region(memory.clone(), *at),
            Local::Staged(memory, _) => Local::Region(memory.clone(), 0),
            Local::Target(writes, at) => Local::Target(writes.clone(), *at),
            Local::Answer => Local::Answer,
            Local::None | Local::Window(_) | Local::Farewell(_) => Local::None,
        }
    }
}

/// A request to post, with the memory that it keeps until it completes.
#[derive(Debug)]
pub(super) struct Request<'a> {
    op: Op,
    local: Local<'a>,
    octets: u64,
    /// Header of a channel's message, before the data of `local`; all zero for none.
    header: [u8; HEADER],
}

/// Length of the header of a channel's message, in bytes.
pub(super) const HEADER: usize = 8;

impl<'a> Request<'a> {
    #[inline]
    pub(super) const fn new(op: Op, local: Local<'a>, octets: u64) -> Self {
        Self {
            op,
            local,
            octets,
            header: [0; HEADER],
        }
    }

    pub(super) const fn empty() -> Self {
        Self::new(Op::Send, Local::None, 0)
    }

    /// Returns a request that sends the first `octets` bytes of `memory`.
    pub(super) const fn staged(
        op: Op,
        memory: MemoryRegion,
        farewell: Farewell,
        octets: u64,
    ) -> Self {
        Self::new(op, Local::Staged(memory, farewell), octets)
    }

    /// Returns an empty Send. If its operation is dropped, the connection stays until it has
    /// completed.
    pub(super) const fn farewell(connection: Arc<Inner>) -> Self {
        Self::new(Op::Send, Local::Farewell(connection), 0)
    }

    /// Returns the bind of a window to `octets` bytes at `addr`.
    pub(super) const fn binding(window: MemoryWindow, addr: u64, octets: u64, to: Access) -> Self {
        Self::new(Op::Bind(addr, to), Local::Window(window), octets)
    }

    /// Returns the invalidation of a window, executed in order with other requests.
    pub(super) const fn invalidating(window: MemoryWindow) -> Self {
        Self::new(Op::Invalidate, Local::Window(window), 0)
    }

    #[cold]
    fn span(&self, connection: &Connection) -> Box<tracing::Span> {
        Box::new(tracing::debug_span!(
            parent: &connection.inner.span,
            "operation",
            kind = self.op.kind().name(),
            octets = self.octets
        ))
    }

    /// Returns the work request's operation.
    #[inline]
    fn send_op(&self) -> SendOp {
        self.op.of_verbs(&self.local, self.octets)
    }

    /// Registers data that is too long to be copied.
    fn register_long(&mut self, inner: &Inner) -> Result<()> {
        match &self.local {
            Local::Owned(owned) if owned.octets().len() > inner.longest_copy(self.headed()) => {}
            _ => return Ok(()),
        }
        if let Local::Owned(owned) = std::mem::replace(&mut self.local, Local::None) {
            let memory = inner.register(owned.into_pages())?;
            self.local = Local::Region(memory, 0);
        }
        Ok(())
    }

    /// Moves what is needed to post the request into a request of the backlog.
    #[cold]
    fn queued(&mut self) -> Unposted {
        let request = Request {
            op: self.op,
            local: self.local.queued(),
            octets: self.octets,
            header: self.header,
        };
        Unposted::One(self.send_op(), request)
    }

    /// Posts the request as the operation `op`.
    #[inline]
    pub(super) fn post(&self, inner: &Inner, id: SlotId, op: SendOp) -> Result<()> {
        let mut wr = SendWr::new(id.wr_id(), op, &[]).with_flags(SendFlags::SIGNALED);
        let (inline, elements);
        if self.header[0] != 0 {
            return self.post_from_staging(inner, id, op);
        }
        match &self.local {
            Local::Region(memory, at) => {
                elements = [self.part_of(memory, *at)?];
                wr.sges = &elements;
            }
            Local::Staged(memory, _) => {
                elements = [self.part_of(memory, 0)?];
                wr.sges = &elements;
            }
            Local::Target(writes, at) => {
                elements = [self.part_of(writes.memory(), *at)?];
                wr.sges = &elements;
            }
            Local::Copied(octets) if self.octets <= u64::from(inner.max_inline) => {
                inline = [*octets];
                wr.inline = &inline;
                wr = wr.with_flags(SendFlags::INLINE);
            }
            _ => return self.post_from_staging(inner, id, op),
        }
        inner.qp().post_more(&wr)
    }

    fn part_of(&self, memory: &MemoryRegion, at: usize) -> Result<Sge> {
        let octets = self.octets - self.headed().len() as u64;
        // A length that does not fit exceeds the region, and is refused as too long for an element.
        let octets = usize::try_from(octets).unwrap_or(usize::MAX);
        memory.sge(at..at.saturating_add(octets))
    }

    const fn headed(&self) -> &[u8] {
        match self.header {
            [0, ..] => &[],
            _ => &self.header,
        }
    }

    /// Posts a request that uses the slot's staging memory: one with a header, long copied data, or
    /// an answer.
    fn post_from_staging(&self, inner: &Inner, id: SlotId, op: SendOp) -> Result<()> {
        let header = self.headed();
        let copied = self.local.copied().unwrap_or_default();
        let (inline, elements);
        let mut wr = SendWr::new(id.wr_id(), op, &[]).with_flags(SendFlags::SIGNALED);
        match &self.local {
            Local::None | Local::Window(_) | Local::Farewell(_) if header.is_empty() => {}
            Local::Copied(_)
            | Local::Owned(_)
            | Local::None
            | Local::Window(_)
            | Local::Farewell(_)
                if self.octets <= u64::from(inner.max_inline) =>
            {
                inline = [header, copied];
                wr.inline = &inline;
                wr = wr.with_flags(SendFlags::INLINE);
            }
            local => {
                let (staging, at) = inner.staging(id)?;
                staging.write_at(at, header)?;
                staging.write_at(at + header.len(), copied)?;
                let answer = match local {
                    // Not longer than the slot's staging memory.
                    Local::Answer => self.octets as usize,
                    _ => 0,
                };
                let staged = header.len() + copied.len() + answer;
                let staged = staging.sge(at..at + staged)?;
                wr.sges = match local {
                    Local::Region(memory, at) => {
                        elements = [staged, self.part_of(memory, *at)?];
                        &elements
                    }
                    _ => {
                        elements = [staged, Sge::default()];
                        &elements[..1]
                    }
                };
            }
        }
        inner.qp().post_more(&wr)
    }
}

mod sealed {
    use super::{Inner, Local, Result, SlotId};

    /// Result of a successful operation.
    pub trait Yield {
        type Output;
        /// Whether the answer is placed in the slot's staging memory.
        const ANSWERS: bool = false;

        /// Reads the answer from the staging memory before the slot is freed.
        fn read(&mut self, _inner: &Inner, _id: SlotId) -> Result<()> {
            Ok(())
        }

        /// Builds the result from the answer and the memory that the request kept.
        fn finish(&mut self, local: &mut Local<'_>) -> Result<Self::Output>;
    }
}

pub(super) use sealed::Yield;

/// Output of an operation without a result.
#[derive(Debug)]
pub struct Done;

impl Yield for Done {
    type Output = ();

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<()> {
        Ok(())
    }
}

/// Output of an operation that reads elements of a peer.
#[derive(Debug)]
pub struct Elements<T> {
    pub(super) out: Vec<T>,
}

impl<T: Pod> Yield for Elements<T> {
    type Output = Vec<T>;
    const ANSWERS: bool = true;

    #[inline]
    fn read(&mut self, inner: &Inner, id: SlotId) -> Result<()> {
        inner.read_staging(id, bytemuck::cast_slice_mut(&mut self.out))
    }

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<Vec<T>> {
        Ok(std::mem::take(&mut self.out))
    }
}

/// Output of an operation that returns one element of a peer, or the old value of a word.
#[derive(Debug)]
pub struct Element<T> {
    pub(super) out: T,
}

impl<T: Pod> Yield for Element<T> {
    type Output = T;
    const ANSWERS: bool = true;

    fn read(&mut self, inner: &Inner, id: SlotId) -> Result<()> {
        inner.read_staging(id, bytemuck::bytes_of_mut(&mut self.out))
    }

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<T> {
        Ok(self.out)
    }
}

/// Output of a bind.
#[derive(Debug)]
pub struct Bound<T> {
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: Pod> Yield for Bound<T> {
    type Output = Window<T>;

    fn finish(&mut self, local: &mut Local<'_>) -> Result<Window<T>> {
        let Local::Window(bound) = std::mem::replace(local, Local::None) else {
            return Err(Error::InvalidState("the window of a bind is gone"));
        };
        Ok(Window {
            bound,
            token: self.token,
            region: self.region.clone(),
        })
    }
}

#[derive(Debug)]
enum Stage {
    New,
    /// Refused; it can never be posted.
    Refused(Box<Error>),
    /// Posted, or in the backlog.
    Started(SlotId),
    Over,
}

/// A request on a connection: a future, and a blocking call ([`wait`](Self::wait)).
///
/// It starts when it is first polled or waited for, or by [`started`](Self::started), so that
/// several requests can be in flight. It owns a handle of the connection, and its data unless that
/// was passed by reference. So it can be moved to another task.
///
/// # Order
///
/// The requests of a connection are posted in the order in which they start, also those of
/// different tasks and threads if one starts after the other. If the send queue is full
/// ([`Options::send_depth`](super::Options::send_depth)), a request is queued, and posted by the
/// connection as soon as earlier ones have completed, even if no task waits for it. Any number of
/// operations can be started, and awaited in any order.
///
/// The peer receives Sends, and places Writes, in this order. A Read may be answered before earlier
/// Writes are placed at *this* end's memory, but it sees all earlier Writes of this end. Reads and
/// atomics are answered in order. An operation that follows a Read does not wait for the answer.
///
/// # Cancellation
///
/// Dropping an operation is safe at any time. If it has not started, nothing happens. If it was
/// started by [`started`](Self::started), or posted, the request is still executed and its result
/// discarded; its memory is kept until then. If it was only polled or waited for and is still
/// queued, it is removed from the queue. Forgetting a started operation ([`std::mem::forget`])
/// leaks a slot, and its memory.
#[must_use = "it does nothing unless it is awaited, waited for, or started"]
#[derive(Debug)]
pub struct Operation<'a, Y: Yield> {
    inner: Arc<Inner>,
    request: Request<'a>,
    stage: Stage,
    /// Only if spans are recorded, to cost nothing otherwise.
    span: Option<Box<tracing::Span>>,
    /// It has been posted or queued.
    begun: bool,
    /// It stays in the backlog when it is dropped.
    detached: bool,
    result: Y,
}

/// Operations are moved into lists and tasks, which must be cheap.
const _: () = assert!(size_of::<Operation<'_, Done>>() <= 128);

impl<'a, Y: Yield> Operation<'a, Y> {
    #[inline]
    pub(super) fn new(
        connection: &Connection,
        checked: Checked,
        request: Request<'a>,
        result: Y,
    ) -> Self {
        let stage = match checked {
            Ok(()) => Stage::New,
            Err(error) => Stage::Refused(error),
        };
        let span = match tracing::enabled!(tracing::Level::DEBUG) {
            true => Some(request.span(connection)),
            false => None,
        };
        Self {
            inner: Arc::clone(&connection.inner),
            request,
            stage,
            span,
            begun: false,
            detached: false,
            result,
        }
    }

    /// Starts the request now: posts it, or queues it if the send queue is full. Does not block.
    /// Errors are returned when it is awaited or waited for.
    ///
    /// Requests started in quick succession may be sent together: when the program waits for
    /// something on the connection, when enough have gathered, or after 0.1 ms.
    #[inline]
    pub fn started(mut self) -> Self {
        self.detach();
        self
    }

    /// Starts the request if it has not started. It is executed even if the operation is dropped.
    #[inline]
    pub(super) fn detach(&mut self) {
        self.detached = true;
        if matches!(self.stage, Stage::New) && !self.inner.router.origin.is_foreign() {
            self.start();
        }
    }

    /// Blocks until the operation completes. The thread polls briefly before it sleeps, if the last
    /// waits were short.
    ///
    /// # Errors
    /// [`Error::Refused`]: the request is invalid; [`Error::Operation`]: it failed;
    /// [`Error::Closed`]: the connection was already closed.
    #[inline]
    pub fn wait(mut self) -> Result<Y::Output> {
        match self.has_succeeded() {
            Some(id) => self.take_result(id),
            None => block(&mut self, None),
        }
    }

    /// Blocks until the operation completes, for at most `limit`.
    ///
    /// # Errors
    /// See [`wait`](Self::wait); [`Error::TimedOut`]: the operation is dropped, and its request may
    /// still be executed.
    pub fn wait_for(mut self, limit: Duration) -> Result<Y::Output> {
        block(&mut self, Some(limit))
    }

    pub(super) const fn with_header(mut self, header: [u8; HEADER]) -> Self {
        self.request.header = header;
        self.request.octets += HEADER as u64;
        self
    }

    /// Returns `true` if its data is copied when it is posted.
    pub(super) const fn is_copied(&self) -> bool {
        matches!(self.request.local, Local::Copied(_))
    }

    /// Returns the data that is copied when it is posted, if it has not been posted.
    pub(super) fn unsent(&self) -> Option<&[u8]> {
        match self.stage {
            Stage::New => self.request.local.copied(),
            _ => None,
        }
    }

    /// Ends it without posting it, because its data has been copied to a later request.
    pub(super) fn supersede(&mut self) {
        self.stage = Stage::Over;
        self.begun = true;
    }

    /// Makes it another operation, which `op` creates from the length of the data. If there is
    /// `staging`, copies the data to this memory, and sends them from there.
    pub(super) fn aim(
        &mut self,
        staging: Option<(MemoryRegion, Farewell)>,
        op: impl FnOnce(u32) -> Op,
    ) -> Result<()> {
        if let Some((memory, farewell)) = staging {
            memory.write_at(0, self.request.local.copied().unwrap_or_default())?;
            self.request.local = Local::Staged(memory, farewell);
        }
        let len = u32::try_from(self.request.octets);
        self.request.op = op(len.map_err(|_| Error::Post(PostError::MessageTooLong))?);
        Ok(())
    }

    /// Adds it to the backlog, without posting it. It is executed even if the operation is dropped.
    /// Call [`Router::post_queued`] soon.
    pub(super) fn enqueue(&mut self) {
        self.detached = true;
        if matches!(self.stage, Stage::New) {
            self.queue_with(Router::enqueue);
        }
    }

    /// Returns `true` if it was posted or queued, and its result has not been taken.
    #[cfg(test)]
    pub(super) const fn is_started(&self) -> bool {
        matches!(self.stage, Stage::Started(_))
    }

    /// Returns `true` if its data was copied, and the connection stays until it has completed.
    pub(super) const fn is_staged(&self) -> bool {
        matches!(self.request.local, Local::Staged(..))
    }

    pub(super) const fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused(_))
    }

    /// Returns the slot if the request succeeded. Results are large, so they are read separately.
    #[inline]
    fn has_succeeded(&self) -> Option<SlotId> {
        match self.stage {
            Stage::Started(id)
                if self.router().outcome(id) == Some(true)
                    && !self.router().origin.is_foreign() =>
            {
                Some(id)
            }
            _ => None,
        }
    }

    #[inline]
    fn take_result(&mut self, id: SlotId) -> Result<Y::Output> {
        if Y::ANSWERS {
            self.result.read(&self.inner, id)?;
        }
        self.stage = Stage::Over;
        self.inner.router.release(id);
        if let Some(span) = &self.span {
            span.in_scope(|| tracing::trace!("completed"));
        }
        self.result.finish(&mut self.request.local)
    }

    fn start(&mut self) {
        if let Local::Owned(_) = self.request.local
            && let Err(error) = self.request.register_long(&self.inner)
        {
            return self.refuse(error);
        }
        let id = match self.inner.router.enter(1) {
            Entry::Taken(id) => id,
            Entry::Full => return self.queue(),
            Entry::Ended => return self.refuse(Error::Post(PostError::InvalidState)),
        };
        // Set before posting: moving a value right after writing it is slow.
        self.stage = Stage::Started(id);
        self.begun = true;
        let posted = {
            let _entered = self.span.as_ref().map(|span| span.enter());
            tracing::trace!("posting");
            self.request.post(&self.inner, id, self.request.send_op())
        };
        if let Err(error) = posted {
            self.inner.router.withdraw(id);
            self.begun = false;
            self.refuse(error);
        }
    }

    #[cold]
    fn queue(&mut self) {
        self.queue_with(Router::queue);
    }

    fn queue_with(
        &mut self,
        queue: impl FnOnce(&Router, u32, Unposted) -> Result<SlotId, Box<NotQueued>>,
    ) {
        let request = self.request.queued();
        match queue(&self.inner.router, 1, request) {
            Ok(id) => {
                self.stage = Stage::Started(id);
                self.begun = true;
            }
            Err(refused) => self.refuse(refused.0),
        }
    }

    #[cold]
    fn refuse(&mut self, error: Error) {
        self.stage = Stage::Refused(Box::new(self.refusal(error)));
    }

    /// Returns the error of a request that was not posted.
    fn refusal(&self, error: Error) -> Error {
        match error {
            // The end of the connection may not have been noticed yet.
            Error::Post(PostError::InvalidState) => self.failure(WcStatus::Flushed),
            Error::Post(error) => Error::Refused(Refusal::Post(error)),
            error => error,
        }
    }

    #[cold]
    fn failure(&self, status: WcStatus) -> Error {
        let kind = self.request.op.kind();
        self.inner.failure(kind, self.request.octets, status)
    }

    /// Takes the error of a failed request, if it has completed.
    #[cold]
    fn take_failure(&mut self, id: SlotId) -> Poll<Error> {
        let Some(result) = self.router().collect(id) else {
            return Poll::Pending;
        };
        self.stage = Stage::Over;
        Poll::Ready(match result {
            Err(Failure::Completed(status)) => self.failure(status),
            Err(Failure::Refused(error)) => self.refusal(error),
            // Only called for requests that did not succeed.
            Ok(()) => self.failure(WcStatus::General),
        })
    }

    #[cold]
    fn give_error(&mut self) -> Error {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Refused(error) => *error,
            _ => Error::InvalidState("the operation has ended already"),
        }
    }
}

impl<Y: Yield> Wait for Operation<'_, Y> {
    type Output = Y::Output;

    #[inline]
    fn poll_now(&mut self) -> Poll<Result<Y::Output>> {
        if matches!(self.stage, Stage::New) {
            self.start();
        }
        match self.stage {
            Stage::Started(id) => match self.router().outcome(id) {
                None => Poll::Pending,
                Some(true) => Poll::Ready(self.take_result(id)),
                Some(false) => self.take_failure(id).map(Err),
            },
            Stage::New | Stage::Refused(_) | Stage::Over => Poll::Ready(Err(self.give_error())),
        }
    }

    fn is_likely_ready(&self) -> bool {
        match self.stage {
            Stage::Started(id) => self.router().outcome(id).is_some(),
            _ => false,
        }
    }

    fn register(&mut self, waker: &Waker) {
        if let Stage::Started(id) = self.stage {
            self.router().wait_for_end_of(id, waker);
        }
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    #[inline]
    fn router(&self) -> &Router {
        &self.inner.router
    }
}

impl<Y: Yield + Unpin> Future for Operation<'_, Y> {
    type Output = Result<Y::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        poll(self.get_mut(), cx.waker())
    }
}

impl<Y: Yield> Drop for Operation<'_, Y> {
    #[inline]
    fn drop(&mut self) {
        if let Stage::Started(id) = self.stage {
            self.abandon(id);
        }
    }
}

impl<Y: Yield> Operation<'_, Y> {
    #[cold]
    fn abandon(&mut self, id: SlotId) {
        let router = &self.inner.router;
        if router.origin.is_foreign() || (!self.detached && router.cancel(id).is_some()) {
            return;
        }
        let local = std::mem::replace(&mut self.request.local, Local::None);
        router.abandon(id, local.into_held());
    }
}
