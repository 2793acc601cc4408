//! One request: what it is, when it is posted, and what comes of it.

#![allow(
    private_interfaces,
    reason = "the trait is sealed: programs name the operations, and cannot call its functions"
)]

use super::handle::{Connection, Inner};
use super::region::Region;
use super::remote::RemoteRegion;
use super::router::{Entry, Held, Priority, Router, SlotId};
use super::wait::{Wait, block, poll};
use super::window::{BoundWindow, Window};
use crate::error::{Error, Result};
use crate::failure::{Refusal, RequestKind};
use bytemuck::Pod;
use iwarp_rnic::{PostError, SendFlags, SendOp, SendWr, Sge, WcStatus};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// What a Send or Write carries: octets of the program, which are copied when the request is posted, or elements of a region, which
/// are not. References to slices, arrays and strings convert into it, and so do regions.
#[derive(Debug)]
pub struct Payload<'a, T>(pub(super) Carried<'a, T>);

#[derive(Debug)]
pub(super) enum Carried<'a, T> {
    Copied(&'a [T]),
    Region(Region<T>),
}

impl<'a, T> From<&'a [T]> for Payload<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a, T> From<&'a Vec<T>> for Payload<'a, T> {
    fn from(elements: &'a Vec<T>) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for Payload<'a, T> {
    fn from(elements: &'a [T; N]) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a> From<&'a str> for Payload<'a, u8> {
    fn from(text: &'a str) -> Self {
        Self(Carried::Copied(text.as_bytes()))
    }
}

impl<'a> From<&'a String> for Payload<'a, u8> {
    fn from(text: &'a String) -> Self {
        Self(Carried::Copied(text.as_bytes()))
    }
}

impl<T> From<Region<T>> for Payload<'_, T> {
    fn from(region: Region<T>) -> Self {
        Self(Carried::Region(region))
    }
}

impl<T> From<&Region<T>> for Payload<'_, T> {
    fn from(region: &Region<T>) -> Self {
        Self(Carried::Region(region.clone()))
    }
}

impl<T: Pod> Payload<'_, T> {
    pub(super) const fn octets(&self) -> u64 {
        match &self.0 {
            Carried::Copied(elements) => size_of_val(*elements) as u64,
            Carried::Region(region) => region.octets() as u64,
        }
    }
}

/// The local side of a request.
#[derive(Debug)]
enum Local<'a> {
    /// Nothing is moved.
    None,
    /// Copied when the request is posted: into the request, or into the slot's staging.
    Copied(&'a [u8]),
    /// Octets of a region.
    Region(Sge),
    /// The answer lands in the slot's staging.
    Answer(u32),
}

/// A request before it is posted.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) kind: RequestKind,
    op: SendOp,
    /// Octets in front of those of `local`, for a channel; zeros for none.
    header: [u8; HEADER],
    local: Local<'a>,
    octets: u64,
    held: Held,
}

/// Length of the header of a channel's message, in octets.
pub(super) const HEADER: usize = 8;

impl<'a> Request<'a> {
    /// A request without octets of its own.
    pub(super) const fn bare(kind: RequestKind, op: SendOp, held: Held) -> Self {
        Self {
            kind,
            op,
            header: [0; HEADER],
            local: Local::None,
            octets: 0,
            held,
        }
    }

    /// A request that sends a payload.
    #[inline]
    pub(super) fn sending<T: Pod>(
        connection: &Connection,
        kind: RequestKind,
        op: SendOp,
        payload: Payload<'a, T>,
    ) -> Result<Self> {
        let octets = payload.octets();
        let (local, held) = match payload.0 {
            Carried::Copied(elements) => {
                let octets: &[u8] = bytemuck::cast_slice(elements);
                let most = connection.inner.message_size as usize;
                if octets.len() > most {
                    let octets = octets.len();
                    return Err(Error::Refused(Refusal::TooLongToCopy { octets, most }));
                }
                (Local::Copied(octets), Held::Nothing)
            }
            Carried::Region(region) => {
                connection.inner.check_own(&region)?;
                (Local::Region(region.sge()?), Held::One(region.memory))
            }
        };
        Ok(Self {
            kind,
            op,
            header: [0; HEADER],
            local,
            octets,
            held,
        })
    }

    /// A request whose answer lands in a region.
    pub(super) fn into_region<T: Pod>(
        connection: &Connection,
        op: SendOp,
        region: Region<T>,
        octets: u64,
    ) -> Result<Self> {
        connection.inner.check_own(&region)?;
        let mut sge = region.sge()?;
        sge.len = u32::try_from(octets).unwrap_or(sge.len);
        Ok(Self {
            kind: RequestKind::Read,
            op,
            header: [0; HEADER],
            local: Local::Region(sge),
            octets,
            held: Held::One(region.memory),
        })
    }

    /// A request whose answer lands in the slot's staging.
    pub(super) fn into_staging(
        connection: &Connection,
        kind: RequestKind,
        op: SendOp,
        octets: u64,
    ) -> Result<Self> {
        let most = connection.inner.message_size;
        let Some(len) = u32::try_from(octets).ok().filter(|len| *len <= most) else {
            let (octets, most) = (usize::try_from(octets).unwrap_or(usize::MAX), most as usize);
            return Err(Error::Refused(Refusal::TooLongToCopy { octets, most }));
        };
        Ok(Self {
            kind,
            op,
            header: [0; HEADER],
            local: Local::Answer(len),
            octets,
            held: Held::Nothing,
        })
    }

    /// Puts a header in front of the octets. Copied ones may be shorter by that.
    pub(super) fn with_header(mut self, header: [u8; HEADER]) -> Self {
        self.header = header;
        self.octets += HEADER as u64;
        self
    }

    #[cold]
    fn span(&self, connection: &Connection) -> Box<tracing::Span> {
        Box::new(tracing::debug_span!(
            parent: &connection.inner.span,
            "operation",
            kind = self.kind.name(),
            octets = self.octets
        ))
    }

    /// Posts it. `id` is its slot.
    #[inline]
    fn post(&self, inner: &Inner, id: SlotId) -> Result<()> {
        let header = match self.header {
            [0, ..] => [].as_slice(),
            _ => self.header.as_slice(),
        };
        let (inline, elements);
        let mut wr = SendWr::new(id.wr_id(), self.op, &[]).with_flags(SendFlags::SIGNALED);
        match &self.local {
            Local::None if header.is_empty() => {}
            Local::Copied(_) | Local::None if self.octets <= u64::from(inner.max_inline) => {
                inline = [header, self.copied()];
                wr.inline = &inline;
                wr = wr.with_flags(SendFlags::INLINE);
            }
            Local::Copied(_) | Local::None => {
                let staging = inner.staging()?;
                let at = inner.staging_at(id);
                staging.write_at(at, header)?;
                staging.write_at(at + header.len(), self.copied())?;
                let len = header.len() + self.copied().len();
                elements = [inner.staging_sge(staging, id, len)?, Sge::default()];
                wr.sges = &elements[..1];
            }
            Local::Region(element) if header.is_empty() => {
                elements = [*element, Sge::default()];
                wr.sges = &elements[..1];
            }
            Local::Region(element) => {
                let staging = inner.staging()?;
                staging.write_at(inner.staging_at(id), header)?;
                elements = [inner.staging_sge(staging, id, header.len())?, *element];
                wr.sges = &elements;
            }
            Local::Answer(len) => {
                let staging = inner.staging()?;
                elements = [
                    inner.staging_sge(staging, id, *len as usize)?,
                    Sge::default(),
                ];
                wr.sges = &elements[..1];
            }
        }
        inner.qp().post_send(&[wr]).map_err(|(_, error)| error)
    }

    const fn copied(&self) -> &'a [u8] {
        match self.local {
            Local::Copied(octets) => octets,
            _ => &[],
        }
    }
}

mod sealed {
    use super::{Held, Inner, Result, SlotId};

    /// What an operation returns when its request has succeeded.
    pub trait Yield {
        type Output;
        /// The answer is in the slot's staging.
        const ANSWERS: bool = false;

        /// Takes the answer out of the staging, before the slot is free again.
        fn read(&mut self, _inner: &Inner, _id: SlotId) -> Result<()> {
            Ok(())
        }

        /// Makes the result of the answer and of what the request has kept.
        fn finish(&mut self, held: Held) -> Result<Self::Output>;
    }
}

pub(super) use sealed::Yield;

/// Nothing: that it has completed is all.
#[derive(Debug)]
pub struct Done;

impl Yield for Done {
    type Output = ();

    fn finish(&mut self, _held: Held) -> Result<()> {
        Ok(())
    }
}

/// Elements from a peer.
#[derive(Debug)]
pub struct Elements<T> {
    pub(super) out: Vec<T>,
}

impl<T: Pod> Yield for Elements<T> {
    type Output = Vec<T>;
    const ANSWERS: bool = true;

    fn read(&mut self, inner: &Inner, id: SlotId) -> Result<()> {
        inner.read_staging(id, bytemuck::cast_slice_mut(&mut self.out))
    }

    fn finish(&mut self, _held: Held) -> Result<Vec<T>> {
        Ok(std::mem::take(&mut self.out))
    }
}

/// One element from a peer, or the old value of a word.
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

    fn finish(&mut self, _held: Held) -> Result<T> {
        Ok(self.out)
    }
}

/// A window that is bound.
#[derive(Debug)]
pub struct Bound<T> {
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: Pod> Yield for Bound<T> {
    type Output = Window<T>;

    fn finish(&mut self, held: Held) -> Result<Window<T>> {
        let Held::Window(bound) = held else {
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
    Posted(SlotId),
    Over,
}

/// A request on a connection: a future, and a blocking call ([`wait`](Self::wait)).
///
/// It is posted when it is first polled or waited for, or by [`started`](Self::started), which lets a program have several requests on
/// their way. Requests of one task start in the order in which it posts them. If the send queue is full, the operation waits for room.
///
/// Dropping an operation is sound at any time. If it was not posted yet, nothing happens. If it was, the request is carried out all the
/// same, and its result is lost; regions that it uses are kept until then. Forgetting one ([`std::mem::forget`]) costs the connection a
/// place of its send queue.
#[must_use = "it does nothing unless it is awaited, waited for, or started"]
#[derive(Debug)]
pub struct Operation<'a, Y: Yield> {
    connection: &'a Connection,
    request: Result<Request<'a>, Option<Error>>,
    stage: Stage,
    posted: bool,
    ticket: Option<u64>,
    priority: Priority,
    result: Y,
    /// Only if spans are recorded, so that it costs nothing otherwise.
    span: Option<Box<tracing::Span>>,
}

impl<'a, Y: Yield> Operation<'a, Y> {
    #[inline]
    pub(super) fn new(connection: &'a Connection, request: Result<Request<'a>>, result: Y) -> Self {
        let span = match &request {
            Ok(request) if tracing::enabled!(tracing::Level::DEBUG) => {
                Some(request.span(connection))
            }
            _ => None,
        };
        Self {
            connection,
            request: request.map_err(Some),
            stage: Stage::New,
            posted: false,
            ticket: None,
            priority: Priority::Normal,
            result,
            span,
        }
    }

    /// Posts the request now, if there is room in the send queue. Otherwise it is posted when it is awaited or waited for. An error
    /// is returned then, too.
    #[inline]
    pub fn started(mut self) -> Self {
        if matches!(self.stage, Stage::New)
            && !self.connection.inner.router.origin.is_foreign()
            && let Err(error) = self.try_post()
        {
            self.request = Err(Some(error));
        }
        self
    }

    /// Blocks the thread until it is done. The thread polls for a moment before it sleeps, if the last waits were short.
    ///
    /// # Errors
    /// Those of the call that made it: [`Error::Refused`] if it does not fit, [`Error::Operation`] if it failed, [`Error::Closed`] if
    /// the connection was closed before.
    #[inline]
    pub fn wait(mut self) -> Result<Y::Output> {
        block(&mut self, None)
    }

    /// Blocks the thread until it is done, for at most `limit`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]: then the operation is dropped, and its request may still be carried out. Those of [`wait`](Self::wait).
    pub fn wait_for(mut self, limit: Duration) -> Result<Y::Output> {
        block(&mut self, Some(limit))
    }

    /// Sets how it waits for room.
    pub(super) fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Takes over a place among those who wait for room.
    pub(super) const fn set_ticket(&mut self, ticket: Option<u64>) {
        self.ticket = ticket;
    }

    /// Gives the place among those who wait for room to the caller.
    pub(super) const fn take_ticket(&mut self) -> Option<u64> {
        self.ticket.take()
    }

    /// Returns `true` if it was posted, and its end is not known.
    pub(super) const fn is_posted(&self) -> bool {
        matches!(self.stage, Stage::Posted(_))
    }

    /// Returns `true` if it was posted at any time.
    pub(super) const fn was_posted(&self) -> bool {
        self.posted
    }

    /// Returns `true` if it can never be posted.
    pub(super) const fn is_refused(&self) -> bool {
        self.request.is_err()
    }

    /// Posts the request if there is room.
    #[inline]
    fn try_post(&mut self) -> Result<()> {
        let inner = &self.connection.inner;
        let request = match &mut self.request {
            Ok(request) => request,
            Err(error) => return Err(error.take().unwrap_or(Error::Closed)),
        };
        let entry = inner
            .router
            .enter(1, self.priority, &mut request.held, &mut self.ticket);
        let id = match entry {
            Entry::Taken(id) => id,
            Entry::Full => return Ok(()),
            Entry::Ended => {
                return Err(inner.failure(request.kind, request.octets, WcStatus::Flushed));
            }
        };
        let _entered = self.span.as_ref().map(|span| span.enter());
        if let Err(error) = request.post(inner, id) {
            request.held = inner.router.withdraw(id);
            return Err(match error {
                // The end of the connection is not known here yet.
                Error::Post(PostError::InvalidState) => {
                    inner.failure(request.kind, request.octets, WcStatus::Flushed)
                }
                Error::Post(error) => Error::Refused(Refusal::Post(error)),
                error => error,
            });
        }
        self.stage = Stage::Posted(id);
        self.posted = true;
        tracing::trace!("posted");
        Ok(())
    }

    /// Looks whether the posted request has ended.
    #[inline]
    fn collect(&mut self, id: SlotId) -> Poll<Result<Y::Output>> {
        let inner = &self.connection.inner;
        if Y::ANSWERS {
            match inner.router.outcome(id) {
                None => return Poll::Pending,
                Some(WcStatus::Success) => self.result.read(inner, id)?,
                Some(_) => {}
            }
        }
        let Some((status, held)) = inner.router.collect(id) else {
            return Poll::Pending;
        };
        self.stage = Stage::Over;
        let _entered = self.span.as_ref().map(|span| span.enter());
        tracing::trace!(?status, "completed");
        Poll::Ready(match (status, &self.request) {
            (WcStatus::Success, _) => self.result.finish(held),
            (status, Ok(request)) => Err(inner.failure(request.kind, request.octets, status)),
            (_, Err(_)) => Err(Error::Closed),
        })
    }
}

impl<Y: Yield> Wait for Operation<'_, Y> {
    type Output = Y::Output;

    #[inline]
    fn look(&mut self) -> Poll<Result<Y::Output>> {
        if matches!(self.stage, Stage::New)
            && let Err(error) = self.try_post()
        {
            self.stage = Stage::Over;
            return Poll::Ready(Err(error));
        }
        match self.stage {
            Stage::Posted(id) => self.collect(id),
            Stage::New => Poll::Pending,
            Stage::Over => Poll::Ready(Err(Error::InvalidState("the operation has ended already"))),
        }
    }

    fn is_likely(&self) -> bool {
        match self.stage {
            Stage::Posted(id) => self.router().is_done(id),
            _ => false,
        }
    }

    fn register(&mut self, waker: &Waker) {
        let router = &self.connection.inner.router;
        match self.stage {
            Stage::Posted(id) => router.wait_for_end_of(id, waker),
            Stage::New => router.wait_for_room(&mut self.ticket, waker),
            Stage::Over => {}
        }
    }

    fn step(&self) -> u8 {
        u8::from(self.posted)
    }

    fn router(&self) -> &Router {
        &self.connection.inner.router
    }
}

impl<Y: Yield + Unpin> Future for Operation<'_, Y> {
    type Output = Result<Y::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        poll(self.get_mut(), cx.waker())
    }
}

impl<Y: Yield> Drop for Operation<'_, Y> {
    fn drop(&mut self) {
        let router = &self.connection.inner.router;
        match self.stage {
            Stage::Posted(id) => router.abandon(id),
            Stage::New => router.leave_room(self.ticket),
            Stage::Over => {}
        }
    }
}

impl BoundWindow {
    /// The request that binds it to a part of a region.
    pub(super) fn binding<'a>(
        self,
        addr: u64,
        octets: u64,
        access: iwarp_rnic::Access,
    ) -> Request<'a> {
        let op = SendOp::Bind(self.bind(addr, octets, access));
        Request::bare(RequestKind::Bind, op, Held::Window(self))
    }

    /// The request that ends it, in the order of the others.
    pub(super) fn invalidating<'a>(self) -> Request<'a> {
        let stag = self.stag_when_bound();
        let op = SendOp::LocalInvalidate { stag };
        Request::bare(RequestKind::Invalidate, op, Held::Window(self))
    }
}
