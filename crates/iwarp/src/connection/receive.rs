//! Receive buffers of a connection, and the messages in them.
//!
//! Invariant of the `unsafe` code: a buffer is posted only when it is created and when the
//! [`Message`] in it is dropped. A message is created from a completion of its buffer, and each
//! completion is routed once. So no request names the bytes of a message while it lives. Programs
//! do not learn the key of this memory.

use super::exclusive::Filled;
use super::handle::{Connection, Inner};
use super::router::{Arrived, Inbox, Router, receive_id};
use super::wait::{Wait, waits};
use super::waiters::Ticket;
use crate::error::{Error, Result};
use crate::failure::RequestKind;
use crate::runtime::QueuePair;
use crate::verbs::{MemoryRegion, ProtectionDomain};
use iwarp_rnic::{Access, RecvWr, WcStatus};
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// Receive buffers of a connection: `count` buffers of `size` bytes each.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: MemoryRegion,
    size: u32,
    count: u32,
}

impl Buffers {
    pub(super) fn new(pd: &ProtectionDomain, size: u32, count: u32) -> Result<Self> {
        let octets = (size as usize)
            .checked_mul(count as usize)
            .ok_or(Error::InvalidArgument("the receive buffers are too long"))?;
        let memory = pd.reg_mr(octets, Access::LOCAL_WRITE)?;
        Ok(Self {
            memory,
            size,
            count,
        })
    }

    pub(super) const fn count(&self) -> usize {
        self.count as usize
    }

    pub(super) fn post_all(&self, qp: &QueuePair) -> Result<()> {
        (0..self.count).try_for_each(|buffer| self.post(qp, buffer))
    }

    fn place(&self, buffer: u32) -> usize {
        buffer as usize * self.size as usize
    }

    fn post(&self, qp: &QueuePair, buffer: u32) -> Result<()> {
        let at = self.place(buffer);
        let wr = RecvWr {
            wr_id: receive_id(buffer),
            sges: &[self.memory.sge(at..at + self.size as usize)?],
        };
        Ok(qp.post_recv(&[wr])?)
    }

    fn filled(&self, arrived: &Arrived) -> Option<Filled> {
        let (at, len) = (self.place(arrived.buffer), arrived.len as usize);
        // SAFETY: the buffer's completion was routed to the caller, and the buffer is reposted only
        // when the message is dropped.
        unsafe { Filled::new(self.memory.clone(), at, len) }
    }
}

/// A received message, in its receive buffer: dereferences to bytes, without a copy.
///
/// Dropping it reposts the receive buffer. If a program keeps all of them, the peer's next message
/// waits, and the connection ends after
/// [`Config::receiver_not_ready`](crate::Config::receiver_not_ready).
#[derive(Debug)]
pub struct Message {
    filled: Option<Filled>,
    arrived: Arrived,
    back: Weak<Inner>,
}

impl Message {
    /// Returns the immediate data, if the peer sent any.
    pub const fn immediate(&self) -> Option<u32> {
        self.arrived.immediate
    }

    /// Returns `true` if it announces an RDMA Write with immediate data. It is empty then.
    pub const fn is_of_write(&self) -> bool {
        self.arrived.of_write
    }

    /// Returns the STag of the window that the peer invalidated with this message.
    pub(super) const fn invalidated(&self) -> Option<u32> {
        self.arrived.invalidated
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.filled.as_ref().map_or(&[], Filled::octets)
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // Released before the buffer is posted again.
        self.filled = None;
        let Some(inner) = self.back.upgrade() else {
            return;
        };
        if inner.router.origin.is_foreign() {
            return;
        }
        if let Err(error) = inner.buffers.post(inner.qp(), self.arrived.buffer) {
            // The connection has ended and needs no more receives.
            tracing::trace!(%error, "a receive is not posted again");
        }
    }
}

impl Inner {
    pub(super) fn message(self: &Arc<Self>, arrived: Arrived) -> Message {
        tracing::trace!(parent: &self.span, octets = arrived.len, "received");
        Message {
            filled: self.buffers.filled(&arrived),
            arrived,
            back: Arc::downgrade(self),
        }
    }

    /// Returns why no more messages will arrive.
    pub(super) fn no_message(&self) -> Error {
        let octets = u64::from(self.buffers.size);
        self.failure(RequestKind::Receive, octets, WcStatus::Flushed)
    }
}

/// Waits for a message; see [`Connection::recv`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Recv {
    connection: Connection,
    ticket: Option<Ticket>,
}

impl Recv {
    pub(super) fn new(connection: &Connection) -> Self {
        Self {
            connection: connection.clone(),
            ticket: None,
        }
    }

    /// Returns a message if one has arrived. Does not block.
    ///
    /// # Errors
    /// See [`Connection::recv`].
    pub fn now(mut self) -> Result<Option<Message>> {
        let router = self.router();
        router.check_process()?;
        router.drive();
        match self.poll_now() {
            Poll::Ready(message) => message.map(Some),
            Poll::Pending => Ok(None),
        }
    }
}

waits!([] Recv, Message);

impl Wait for Recv {
    type Output = Message;

    fn poll_now(&mut self) -> Poll<Result<Message>> {
        let inner = &self.connection.inner;
        match inner.router.take_message(&mut self.ticket) {
            Inbox::Empty => Poll::Pending,
            Inbox::Ended => Poll::Ready(Err(inner.no_message())),
            Inbox::Message(arrived) => Poll::Ready(Ok(inner.message(arrived))),
        }
    }

    fn is_likely(&self) -> bool {
        self.router().has_message()
    }

    fn register(&mut self, waker: &Waker) {
        let inner = &self.connection.inner;
        inner.router.wait_for_message(&mut self.ticket, waker);
    }

    fn router(&self) -> &Router {
        &self.connection.inner.router
    }
}

impl Drop for Recv {
    fn drop(&mut self) {
        self.connection.inner.router.leave_readers(self.ticket);
    }
}
