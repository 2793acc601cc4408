//! Receive buffers of a connection, and the messages in them.
//!
//! Invariant of the `unsafe` code: a buffer is posted only when it is created and when the last
//! [`Message`] in it is dropped. A message is created from a completion of its buffer, and each
//! completion is routed once. Clones and slices are counted. So while a message lives, no posted
//! receive refers to its bytes. No request of the program can refer to them either: the program
//! never gets the lkey of this memory.

use super::exclusive::ReceivedBytes;
use super::handle::{Connection, Inner};
use super::region::resolve;
use super::router::{Arrived, Inbox, Router, receive_id};
use super::wait::{Wait, impl_future_and_wait};
use super::waiters::Ticket;
use crate::error::{Error, Result};
use crate::failure::{Refusal, RequestKind};
use crate::runtime::QueuePair;
use crate::verbs::{MemoryRegion, ProtectionDomain};
use bytemuck::Pod;
use iwarp_rnic::{Access, RecvWr, WcStatus};
use std::ops::{Deref, RangeBounds};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// Receive buffers of a connection: `count` buffers of `size` bytes each.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: MemoryRegion,
    size: u32,
    /// For each buffer, the number of messages, clones and slices that refer to it.
    pub(super) message_counts: Box<[AtomicU32]>,
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
            message_counts: (0..count).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    pub(super) const fn count(&self) -> usize {
        self.message_counts.len()
    }

    pub(super) fn post_all(&self, qp: &QueuePair) -> Result<()> {
        // The count was a `u32`, so the cast loses nothing.
        (0..self.count() as u32).try_for_each(|buffer| self.post(qp, buffer))
    }

    fn offset_of(&self, buffer: u32) -> usize {
        buffer as usize * self.size as usize
    }

    fn post(&self, qp: &QueuePair, buffer: u32) -> Result<()> {
        let at = self.offset_of(buffer);
        let wr = RecvWr {
            wr_id: receive_id(buffer),
            sges: &[self.memory.sge(at..at + self.size as usize)?],
        };
        Ok(qp.post_recv(&[wr])?)
    }

    /// Counts a message, a clone or a slice.
    fn add_message(&self, buffer: u32) {
        if let Some(count) = self.message_counts.get(buffer as usize) {
            // Relaxed: the message that is cloned is counted, so the count cannot reach 0
            // meanwhile.
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the drop of a message. Returns `true` if it was the last one in its buffer.
    fn remove_message(&self, buffer: u32) -> bool {
        // The last one must see that the others have ended their accesses.
        let count = self.message_counts.get(buffer as usize);
        count.is_some_and(|count| count.fetch_sub(1, Ordering::AcqRel) == 1)
    }

    fn received_bytes(&self, arrived: &Arrived) -> Option<ReceivedBytes> {
        let (at, len) = (self.offset_of(arrived.buffer), arrived.len as usize);
        // SAFETY: the buffer's completion was routed to the caller, and the buffer is reposted only
        // when the last message in it is dropped.
        unsafe { ReceivedBytes::new(self.memory.clone(), at, len) }
    }
}

/// A received message, in its receive buffer: dereferences to bytes, without a copy. A clone or a
/// [slice](Self::slice) is cheap, and refers to the same bytes.
///
/// When the last of them is dropped, the receive buffer is posted again. If a program keeps all
/// buffers, the peer's next message waits, and the connection ends after
/// [`Config::receiver_not_ready`](crate::Config::receiver_not_ready).
#[derive(Debug)]
pub struct Message {
    bytes: Option<ReceivedBytes>,
    arrived: Arrived,
    connection: Weak<Inner>,
}

impl Message {
    /// Returns the immediate data, if the peer sent any.
    pub const fn immediate(&self) -> Option<u32> {
        self.arrived.immediate
    }

    /// Returns `true` if this message only reports an RDMA Write with immediate data. The message
    /// is then empty.
    pub const fn is_write_immediate(&self) -> bool {
        self.arrived.is_write_immediate
    }

    /// Returns the message as elements, in place. Receive buffers are aligned for elements if
    /// [`message_size`](super::Options::message_size) is a multiple of their alignment.
    ///
    /// ```
    /// # fn total(connection: &iwarp::Connection) -> iwarp::Result<u64> {
    /// let message = connection.recv().wait()?;
    /// Ok(message.elements::<u64>()?.iter().sum())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Refusal::NotElements`](crate::Refusal::NotElements).
    pub fn elements<T: Pod>(&self) -> Result<&[T]> {
        let refusal = Refusal::NotElements {
            octets: self.len(),
            element: size_of::<T>(),
        };
        bytemuck::try_cast_slice(self).map_err(|_| Error::Refused(refusal))
    }

    /// Returns a part of the message, which keeps the receive buffer, too.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`](crate::Refusal::OutOfRange).
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (at, len) = resolve(range, self.len())?;
        let mut part = self.clone();
        part.restrict(at, len);
        Ok(part)
    }

    /// Restricts it to `len` of its bytes, from `at` on. The caller has checked the range.
    pub(super) fn restrict(&mut self, at: usize, len: usize) {
        if let Some(bytes) = &mut self.bytes {
            bytes.restrict(at, len);
        }
    }

    /// Removes its first bytes.
    pub(super) fn skip(&mut self, octets: usize) {
        let at = octets.min(self.len());
        self.restrict(at, self.len() - at);
    }

    /// Gives up the bytes. Returns `true` if no other message is in the buffer, which is then
    /// posted again.
    pub(super) fn give_up(&mut self) -> bool {
        // Take the bytes out first: the peer may overwrite them as soon as the buffer is posted
        // again.
        let bytes = self.bytes.take();
        let Some(inner) = self.connection.upgrade() else {
            return false;
        };
        // In a forked child, the buffers belong to the parent.
        if bytes.is_none() || inner.router.origin.is_foreign() {
            return false;
        }
        drop(bytes);
        if !inner.buffers.remove_message(self.arrived.buffer) {
            return false;
        }
        if let Err(error) = inner.buffers.post(inner.qp(), self.arrived.buffer) {
            // The connection has ended and needs no more receives.
            tracing::trace!(%error, "a receive is not posted again");
        }
        true
    }

    /// Returns the STag of the window that the peer invalidated with this message.
    pub(super) const fn invalidated(&self) -> Option<u32> {
        self.arrived.invalidated
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], ReceivedBytes::octets)
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Clone for Message {
    fn clone(&self) -> Self {
        // Without a connection, no buffer is posted again.
        if let (Some(inner), true) = (self.connection.upgrade(), self.bytes.is_some()) {
            inner.buffers.add_message(self.arrived.buffer);
        }
        Self {
            bytes: self.bytes.clone(),
            arrived: self.arrived,
            connection: Weak::clone(&self.connection),
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(feature = "bytes")]
impl From<Message> for bytes::Bytes {
    /// Keeps the bytes in the receive buffer.
    fn from(message: Message) -> Self {
        Self::from_owner(message)
    }
}

impl Inner {
    pub(super) fn message(self: &Arc<Self>, arrived: Arrived) -> Message {
        tracing::trace!(parent: &self.span, octets = arrived.len, "received");
        let bytes = self.buffers.received_bytes(&arrived);
        self.buffers.add_message(arrived.buffer);
        Message {
            bytes,
            arrived,
            connection: Arc::downgrade(self),
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

impl_future_and_wait!(Recv => Message);

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

    fn is_likely_ready(&self) -> bool {
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
