//! Connection management (`rdma_cm(7)`): connects queue pairs.
//!
//! ```
//! use iwarp::verbs::cm::{ConnectionParameters, Connector, ListeningId};
//! use iwarp::verbs::{Config, Context, Device, ProtectionDomain, QpInitAttr};
//!
//! # fn main() -> iwarp::Result<()> {
//! let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
//! let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(16, None)?);
//! let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into())?;
//! let address = listener.local_addr();
//! let theirs = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//! let server = std::thread::spawn(move || -> iwarp::Result<()> {
//!     let request = listener.accept(None)?;
//!     assert_eq!(request.private_data(), b"who I am");
//!     let connection = request.accept(theirs, &ConnectionParameters::default())?;
//!     connection.wait_disconnected(None)
//! });
//! let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//! let connection = Connector::new(&ctx).private_data(b"who I am").connect(address, qp)?;
//! connection.disconnect()?;
//! server.join().unwrap()?;
//! # Ok(())
//! # }
//! ```
//!
//! The passive side creates a [`ListeningId`] and answers its [`ConnectionRequest`]s with a queue
//! pair. The active side creates a [`Connector`]. Both get a [`ConnectedId`]. Each of these types
//! owns an `rdma_cm_id` and destroys it when dropped. Each side can send up to 512 bytes of private
//! data.
//!
//! Blocking calls have `…_async` variants, whose futures run on any runtime.

pub use crate::runtime::cm::ConnectionParameters;

use super::QueuePair;
use crate::admission::{Admission, Networks};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::runtime::cm::{CmEvent, CmEventChannel, CmEventKind, CmId};
use crate::runtime::create_event_channel;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Returns the time limit of a blocking call. The device's own limits expire earlier; this limit
/// only guards against a bug in them. It allows three attempts, because an attempt with MPA
/// revision 1 may follow two with revision 2.
fn set_up_limit(config: &Config) -> Duration {
    const MARGIN: Duration = Duration::from_secs(30);
    let attempt = [
        config.connect_timeout,
        config.answer_timeout,
        config.handshake_timeout,
    ];
    let attempt = attempt.into_iter().fold(MARGIN, Duration::saturating_add);
    attempt.saturating_mul(3)
}

/// Private data of a reject that is sent because this process has no file descriptors left.
const NO_DESCRIPTORS: &[u8] = b"the listener has no file descriptors left";

/// An identifier that listens for connections (`rdma_listen(3)`). Dropping it stops listening and
/// rejects the requests that were not accepted.
///
/// ```
/// # use iwarp::verbs::{Config, Context, Device, cm::ListeningId};
/// # fn main() -> iwarp::Result<()> {
/// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
/// let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into())?;
/// println!("listening on {}", listener.local_addr());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ListeningId {
    /// Keeps listening until it is dropped.
    _id: OwnedId,
    channel: CmEventChannel,
    local: SocketAddr,
}

impl ListeningId {
    /// Listens on `address`, with a backlog of 128 requests. Port 0 selects a free port.
    ///
    /// # Errors
    /// [`Error::Io`]: the address is in use or not an address of this host, or no file descriptor
    /// is left.
    pub fn bind(ctx: &Context, address: SocketAddr) -> Result<Self> {
        Self::bind_with_backlog(ctx, address, 0)
    }

    /// Listens on `address`, as [`bind`](Self::bind) does, with room for `backlog` unanswered
    /// requests; 0 selects 128.
    ///
    /// # Errors
    /// See [`bind`](Self::bind).
    pub fn bind_with_backlog(ctx: &Context, address: SocketAddr, backlog: u32) -> Result<Self> {
        Self::builder(ctx).backlog(backlog).bind(address)
    }

    /// Returns a builder that sets a backlog and an admission policy.
    ///
    /// ```
    /// # use iwarp::verbs::{Config, Context, Device, cm::ListeningId};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
    /// let listener = ListeningId::builder(&ctx)
    ///     .peers("127.0.0.0/8,::1".parse()?)
    ///     .bind(([127, 0, 0, 1], 0).into())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(ctx: &Context) -> ListeningIdBuilder {
        ListeningIdBuilder {
            ctx: ctx.clone(),
            backlog: 0,
            admission: ctx.config().admission.clone(),
        }
    }

    /// Returns the local address, with the selected port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Blocks until a connection request arrives (`rdma_get_request(3)`). `None` waits without
    /// limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Io`] if no file descriptors are left.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<ConnectionRequest> {
        ConnectionRequest::new(self.channel.next(timeout)?)
    }

    /// Waits for a connection request in a task. Cancel safe: dropping the future loses no request.
    ///
    /// # Errors
    /// [`Error::Io`] if no file descriptors are left.
    pub async fn accept_async(&self) -> Result<ConnectionRequest> {
        ConnectionRequest::new(self.channel.recv().await)
    }
}

/// Builds a [`ListeningId`]; [`ListeningId::builder`] returns it with defaults.
#[derive(Debug, Clone)]
#[must_use = "it does nothing until `bind` is called"]
pub struct ListeningIdBuilder {
    ctx: Context,
    backlog: u32,
    admission: Admission,
}

impl ListeningIdBuilder {
    /// Sets the maximum number of unanswered requests. The default and the minimum are 128. Further
    /// connections wait in the kernel.
    pub fn backlog(mut self, requests: u32) -> Self {
        self.backlog = requests;
        self
    }

    /// Sets which peers may connect; by default the device's settings apply. A connection from
    /// another peer is reset.
    pub fn peers(mut self, peers: Networks) -> Self {
        self.admission.peers = peers;
        self
    }

    /// Sets which peers may connect, and how many at a time.
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Listens on `address`; port 0 selects a free port.
    ///
    /// # Errors
    /// See [`ListeningId::bind`].
    pub fn bind(self, address: SocketAddr) -> Result<ListeningId> {
        let channel = create_event_channel()?;
        let id = OwnedId(CmId::create(&channel, Some(&self.ctx)));
        id.0.set_admission(self.admission);
        id.0.bind(address)?;
        id.0.listen(self.backlog)?;
        let local = id.0.addresses().0.unwrap_or(address);
        Ok(ListeningId {
            _id: id,
            channel,
            local,
        })
    }
}

/// A connection request (`rdma_get_request(3)`). Dropping it rejects the connection.
#[derive(Debug)]
pub struct ConnectionRequest {
    id: OwnedId,
    channel: CmEventChannel,
    private_data: Vec<u8>,
    peer_reads: (Option<u16>, Option<u16>),
}

impl ConnectionRequest {
    fn new(event: CmEvent) -> Result<Self> {
        let channel = create_event_channel().inspect_err(|_| {
            // The private data is the reason; without it the peer could only report a rejection.
            let _ = event.id.reject(NO_DESCRIPTORS);
        })?;
        event.id.migrate(&channel);
        Ok(Self {
            id: OwnedId(event.id),
            channel,
            private_data: event.private_data,
            peer_reads: (event.responder_resources, event.initiator_depth),
        })
    }

    /// Returns the private data of the peer's request.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.0.addresses().1
    }

    /// Returns the local address that the peer connected to.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.0.addresses().0
    }

    /// Returns the ORD and IRD in the peer's request: the RDMA Reads and atomics that it wants to
    /// have in flight, and those that it accepts. `None` if the request does not contain them.
    pub fn peer_reads(&self) -> (Option<u16>, Option<u16>) {
        self.peer_reads
    }

    /// Accepts the connection with `qp` (`rdma_accept(3)`), and blocks until it is established.
    /// Post receives before this call.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`]: the peer closed the connection; [`Error::InvalidArgument`]: the
    /// private data is too long.
    pub fn accept(self, qp: QueuePair, parameters: &ConnectionParameters) -> Result<ConnectedId> {
        self.start(&qp, parameters)?;
        let ctx = self.id.0.context();
        let event = self
            .channel
            .next(ctx.map(|ctx| set_up_limit(ctx.config())))?;
        ConnectedId::settle(self.id, self.channel, qp, event)
    }

    /// Accepts the connection in a task.
    ///
    /// # Errors
    /// See [`accept`](Self::accept).
    pub async fn accept_async(
        self,
        qp: QueuePair,
        parameters: &ConnectionParameters,
    ) -> Result<ConnectedId> {
        self.start(&qp, parameters)?;
        let event = self.channel.recv().await;
        ConnectedId::settle(self.id, self.channel, qp, event)
    }

    fn start(&self, qp: &QueuePair, parameters: &ConnectionParameters) -> Result<()> {
        self.id.0.set_queue_pair(Some(qp));
        self.id.0.accept(parameters)
    }

    /// Rejects the connection (`rdma_reject(3)`) and sends `private_data` to the peer.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the peer closed the connection.
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        self.id.0.reject(private_data)
    }
}

/// Connects queue pairs to listeners (`rdma_connect(3)`).
#[derive(Debug, Clone)]
#[must_use = "a connector does nothing until it connects"]
pub struct Connector {
    ctx: Context,
    source: Option<SocketAddr>,
    parameters: ConnectionParameters,
}

impl Connector {
    /// Returns a connector that uses this device and its settings.
    pub fn new(ctx: &Context) -> Self {
        Self {
            ctx: ctx.clone(),
            source: None,
            parameters: ConnectionParameters::default(),
        }
    }

    /// Sets the private data of the connection request, at most 512 bytes.
    pub fn private_data(mut self, data: &[u8]) -> Self {
        self.parameters.private_data = data.to_vec();
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight: inbound (`ird`) and outbound (`ord`).
    /// The defaults are those of the queue pair.
    pub fn reads(mut self, ird: u16, ord: u16) -> Self {
        self.parameters.responder_resources = Some(ird);
        self.parameters.initiator_depth = Some(ord);
        self
    }

    /// Sets the local address to connect from; port 0 selects a free port.
    pub fn source(mut self, address: SocketAddr) -> Self {
        self.source = Some(address);
        self
    }

    /// Connects `qp` to `peer`, and blocks until the connection is established.
    ///
    /// # Errors
    /// [`Error::Rejected`], [`Error::TimedOut`], [`Error::Handshake`], or [`Error::Io`]: connection
    /// refused, no route.
    pub fn connect(&self, peer: SocketAddr, qp: QueuePair) -> Result<ConnectedId> {
        self.connect_within(set_up_limit(self.ctx.config()), peer, qp)
    }

    /// As [`connect`](Self::connect), for at most `limit`.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub fn connect_within(
        &self,
        limit: Duration,
        peer: SocketAddr,
        qp: QueuePair,
    ) -> Result<ConnectedId> {
        let deadline = Instant::now().checked_add(limit);
        let (id, channel) = self.start(peer, &qp)?;
        loop {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let event = channel.next(left)?;
            if !is_preliminary(event.kind) {
                return ConnectedId::settle(id, channel, qp, event);
            }
        }
    }

    /// Connects in a task. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub async fn connect_async(&self, peer: SocketAddr, qp: QueuePair) -> Result<ConnectedId> {
        let (id, channel) = self.start(peer, &qp)?;
        loop {
            let event = channel.recv().await;
            if !is_preliminary(event.kind) {
                return ConnectedId::settle(id, channel, qp, event);
            }
        }
    }

    fn start(&self, peer: SocketAddr, qp: &QueuePair) -> Result<(OwnedId, CmEventChannel)> {
        let channel = create_event_channel()?;
        let id = OwnedId(CmId::create(&channel, Some(&self.ctx)));
        let source = self.source.or_else(|| self.default_source(peer));
        id.0.resolve_addr(source, peer)?;
        id.0.resolve_route()?;
        id.0.set_queue_pair(Some(qp));
        id.0.connect(&self.parameters)?;
        Ok((id, channel))
    }

    /// Returns the device's own address of the peer's family, if it has one.
    fn default_source(&self, peer: SocketAddr) -> Option<SocketAddr> {
        let device = self.ctx.device();
        device.source_for(peer).map(|ip| device.socket_addr(ip, 0))
    }
}

const fn is_preliminary(kind: CmEventKind) -> bool {
    matches!(kind, CmEventKind::AddrResolved | CmEventKind::RouteResolved)
}

/// A connected identifier, which owns its queue pair. Dropping it disconnects gracefully and
/// destroys the queue pair.
#[derive(Debug)]
pub struct ConnectedId {
    // The identifier is dropped first, so that no event arrives for the fields below.
    id: OwnedId,
    qp: QueuePair,
    channel: CmEventChannel,
    private_data: Vec<u8>,
}

/// Destroys its identifier when dropped. This stops a listener, rejects a request or cancels an
/// attempt, and discards pending events.
#[derive(Debug)]
struct OwnedId(CmId);

impl Drop for OwnedId {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl ConnectedId {
    fn settle(id: OwnedId, channel: CmEventChannel, qp: QueuePair, event: CmEvent) -> Result<Self> {
        let os = || Error::from(io::Error::from_raw_os_error(event.status));
        match event.kind {
            CmEventKind::Established => Ok(Self {
                id,
                qp,
                channel,
                private_data: event.private_data,
            }),
            CmEventKind::Rejected if event.replied => Err(Error::Rejected(event.private_data)),
            CmEventKind::Unreachable if event.status == libc::ETIMEDOUT => {
                Err(Error::TimedOut("the peer did not answer"))
            }
            CmEventKind::ConnectError if event.status == libc::EPROTO => Err(Error::Handshake(
                "the peer's MPA reply is invalid or incompatible".into(),
            )),
            CmEventKind::ConnectError if event.status == libc::ENOSPC => Err(Error::Unsupported(
                "the peer wants more RDMA Reads in flight (its ORD) \
                         than this end accepts (our IRD)",
            )),
            CmEventKind::Disconnected => Err(Error::ConnectionLost(
                "the peer closed the connection immediately".into(),
            )),
            _ => Err(os()),
        }
    }

    /// Returns the private data of the peer's reply.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the local address and the peer's address.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        self.id.0.addresses()
    }

    /// Returns the queue pair.
    pub fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Starts a graceful disconnect (`rdma_disconnect(3)`): queued requests that fit into TCP's
    /// send buffer are sent, the others are flushed. Does not block.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the identifier was never connected.
    pub fn disconnect(&self) -> Result<()> {
        self.id.0.disconnect()
    }

    /// Blocks until either side has ended the connection. `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::ConnectionLost`] with the reason if the end was not graceful.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        let event = self.channel.next(timeout)?;
        self.ended(&event)
    }

    /// Waits in a task until the connection has ended.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`] with the reason if the end was not graceful.
    pub async fn disconnected(&self) -> Result<()> {
        let event = self.channel.recv().await;
        self.ended(&event)
    }

    /// Registers a waker for the end of the connection. Call [`try_ended`](Self::try_ended) after
    /// this and before waiting.
    pub(crate) fn wake_at_end(&self, waker: &Waker) {
        self.channel.wake_at_next(waker);
    }

    /// Takes the event of the connection's end, and returns its status. Returns `None` if the
    /// connection has not ended, or if another call has taken the event.
    pub(crate) fn try_ended(&self) -> Option<i32> {
        Some(self.channel.try_next()?.status)
    }

    fn ended(&self, event: &CmEvent) -> Result<()> {
        match self.qp.fault() {
            Some(fault) => Err(Error::ConnectionLost(fault.to_string())),
            None if event.status != 0 => {
                Err(Error::from(io::Error::from_raw_os_error(event.status)))
            }
            None => Ok(()),
        }
    }
}

impl Deref for ConnectedId {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        &self.qp
    }
}

#[cfg(test)]
#[path = "cm_tests.rs"]
mod tests;
