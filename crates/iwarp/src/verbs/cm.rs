//! Connection management: connects queue pairs (`rdma_cm(7)`).
//!
//! The passive side has a [`Listener`], whose [`ConnectionRequest`]s it answers with a queue pair. The active side has a [`Connector`]. Both
//! get a [`Connection`]. Up to 512 octets of private data go along in each direction.
//!
//! Calls that wait block the thread, and have `…_async` twins for tasks of any runtime.

use super::{Context, QueuePair};
use crate::admission::{Admission, Networks};
use crate::error::Result;
use crate::owned::cm;
use std::net::SocketAddr;
use std::ops::Deref;
use std::time::Duration;

pub use crate::cm::ConnectionParameters;

/// Waits for connections to an address of a device (`rdma_listen(3)`).
///
/// ```
/// # use iwarp::verbs::{Config, Context, Device, cm::Listener};
/// # fn main() -> iwarp::Result<()> {
/// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
/// let listener = Listener::bind(&ctx, ([127, 0, 0, 1], 0).into())?;
/// println!("listening on {}", listener.local_addr());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Listener(cm::Listener);

impl Listener {
    /// Listens on an address; port 0 picks a free port. Up to 128 requests may wait for an answer.
    ///
    /// # Errors
    /// The operating system's: address in use, not of this host, no descriptors.
    pub fn bind(ctx: &Context, address: SocketAddr) -> Result<Self> {
        cm::Listener::bind(&ctx.0, address).map(Self)
    }

    /// Listens on an address, with room for `backlog` requests that wait for an answer; 0 means 128.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with_backlog(ctx: &Context, address: SocketAddr, backlog: u32) -> Result<Self> {
        cm::Listener::bind_with_backlog(&ctx.0, address, backlog).map(Self)
    }

    /// Makes a listener with settings of its own.
    ///
    /// ```
    /// # use iwarp::verbs::{Config, Context, Device, cm::Listener};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
    /// let listener = Listener::builder(&ctx)
    ///     .peers("127.0.0.0/8,::1".parse()?)
    ///     .bind(([127, 0, 0, 1], 0).into())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(ctx: &Context) -> ListenerBuilder {
        ListenerBuilder(cm::Listener::builder(&ctx.0))
    }

    /// Returns the address it listens on, with the port that was picked.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Waits for a connection request; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); the operating system's: no descriptors.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<ConnectionRequest> {
        self.0.accept(timeout).map(ConnectionRequest)
    }

    /// Waits for a connection request in a task. Dropping the future loses none.
    ///
    /// # Errors
    /// The operating system's: no descriptors.
    pub async fn accept_async(&self) -> Result<ConnectionRequest> {
        self.0.accept_async().await.map(ConnectionRequest)
    }
}

/// A listener that is about to be made. Made by [`Listener::builder`].
#[derive(Debug, Clone)]
#[must_use = "it does nothing until `bind` is called"]
pub struct ListenerBuilder(cm::ListenerBuilder);

impl ListenerBuilder {
    /// Sets how many requests may wait for an answer; default and least are 128. Further ones wait in the kernel, unaccepted.
    pub fn backlog(self, requests: u32) -> Self {
        Self(self.0.backlog(requests))
    }

    /// Sets which peers are let in; default is what the device's settings say. The connection of another peer is reset.
    pub fn peers(self, peers: Networks) -> Self {
        Self(self.0.peers(peers))
    }

    /// Sets which peers are let in, and how many.
    pub fn admission(self, admission: Admission) -> Self {
        Self(self.0.admission(admission))
    }

    /// Listens on an address; port 0 picks a free port.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind(self, address: SocketAddr) -> Result<Listener> {
        self.0.bind(address).map(Listener)
    }
}

/// A connection request of a peer (`rdma_get_request(3)`). Dropping it refuses the connection.
#[derive(Debug)]
pub struct ConnectionRequest(cm::ConnectionRequest);

impl ConnectionRequest {
    /// Returns the private data that the peer sent with its request.
    pub fn private_data(&self) -> &[u8] {
        self.0.private_data()
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.peer_addr()
    }

    /// Returns the local address that the peer connected to.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.local_addr()
    }

    /// Returns how many RDMA Reads and atomics the peer wants to have outstanding, and how many it can serve; `None` if it did not say.
    pub fn peer_reads(&self) -> (Option<u16>, Option<u16>) {
        self.0.peer_reads()
    }

    /// Accepts the connection with a queue pair (`rdma_accept(3)`), and blocks until it is up. Post receives before.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`](crate::Error::ConnectionLost): the peer is gone;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): the private data are too long.
    pub fn accept(self, qp: QueuePair, parameters: &ConnectionParameters) -> Result<Connection> {
        let (owner, qp) = qp.hand_over()?;
        let cm = self.0.accept(owner, parameters)?;
        Ok(Connection { cm, qp })
    }

    /// Accepts the connection in a task.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub async fn accept_async(
        self,
        qp: QueuePair,
        parameters: &ConnectionParameters,
    ) -> Result<Connection> {
        let (owner, qp) = qp.hand_over()?;
        let cm = self.0.accept_async(owner, parameters).await?;
        Ok(Connection { cm, qp })
    }

    /// Refuses the connection (`rdma_reject(3)`). The peer gets `private_data`, for example the reason.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState): the peer is gone.
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        self.0.reject(private_data)
    }
}

/// Connects queue pairs to listeners (`rdma_connect(3)`).
#[derive(Debug, Clone)]
#[must_use = "a connector does nothing until it connects"]
pub struct Connector(cm::Connector);

impl Connector {
    /// Makes a connector that uses this device and its settings.
    pub fn new(ctx: &Context) -> Self {
        Self(cm::Connector::new(&ctx.0))
    }

    /// Sets the private data that the listener gets with the request.
    pub fn private_data(self, data: &[u8]) -> Self {
        Self(self.0.private_data(data))
    }

    /// Sets how many RDMA Reads and atomics may be in flight: inbound to serve (`ird`), outbound to have outstanding (`ord`). Without it,
    /// both are as many as the queue pair can.
    pub fn reads(self, ird: u16, ord: u16) -> Self {
        Self(self.0.reads(ird, ord))
    }

    /// Sets the local address to connect from.
    pub fn source(self, address: SocketAddr) -> Self {
        Self(self.0.source(address))
    }

    /// Connects, and blocks until the connection is up.
    ///
    /// # Errors
    /// [`Error::Rejected`](crate::Error::Rejected), [`Error::TimedOut`](crate::Error::TimedOut),
    /// [`Error::Handshake`](crate::Error::Handshake), and the operating system's: connection refused, no route.
    pub fn connect(&self, peer: SocketAddr, qp: QueuePair) -> Result<Connection> {
        let (owner, qp) = qp.hand_over()?;
        let cm = self.0.connect(peer, owner)?;
        Ok(Connection { cm, qp })
    }

    /// Connects in a task. Dropping the future ends the attempt.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_async(&self, peer: SocketAddr, qp: QueuePair) -> Result<Connection> {
        let (owner, qp) = qp.hand_over()?;
        let cm = self.0.connect_async(peer, owner).await?;
        Ok(Connection { cm, qp })
    }
}

/// A connected queue pair. Dropping it disconnects gracefully.
#[derive(Debug)]
pub struct Connection {
    // Dropped first: it owns the queue pair.
    cm: cm::Connection,
    qp: QueuePair,
}

impl Connection {
    /// Returns the private data that the peer sent when it accepted.
    pub fn private_data(&self) -> &[u8] {
        self.cm.private_data()
    }

    /// Returns the local address and the peer's.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        self.cm.addresses()
    }

    /// Returns the queue pair.
    pub const fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Begins the graceful end (`rdma_disconnect(3)`): queued requests that TCP takes are sent, the others are flushed. Does not block.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState): never connected.
    pub fn disconnect(&self) -> Result<()> {
        self.cm.disconnect()
    }

    /// Blocks until either side has ended the connection; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); [`Error::ConnectionLost`](crate::Error::ConnectionLost) with the reason if the end
    /// was not graceful.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        self.cm.wait_disconnected(timeout)
    }

    /// Waits for the end of the connection in a task.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`](crate::Error::ConnectionLost).
    pub async fn disconnected(&self) -> Result<()> {
        self.cm.disconnected().await
    }
}

impl Deref for Connection {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        &self.qp
    }
}
