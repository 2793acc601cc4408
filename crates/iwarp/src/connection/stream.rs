//! Byte streams over a channel, for programs that only need a fast pipe.
//!
//! Written data is copied. Short writes are sent at once, in small messages. Long writes are sent
//! in large messages, which one RDMA Write places in memory that the reader has lent
//! ([`super::large`]); while the reader has much to read, further writes are gathered
//! ([`super::tail`]). Read data is copied from where it was received.

use super::channel::Channel;
use super::channel_wait::{ChannelMessage, Receiving, Sending, Tickets};
use super::payload::Payload;
use super::tail::{ENOUGH, Kind};
use super::wait::block;
use crate::error::{Error, Result};
use std::io;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// A byte stream in both directions over a [`Channel`]: implements [`std::io::Read`] and
/// [`std::io::Write`], and with the feature `tokio` also tokio's `AsyncRead` and `AsyncWrite`.
///
/// A write returns when its data is copied; it waits while the peer has no room. Data is sent at
/// once, or, while the peer has at least 256 KiB to read, when the peer has read. `flush` sends it
/// earlier, but is not necessary. When the stream is dropped, the peer reads what was written, and
/// then the end, even if the process exits: the exit then waits as long as the peer takes data. Any
/// other end of the connection is an error, so a truncated stream is never mistaken for a complete
/// one.
///
/// An end lends its peer no memory until the peer has written more than a short message, and then
/// up to eight pieces of at most 640 KiB, until the stream is dropped. The writer has as much
/// memory.
///
/// ```
/// use iwarp::{Channel, Stream};
/// use std::io::{Read, Write};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = iwarp::listen("127.0.0.1:0").bind()?;
/// let address = listener.local_addr();
/// let server = std::thread::spawn(move || -> std::io::Result<String> {
///     let mut stream = Stream::from(Channel::open(listener.accept().wait()?).wait()?);
///     let mut text = String::new();
///     stream.read_to_string(&mut text)?;
///     Ok(text)
/// });
/// let mut stream = Stream::from(Channel::open(iwarp::connect(address).wait()?).wait()?);
/// stream.write_all(b"a fast pipe")?;
/// drop(stream);
/// assert_eq!(server.join().unwrap()?, "a fast pipe");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Stream {
    read: ReadHalf,
    write: WriteHalf,
}

impl From<Channel> for Stream {
    fn from(channel: Channel) -> Self {
        Self {
            read: ReadHalf {
                channel: channel.clone(),
                current: None,
                tickets: Tickets::default(),
                over: false,
            },
            write: WriteHalf {
                channel,
                tickets: Tickets::default(),
            },
        }
    }
}

impl Stream {
    /// Returns the channel.
    pub const fn channel(&self) -> &Channel {
        &self.write.channel
    }

    /// Splits the stream into two halves, for two threads or tasks.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// Notifies the peer that no more data follows. Reading remains possible.
    ///
    /// # Errors
    /// See [`Channel::finish`].
    pub fn finish(&self) -> Result<()> {
        self.write.finish()
    }
}

/// The reading half of a [`Stream`].
#[derive(Debug)]
pub struct ReadHalf {
    channel: Channel,
    /// The message being read, and the number of bytes read.
    current: Option<(ChannelMessage, usize)>,
    tickets: Tickets,
    over: bool,
}

impl ReadHalf {
    /// Copies data of the current message. Returns `None` if there is none.
    fn copy(&mut self, mut put: impl FnMut(&[u8]) -> usize) -> Option<usize> {
        let (message, at) = self.current.as_mut()?;
        let n = put(message.get(*at..).unwrap_or_default());
        *at += n;
        if *at >= message.len() {
            self.current = None;
        }
        Some(n)
    }

    /// Sets the current message; `None` is the end.
    fn next(&mut self, message: Option<ChannelMessage>) {
        self.over = message.is_none();
        self.current = message.filter(|m| !m.is_empty()).map(|m| (m, 0));
    }

    /// Waits in a task for a current message or the end.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(dead_code, reason = "tokio's traits use it")
    )]
    pub(super) fn poll_fill(&mut self, waker: &Waker) -> Poll<Result<()>> {
        while self.current.is_none() && !self.over {
            let tickets = std::mem::take(&mut self.tickets);
            let mut wait = Receiving::new(&self.channel.shared, tickets);
            match super::wait::poll(&mut wait, waker) {
                Poll::Pending => {
                    self.tickets = wait.pause();
                    return Poll::Pending;
                }
                Poll::Ready(message) => {
                    drop(wait);
                    self.next(message?);
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Passes data of the current message to `put`, which returns how many bytes it took. Returns 0
    /// at the end.
    pub(super) fn take(&mut self, put: impl FnMut(&[u8]) -> usize) -> usize {
        self.copy(put).unwrap_or(0)
    }
}

impl io::Read for ReadHalf {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_none() && !self.over && !out.is_empty() {
            let mut wait = Receiving::new(&self.channel.shared, Tickets::default());
            let message = block(&mut wait, None)?;
            drop(wait);
            self.next(message);
        }
        Ok(self.take(|octets| {
            let n = octets.len().min(out.len());
            out[..n].copy_from_slice(&octets[..n]);
            n
        }))
    }
}

impl Drop for ReadHalf {
    fn drop(&mut self) {
        let tickets = std::mem::take(&mut self.tickets);
        drop(Receiving::new(&self.channel.shared, tickets));
    }
}

/// The writing half of a [`Stream`].
#[derive(Debug)]
pub struct WriteHalf {
    channel: Channel,
    tickets: Tickets,
}

impl WriteHalf {
    /// Notifies the peer that no more data follows.
    ///
    /// # Errors
    /// See [`Channel::finish`].
    pub fn finish(&self) -> Result<()> {
        self.channel.finish().wait()
    }

    /// Sends gathered data; see [`super::tail`].
    fn send_gathered(&self) {
        let shared = &self.channel.shared;
        if !shared.connection.inner.router.origin.is_foreign() {
            shared.send_tail();
        }
    }

    /// Adds data to gathered data; see [`super::tail`].
    fn gather(&self, octets: &[u8]) -> Result<Option<usize>> {
        let shared = &self.channel.shared;
        shared.connection.inner.router.check_process()?;
        match self.tickets.is_waiting() {
            // This write has its place among the writers.
            true => Ok(None),
            false => shared.append_bytes(octets),
        }
    }

    fn send<'a>(channel: &Channel, piece: &'a [u8], tickets: Tickets) -> Sending<'a> {
        Sending::new(&channel.shared, Payload::from(piece), Kind::Bytes, tickets)
    }

    /// Returns as much data as is sent in one message. Until the peer has lent slots, the messages
    /// are small.
    fn piece<'a>(&self, octets: &'a [u8]) -> &'a [u8] {
        let shared = &self.channel.shared;
        let small = shared.most_small(true);
        let most = match octets.len() > small && shared.has_slots() {
            true => self.channel.max_len().min(ENOUGH),
            false => small,
        };
        &octets[..most.min(octets.len())]
    }

    /// Writes in a task.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(dead_code, reason = "tokio's traits use it")
    )]
    pub(super) fn poll_write(&mut self, octets: &[u8], waker: &Waker) -> Poll<Result<usize>> {
        if octets.is_empty() {
            return Poll::Ready(Ok(0));
        }
        match self.gather(octets) {
            Ok(None) => {}
            Ok(Some(written)) => return Poll::Ready(Ok(written)),
            Err(error) => return Poll::Ready(Err(error)),
        }
        let piece = self.piece(octets);
        let tickets = std::mem::take(&mut self.tickets);
        let mut sending = Self::send(&self.channel, piece, tickets);
        match super::wait::poll(&mut sending, waker) {
            Poll::Pending => {
                self.tickets = sending.pause();
                Poll::Pending
            }
            Poll::Ready(result) => Poll::Ready(result.map(|()| piece.len())),
        }
    }

    /// Notifies the peer in a task that no more data follows.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(dead_code, reason = "tokio's traits use it")
    )]
    pub(super) fn poll_finish(&mut self, waker: &Waker) -> Poll<Result<()>> {
        // It precedes all waiters and needs no answer, so posting it is enough.
        if self.channel.is_finished() {
            return Poll::Ready(Ok(()));
        }
        match super::wait::poll(&mut self.channel.finish(), waker) {
            Poll::Ready(Err(Error::Closed)) | Poll::Pending => Poll::Ready(Ok(())),
            done => done,
        }
    }
}

impl io::Write for WriteHalf {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if octets.is_empty() {
            return Ok(0);
        }
        if let Some(written) = self.gather(octets)? {
            return Ok(written);
        }
        let piece = self.piece(octets);
        Self::send(&self.channel, piece, Tickets::default()).wait()?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_gathered();
        Ok(())
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        self.send_gathered();
        let tickets = std::mem::take(&mut self.tickets);
        drop(Self::send(&self.channel, &[], tickets));
    }
}

impl io::Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.read.read(out)
    }
}

impl io::Write for Stream {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.write.write(octets)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write.flush()
    }
}

impl From<Error> for io::Error {
    /// Keeps the error as the source and derives the kind from it.
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => {
                let kind = error.kind();
                Arc::try_unwrap(error).unwrap_or_else(|error| Self::new(kind, error))
            }
            error => {
                let kind = Self::from_raw_os_error(error.errno()).kind();
                Self::new(kind, error)
            }
        }
    }
}

#[cfg(feature = "tokio")]
mod asynchronous {
    use super::{ReadHalf, Stream, WriteHalf};
    use std::io::{Error, Result};
    use std::pin::Pin;
    use std::task::{Context, Poll, ready};
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    impl AsyncRead for ReadHalf {
        fn poll_read(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<Result<()>> {
            let this = self.get_mut();
            if out.remaining() > 0 {
                ready!(this.poll_fill(cx.waker()))?;
            }
            this.take(|octets| {
                let n = octets.len().min(out.remaining());
                out.put_slice(&octets[..n]);
                n
            });
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for WriteHalf {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            octets: &[u8],
        ) -> Poll<Result<usize>> {
            let written = Self::poll_write(self.get_mut(), octets, cx.waker());
            written.map(|done| done.map_err(Error::from))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
            self.send_gathered();
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
            let done = self.get_mut().poll_finish(cx.waker());
            done.map(|done| done.map_err(Error::from))
        }
    }

    impl AsyncRead for Stream {
        fn poll_read(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<Result<()>> {
            Pin::new(&mut self.get_mut().read).poll_read(cx, out)
        }
    }

    impl AsyncWrite for Stream {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            octets: &[u8],
        ) -> Poll<Result<usize>> {
            AsyncWrite::poll_write(Pin::new(&mut self.get_mut().write), cx, octets)
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
            Pin::new(&mut self.get_mut().write).poll_flush(cx)
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
            Pin::new(&mut self.get_mut().write).poll_shutdown(cx)
        }
    }
}

#[cfg(all(test, not(miri)))]
#[path = "stream_tests.rs"]
mod tests;
