//! Endpoints, and how connections are created from them.

use super::handle::{Connection, Parts};
use super::listener::Listen;
use super::pool::Pool;
use super::receive::Buffers;
use super::region::Region;
use super::router::Router;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::verbs::cm::{self, ConnectionParameters, Connector};
use crate::verbs::{ProtectionDomain, QpInitAttr, QueuePair};
use bytemuck::Pod;
use iwarp_rnic::Access;
use std::future::Future;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum of the message size. The answer of an atomic needs a word.
const LEAST_MESSAGE: u32 = 64;
/// Maximum of the length of a copied message, and of receive buffers, on the device.
const MOST_MESSAGE: u32 = 1 << 30;

/// Sizes of a connection, and rarely used settings. All have defaults.
#[derive(Debug, Clone)]
#[must_use = "options do nothing by themselves"]
pub struct Options {
    pub(super) send_depth: u32,
    pub(super) receives: u32,
    pub(super) message_size: u32,
    pub(super) max_inline: u32,
    pub(super) inbound: u16,
    pub(super) outbound: u16,
    pub(super) private_data: Vec<u8>,
    pub(super) config: Option<Config>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            send_depth: 128,
            receives: 64,
            message_size: 4096,
            max_inline: 256,
            inbound: 16,
            outbound: 16,
            private_data: Vec::new(),
            config: None,
        }
    }
}

impl Options {
    /// Returns the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many requests may be in flight (default 128, at least 1). Further ones wait for
    /// room.
    pub fn send_depth(mut self, requests: u32) -> Self {
        self.send_depth = requests;
        self
    }

    /// Sets the number of receive buffers (default 64). With 0 the connection receives no messages.
    pub fn receives(mut self, buffers: u32) -> Self {
        self.receives = buffers;
        self
    }

    /// Sets the size of a receive buffer, and of the longest message that is copied when sent, in
    /// bytes (default 4096, 64 to 2^30). A longer message from the peer ends the connection. Unused
    /// memory is not populated.
    pub fn message_size(mut self, octets: u32) -> Self {
        self.message_size = octets;
        self
    }

    /// Sets the maximum of inline data, in bytes (default 256, at most 1024). Longer data is copied
    /// into registered memory.
    pub fn max_inline(mut self, octets: u32) -> Self {
        self.max_inline = octets;
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight from the peer (`inbound`) and to the
    /// peer (`outbound`); default 16 each, at most 4096.
    pub fn reads(mut self, inbound: u16, outbound: u16) -> Self {
        self.inbound = inbound;
        self.outbound = outbound;
        self
    }

    /// Sets the private data for the peer, at most 512 bytes, for example the token of a region.
    pub fn private_data(mut self, octets: impl AsRef<[u8]>) -> Self {
        self.private_data = octets.as_ref().to_vec();
        self
    }

    /// Sets the settings of the device (default [`Config::from_env`]). Ignored if an [`Endpoint`]
    /// is already open.
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Connects with these options; see [`connect`](crate::connect).
    pub fn connect(self, to: impl ToSocketAddrs) -> Connect {
        Connect::new(None, to).options(self)
    }

    /// Listens with these options; see [`listen`](crate::listen).
    pub fn listen(self, at: impl ToSocketAddrs) -> Listen {
        Listen::new(None, at).options(self)
    }

    fn open(&self, device: &Device) -> Result<Endpoint> {
        let config = self.config.clone().unwrap_or_else(Config::from_env);
        Ok(Endpoint {
            pd: ProtectionDomain::new(&Context::open(device, config)?),
        })
    }

    pub(super) fn open_local(&self, ip: IpAddr) -> Result<Endpoint> {
        self.open(&Device::by_address(ip)?)
    }

    pub(super) fn parameters(&self) -> ConnectionParameters {
        ConnectionParameters {
            private_data: self.private_data.clone(),
            ..Default::default()
        }
    }

    /// Creates a queue pair with posted receives, and the objects that belong to it.
    pub(super) fn prepare(&self, endpoint: &Endpoint) -> Result<Prepared> {
        if !(LEAST_MESSAGE..=MOST_MESSAGE).contains(&self.message_size) {
            return Err(Error::InvalidArgument(
                "`message_size` is from 64 to 2^30 octets",
            ));
        }
        if self.send_depth == 0 {
            return Err(Error::InvalidArgument("`send_depth` is at least 1"));
        }
        let ctx = endpoint.pd.context();
        // One completion per request and receive, so that the queue cannot overflow.
        let capacity = self.send_depth.saturating_add(self.receives).max(1);
        let cq = ctx.create_cq(capacity, None)?;
        let attr = QpInitAttr::new(&cq, &cq)
            .cap(self.send_depth, self.receives)
            .max_sge(2, 1)
            .max_inline_data(self.max_inline)
            .rd_atomic(self.inbound, self.outbound);
        let qp = endpoint.pd.create_qp(&attr)?;
        let buffers = Buffers::new(&endpoint.pd, self.message_size, self.receives)?;
        buffers.post_all(&qp)?;
        Ok(Prepared {
            qp,
            router: Router::new(ctx, cq, self.send_depth, self.receives),
            buffers,
            endpoint: endpoint.clone(),
        })
    }
}

/// A queue pair with all that belongs to it, before it is connected.
pub(super) struct Prepared {
    qp: QueuePair,
    router: Arc<Router>,
    buffers: Buffers,
    endpoint: Endpoint,
}

impl Prepared {
    /// Separates the queue pair, which the connection manager connects.
    pub(super) fn split(self) -> (QueuePair, Unconnected) {
        let rest = Unconnected {
            router: self.router,
            buffers: self.buffers,
            endpoint: self.endpoint,
        };
        (self.qp, rest)
    }
}

/// Parts of a connection without its queue pair.
pub(super) struct Unconnected {
    router: Arc<Router>,
    buffers: Buffers,
    endpoint: Endpoint,
}

impl Unconnected {
    pub(super) fn finish(
        self,
        cm: cm::ConnectedId,
        options: &Options,
        initiator: bool,
    ) -> Connection {
        Connection::new(Parts {
            cm,
            router: self.router,
            buffers: self.buffers,
            endpoint: self.endpoint,
            message_size: options.message_size,
            max_inline: options.max_inline,
            send_depth: options.send_depth,
            initiator,
        })
    }
}

/// An open device with registered memory: the connections of an endpoint can use its regions. A
/// clone is another handle, and cheap.
///
/// [`connect`](crate::connect) and [`listen`](crate::listen) open an endpoint themselves. Create
/// one to share a region before listening, or to use the same regions for several connections.
///
/// ```
/// use iwarp::{Access, Endpoint, Options};
/// # fn main() -> iwarp::Result<()> {
/// let endpoint = Endpoint::local("127.0.0.1".parse().unwrap())?;
/// let table = endpoint.share::<u64>(1024, Access::REMOTE_READ)?;
/// let listener = endpoint.listen("127.0.0.1:0").private_data(table.remote().to_bytes()).bind()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Endpoint {
    pd: ProtectionDomain,
}

impl Endpoint {
    /// Opens the device with this address, with the settings of [`Config::from_env`].
    ///
    /// # Errors
    /// [`Error::NoDevice`]; [`Error::Io`]: no file descriptors left.
    pub fn local(ip: IpAddr) -> Result<Self> {
        Options::new().open_local(ip)
    }

    /// Opens the device that routes to `peer`, with the settings of [`Config::from_env`].
    ///
    /// # Errors
    /// See [`local`](Self::local); [`Error::Io`] if there is no route.
    pub fn towards(peer: SocketAddr) -> Result<Self> {
        Options::new().open(&Device::route_to(peer)?)
    }

    /// Opens a device with these settings.
    ///
    /// # Errors
    /// See [`local`](Self::local).
    pub fn open(device: &Device, config: Config) -> Result<Self> {
        Options::new().config(config).open(device)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        self.pd.context().device()
    }

    pub(super) const fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Allocates a local region of `len` zeroed elements. A peer can access it only through a
    /// [`Window`](super::Window).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::InvalidArgument`]: too long, or elements of size zero;
    /// [`Error::Memory`]: too many regions.
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<Region<T>> {
        Region::allocate(&self.pd, len, Access::empty())
    }

    /// Allocates a region of `len` zeroed elements that the peers of all connections of this
    /// endpoint can access with these rights: `REMOTE_READ`, `REMOTE_WRITE`, `REMOTE_ATOMIC`. Peers
    /// need its token ([`Region::remote`]).
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate); [`Error::InvalidArgument`]: other rights.
    pub fn share<T: Pod>(&self, len: usize, rights: Access) -> Result<Region<T>> {
        Region::allocate(&self.pd, len, rights)
    }

    /// Makes a region of a vector, a boxed slice or a string without copying the elements. Anything
    /// else that converts to a vector is converted first, which may copy. Peers can access the
    /// elements with these rights, as in [`share`](Self::share).
    ///
    /// The memory is freed as a vector's when the last handle is dropped. Other data of the program
    /// may be in the same page, but peers cannot access it.
    ///
    /// ```
    /// # fn main() -> iwarp::Result<()> {
    /// # let endpoint = iwarp::Endpoint::local([127, 0, 0, 1].into())?;
    /// let squares: Box<[u64]> = (0..1000).map(|n| n * n).collect();
    /// let region = endpoint.adopt(squares, iwarp::Access::REMOTE_READ)?;
    /// assert_eq!(region.get(12)?, 144);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`share`](Self::share).
    pub fn adopt<T: Pod + Send>(
        &self,
        elements: impl Into<Vec<T>>,
        rights: Access,
    ) -> Result<Region<T>> {
        Region::adopt(&self.pd, elements.into(), rights)
    }

    /// Creates a pool of buffers of `len` elements, which grows as needed to at most `limit`
    /// buffers. Peers can access all of them with these rights, as in [`share`](Self::share); a
    /// token of one buffer gives access to its neighbours, too. To grant rights to a single buffer,
    /// create the pool without rights, and [bind](Connection::bind) a window.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: too long, no buffers, elements of size zero, or other rights.
    pub fn pool<T: Pod>(&self, len: usize, limit: usize, rights: Access) -> Result<Pool<T>> {
        Pool::new(&self.pd, len, limit, rights)
    }

    /// Connects from this endpoint; see [`connect`](crate::connect).
    pub fn connect(&self, to: impl ToSocketAddrs) -> Connect {
        Connect::new(Some(self), to)
    }

    /// Listens with this endpoint; see [`listen`](crate::listen).
    pub fn listen(&self, at: impl ToSocketAddrs) -> Listen {
        Listen::new(Some(self), at)
    }
}

pub(super) fn resolve(address: impl ToSocketAddrs) -> Result<Vec<SocketAddr>> {
    let all: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    match all.is_empty() {
        true => Err(Error::InvalidArgument("the name has no address")),
        false => Ok(all),
    }
}

/// A connection attempt, created by [`connect`](crate::connect): await it, or [`wait`](Self::wait)
/// for it.
#[must_use = "it does nothing unless it is awaited or waited for"]
#[derive(Debug)]
pub struct Connect {
    endpoint: Option<Endpoint>,
    to: Result<Vec<SocketAddr>>,
    options: Options,
}

impl Connect {
    pub(super) fn new(endpoint: Option<&Endpoint>, to: impl ToSocketAddrs) -> Self {
        Self {
            endpoint: endpoint.cloned(),
            to: resolve(to),
            options: Options::default(),
        }
    }

    /// Replaces all options.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the private data; see [`Options::private_data`].
    pub fn private_data(mut self, octets: impl AsRef<[u8]>) -> Self {
        self.options = self.options.private_data(octets);
        self
    }

    fn start(&self, to: SocketAddr) -> Result<(Connector, QueuePair, Unconnected)> {
        let endpoint = match &self.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => self.options.open(&Device::route_to(to)?)?,
        };
        let mut connector = Connector::new(endpoint.pd.context());
        connector = connector.private_data(&self.options.private_data);
        let (qp, rest) = self.options.prepare(&endpoint)?.split();
        Ok((connector, qp, rest))
    }

    /// Connects, and blocks until the connection is established. If a name has several addresses,
    /// they are tried in order.
    ///
    /// # Errors
    /// [`Error::Rejected`], [`Error::TimedOut`], [`Error::Handshake`], [`Error::NoDevice`];
    /// [`Error::Io`], such as connection refused; [`Error::InvalidArgument`]: an option is out of
    /// range.
    pub fn wait(self) -> Result<Connection> {
        self.try_all(|connector, to, qp| connector.connect(to, qp))
    }

    /// Connects, and blocks until the connection is established, for at most `limit`. A task uses
    /// the timeout of its runtime: dropping the future cancels the attempt.
    ///
    /// # Errors
    /// See [`wait`](Self::wait).
    pub fn wait_for(self, limit: Duration) -> Result<Connection> {
        let deadline = Instant::now().checked_add(limit);
        self.try_all(|connector, to, qp| {
            let left = deadline.map_or(limit, |end| end.saturating_duration_since(Instant::now()));
            connector.connect_within(left, to, qp)
        })
    }

    fn try_all(
        mut self,
        connect: impl Fn(&Connector, SocketAddr, QueuePair) -> Result<cm::ConnectedId>,
    ) -> Result<Connection> {
        let mut last = Err(Error::NoDevice);
        for to in std::mem::replace(&mut self.to, Ok(Vec::new()))? {
            let attempt = self.start(to).and_then(|(connector, qp, rest)| {
                let cm = connect(&connector, to, qp)?;
                Ok(rest.finish(cm, &self.options, true))
            });
            last = attempt;
            if last.is_ok() {
                break;
            }
        }
        last
    }

    async fn run(mut self) -> Result<Connection> {
        let mut last = Err(Error::NoDevice);
        for to in std::mem::replace(&mut self.to, Ok(Vec::new()))? {
            last = self.run_one(to).await;
            if last.is_ok() {
                break;
            }
        }
        last
    }

    async fn run_one(&self, to: SocketAddr) -> Result<Connection> {
        let (connector, qp, rest) = self.start(to)?;
        let cm = connector.connect_async(to, qp).await?;
        Ok(rest.finish(cm, &self.options, true))
    }
}

/// Connects in a task of any runtime. Dropping the future cancels the attempt.
impl IntoFuture for Connect {
    type Output = Result<Connection>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
