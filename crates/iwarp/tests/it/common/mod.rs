//! Fixtures for tests with misbehaving peers: registered memory, an end of a connection, a pair of
//! connected ends in one process, and a check that unrelated connections still work. `wire`
//! contains the hand-written peer, and `net` a network of two hosts.
#![allow(unreachable_pub, reason = "a module of tests")]

pub mod alone;
pub mod calls;
pub mod loopback;
pub mod lossy;
pub mod net;
pub mod wire;
pub mod words;

pub use alone::{alone, alone_with};

use iwarp::runtime::cm::{CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters};
use iwarp::runtime::{
    CompletionQueue, Context, Cqe, QpAttributes, QueuePair, RecvWr, SendOp, SendWr, Sge,
    SharedReceiveQueue, State, WcOpcode, WcStatus, create_event_channel,
};
use iwarp::{Access, Config, Device, ReceiverNotReady};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Time limit for a single step of a test. A step that takes longer has failed.
pub const LIMIT: Duration = Duration::from_secs(20);
/// Our side's time limit for the peer in MPA start-up. It is long enough for a machine that is busy
/// with other tests.
pub const HANDSHAKE: Duration = Duration::from_millis(1200);
/// Our side's time limit for the peer to close the stream.
pub const LINGER: Duration = Duration::from_millis(600);

pub const V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
pub const V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);

/// A configuration with short time-outs, so that the tests are quick.
pub fn config() -> Config {
    let mut c = Config::default();
    c.handshake_timeout = HANDSHAKE;
    c.answer_timeout = HANDSHAKE * 2;
    c.linger = LINGER;
    // Tests check that the responder is silent until the first FPDU. With a limit it would send
    // first on a slow machine.
    c.speak_first = None;
    c.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_millis(300));
    c
}

/// Calls `look` until it returns `true`. Panics with `what` after `LIMIT`.
pub fn until(what: &str, mut look: impl FnMut() -> bool) {
    let start = Instant::now();
    while !look() {
        assert!(start.elapsed() < LIMIT, "did not happen: {what}");
        std::thread::yield_now();
    }
}

/// Returns the number of sockets that this process has open.
pub fn sockets() -> usize {
    open_sockets().len()
}

/// Returns the names of this process's open sockets. A socket's name is never reused.
pub fn open_sockets() -> BTreeSet<PathBuf> {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|to| to.to_string_lossy().starts_with("socket:"))
        .collect()
}

/// Registered memory that both ends may access at any time.
pub struct Mem {
    words: Box<[u64]>,
    pub stag: u32,
}

impl Mem {
    pub fn new(ctx: &Context, pd: u32, len: usize) -> Self {
        Self::with(ctx, pd, len, Access::all() - Access::ZERO_BASED)
    }

    pub fn with(ctx: &Context, pd: u32, len: usize, access: Access) -> Self {
        let words = vec![0u64; len.div_ceil(8)].into_boxed_slice();
        let addr = words.as_ptr() as u64;
        // SAFETY: the memory is freed when this value is dropped. Before that, the tests end every
        // connection that can access it.
        let stag =
            unsafe { ctx.register(addr, (words.len() * 8) as u64, addr, pd, access) }.unwrap();
        Self { words, stag }
    }

    pub fn addr(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    pub fn len(&self) -> u64 {
        (self.words.len() * 8) as u64
    }

    pub fn sge(&self, len: u32) -> Sge {
        Sge {
            addr: self.addr(),
            len,
            lkey: self.stag,
        }
    }

    pub fn set(&self, i: usize, value: u64) {
        // SAFETY: the word lies inside the box. All other accesses go through the RNIC.
        unsafe {
            std::ptr::from_ref(&self.words[i])
                .cast_mut()
                .write_volatile(value)
        };
    }

    pub fn word(&self, i: usize) -> u64 {
        // SAFETY: the word is within the box. All other accesses go through the RNIC.
        unsafe { std::ptr::from_ref(&self.words[i]).read_volatile() }
    }
}

/// One end of a connection.
pub struct End {
    pub ctx: Context,
    pub pd: u32,
    pub cq: CompletionQueue,
    pub qp: QueuePair,
    pub id: CmId,
    pub channel: CmEventChannel,
}

impl End {
    /// Creates an unconnected end with its own device context.
    pub fn new(ip: IpAddr, config: &Config) -> Self {
        Self::sized(ip, config, 1024, 16)
    }

    pub fn sized(ip: IpAddr, config: &Config, cqe: u32, ird: u16) -> Self {
        let ctx = context(ip, config);
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(cqe, None).unwrap());
        let qp = queue_pair(&ctx, pd, &cq, None, ird);
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&ctx));
        Self {
            ctx,
            pd,
            cq,
            qp,
            id,
            channel,
        }
    }

    pub fn mem(&self, len: usize) -> Mem {
        Mem::new(&self.ctx, self.pd, len)
    }

    pub fn resolve(&self, peer: SocketAddr) {
        self.id.resolve_addr(None, peer).unwrap();
        self.expect(CmEventKind::AddrResolved);
        self.id.resolve_route().unwrap();
        self.expect(CmEventKind::RouteResolved);
        self.id.set_queue_pair(Some(&self.qp));
    }

    /// Resolves `peer` and starts to connect to it.
    pub fn connect(&self, peer: SocketAddr, private_data: &[u8]) {
        self.resolve(peer);
        self.id.connect(&parameters(private_data)).unwrap();
    }

    /// Waits for the next connection event, which must be of this kind.
    pub fn expect(&self, kind: CmEventKind) -> CmEvent {
        expect(&self.channel, kind)
    }

    /// Waits for the next connection event, which must report a failure of this kind with this
    /// status (an errno).
    pub fn expect_failure(&self, kind: CmEventKind, status: i32) {
        let event = self.expect(kind);
        assert_eq!(event.status, status, "{event:?}");
    }

    pub fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.qp
            .post_send(&[SendWr::new(wr_id, op, sges).signaled()])
            .unwrap();
    }

    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) {
        self.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    }

    /// Waits for the next completion.
    pub fn poll(&self) -> Cqe {
        poll(&self.cq)
    }

    /// Waits for the next completion, which must be for this request and have this status.
    pub fn expect_status(&self, wr_id: u64, status: WcStatus) -> Cqe {
        let cqe = self.poll();
        assert_eq!((cqe.wr_id, cqe.status), (wr_id, status), "{cqe:?}");
        cqe
    }

    /// Waits for the next asynchronous event and returns the name of its kind.
    pub fn async_kind(&self) -> String {
        let event = self.ctx.async_event(Some(LIMIT)).unwrap();
        let text = format!("{:?}", event.kind);
        text.split('(').next().unwrap_or_default().to_owned()
    }

    /// Waits for `Disconnected` and checks that the queue pair is in the error state.
    pub fn expect_disconnected(&self) -> CmEvent {
        let event = self.expect(CmEventKind::Disconnected);
        assert_eq!(self.qp.state(), State::Error);
        event
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.qp.destroy();
        self.id.destroy();
    }
}

pub fn parameters(private_data: &[u8]) -> ConnectionParameters {
    ConnectionParameters {
        private_data: private_data.to_vec(),
        ..ConnectionParameters::default()
    }
}

pub fn context(ip: IpAddr, config: &Config) -> Context {
    Context::open(&Device::by_address(ip).unwrap(), config.clone()).unwrap()
}

pub fn queue_pair(
    ctx: &Context,
    pd: u32,
    cq: &CompletionQueue,
    srq: Option<&SharedReceiveQueue>,
    ird: u16,
) -> QueuePair {
    ctx.create_qp(&QpAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: srq.cloned(),
        unreliable: false,
        max_send_wr: 128,
        max_recv_wr: 128,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 64,
        signal_all: false,
        max_ird: ird,
        max_ord: 16,
    })
    .unwrap()
}

pub fn expect(channel: &CmEventChannel, kind: CmEventKind) -> CmEvent {
    let event = channel.next(Some(LIMIT)).unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

pub fn poll(cq: &CompletionQueue) -> Cqe {
    let mut out = [Cqe::default()];
    until("a completion", || cq.poll(&mut out).unwrap() > 0);
    out[0]
}

/// A listener on a free port.
pub struct Server {
    pub ctx: Context,
    pub id: CmId,
    pub channel: CmEventChannel,
    pub address: SocketAddr,
}

impl Server {
    pub fn new(ip: IpAddr, config: &Config) -> Self {
        let (ctx, channel) = (context(ip, config), create_event_channel().unwrap());
        let id = CmId::create(&channel, Some(&ctx));
        id.bind(SocketAddr::new(ip, 0)).unwrap();
        id.listen(4).unwrap();
        let address = id.addresses().0.unwrap();
        Self {
            ctx,
            id,
            channel,
            address,
        }
    }

    /// Waits for a connection request.
    pub fn request(&self) -> CmEvent {
        expect(&self.channel, CmEventKind::ConnectRequest)
    }

    /// Creates an end for a connection request. The caller still has to accept it.
    pub fn end(&self, request: CmEvent) -> End {
        self.end_with(request, None, 16, 1024)
    }

    pub fn end_with(
        &self,
        request: CmEvent,
        srq: Option<(&SharedReceiveQueue, u32)>,
        ird: u16,
        cqe: u32,
    ) -> End {
        let ctx = self.ctx.clone();
        let pd = srq.map_or_else(|| ctx.allocate_pd(), |(_, pd)| pd);
        let cq = ctx.create_cq(cqe, None).unwrap();
        let qp = queue_pair(&ctx, pd, &cq, srq.map(|s| s.0), ird);
        let channel = create_event_channel().unwrap();
        request.id.migrate(&channel);
        request.id.set_queue_pair(Some(&qp));
        End {
            ctx,
            pd,
            cq,
            qp,
            id: request.id,
            channel,
        }
    }

    /// Waits for the next connection request and accepts it.
    pub fn accept(&self) -> End {
        let end = self.end(self.request());
        end.id.accept(&parameters(b"")).unwrap();
        end
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.id.destroy();
    }
}

/// Returns two connected ends in this process: the initiator and the responder.
pub fn pair(ip: IpAddr, config: &Config) -> (End, End) {
    let server = Server::new(ip, config);
    let client = End::new(ip, config);
    client.connect(server.address, b"hello");
    let accepted = server.accept();
    client.expect(CmEventKind::Established);
    accepted.expect(CmEventKind::Established);
    (client, accepted)
}

/// A connection that has no part in the test, to check that a misbehaving peer does not disturb
/// others.
pub struct Healthy {
    client: End,
    server: End,
    mine: Mem,
    theirs: Mem,
    round: u64,
}

impl Healthy {
    pub fn new(ip: IpAddr) -> Self {
        let (client, server) = pair(ip, &Config::default());
        let (mine, theirs) = (client.mem(1 << 16), server.mem(1 << 16));
        Self {
            client,
            server,
            mine,
            theirs,
            round: 0,
        }
    }

    /// Performs a Send, a Write and a Read, and checks the data.
    pub fn check(&mut self) {
        self.round += 1;
        let Self {
            client,
            server,
            mine,
            theirs,
            round,
        } = self;
        let stamp = *round * 0x0101_0101;
        server.post_recv(1, &[theirs.sge(1 << 15)]);
        mine.set(0, stamp);
        mine.set(4095, stamp + 1);
        client.post(2, SendOp::Send, &[mine.sge(1 << 15)]);
        client.expect_status(2, WcStatus::Success);
        let got = server.expect_status(1, WcStatus::Success);
        assert_eq!((got.opcode, got.byte_len), (WcOpcode::Recv, 1 << 15));
        assert_eq!((theirs.word(0), theirs.word(4095)), (stamp, stamp + 1));
        let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
        mine.set(0, stamp + 2);
        client.post(3, SendOp::Write { remote_addr, rkey }, &[mine.sge(40_000)]);
        client.expect_status(3, WcStatus::Success);
        mine.set(0, 0);
        client.post(4, SendOp::Read { remote_addr, rkey }, &[mine.sge(40_000)]);
        client.expect_status(4, WcStatus::Success);
        assert_eq!((mine.word(0), theirs.word(0)), (stamp + 2, stamp + 2));
    }
}

/// Aborts the process if a test runs for longer than `LIMIT * 4`, because some waits have no time
/// limit.
pub struct Watchdog(
    #[expect(dead_code, reason = "dropping the sender stops the watchdog")] Sender<()>,
);

impl Watchdog {
    pub fn new() -> Self {
        let (alive, watch) = channel();
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        std::thread::spawn(move || {
            if watch.recv_timeout(LIMIT * 4) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name} hangs");
                std::process::abort();
            }
        });
        Self(alive)
    }
}

/// Runs a test while an unrelated connection exists. That connection must work before and after the
/// test, and a new connection must work after it.
pub fn others_are_served(test: impl FnOnce()) {
    let _guard = Watchdog::new();
    let mut other = Healthy::new(V4);
    other.check();
    test();
    other.check();
    Healthy::new(V4).check();
}

/// Returns the number of descriptors that this process has open.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
