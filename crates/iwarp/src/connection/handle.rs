//! A connection: its operations, and the state shared by its handles.

use super::batch::Batch;
use super::endpoint::Endpoint;
use super::operation::Operation;
use super::output::{Bound, Done, Element, Elements, Yield};
use super::payload::{Checked, Payload, refused};
use super::receive::{Buffers, Recv};
use super::region::{REMOTE, Region};
use super::remote::RemoteRegion;
use super::request::{Local, Op, Request};
use super::router::{Router, SlotId};
use super::wait::{Wait, impl_future_and_wait};
use super::waiters::Ticket;
use super::window::Window;
use crate::engine::slots::BLOCKS;
use crate::error::{Error, Result};
use crate::failure::{End, OperationError, Refusal, RequestKind};
use crate::runtime::QueuePair;
use crate::verbs::cm;
use crate::verbs::{MemoryRegion, MemoryWindow, Pages, ProtectionDomain};
use bytemuck::Pod;
use iwarp_rnic::qp::Fault;
use iwarp_rnic::{Access, WcStatus};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Poll, Wake, Waker};

/// State shared by the handles of a connection.
#[derive(Debug)]
pub(super) struct Inner {
    // Dropped first, so that the queue pair does not use the memory of the fields below.
    cm: cm::ConnectedId,
    pub(super) router: Arc<Router>,
    pub(super) buffers: Buffers,
    /// By the block of the slots.
    staging: [OnceLock<MemoryRegion>; BLOCKS],
    endpoint: Endpoint,
    pub(super) message_size: u32,
    pub(super) max_inline: u32,
    pub(super) send_depth: u32,
    initiator: bool,
    /// This end has begun to close it.
    closing: AtomicBool,
    end: OnceLock<End>,
    pub(super) span: tracing::Span,
}

pub(super) struct Parts {
    pub(super) cm: cm::ConnectedId,
    pub(super) router: Arc<Router>,
    pub(super) buffers: Buffers,
    pub(super) endpoint: Endpoint,
    pub(super) message_size: u32,
    pub(super) max_inline: u32,
    pub(super) send_depth: u32,
    pub(super) initiator: bool,
}

/// Records the end of a connection. A weak reference, so that the waker does not keep it alive.
struct AtEnd(Weak<Inner>);

impl Wake for AtEnd {
    fn wake(self: Arc<Self>) {
        if let Some(inner) = self.0.upgrade() {
            inner.note_end();
        }
    }
}

impl Inner {
    pub(super) fn pd(&self) -> &ProtectionDomain {
        self.endpoint.pd()
    }

    pub(super) fn qp(&self) -> &QueuePair {
        self.cm.qp()
    }

    fn note_end(&self) {
        let Some(errno) = self.cm.try_ended() else {
            return;
        };
        let closing = self.closing.load(Ordering::Relaxed);
        let qp = self.qp();
        let end = End::new(qp.fault(), errno, qp.has_peer_vanished(), closing);
        // The queue pair has logged an end in error.
        if qp.fault().is_none() {
            tracing::debug!(parent: &self.span, ?end, "the connection has ended");
        }
        // Set once: there is one event.
        let _ = self.end.set(end);
        self.router.end();
    }

    /// Returns the error of a request that has failed or can no longer be posted.
    pub(super) fn failure(&self, request: RequestKind, octets: u64, status: WcStatus) -> Error {
        let fault = self.qp().fault();
        if status == WcStatus::Flushed && fault.is_none() {
            return Error::Closed;
        }
        let error = OperationError {
            request,
            octets,
            peer: self.cm.addresses().1,
            status,
            fault,
        };
        match status {
            // A consequence of the end of the connection, which has been logged.
            WcStatus::Flushed => {
                tracing::trace!(parent: &self.span, %error, "a request has failed");
            }
            _ => tracing::debug!(parent: &self.span, %error, "a request has failed"),
        }
        Error::Operation(error)
    }

    /// Refuses regions of other endpoints, which the queue pair could not use.
    #[inline]
    pub(super) fn check_own<T>(&self, region: &Region<T>) -> Checked {
        match region.memory.is_of(self.endpoint.pd()) {
            true => Ok(()),
            false => refused(Refusal::ForeignRegion),
        }
    }

    /// Refuses data that is too long to be copied.
    #[inline]
    pub(super) fn check_copied(&self, octets: u64) -> Checked {
        match octets <= u64::from(self.message_size) {
            true => Ok(()),
            false => refused(Refusal::TooLongToCopy {
                octets: usize::try_from(octets).unwrap_or(usize::MAX),
                most: self.message_size as usize,
            }),
        }
    }

    /// Returns the staging memory of a slot, which has room for one message, and its offset there.
    /// The memory of the first slots is allocated when one of them needs it, and that of slots that
    /// were added later likewise.
    pub(super) fn staging(&self, id: SlotId) -> Result<(&MemoryRegion, usize)> {
        let block = self.router.block_of(id);
        let message = self.message_size as usize;
        let cell = self.staging.get(block.number).ok_or(Error::OutOfMemory)?;
        let at = block.index * message;
        if let Some(memory) = cell.get() {
            return Ok((memory, at));
        }
        let octets = message.checked_mul(block.slots).ok_or(Error::OutOfMemory)?;
        let memory = self.endpoint.pd().reg_mr(octets, Access::LOCAL_WRITE)?;
        Ok((cell.get_or_init(|| memory), at))
    }

    pub(super) fn read_staging(&self, id: SlotId, out: &mut [u8]) -> Result<()> {
        let (memory, at) = self.staging(id)?;
        memory.read_at(at, out)
    }

    /// Returns how many bytes after a header are copied when a request is posted.
    pub(super) const fn longest_copy(&self, header: &[u8]) -> usize {
        (self.message_size as usize).saturating_sub(header.len())
    }

    /// Registers data of the program that a request sends.
    pub(super) fn register(&self, pages: Pages) -> Result<MemoryRegion> {
        MemoryRegion::of_pages(self.endpoint.pd(), pages, Access::empty())
    }
}

/// A connection to a peer. A clone is another handle; tasks and threads can share a connection.
/// Dropping the last handle disconnects gracefully; requests whose operations were dropped earlier
/// may then not be executed. [`close`](Self::close) ends it for all handles.
///
/// Most calls return an [`Operation`]: a future for any runtime, with [`wait`](Operation::wait) for
/// threads. They check lengths and rights, so a mistake gives an [`Error::Refused`] and leaves the
/// connection intact. A posted request that fails gives an [`Error::Operation`], and the connection
/// has ended.
///
/// An operation completes when its data may be reused. A Send or Write may not have reached the
/// peer's program then; Reads and atomics have been answered.
#[derive(Debug, Clone)]
pub struct Connection {
    pub(super) inner: Arc<Inner>,
}

impl Connection {
    pub(super) fn new(parts: Parts) -> Self {
        let (local, peer) = parts.cm.addresses();
        let span = tracing::debug_span!("connection", ?local, ?peer, qp = parts.cm.qp().num());
        let inner = Arc::new_cyclic(|weak: &Weak<Inner>| {
            parts.router.set_connection(weak.clone());
            parts
                .cm
                .wake_at_end(&Waker::from(Arc::new(AtEnd(weak.clone()))));
            Inner {
                cm: parts.cm,
                router: parts.router,
                buffers: parts.buffers,
                staging: [const { OnceLock::new() }; BLOCKS],
                endpoint: parts.endpoint,
                message_size: parts.message_size,
                max_inline: parts.max_inline,
                send_depth: parts.send_depth,
                initiator: parts.initiator,
                closing: AtomicBool::new(false),
                end: OnceLock::new(),
                span,
            }
        });
        // It may have ended before the waker was registered or the handle was created.
        inner.note_end();
        Self { inner }
    }

    /// Returns the private data of the peer's reply; empty at the accepting end, where
    /// [`Incoming::private_data`](super::Incoming::private_data) returns the request's.
    pub fn private_data(&self) -> &[u8] {
        self.inner.cm.private_data()
    }

    /// Returns the address of this end.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.cm.addresses().0
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner.cm.addresses().1
    }

    /// Returns the endpoint, whose regions it can use.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }

    /// Returns the length of the longest message that it receives or copies, in bytes:
    /// [`Options::message_size`](super::Options::message_size).
    pub fn message_size(&self) -> usize {
        self.inner.message_size as usize
    }

    /// Returns the number of receive buffers: [`Options::receives`](super::Options::receives).
    pub fn receives(&self) -> usize {
        self.inner.buffers.count()
    }

    /// Returns `true` if this end connected, `false` if it accepted.
    pub fn is_initiator(&self) -> bool {
        self.inner.initiator
    }

    /// Returns why it ended, and which side is at fault; `None` if it has not ended or was closed
    /// gracefully.
    pub fn fault(&self) -> Option<Fault> {
        self.inner.qp().fault()
    }

    /// Allocates a local region of `len` zeroed elements; see [`Endpoint::allocate`].
    ///
    /// # Errors
    /// See [`Endpoint::allocate`].
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<Region<T>> {
        self.inner.endpoint.allocate(len)
    }

    /// Allocates a region that peers may access; see [`Endpoint::share`].
    ///
    /// # Errors
    /// See [`Endpoint::share`].
    pub fn share<T: Pod>(&self, len: usize, rights: Access) -> Result<Region<T>> {
        self.inner.endpoint.share(len, rights)
    }

    /// Returns an operation that sends a payload.
    #[inline]
    pub(super) fn sending<'a, T: Pod>(
        &self,
        checked: Checked,
        op: Op,
        payload: Payload<'a, T>,
    ) -> Operation<'a, Done> {
        let checked = checked.and_then(|()| payload.check(self));
        self.sending_checked(checked, op, payload)
    }

    /// Does the same as [`sending`](Self::sending) without checking the payload.
    pub(super) fn sending_checked<'a, T: Pod>(
        &self,
        checked: Checked,
        op: Op,
        payload: Payload<'a, T>,
    ) -> Operation<'a, Done> {
        let octets = payload.octets();
        let request = Request::new(op, Local::of(payload), octets);
        Operation::new(self, checked, request, Done)
    }

    /// Sends a message. Data of the program may have up to [`message_size`](Self::message_size)
    /// bytes, a region up to 2 GiB. The peer needs a receive buffer of that length.
    pub fn send<'a>(&self, payload: impl Into<Payload<'a, u8>>) -> Operation<'a, Done> {
        self.sending(Ok(()), Op::Send, payload.into())
    }

    /// Sends a message with immediate data ([`Message::immediate`](super::Message::immediate)).
    /// Requires an iwarp peer.
    pub fn send_with_immediate<'a>(
        &self,
        payload: impl Into<Payload<'a, u8>>,
        immediate: u32,
    ) -> Operation<'a, Done> {
        self.sending(Ok(()), Op::SendImmediate(immediate), payload.into())
    }

    /// Sends a message and invalidates the peer's window, which gives up its rights.
    pub fn send_with_invalidate<'a, T: Pod>(
        &self,
        payload: impl Into<Payload<'a, u8>>,
        window: &RemoteRegion<T>,
    ) -> Operation<'a, Done> {
        let op = Op::SendInvalidate(window.rkey());
        self.sending(Ok(()), op, payload.into())
    }

    /// Waits for a message. Cancel safe: a dropped future or a timeout loses no message.
    ///
    /// # Errors
    /// When all messages are taken: [`Error::Closed`], or why the connection ended.
    pub fn recv(&self) -> Recv {
        Recv::new(self)
    }

    /// Writes elements to the start of the peer's region. The peer's program takes no part.
    #[inline]
    pub fn write<'a, T: Pod>(
        &self,
        payload: impl Into<Payload<'a, T>>,
        to: &RemoteRegion<T>,
    ) -> Operation<'a, Done> {
        let payload = payload.into();
        let checked = to.check(Access::REMOTE_WRITE, payload.octets());
        self.sending(checked, Op::Write(to.target()), payload)
    }

    /// Writes elements to the start of the peer's region, and notifies the peer's program by an
    /// empty message ([`Message::is_write_immediate`](super::Message::is_write_immediate)).
    /// Requires an iwarp peer.
    pub fn write_with_immediate<'a, T: Pod>(
        &self,
        payload: impl Into<Payload<'a, T>>,
        to: &RemoteRegion<T>,
        immediate: u32,
    ) -> Operation<'a, Done> {
        let payload = payload.into();
        let checked = to.check(Access::REMOTE_WRITE, payload.octets());
        let op = Op::WriteImmediate(to.target(), immediate);
        self.sending(checked, op, payload)
    }

    /// Reads all elements of the peer's region into the start of a local one. While the operation
    /// or its request exists, the region cannot be [viewed](Region::view).
    #[inline]
    pub fn read_into<T: Pod>(
        &self,
        into: impl Into<Region<T>>,
        from: &RemoteRegion<T>,
    ) -> Operation<'static, Done> {
        let (into, octets) = (into.into(), from.octets());
        let room = into.octets() as u64;
        let checked = match octets <= room {
            true => from.check(Access::REMOTE_READ, octets),
            false => refused(Refusal::TooLong { octets, room }),
        };
        let checked = checked.and_then(|()| self.inner.check_own(&into));
        let target = checked.and_then(|()| Ok(into.write_access()?));
        let (checked, local) = match target {
            Ok(writes) => (Ok(()), Local::Target(writes, into.at)),
            Err(error) => (Err(error), Local::None),
        };
        let request = Request::new(Op::Read(from.target()), local, octets);
        Operation::new(self, checked, request, Done)
    }

    /// Reads all elements of the peer's region, at most [`message_size`](Self::message_size) bytes,
    /// into a new vector.
    pub fn read<T: Pod>(&self, from: &RemoteRegion<T>) -> Operation<'static, Elements<T>> {
        let octets = from.octets();
        let checked = from.check(Access::REMOTE_READ, octets);
        let checked = checked.and_then(|()| self.inner.check_copied(octets));
        // A refused length may exceed the available memory.
        let len = if checked.is_ok() { from.len() } else { 0 };
        let out = vec![T::zeroed(); len];
        self.answered(checked, Op::Read(from.target()), octets, Elements { out })
    }

    /// Reads the first element of the peer's region.
    #[inline]
    pub fn get<T: Pod>(&self, from: &RemoteRegion<T>) -> Operation<'static, Element<T>> {
        let octets = size_of::<T>() as u64;
        let checked = from.check(Access::REMOTE_READ, octets);
        let out = T::zeroed();
        self.answered(checked, Op::Read(from.target()), octets, Element { out })
    }

    /// Adds to a word of the peer atomically, and returns the old value. The region must have one
    /// element. Requires an iwarp peer.
    pub fn fetch_add(
        &self,
        word: &RemoteRegion<u64>,
        add: u64,
    ) -> Operation<'static, Element<u64>> {
        let op = Op::FetchAdd(word.target(), add);
        self.answered(word.check_word(), op, 8, Element { out: 0 })
    }

    /// Replaces a word of the peer by `swap` if it equals `compare`, atomically, and returns the
    /// old value. The region must have one element. Requires an iwarp peer.
    pub fn compare_swap(
        &self,
        word: &RemoteRegion<u64>,
        compare: u64,
        swap: u64,
    ) -> Operation<'static, Element<u64>> {
        let op = Op::CompareSwap(word.target(), compare, swap);
        self.answered(word.check_word(), op, 8, Element { out: 0 })
    }

    /// Returns an operation whose answer is copied.
    #[inline]
    fn answered<Y: Yield>(
        &self,
        checked: Checked,
        op: Op,
        octets: u64,
        result: Y,
    ) -> Operation<'static, Y> {
        let checked = checked.and_then(|()| self.inner.check_copied(octets));
        let request = Request::new(op, Local::Answer, octets);
        Operation::new(self, checked, request, result)
    }

    /// Grants the peer rights to a part of a region, until the [`Window`] is dropped. Only this
    /// connection's peer gets them. While the peer has rights to write, the region cannot be
    /// [viewed](Region::view).
    pub fn bind<T: Pod>(
        &self,
        region: impl Into<Region<T>>,
        rights: Access,
    ) -> Operation<'static, Bound<T>> {
        let region = region.into();
        let octets = region.octets() as u64;
        let addr = region.remote();
        let bound = match REMOTE.contains(rights) && !rights.is_empty() {
            true => self.window(&region, rights),
            false => Err(Error::InvalidArgument("a window has remote rights only")),
        };
        let (checked, request, stag) = match bound {
            Ok(bound) => {
                let stag = bound.rkey();
                let request = Request::binding(bound, addr.address(), octets, rights);
                (Ok(()), request, stag)
            }
            Err(error) => (Err(Box::new(error)), Request::empty(), 0),
        };
        let token = RemoteRegion::from_parts(addr.address(), octets, stag, rights);
        Operation::new(self, checked, request, Bound { token, region })
    }

    fn window<T: Pod>(&self, region: &Region<T>, rights: Access) -> Result<MemoryWindow> {
        self.inner.router.check_process()?;
        self.inner.check_own(region).map_err(|error| *error)?;
        let mut window = self.inner.endpoint.pd().alloc_mw(&region.memory)?;
        if rights.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            window.keep(region.write_access()?);
        }
        Ok(window)
    }

    /// Ends a window by a request, after all requests posted before it. Dropping the window ends it
    /// immediately.
    pub fn invalidate<T: Pod>(&self, window: Window<T>) -> Operation<'static, Done> {
        let request = Request::invalidating(window.bound);
        Operation::new(self, Ok(()), request, Done)
    }

    /// Returns an empty batch: requests that complete together, for the last per cent of speed.
    pub fn batch(&self) -> Batch {
        Batch::new(self)
    }

    /// Closes the connection for all handles: requests that fit into TCP's send buffer are sent,
    /// the others fail. Wait for operations before this call, and for [`closed`](Self::closed)
    /// after it. Does not block.
    ///
    /// # Errors
    /// [`Refusal::Forked`].
    pub fn close(&self) -> Result<()> {
        self.inner.router.check_process()?;
        self.inner.closing.store(true, Ordering::Relaxed);
        match self.inner.cm.disconnect() {
            // It has already ended.
            Ok(()) | Err(Error::InvalidState(_)) => {}
            Err(error) => return Err(error),
        }
        self.inner.router.end();
        Ok(())
    }

    /// Waits until either side has ended the connection, and returns how it ended.
    ///
    /// # Errors
    /// [`Refusal::Forked`].
    pub fn closed(&self) -> Closed {
        Closed {
            connection: self.clone(),
            ticket: None,
        }
    }
}

/// Waits for the end of a connection; see [`Connection::closed`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Closed {
    connection: Connection,
    ticket: Option<Ticket>,
}

impl_future_and_wait!(Closed => End);

impl Wait for Closed {
    type Output = End;

    fn poll_now(&mut self) -> Poll<Result<End>> {
        match self.connection.inner.end.get() {
            None => Poll::Pending,
            Some(end) => Poll::Ready(Ok(*end)),
        }
    }

    fn is_likely_ready(&self) -> bool {
        self.connection.inner.end.get().is_some()
    }

    fn register(&mut self, waker: &Waker) {
        let router = &self.connection.inner.router;
        router.wait_for_end(&mut self.ticket, waker);
    }

    fn router(&self) -> &Router {
        &self.connection.inner.router
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.connection.inner.router.leave_end_waiters(self.ticket);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "handle_tests.rs"]
mod tests;
