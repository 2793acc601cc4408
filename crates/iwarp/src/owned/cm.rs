//! Connections: listen, connect, accept, reject, disconnect; for threads and for async tasks.
//!
//! The semantics are those of `rdma_cm(7)`; the objects below are in [`raw::cm`](crate::cm).
//!
//! ```
//! use iwarp::{Access, Cqe, Config, Context, Device, ProtectionDomain, RecvWr, SendWr, owned::cm};
//! # fn main() -> iwarp::Result<()> {
//! let ctx = Context::open(&Device::by_address("127.0.0.1".parse().unwrap())?, Config::default())?;
//! let pd = ProtectionDomain::new(&ctx);
//! let listener = cm::Listener::bind(&ctx, "127.0.0.1:0".parse().unwrap())?;
//! let address = listener.local_addr();
//!
//! let server = std::thread::spawn({
//!     let (ctx, pd) = (ctx.clone(), pd.clone());
//!     move || -> iwarp::Result<Vec<u8>> {
//!         let cq = ctx.create_cq(16, None)?;
//!         let mr = pd.allocate(64, Access::LOCAL_WRITE)?;
//!         let request = listener.accept(None)?;
//!         let qp = pd.queue_pair().build(&cq, &cq)?;
//!         qp.post_recv(&[RecvWr { wr_id: 1, sges: &[mr.sge(..)?] }]).map_err(|e| e.1)?;
//!         let connection = request.accept(qp, &Default::default())?;
//!         let mut done = [Cqe::default()];
//!         cq.wait(&mut done, None)?;
//!         drop(connection);
//!         mr.to_vec(..done[0].byte_len as usize)
//!     }
//! });
//!
//! let cq = ctx.create_cq(16, None)?;
//! let qp = pd.queue_pair().build(&cq, &cq)?;
//! let connection = cm::Connector::new(&ctx).connect(address, qp)?;
//! connection.post_send(&[SendWr::inline(1, &[b"hello"]).signaled()]).map_err(|e| e.1)?;
//! assert_eq!(server.join().unwrap()?, b"hello");
//! # Ok(())
//! # }
//! ```

pub use crate::cm::ConnectionParameters;

use crate::admission::{Admission, Networks};
use crate::cm::{CmEvent, CmEventChannel, CmEventKind, CmId};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::owned::QueuePair;
use crate::runtime::create_event_channel;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::task::Waker;
use std::time::Duration;

/// Returns the time after which a blocking call gives up a set-up. The limits of the device end it earlier; this one only guards
/// against a mistake in them. It is three times as long as an attempt, because one with MPA revision 1 may follow two with revision 2.
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

/// The private data that tell a peer that its request cannot be answered for lack of descriptors.
const NO_DESCRIPTORS: &[u8] = b"the listener has no file descriptors left";

/// A listener: waits for connections to an address of a device.
#[derive(Debug)]
pub struct Listener {
    /// Listens as long as this is there.
    _id: OwnedId,
    channel: CmEventChannel,
    local: SocketAddr,
}

impl Listener {
    /// Listens on an address; port 0 picks a free port. Up to 128 requests may wait for an answer.
    ///
    /// # Errors
    /// The operating system's: address in use, not of this host, no descriptors.
    pub fn bind(ctx: &Context, address: SocketAddr) -> Result<Self> {
        Self::bind_with_backlog(ctx, address, 0)
    }

    /// Listens on an address, with room for `backlog` requests that wait for an answer; 0 means 128.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with_backlog(ctx: &Context, address: SocketAddr, backlog: u32) -> Result<Self> {
        Self::builder(ctx).backlog(backlog).bind(address)
    }

    /// Makes a listener with settings of its own.
    pub fn builder(ctx: &Context) -> ListenerBuilder {
        ListenerBuilder {
            ctx: ctx.clone(),
            backlog: 0,
            admission: ctx.config().admission.clone(),
        }
    }

    /// Returns the address it listens on, with the port that was picked.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Waits for a connection request; `None` waits without limit. Blocks the thread.
    ///
    /// # Errors
    /// [`Error::TimedOut`].
    pub fn accept(&self, timeout: Option<Duration>) -> Result<ConnectionRequest> {
        ConnectionRequest::new(self.channel.next(timeout)?)
    }

    /// Waits for a connection request in an async task; see [`accept`](Self::accept).
    ///
    /// # Errors
    /// The operating system's: no descriptors.
    pub async fn accept_async(&self) -> Result<ConnectionRequest> {
        ConnectionRequest::new(self.channel.recv().await)
    }
}

/// A listener that is about to be made. Made by [`Listener::builder`].
#[derive(Debug, Clone)]
#[must_use = "it does nothing until `bind` is called"]
pub struct ListenerBuilder {
    ctx: Context,
    backlog: u32,
    admission: Admission,
}

impl ListenerBuilder {
    /// Sets how many requests may wait for an answer; 0 means 128.
    pub fn backlog(mut self, requests: u32) -> Self {
        self.backlog = requests;
        self
    }

    /// Sets which peers are let in.
    pub fn peers(mut self, peers: Networks) -> Self {
        self.admission.peers = peers;
        self
    }

    /// Sets which peers are let in, and how many.
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Listens on an address; port 0 picks a free port.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind(self, address: SocketAddr) -> Result<Listener> {
        let channel = create_event_channel()?;
        let id = OwnedId(CmId::create(&channel, Some(&self.ctx)));
        id.0.set_admission(self.admission);
        id.0.bind(address)?;
        id.0.listen(self.backlog)?;
        let local = id.0.addresses().0.unwrap_or(address);
        Ok(Listener {
            _id: id,
            channel,
            local,
        })
    }
}

/// A connection request of a peer. Dropping it refuses the connection.
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
            // Without these private data the peer could only report that it was refused.
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

    /// Returns the private data that the peer sent with its request.
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

    /// Returns how many RDMA Reads and atomics the peer wants to have outstanding, and how many it can serve; `None` if it
    /// did not say.
    pub fn peer_reads(&self) -> (Option<u16>, Option<u16>) {
        self.peer_reads
    }

    /// Accepts the connection with a queue pair, and blocks until the connection is up. Post receives before.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`]: the peer is gone; [`Error::InvalidArgument`]: the private data are too long.
    pub fn accept(self, qp: QueuePair, parameters: &ConnectionParameters) -> Result<Connection> {
        self.start(&qp, parameters)?;
        let ctx = self.id.0.context();
        let event = self
            .channel
            .next(ctx.map(|ctx| set_up_limit(ctx.config())))?;
        Connection::settle(self.id, self.channel, qp, event)
    }

    /// Accepts the connection in an async task; see [`accept`](Self::accept).
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub async fn accept_async(
        self,
        qp: QueuePair,
        parameters: &ConnectionParameters,
    ) -> Result<Connection> {
        self.start(&qp, parameters)?;
        let event = self.channel.recv().await;
        Connection::settle(self.id, self.channel, qp, event)
    }

    fn start(&self, qp: &QueuePair, parameters: &ConnectionParameters) -> Result<()> {
        self.id.0.set_queue_pair(Some(qp));
        self.id.0.accept(parameters)
    }

    /// Refuses the connection. The peer gets `private_data`, for example the reason.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the peer is gone.
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        self.id.0.reject(private_data)
    }
}

/// Connects queue pairs to listeners.
#[derive(Debug, Clone)]
pub struct Connector {
    ctx: Context,
    source: Option<SocketAddr>,
    parameters: ConnectionParameters,
}

impl Connector {
    /// Makes a connector that uses this device and its settings.
    pub fn new(ctx: &Context) -> Self {
        Self {
            ctx: ctx.clone(),
            source: None,
            parameters: ConnectionParameters::default(),
        }
    }

    /// Sets the private data that the listener gets with the request.
    #[must_use]
    pub fn private_data(mut self, data: &[u8]) -> Self {
        self.parameters.private_data = data.to_vec();
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight: inbound to serve (`ird`), outbound to have outstanding (`ord`).
    /// Without it, both are as many as the queue pair can.
    #[must_use]
    pub fn reads(mut self, ird: u16, ord: u16) -> Self {
        self.parameters.responder_resources = Some(ird);
        self.parameters.initiator_depth = Some(ord);
        self
    }

    /// Sets the local address to connect from.
    #[must_use]
    pub fn source(mut self, address: SocketAddr) -> Self {
        self.source = Some(address);
        self
    }

    /// Connects, and blocks until the connection is up.
    ///
    /// # Errors
    /// [`Error::Rejected`], [`Error::TimedOut`], [`Error::Handshake`], and the operating system's: connection refused, no route.
    pub fn connect(&self, peer: SocketAddr, qp: QueuePair) -> Result<Connection> {
        let (id, channel) = self.start(peer, &qp)?;
        loop {
            let event = channel.next(Some(set_up_limit(self.ctx.config())))?;
            if !is_preliminary(event.kind) {
                return Connection::settle(id, channel, qp, event);
            }
        }
    }

    /// Connects in an async task; see [`connect`](Self::connect). Dropping the future ends the attempt.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_async(&self, peer: SocketAddr, qp: QueuePair) -> Result<Connection> {
        let (id, channel) = self.start(peer, &qp)?;
        loop {
            let event = channel.recv().await;
            if !is_preliminary(event.kind) {
                return Connection::settle(id, channel, qp, event);
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

    /// Returns the device's own address, if it has one of the peer's kind.
    fn default_source(&self, peer: SocketAddr) -> Option<SocketAddr> {
        let device = self.ctx.device();
        device.source_for(peer).map(|ip| device.socket_addr(ip, 0))
    }
}

const fn is_preliminary(kind: CmEventKind) -> bool {
    matches!(kind, CmEventKind::AddrResolved | CmEventKind::RouteResolved)
}

/// A connected queue pair. Dropping it disconnects gracefully.
#[derive(Debug)]
pub struct Connection {
    // Fields are dropped in this order: the identifier goes first, so that no event arrives for what follows.
    id: OwnedId,
    qp: QueuePair,
    channel: CmEventChannel,
    private_data: Vec<u8>,
}

/// An identifier that is destroyed when it is dropped: a listener stops, a request is refused, an attempt ends, and news that nobody has taken go.
#[derive(Debug)]
struct OwnedId(CmId);

impl Drop for OwnedId {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl Connection {
    fn settle(id: OwnedId, channel: CmEventChannel, qp: QueuePair, event: CmEvent) -> Result<Self> {
        let os = || Error::Io(io::Error::from_raw_os_error(event.status));
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
                "the peer's MPA reply is not one we can work with".into(),
            )),
            CmEventKind::ConnectError if event.status == libc::ENOSPC => Err(Error::Unsupported(
                "the peer's reply asks for more RDMA Reads at a time (its ORD) than this end serves (our IRD)",
            )),
            CmEventKind::Disconnected => {
                Err(Error::ConnectionLost("the peer closed at once".into()))
            }
            _ => Err(os()),
        }
    }

    /// Returns the private data that the peer sent when it accepted.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the local address and the peer's.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        self.id.0.addresses()
    }

    /// Returns the queue pair.
    pub fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Begins the graceful end: queued requests that TCP takes are sent, the others are flushed. Does not block.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: never connected.
    pub fn disconnect(&self) -> Result<()> {
        self.id.0.disconnect()
    }

    /// Blocks until either side has ended the connection; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::ConnectionLost`] with the reason if the end was not graceful.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        let event = self.channel.next(timeout)?;
        self.ended(&event)
    }

    /// Waits for the end of the connection in an async task; see [`wait_disconnected`](Self::wait_disconnected).
    ///
    /// # Errors
    /// [`Error::ConnectionLost`].
    pub async fn disconnected(&self) -> Result<()> {
        let event = self.channel.recv().await;
        self.ended(&event)
    }

    /// Wakes a task when the connection has ended. Ask [`try_ended`](Self::try_ended) once more after this, then wait.
    pub(crate) fn wake_at_end(&self, waker: &Waker) {
        self.channel.wake_at_next(waker);
    }

    /// Returns how the connection has ended, once. `None` if it has not, or if another call has taken the news.
    pub(crate) fn try_ended(&self) -> Option<Result<()>> {
        Some(self.ended(&self.channel.try_next()?))
    }

    fn ended(&self, event: &CmEvent) -> Result<()> {
        match self.qp.fault() {
            Some(fault) => Err(Error::ConnectionLost(fault.to_string())),
            None if event.status != 0 => Err(Error::Io(io::Error::from_raw_os_error(event.status))),
            None => Ok(()),
        }
    }
}

impl Deref for Connection {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        &self.qp
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::owned::memory::ProtectionDomain;
    use crate::testing;
    use std::io::{Read, Write};
    use std::net::{IpAddr, TcpListener, TcpStream};
    use std::pin::{Pin, pin};
    use std::task::{self, Poll};
    use std::time::Instant;

    /// A blocking `connect` gave up after 60 s, however long the program at the other end was allowed to take.
    #[test]
    fn the_limits_of_the_device_come_first() {
        for seconds in [0, 60, 3600, u64::MAX] {
            let limit = Duration::from_secs(seconds);
            let longer = |config: &Config| {
                let whole = set_up_limit(config);
                whole > limit || whole == Duration::MAX
            };
            let patient = [
                Config {
                    answer_timeout: limit,
                    ..Config::default()
                },
                Config {
                    connect_timeout: limit,
                    ..Config::default()
                },
            ];
            assert!(patient.iter().all(longer), "{limit:?}");
        }
    }

    const LIMIT: Duration = Duration::from_secs(20);

    /// A request of revision 1 without private data (RFC 5044 section 7.1.1).
    const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\x00\x00";

    fn soon(what: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn queue_pair(ctx: &Context) -> QueuePair {
        let (pd, cq) = (ProtectionDomain::new(ctx), ctx.create_cq(4, None).unwrap());
        pd.queue_pair().build(&cq, &cq).unwrap()
    }

    /// Looks once at what a future has.
    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut task::Context::from_waker(Waker::noop()))
    }

    /// A connection that is established, and its identifier.
    fn connected(ctx: &Context) -> (Connection, CmId) {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(ctx));
        id.write_event(CmEventKind::User(0), 0).unwrap();
        let event = CmEvent {
            kind: CmEventKind::Established,
            ..channel.try_next().unwrap()
        };
        let connection = Connection::settle(OwnedId(id.clone()), channel, queue_pair(ctx), event);
        (connection.unwrap(), id)
    }

    /// The news of the end waits for the program, in whichever way it asks.
    #[test]
    fn an_end_has_its_error_however_it_is_asked_for() {
        let (connection, id) = connected(&testing::context());
        for (status, wanted) in [(0, None), (libc::ECONNRESET, Some(libc::ECONNRESET))] {
            let ways: [&dyn Fn() -> Result<()>; 3] = [
                &|| connection.wait_disconnected(Some(LIMIT)),
                &|| match poll_once(pin!(connection.disconnected())) {
                    Poll::Ready(end) => end,
                    Poll::Pending => panic!("the news is there"),
                },
                &|| connection.try_ended().unwrap(),
            ];
            for ended in ways {
                id.write_event(CmEventKind::User(0), status).unwrap();
                let end = ended().map_err(|e| e.errno());
                assert_eq!(end.err(), wanted);
                assert!(connection.try_ended().is_none());
            }
        }
    }

    /// The identifier goes with the connection, and the news that nobody has taken with it.
    #[test]
    fn a_connection_that_is_dropped_takes_its_identifier_along() {
        let (connection, id) = connected(&testing::context());
        id.write_event(CmEventKind::User(0), 0).unwrap();
        drop(connection);
        assert!(id.channel().is_empty());
        let late = id.write_event(CmEventKind::User(0), 0);
        assert!(matches!(late, Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn a_listener_that_is_dropped_refuses_what_waits_for_it() {
        let listener = Listener::bind(&testing::context(), ([127, 0, 0, 1], 0).into()).unwrap();
        let at = listener.local_addr();
        let mut peer = TcpStream::connect(at).unwrap();
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        peer.write_all(REQUEST).unwrap();
        soon("a request waits", || !listener.channel.is_empty());
        drop(listener);
        let mut reply = [0; 20];
        peer.read_exact(&mut reply).unwrap();
        assert_eq!(&reply[..17], b"MPA ID Rep Frame\x60", "CRC, rejected");
        soon("it does not listen", || TcpStream::connect(at).is_err());
    }

    /// Connections start at the device's address unless the program names another one. An attempt that nobody waits for any more ends.
    #[test]
    fn an_attempt_starts_at_the_right_address_and_ends_with_its_future() {
        let device = testing::device_at(&["127.0.0.5"]);
        let ctx = Context::open(&device, Config::default()).unwrap();
        let connector = Connector::new(&ctx);
        let named = connector.clone().source(([127, 0, 0, 6], 0).into());
        for (connector, from) in [(connector, [127, 0, 0, 5]), (named, [127, 0, 0, 6])] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let at = listener.local_addr().unwrap();
            let (mut peer, source) = {
                let mut attempt = pin!(connector.connect_async(at, queue_pair(&ctx)));
                assert!(poll_once(attempt.as_mut()).is_pending());
                listener.accept().unwrap()
            };
            assert_eq!(source.ip(), IpAddr::from(from));
            peer.set_read_timeout(Some(LIMIT)).unwrap();
            let end = peer.read_to_end(&mut Vec::new());
            assert!(!end.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
        }
    }

    /// What ends a set-up, with what the program is told of it.
    #[test]
    fn each_end_of_a_set_up_has_its_error() {
        use CmEventKind::{ConnectError, Disconnected, Established, Rejected, Unreachable};
        let ctx = testing::context();
        let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(4, None).unwrap());
        let settled = |kind, status, replied| {
            let channel = create_event_channel().unwrap();
            let id = CmId::create(&channel, Some(&ctx));
            let event = CmEvent {
                kind,
                status,
                id: id.clone(),
                listener: None,
                private_data: b"because".to_vec(),
                replied,
                responder_resources: None,
                initiator_depth: None,
                xrc: None,
                datagrams: None,
                service_status: 0,
                infiniband: None,
                _untaken: None,
            };
            let qp = pd.queue_pair().build(&cq, &cq).unwrap();
            Connection::settle(OwnedId(id), channel, qp, event)
        };
        let connection = settled(Established, 0, false).unwrap();
        assert_eq!(connection.private_data(), b"because");
        for (kind, status, replied, wanted) in [
            (Rejected, libc::ECONNREFUSED, true, "because"),
            (Rejected, libc::ECONNREFUSED, false, "os 111"),
            (Unreachable, libc::ETIMEDOUT, false, "time"),
            (Unreachable, libc::EHOSTUNREACH, false, "os 113"),
            (ConnectError, libc::EPROTO, false, "handshake"),
            (ConnectError, libc::ENOSPC, false, "unsupported"),
            (ConnectError, libc::ETIMEDOUT, false, "os 110"),
            (Disconnected, 0, false, "lost"),
        ] {
            let told = match settled(kind, status, replied).unwrap_err() {
                Error::Rejected(data) => String::from_utf8(data).unwrap(),
                Error::TimedOut(_) => "time".into(),
                Error::Handshake(_) => "handshake".into(),
                Error::Unsupported(_) => "unsupported".into(),
                Error::ConnectionLost(_) => "lost".into(),
                Error::Io(e) => format!("os {}", e.raw_os_error().unwrap()),
                other => panic!("{other:?}"),
            };
            assert_eq!(told, wanted, "{kind:?} {status}");
        }
    }

    /// A call of the builder changes its own setting only, in any order. The device's settings hold for the others.
    #[test]
    fn listener_settings_combine_in_any_order() {
        let mut config = Config::default();
        (config.admission.half_open, config.admission.connections) = (7, 8);
        let device = config.admission.clone();
        let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into()).unwrap(), config);
        let ctx = ctx.unwrap();
        let few = Admission {
            connections: 3,
            ..Admission::default()
        };
        let peers: Networks = "192.0.2.0/24".parse().unwrap();
        let with_peers = |admission: &Admission| Admission {
            peers: peers.clone(),
            ..admission.clone()
        };
        let builder = || Listener::builder(&ctx);
        for (made, admission, backlog) in [
            (builder(), device.clone(), 0),
            (builder().peers(peers.clone()), with_peers(&device), 0),
            (builder().admission(few.clone()), few.clone(), 0),
            (
                builder()
                    .admission(few.clone())
                    .peers(peers.clone())
                    .backlog(9),
                with_peers(&few),
                9,
            ),
            (
                builder()
                    .backlog(9)
                    .peers(peers.clone())
                    .admission(few.clone()),
                few.clone(),
                9,
            ),
        ] {
            assert_eq!((made.admission, made.backlog), (admission, backlog));
        }
    }

    #[test]
    fn source_names_address_and_port() {
        let ctx = testing::context();
        let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(4, None).unwrap());
        let listener = Listener::bind(&ctx, ([127, 0, 0, 1], 0).into()).unwrap();
        // No other test uses this address, so its port stays free.
        let free = TcpListener::bind("127.0.0.77:0")
            .unwrap()
            .local_addr()
            .unwrap();
        for source in [free, SocketAddr::new(free.ip(), 0)] {
            let qp = pd.queue_pair().build(&cq, &cq).unwrap();
            let connector = Connector::new(&ctx).source(source);
            let from = std::thread::scope(|scope| {
                scope.spawn(|| connector.connect(listener.local_addr(), qp).map(drop));
                let request = listener.accept(None).unwrap();
                let from = request.peer_addr().unwrap();
                request.reject(b"").unwrap();
                from
            });
            assert_eq!(from.ip(), source.ip());
            assert!([0, from.port()].contains(&source.port()), "{from} {source}");
        }
    }
}
