//! Listeners: each accepted connection has its own queue pair and receive buffers, and the endpoint's regions.

use super::endpoint::{Endpoint, Options, resolve};
use super::handle::Connection;
use crate::admission::Admission;
use crate::error::{Error, Result};
use crate::verbs::cm;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// A listener that is about to be made. Made by [`listen`](crate::listen).
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

    /// Sets all options of the connections.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the private data that peers get; see [`Options::private_data`].
    pub fn private_data(mut self, octets: impl AsRef<[u8]>) -> Self {
        self.options = self.options.private_data(octets);
        self
    }

    /// Sets how many peers may wait for an answer; default and least are 128. Further ones wait in the kernel, unaccepted.
    pub fn backlog(mut self, peers: u32) -> Self {
        self.backlog = peers;
        self
    }

    /// Sets which peers are let in, and how many; default is what the device's settings say ([`Config`](crate::Config)).
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Begins to listen. Of several addresses of a name the first is taken.
    ///
    /// # Errors
    /// [`Error::NoDevice`]: not an address of this host; the operating system's: address in use, no descriptors.
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

/// Waits for peers that connect. Made by [`listen`](crate::listen).
#[derive(Debug)]
pub struct Listener {
    listener: cm::ListeningId,
    endpoint: Endpoint,
    options: Options,
}

impl Listener {
    /// Returns the address it listens on, with the port that was picked.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Returns its endpoint, whose regions all of its connections can use.
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Waits for a peer and accepts it. A peer that fails or leaves meanwhile is left out. While one peer is being accepted, others wait: a
    /// server of many peers takes [`incoming`](Self::incoming), and accepts each in a task or thread of its own.
    pub const fn accept(&self) -> Accept<'_> {
        Accept { listener: self }
    }

    /// Waits for a peer that wants to connect, in a task of any runtime.
    ///
    /// # Errors
    /// The operating system's: no descriptors left.
    pub async fn incoming(&self) -> Result<Incoming> {
        Ok(self.take(self.listener.accept_async().await?))
    }

    /// Waits for a peer that wants to connect, and blocks the thread; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; the operating system's: no descriptors left.
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

/// Returns `true` if an attempt to accept has failed for a reason of this end: then the next one would fail, too.
const fn is_our_own(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidArgument(_) | Error::OutOfMemory | Error::Memory(_)
    )
}

/// Passes on what concerns the listener, and returns `None` for a peer that has failed.
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

/// Waits for a peer and accepts it. See [`Listener::accept`].
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Accept<'a> {
    listener: &'a Listener,
}

impl Accept<'_> {
    /// Blocks the thread until a peer is connected.
    ///
    /// # Errors
    /// As [`Listener::incoming`]; [`Error::InvalidArgument`], [`Error::OutOfMemory`], [`Error::Memory`]: the options cannot be had.
    pub fn wait(self) -> Result<Connection> {
        loop {
            let incoming = self.listener.wait_incoming(None)?;
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

/// Accepts in a task of any runtime. Dropping the future loses at most the peer that is being accepted, which is refused.
impl<'a> IntoFuture for Accept<'a> {
    type Output = Result<Connection>;
    type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// A peer that wants to connect. Dropping it refuses the peer.
#[derive(Debug)]
pub struct Incoming {
    request: cm::ConnectionRequest,
    endpoint: Endpoint,
    options: Options,
}

impl Incoming {
    /// Returns the private data that the peer sent.
    pub fn private_data(&self) -> &[u8] {
        self.request.private_data()
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.request.peer_addr()
    }

    /// Changes the options for this peer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Accepts the peer, in a task of any runtime.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`]: the peer is gone; [`Error::InvalidArgument`]: an option is out of range, or the private data are too
    /// long; [`Error::OutOfMemory`].
    pub async fn accept(self) -> Result<Connection> {
        let (qp, rest) = self.options.prepare(&self.endpoint)?.split();
        let parameters = self.options.parameters();
        let cm = self.request.accept_async(qp, &parameters).await?;
        Ok(rest.finish(cm, &self.options, false))
    }

    /// Accepts the peer, and blocks the thread until the connection is up.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn wait(self) -> Result<Connection> {
        let (qp, rest) = self.options.prepare(&self.endpoint)?.split();
        let cm = self.request.accept(qp, &self.options.parameters())?;
        Ok(rest.finish(cm, &self.options, false))
    }

    /// Refuses the peer, which gets `reason` as private data.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the peer is gone.
    pub fn reject(self, reason: impl AsRef<[u8]>) -> Result<()> {
        self.request.reject(reason.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What every peer would meet is told, and what one peer has done wrong is not.
    #[test]
    fn an_accept_fails_by_what_is_wrong_here() {
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
