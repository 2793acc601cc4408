//! Listeners. Each accepted connection has its own queue pair and receive buffers, and shares the
//! endpoint's regions.

use super::endpoint::{Endpoint, Options, resolve};
use super::handle::Connection;
use crate::admission::Admission;
use crate::error::{Error, Result};
use crate::verbs::cm;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Builds a [`Listener`]; created by [`listen`](crate::listen).
#[must_use = "it does nothing until `bind` is called"]
#[derive(Debug)]
pub struct Listen {
    endpoint: Option<Endpoint>,
    at: Result<Vec<SocketAddr>>,
    options: Options,
    backlog: u32,
    admission: Option<Admission>,
}

impl Listen {
    pub(super) fn new(endpoint: Option<&Endpoint>, at: impl ToSocketAddrs) -> Self {
        Self {
            endpoint: endpoint.cloned(),
            at: resolve(at),
            options: Options::default(),
            backlog: 0,
            admission: None,
        }
    }

    /// Replaces all options of the connections.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the private data for peers; see [`Options::private_data`].
    pub fn private_data(mut self, octets: impl AsRef<[u8]>) -> Self {
        self.options = self.options.private_data(octets);
        self
    }

    /// Sets the number of unanswered requests. The default and the minimum is 128; more requests
    /// wait in the kernel, unaccepted.
    pub fn backlog(mut self, peers: u32) -> Self {
        self.backlog = peers;
        self
    }

    /// Sets which peers may connect, and how many; by default the device's settings apply
    /// ([`Config`](crate::Config)).
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Starts listening, on the first address if a name has several.
    ///
    /// # Errors
    /// [`Error::NoDevice`]: not an address of this host; [`Error::Io`]: address in use, no file
    /// descriptors left.
    pub fn bind(self) -> Result<Listener> {
        let at = *self.at?.first().ok_or(Error::NoDevice)?;
        let endpoint = match self.endpoint {
            Some(endpoint) => endpoint,
            None => self.options.open_local(at.ip())?,
        };
        let ctx = endpoint.pd().context();
        let builder = cm::ListeningId::builder(ctx).backlog(self.backlog);
        let builder = match self.admission {
            Some(admission) => builder.admission(admission),
            None => builder,
        };
        let listener = builder.bind(at)?;
        Ok(Listener {
            listener,
            endpoint,
            options: self.options,
        })
    }
}

/// Accepts connections; created by [`listen`](crate::listen).
#[derive(Debug)]
pub struct Listener {
    listener: cm::ListeningId,
    endpoint: Endpoint,
    options: Options,
}

impl Listener {
    /// Returns the local address, with the port that was selected.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Returns the endpoint, whose regions all its connections can use.
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Waits for a peer and accepts it. Skips peers that fail or disconnect meanwhile. Other peers
    /// wait while one is being accepted; a server of many peers calls [`incoming`](Self::incoming)
    /// and accepts each in its own task or thread.
    pub const fn accept(&self) -> Accept<'_> {
        Accept { listener: self }
    }

    /// Waits in a task for a connection request.
    ///
    /// # Errors
    /// [`Error::Io`]: no file descriptors left.
    pub async fn incoming(&self) -> Result<Incoming> {
        Ok(self.take(self.listener.accept_async().await?))
    }

    /// Blocks until a connection request arrives. `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Io`]: no file descriptors left.
    pub fn wait_incoming(&self, limit: Option<Duration>) -> Result<Incoming> {
        Ok(self.take(self.listener.accept(limit)?))
    }

    fn take(&self, request: cm::ConnectionRequest) -> Incoming {
        Incoming {
            request,
            endpoint: self.endpoint.clone(),
            options: self.options.clone(),
        }
    }
}

/// Returns `true` for a local failure, which the next attempt would meet, too.
const fn is_our_own(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidArgument(_) | Error::OutOfMemory | Error::Memory(_)
    )
}

/// Returns local errors, and `None` if the peer failed.
fn unless_peers_fault(result: Result<Connection>) -> Result<Option<Connection>> {
    match result {
        Ok(connection) => Ok(Some(connection)),
        Err(error) if is_our_own(&error) => Err(error),
        Err(error) => {
            tracing::debug!(%error, "a peer was not accepted");
            Ok(None)
        }
    }
}

/// Waits for a peer and accepts it; see [`Listener::accept`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Accept<'a> {
    listener: &'a Listener,
}

impl Accept<'_> {
    /// Blocks until a peer is connected.
    ///
    /// # Errors
    /// See [`Listener::incoming`]; [`Error::InvalidArgument`], [`Error::OutOfMemory`],
    /// [`Error::Memory`] if the options cannot be satisfied.
    pub fn wait(self) -> Result<Connection> {
        self.wait_until(None)
    }

    /// Blocks until a peer is connected, for at most `limit`. Once a peer has sent its request, its
    /// set-up may take longer. A task uses the timeout of its runtime.
    ///
    /// # Errors
    /// See [`wait`](Self::wait); [`Error::TimedOut`].
    pub fn wait_for(self, limit: Duration) -> Result<Connection> {
        self.wait_until(Instant::now().checked_add(limit))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<Connection> {
        loop {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let incoming = self.listener.wait_incoming(left)?;
            if let Some(connection) = unless_peers_fault(incoming.wait())? {
                return Ok(connection);
            }
        }
    }

    async fn run(self) -> Result<Connection> {
        loop {
            let incoming = self.listener.incoming().await?;
            if let Some(connection) = unless_peers_fault(incoming.accept().await)? {
                return Ok(connection);
            }
        }
    }
}

/// Accepts in a task of any runtime. Dropping the future rejects the peer that is being accepted;
/// no other is lost.
impl<'a> IntoFuture for Accept<'a> {
    type Output = Result<Connection>;
    type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// A connection request. Dropping it rejects the peer.
#[derive(Debug)]
pub struct Incoming {
    request: cm::ConnectionRequest,
    endpoint: Endpoint,
    options: Options,
}

impl Incoming {
    /// Returns the private data of the peer's request.
    pub fn private_data(&self) -> &[u8] {
        self.request.private_data()
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.request.peer_addr()
    }

    /// Replaces the options for this peer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Accepts the peer in a task of any runtime.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`]: the peer closed the connection; [`Error::InvalidArgument`]: an
    /// option is out of range, or the private data is too long; [`Error::OutOfMemory`].
    pub async fn accept(self) -> Result<Connection> {
        let (qp, rest) = self.options.prepare(&self.endpoint)?.split();
        let parameters = self.options.parameters();
        let cm = self.request.accept_async(qp, &parameters).await?;
        Ok(rest.finish(cm, &self.options, false))
    }

    /// Accepts the peer, and blocks until the connection is established.
    ///
    /// # Errors
    /// See [`accept`](Self::accept).
    pub fn wait(self) -> Result<Connection> {
        let (qp, rest) = self.options.prepare(&self.endpoint)?.split();
        let cm = self.request.accept(qp, &self.options.parameters())?;
        Ok(rest.finish(cm, &self.options, false))
    }

    /// Rejects the peer, with `reason` as private data.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the peer closed the connection.
    pub fn reject(self, reason: impl AsRef<[u8]>) -> Result<()> {
        self.request.reject(reason.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Local failures are returned; failures of one peer are not.
    #[test]
    fn accept_reports_local_failures_only() {
        let lost = |why: &str| Error::ConnectionLost(why.into());
        for (error, is_told) in [
            (Error::InvalidArgument("an option"), true),
            (Error::OutOfMemory, true),
            (lost("the peer is gone"), false),
            (Error::Closed, false),
            (Error::TimedOut("the peer said nothing"), false),
        ] {
            let what = error.to_string();
            match unless_peers_fault(Err(error)) {
                Err(told) => assert!(is_told && told.to_string() == what),
                Ok(accepted) => assert!(!is_told && accepted.is_none(), "{what}"),
            }
        }
    }
}
