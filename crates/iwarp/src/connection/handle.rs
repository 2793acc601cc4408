//! A connection: its operations, and what all of its handles share.

use super::batch::Batch;
use super::endpoint::Endpoint;
use super::operation::{
    Bound, Checked, Done, Element, Elements, Local, Op, Operation, Payload, Request, Yield, refused,
};
use super::receive::{Buffers, Recv};
use super::region::{REMOTE, Region};
use super::remote::RemoteRegion;
use super::router::{Router, SlotId};
use super::wait::{Wait, waits};
use super::waiters::Ticket;
use super::window::Window;
use crate::error::{Error, Result};
use crate::failure::{OperationError, Refusal, RequestKind};
use crate::runtime::QueuePair;
use crate::verbs::MemoryRegion;
use crate::verbs::MemoryWindow;
use crate::verbs::cm;
use bytemuck::Pod;
use iwarp_rnic::qp::Fault;
use iwarp_rnic::{Access, Sge, WcStatus};
use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Poll, Wake, Waker};

/// How a connection has ended.
#[derive(Debug, Clone)]
enum Ended {
    Gracefully,
    Lost(String),
    Os(i32),
}

/// What the handles of a connection share.
#[derive(Debug)]
pub(super) struct Inner {
    // Fields are dropped in this order. The queue pair goes first, so that nothing uses the memory of what follows.
    cm: cm::ConnectedId,
    pub(super) router: Arc<Router>,
    pub(super) buffers: Buffers,
    staging: OnceLock<MemoryRegion>,
    endpoint: Endpoint,
    pub(super) message_size: u32,
    pub(super) max_inline: u32,
    pub(super) send_depth: u32,
    initiator: bool,
    ended: Mutex<Option<Ended>>,
    pub(super) span: tracing::Span,
}

/// What a new connection is made of.
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

/// Takes note of the end of a connection, and does not keep it.
struct AtEnd(Weak<Inner>);

impl Wake for AtEnd {
    fn wake(self: Arc<Self>) {
        if let Some(inner) = self.0.upgrade() {
            inner.note_end();
        }
    }
}

impl Inner {
    pub(super) fn qp(&self) -> &QueuePair {
        self.cm.qp()
    }

    fn note_end(&self) {
        let Some(how) = self.cm.try_ended() else {
            return;
        };
        let how = match how {
            Ok(()) => Ended::Gracefully,
            Err(Error::Io(error)) => Ended::Os(error.raw_os_error().unwrap_or(libc::EIO)),
            Err(Error::ConnectionLost(why)) => Ended::Lost(why),
            Err(other) => Ended::Lost(other.to_string()),
        };
        tracing::debug!(parent: &self.span, ?how, "the connection has ended");
        *self.ended.lock() = Some(how);
        self.router.end();
    }

    /// Returns the error of a request that was posted, or would have been.
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
        tracing::debug!(parent: &self.span, %error, "a request has failed");
        Error::Operation(error)
    }

    /// Refuses regions of other endpoints: the queue pair could not use them.
    #[inline]
    pub(super) fn check_own<T>(&self, region: &Region<T>) -> Checked {
        match region.memory.is_of(self.endpoint.pd()) {
            true => Ok(()),
            false => refused(Refusal::ForeignRegion),
        }
    }

    /// Refuses more octets than are copied.
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

    /// Returns memory in which each slot of the router has a place for one message.
    pub(super) fn staging(&self) -> Result<&MemoryRegion> {
        if let Some(staging) = self.staging.get() {
            return Ok(staging);
        }
        let octets = (self.message_size as usize)
            .checked_mul(self.send_depth as usize)
            .ok_or(Error::OutOfMemory)?;
        let staging = self.endpoint.pd().reg_mr(octets, Access::LOCAL_WRITE)?;
        Ok(self.staging.get_or_init(|| staging))
    }

    pub(super) const fn staging_at(&self, id: SlotId) -> usize {
        id.index() * self.message_size as usize
    }

    pub(super) fn staging_sge(
        &self,
        staging: &MemoryRegion,
        id: SlotId,
        len: usize,
    ) -> Result<Sge> {
        let at = self.staging_at(id);
        staging.sge(at..at + len)
    }

    pub(super) fn read_staging(&self, id: SlotId, out: &mut [u8]) -> Result<()> {
        self.staging()?.read_at(self.staging_at(id), out)
    }
}

/// A connection to a peer. A clone is another handle to it: any number of tasks and threads may use one connection at the same time.
/// It is disconnected gracefully when the last handle is dropped; requests whose operations were dropped before may then not be
/// carried out. [`close`](Self::close) ends it for all handles.
///
/// The calls below make an [`Operation`]: a future for any runtime, with [`wait`](Operation::wait) for threads. They check lengths and
/// rights, so that a mistake is an [`Error::Refused`] and costs nothing. A posted request that fails is an [`Error::Operation`]; the
/// connection has ended then.
///
/// An operation has completed when its octets may be used again. A Send or Write may not have reached the peer's program at that time;
/// Reads and atomics have been answered.
#[derive(Debug, Clone)]
pub struct Connection {
    pub(super) inner: Arc<Inner>,
}

impl Connection {
    pub(super) fn new(parts: Parts) -> Self {
        let (local, peer) = parts.cm.addresses();
        let span = tracing::debug_span!("connection", ?local, ?peer, qp = parts.cm.qp().num());
        let inner = Arc::new_cyclic(|weak: &Weak<Inner>| {
            parts
                .cm
                .wake_at_end(&Waker::from(Arc::new(AtEnd(weak.clone()))));
            Inner {
                cm: parts.cm,
                router: parts.router,
                buffers: parts.buffers,
                staging: OnceLock::new(),
                endpoint: parts.endpoint,
                message_size: parts.message_size,
                max_inline: parts.max_inline,
                send_depth: parts.send_depth,
                initiator: parts.initiator,
                ended: Mutex::new(None),
                span,
            }
        });
        // It may have ended before the waker was there, or before the handle was.
        inner.note_end();
        Self { inner }
    }

    /// Returns the private data that the peer sent when it accepted; empty at the accepting end, where
    /// [`Incoming::private_data`](super::Incoming::private_data) has them.
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

    /// Returns its endpoint, whose regions it can use.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }

    /// Returns the longest message that it receives, and that it copies, in octets: [`Options::message_size`](super::Options::message_size).
    pub fn message_size(&self) -> usize {
        self.inner.message_size as usize
    }

    /// Returns how many messages it can have in receive buffers: [`Options::receives`](super::Options::receives).
    pub fn receives(&self) -> usize {
        self.inner.buffers.count()
    }

    /// Returns `true` if this end has connected, and `false` if it has accepted.
    pub fn is_initiator(&self) -> bool {
        self.inner.initiator
    }

    /// Returns why it has ended, and which end is to blame; `None` if it has not, or gracefully.
    pub fn fault(&self) -> Option<Fault> {
        self.inner.qp().fault()
    }

    /// Allocates a local region of `len` zeroed elements; see [`Endpoint::allocate`].
    ///
    /// # Errors
    /// As [`Endpoint::allocate`].
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<Region<T>> {
        self.inner.endpoint.allocate(len)
    }

    /// Allocates a region that peers may access; see [`Endpoint::share`].
    ///
    /// # Errors
    /// As [`Endpoint::share`].
    pub fn share<T: Pod>(&self, len: usize, rights: Access) -> Result<Region<T>> {
        self.inner.endpoint.share(len, rights)
    }

    /// Makes an operation that sends a payload.
    #[inline]
    pub(super) fn sending<'a, T: Pod>(
        &'a self,
        checked: Checked,
        op: Op,
        payload: Payload<'a, T>,
    ) -> Operation<'a, Done> {
        let checked = checked.and_then(|()| payload.check(self));
        let octets = payload.octets();
        let request = Request::new(op, Local::of(payload), octets);
        Operation::new(self, checked, request, Done)
    }

    /// Sends a message. Octets of the program may be as many as [`message_size`](Self::message_size); a region may have up to 2 GiB. The
    /// peer needs a receive buffer that is long enough.
    pub fn send<'a>(&'a self, payload: impl Into<Payload<'a, u8>>) -> Operation<'a, Done> {
        self.sending(Ok(()), Op::Send, payload.into())
    }

    /// Sends a message with immediate data ([`Message::immediate`](super::Message::immediate)). The peer has to be an `iwarp`, too.
    pub fn send_with_immediate<'a>(
        &'a self,
        payload: impl Into<Payload<'a, u8>>,
        immediate: u32,
    ) -> Operation<'a, Done> {
        self.sending(Ok(()), Op::SendImmediate(immediate), payload.into())
    }

    /// Sends a message, and invalidates the peer's window: this end gives its rights back.
    pub fn send_with_invalidate<'a, T: Pod>(
        &'a self,
        payload: impl Into<Payload<'a, u8>>,
        window: &RemoteRegion<T>,
    ) -> Operation<'a, Done> {
        let op = Op::SendInvalidate(window.rkey());
        self.sending(Ok(()), op, payload.into())
    }

    /// Waits for a message. Dropping the future, or a time limit, loses none.
    ///
    /// # Errors
    /// [`Error::Closed`], or why the connection has ended, when all messages are taken.
    pub const fn recv(&self) -> Recv<'_> {
        Recv::new(self)
    }

    /// Writes elements to the beginning of the peer's region. The peer's program takes no part.
    #[inline]
    pub fn write<'a, T: Pod>(
        &'a self,
        payload: impl Into<Payload<'a, T>>,
        to: &RemoteRegion<T>,
    ) -> Operation<'a, Done> {
        let payload = payload.into();
        let checked = to.check(Access::REMOTE_WRITE, payload.octets());
        self.sending(checked, Op::Write(to.target()), payload)
    }

    /// Writes elements to the beginning of the peer's region, and tells the peer's program by a message without octets
    /// ([`Message::is_of_write`](super::Message::is_of_write)). The peer has to be an `iwarp`, too.
    pub fn write_with_immediate<'a, T: Pod>(
        &'a self,
        payload: impl Into<Payload<'a, T>>,
        to: &RemoteRegion<T>,
        immediate: u32,
    ) -> Operation<'a, Done> {
        let payload = payload.into();
        let checked = to.check(Access::REMOTE_WRITE, payload.octets());
        let op = Op::WriteImmediate(to.target(), immediate);
        self.sending(checked, op, payload)
    }

    /// Reads all elements of the peer's region into the beginning of a local one.
    #[inline]
    pub fn read_into<T: Pod>(
        &self,
        into: impl Into<Region<T>>,
        from: &RemoteRegion<T>,
    ) -> Operation<'_, Done> {
        let (into, octets) = (into.into(), from.octets());
        let room = into.octets() as u64;
        let checked = match octets <= room {
            true => from.check(Access::REMOTE_READ, octets),
            false => refused(Refusal::TooLong { octets, room }),
        };
        let checked = checked.and_then(|()| self.inner.check_own(&into));
        let local = Local::Region(into.memory, into.at);
        let request = Request::new(Op::Read(from.target()), local, octets);
        Operation::new(self, checked, request, Done)
    }

    /// Reads all elements of the peer's region into a new vector. They may have as many octets as [`message_size`](Self::message_size).
    pub fn read<T: Pod>(&self, from: &RemoteRegion<T>) -> Operation<'_, Elements<T>> {
        let octets = from.octets();
        let checked = from.check(Access::REMOTE_READ, octets);
        let checked = checked.and_then(|()| self.inner.check_copied(octets));
        // What is refused may be longer than memory.
        let len = if checked.is_ok() { from.len() } else { 0 };
        let out = vec![T::zeroed(); len];
        self.answered(checked, Op::Read(from.target()), octets, Elements { out })
    }

    /// Reads the first element of the peer's region.
    #[inline]
    pub fn get<T: Pod>(&self, from: &RemoteRegion<T>) -> Operation<'_, Element<T>> {
        let octets = size_of::<T>() as u64;
        let checked = from.check(Access::REMOTE_READ, octets);
        let out = T::zeroed();
        self.answered(checked, Op::Read(from.target()), octets, Element { out })
    }

    /// Adds to a word of the peer's, atomically; returns the old value. The region has one element. The peer has to be an `iwarp`, too.
    pub fn fetch_add(&self, word: &RemoteRegion<u64>, add: u64) -> Operation<'_, Element<u64>> {
        let op = Op::FetchAdd(word.target(), add);
        self.answered(word.check_word(), op, 8, Element { out: 0 })
    }

    /// Writes `swap` into a word of the peer's if it is `compare`, atomically; returns the old value. The region has one element. The
    /// peer has to be an `iwarp`, too.
    pub fn compare_swap(
        &self,
        word: &RemoteRegion<u64>,
        compare: u64,
        swap: u64,
    ) -> Operation<'_, Element<u64>> {
        let op = Op::CompareSwap(word.target(), compare, swap);
        self.answered(word.check_word(), op, 8, Element { out: 0 })
    }

    /// Makes an operation whose answer is copied.
    #[inline]
    fn answered<Y: Yield>(
        &self,
        checked: Checked,
        op: Op,
        octets: u64,
        result: Y,
    ) -> Operation<'_, Y> {
        let checked = checked.and_then(|()| self.inner.check_copied(octets));
        let request = Request::new(op, Local::Answer, octets);
        Operation::new(self, checked, request, result)
    }

    /// Gives the peer rights to a part of a region, until the [`Window`] is dropped. Only this connection's peer has them.
    pub fn bind<T: Pod>(
        &self,
        region: impl Into<Region<T>>,
        rights: Access,
    ) -> Operation<'_, Bound<T>> {
        let region = region.into();
        let octets = region.octets() as u64;
        let addr = region.remote();
        let bound = match REMOTE.contains(rights) && !rights.is_empty() {
            true => self.window(&region),
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

    fn window<T: Pod>(&self, region: &Region<T>) -> Result<MemoryWindow> {
        self.inner.router.check_process()?;
        self.inner.check_own(region).map_err(|error| *error)?;
        self.inner.endpoint.pd().alloc_mw(&region.memory)
    }

    /// Ends a window by a request, after all requests that were posted before. Dropping the window ends it at once.
    pub fn invalidate<T: Pod>(&self, window: Window<T>) -> Operation<'_, Done> {
        let request = Request::invalidating(window.bound);
        Operation::new(self, Ok(()), request, Done)
    }

    /// Begins a batch: requests that complete together, for the last per cent of speed.
    pub const fn batch(&self) -> Batch<'_> {
        Batch::new(self)
    }

    /// Ends the connection for all handles: requests that TCP takes at once are sent, and the others fail. Wait for operations before, and
    /// for [`closed`](Self::closed) afterwards. Does not block.
    ///
    /// # Errors
    /// [`Refusal::Forked`].
    pub fn close(&self) -> Result<()> {
        self.inner.router.check_process()?;
        match self.inner.cm.disconnect() {
            // It has ended already.
            Ok(()) | Err(Error::InvalidState(_)) => {}
            Err(error) => return Err(error),
        }
        self.inner.router.end();
        Ok(())
    }

    /// Waits until the connection has ended, by either side.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`] with the reason, or the operating system's, if the end was not graceful.
    pub const fn closed(&self) -> Closed<'_> {
        Closed {
            connection: self,
            ticket: None,
        }
    }
}

/// Waits for the end of a connection. See [`Connection::closed`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Closed<'a> {
    connection: &'a Connection,
    ticket: Option<Ticket>,
}

waits!(['a] Closed<'a>, ());

impl Wait for Closed<'_> {
    type Output = ();

    fn look(&mut self) -> Poll<Result<()>> {
        match self.connection.inner.ended.lock().clone() {
            None => Poll::Pending,
            Some(Ended::Gracefully) => Poll::Ready(Ok(())),
            Some(Ended::Lost(why)) => Poll::Ready(Err(Error::ConnectionLost(why))),
            Some(Ended::Os(errno)) => {
                Poll::Ready(Err(Error::Io(io::Error::from_raw_os_error(errno))))
            }
        }
    }

    fn is_likely(&self) -> bool {
        self.connection.inner.ended.lock().is_some()
    }

    fn register(&mut self, waker: &Waker) {
        let router = &self.connection.inner.router;
        router.wait_for_end(&mut self.ticket, waker);
    }

    fn router(&self) -> &Router {
        &self.connection.inner.router
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.connection.inner.router.leave_mourners(self.ticket);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "handle_tests.rs"]
mod tests;
