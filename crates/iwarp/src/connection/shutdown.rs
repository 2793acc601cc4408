//! The end of a connection after everything has arrived.

use super::handle::{Closed, Connection};
use super::operation::Operation;
use super::output::Done;
use super::request::{Local, Op, Request};
use super::router::Router;
use super::wait::{Wait, impl_future_and_wait};
use crate::error::{Error, Result};
use crate::failure::{End, Refusal};
use iwarp_rnic::PostError;
use std::task::{Poll, Waker};

/// Shuts a connection down; see [`Connection::shutdown`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Shutdown {
    connection: Connection,
    /// Completes when all earlier requests are visible at the peer.
    flush: Option<Operation<'static, Done>>,
    closed: Closed,
}

impl_future_and_wait!(Shutdown => End);

impl Connection {
    /// Sends everything that was started, waits until the peer has received it, and closes the
    /// connection for all handles. Returns how it ended: [`End::Closed`], unless the peer closed it
    /// first, or it failed.
    ///
    /// Received means that Sends and Writes are in the peer's memory. Whether its program has
    /// processed them, only an answer of the program can tell. If the peer serves no RDMA Reads
    /// ([`Options::reads`](super::Options::reads)), this waits for TCP's acknowledgement instead.
    ///
    /// # Errors
    /// [`Refusal::Forked`].
    pub fn shutdown(&self) -> Shutdown {
        let request = Request::new(Op::Flush, Local::None, 0);
        Shutdown {
            connection: self.clone(),
            flush: Some(Operation::new(self, Ok(()), request, Done)),
            closed: self.closed(),
        }
    }
}

impl Shutdown {
    /// Returns `true` if the requests before the flush have arrived, or never will.
    fn is_flushed(&mut self) -> bool {
        let Some(flush) = &mut self.flush else {
            return true;
        };
        match flush.poll_now() {
            Poll::Pending => return false,
            Poll::Ready(Err(Error::Refused(Refusal::Post(PostError::InvalidRequest)))) => {
                tracing::debug!("the peer serves no Reads, so it cannot confirm what it received");
            }
            // A failure is reported as the end of the connection.
            Poll::Ready(_) => {}
        }
        self.flush = None;
        true
    }
}

impl Wait for Shutdown {
    type Output = End;

    fn poll_now(&mut self) -> Poll<Result<End>> {
        if self.flush.is_some() && self.is_flushed() {
            self.connection.close()?;
        }
        match self.flush {
            Some(_) => Poll::Pending,
            None => self.closed.poll_now(),
        }
    }

    fn is_likely_ready(&self) -> bool {
        match &self.flush {
            Some(flush) => flush.is_likely_ready(),
            None => self.closed.is_likely_ready(),
        }
    }

    fn register(&mut self, waker: &Waker) {
        match &mut self.flush {
            Some(flush) => flush.register(waker),
            None => self.closed.register(waker),
        }
    }

    fn has_begun(&self) -> bool {
        self.flush.is_none()
    }

    fn router(&self) -> &Router {
        &self.connection.inner.router
    }
}
