//! iWARP as a wire under test.
//!
//! Both ends use the public interface as a program would: one completion queue for all queue pairs
//! of a link, work requests posted in lists, and one signaled request per quarter of the
//! depth. A spinning end polls its completion queue, which drives the socket; a sleeping end waits
//! for completions. An RDMA Write creates no completion at its target. So a spinning target watches
//! the last byte of the buffer while it polls, and a Write with immediate data wakes a sleeping
//! target.

use super::point::{
    Link, Metric, Op, Pending, Point, Poll, Role, STALL, Session, SpinGuard, Transport, stalled,
};
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, PostFailed, ProtectionDomain, QpInitAttr, RecvWr,
    RemoteMemory, SendOp, SendWr, Sge, WcOpcode, WcStatus,
};
use iwarp::{Access, Device};
use iwarp_cli_common::error::{Error, Result};
use iwarp_figures::Latencies;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Work requests per posting call, a number that programs commonly use.
const BATCH: usize = 64;
/// Small messages cycle through this many bytes instead of using one cache line.
const WINDOW: usize = 256 * 1024;
/// Maximum number of Reads in flight per connection.
const MAX_READS: u32 = 4096;
/// Completions per poll.
const POLL_BATCH: usize = 64;
/// Source of the writes that clear memory.
const ZEROS: [u8; 4096] = [0; 4096];
const ALL_RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

#[derive(Debug)]
pub(crate) struct Rdma;

fn failed(what: &str) -> impl Fn(iwarp::Error) -> Error + '_ {
    move |e| Error::failed(format!("{what}: {e}"))
}

fn check_posted(r: std::result::Result<(), PostFailed>) -> Result<()> {
    r.map_err(|failed| Error::failed(format!("posting a work request: {}", failed.error())))
}

/// A device, and the objects that all connections of a link share.
struct Base {
    ctx: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    link: Link,
    /// Receives per connection.
    receive_depth: u32,
}

impl Base {
    fn new(link: &Link, device: &Device) -> Result<Self> {
        let mut config = iwarp_cli_common::rdma::config();
        config.crc = link.crc;
        config.markers = link.markers;
        let ctx = Context::open(device, config).map_err(failed("opening the device"))?;
        let receive_depth = link.depth.max(16) + 8;
        let completions = link.qps * (link.depth + 8 + receive_depth) + 64;
        let cq = ctx
            .create_cq(completions, None)
            .map_err(failed("creating a completion queue"))?;
        Ok(Self {
            pd: ProtectionDomain::new(&ctx),
            ctx,
            cq,
            link: link.clone(),
            receive_depth,
        })
    }

    fn queue_pair(&self) -> Result<iwarp::verbs::QueuePair> {
        let reads = self.link.depth.clamp(1, MAX_READS) as u16;
        self.pd
            .create_qp(
                &QpInitAttr::new(&self.cq, &self.cq)
                    .cap(self.link.depth + 8, self.receive_depth)
                    .max_sge(1, 1)
                    .rd_atomic(reads, reads),
            )
            .map_err(failed("creating a queue pair"))
    }

    /// Registers memory for one connection: the source of sends, and the target of receives and of
    /// the peer's operations.
    fn memory(&self) -> Result<(MemoryRegion, MemoryRegion)> {
        let len = usize::try_from(self.link.max_size)
            .unwrap_or(usize::MAX)
            .max(WINDOW);
        let make = || {
            self.pd
                .reg_mr(len, ALL_RIGHTS)
                .map_err(failed("registering memory"))
        };
        Ok((make()?, make()?))
    }
}

struct Conn {
    connection: ConnectedId,
    source: MemoryRegion,
    target: MemoryRegion,
    remote: RemoteMemory,
    posted_receives: u32,
    /// Operations of the current point that were started.
    started: u64,
    /// Operations that have not completed.
    outstanding: u64,
}

struct RdmaSession {
    base: Base,
    conns: Vec<Conn>,
    /// Messages that have arrived and are not counted yet.
    arrived: u64,
}

impl RdmaSession {
    fn add(
        &mut self,
        connection: ConnectedId,
        memory: (MemoryRegion, MemoryRegion),
        peer: &[u8],
    ) -> Result<()> {
        let remote = RemoteMemory::from_bytes(peer).ok_or_else(|| {
            Error::failed("the peer is not `iwarp perf`: its private data name no memory")
        })?;
        let (source, target) = memory;
        self.conns.push(Conn {
            connection,
            source,
            target,
            remote,
            posted_receives: 0,
            started: 0,
            outstanding: 0,
        });
        let index = self.conns.len() - 1;
        self.refill(index)
    }

    /// Posts the missing receives.
    fn refill(&mut self, index: usize) -> Result<()> {
        let Some(c) = self.conns.get_mut(index) else {
            return Ok(());
        };
        let sge = [c.target.sge(..).map_err(failed("receive buffer"))?];
        let mut missing = (self.base.receive_depth - c.posted_receives) as usize;
        let wrs = [RecvWr {
            wr_id: 0,
            sges: &sge,
        }; BATCH];
        while missing > 0 {
            let n = missing.min(BATCH);
            check_posted(c.connection.post_recv(&wrs[..n]))?;
            missing -= n;
        }
        c.posted_receives = self.base.receive_depth;
        Ok(())
    }

    /// Polls for completions, or waits for one if `sleep`. Returns how many it processed.
    fn process_completions(&mut self, sleep: bool) -> Result<usize> {
        let mut done = [Cqe::default(); POLL_BATCH];
        let n = if sleep {
            self.base
                .cq
                .wait(&mut done, Some(STALL))
                .map_err(|e| match e {
                    iwarp::Error::TimedOut(_) => stalled(),
                    e => Error::failed(e.to_string()),
                })?
        } else {
            self.base
                .cq
                .poll(&mut done)
                .map_err(|e| Error::failed(iwarp::Error::from(e).to_string()))?
        };
        for cqe in &done[..n] {
            self.process(cqe)?;
        }
        Ok(n)
    }

    fn process(&mut self, cqe: &Cqe) -> Result<()> {
        let index = self
            .conns
            .iter()
            .position(|c| c.connection.num() == cqe.qp_num)
            .unwrap_or(0);
        let c = &mut self.conns[index];
        if cqe.status != WcStatus::Success {
            let why = c.connection.fault().map_or_else(
                || "the peer closed the connection".into(),
                |f| f.to_string(),
            );
            return Err(Error::failed(format!(
                "a work request failed with {:?}: {why}",
                cqe.status
            )));
        }
        match cqe.opcode {
            WcOpcode::Recv | WcOpcode::RecvWriteImm => {
                self.arrived += 1;
                c.posted_receives -= 1;
                // Post lists instead of single receives, but before the receive queue is empty.
                if c.posted_receives <= self.base.receive_depth / 2 {
                    self.refill(index)?;
                }
            }
            // The ID of a work request is the number of requests that its completion covers.
            _ => c.outstanding = c.outstanding.saturating_sub(cqe.wr_id),
        }
        Ok(())
    }

    /// Waits until `enough` returns `true`.
    fn wait_until(&mut self, poll: Poll, mut enough: impl FnMut(&Self) -> bool) -> Result<()> {
        let mut guard = SpinGuard::new();
        while !enough(self) {
            if self.process_completions(poll == Poll::Event)? == 0 {
                guard.no_progress()?;
            } else {
                guard.reset();
            }
        }
        Ok(())
    }

    fn await_message(&mut self, poll: Poll) -> Result<()> {
        self.wait_until(poll, |s| s.arrived > 0)?;
        self.arrived -= 1;
        Ok(())
    }

    /// Waits until the last byte of the target equals `tag`; polls meanwhile to drive the socket.
    fn await_octet(&mut self, size: usize, tag: u8) -> Result<()> {
        let target = self.conns[0].target.clone();
        let read = || target.load_u8(size - 1).map_err(failed("watching memory"));
        let mut guard = SpinGuard::new();
        while read()? != tag {
            self.process_completions(false)?;
            guard.no_progress()?;
        }
        Ok(())
    }

    /// Sends a one-byte message on each connection: the client's "end of data", or the server's
    /// "all data arrived".
    fn send_end(&mut self) -> Result<()> {
        for c in &mut self.conns {
            c.outstanding += 1;
            check_posted(
                c.connection
                    .post_send(&[SendWr::inline(1, &[&[1u8]]).signaled()]),
            )?;
        }
        Ok(())
    }

    fn await_ends(&mut self, poll: Poll, messages: u64) -> Result<()> {
        let want = messages + self.conns.len() as u64;
        self.wait_until(poll, |s| s.arrived >= want)?;
        self.arrived -= want;
        Ok(())
    }

    fn await_idle(&mut self, poll: Poll) -> Result<()> {
        self.wait_until(poll, |s| s.conns.iter().all(|c| c.outstanding == 0))
    }

    /// Sends the message of one ping-pong turn.
    fn ping(&mut self, point: &Point, tag: u8) -> Result<()> {
        let size = point.size as usize;
        let c = &mut self.conns[0];
        c.source
            .write_at(size - 1, &[tag])
            .map_err(failed("filling the buffer"))?;
        let sge = [c.source.sge(..size).map_err(failed("send buffer"))?];
        let (addr, rkey) = (c.remote.addr, c.remote.rkey);
        let wr = match (point.op, point.poll) {
            (Op::Write, Poll::Spin) => SendWr::write(1, addr, rkey, &sge),
            (Op::Write, Poll::Event) => SendWr::new(
                1,
                SendOp::WriteImm {
                    remote_addr: addr,
                    rkey,
                    imm: u32::from(tag),
                },
                &sge,
            ),
            _ => SendWr::send(1, &sge),
        };
        c.outstanding += 1;
        check_posted(c.connection.post_send(&[wr.signaled()]))
    }

    fn pong(&mut self, point: &Point, tag: u8) -> Result<()> {
        match (point.op, point.poll) {
            (Op::Write, Poll::Spin) => self.await_octet(point.size as usize, tag),
            _ => self.await_message(point.poll),
        }
    }

    /// Performs one Read or atomic.
    fn fetch(&mut self, point: &Point) -> Result<()> {
        let size = point.size as usize;
        let c = &mut self.conns[0];
        let sge = [c.source.sge(..size).map_err(failed("read buffer"))?];
        let wr = match point.op {
            Op::FetchAdd => SendWr::fetch_add(1, c.remote.addr, c.remote.rkey, 1, &sge),
            _ => SendWr::read(1, c.remote.addr, c.remote.rkey, &sge),
        };
        c.outstanding += 1;
        check_posted(c.connection.post_send(&[wr.signaled()]))?;
        self.wait_until(point.poll, |s| s.conns[0].outstanding == 0)
    }

    /// Starts as many operations as the depth allows, and subtracts them from `remaining`.
    fn fill(&mut self, index: usize, point: &Point, remaining: &mut u64) -> Result<()> {
        let depth = match point.op {
            Op::Read | Op::FetchAdd => u64::from(self.base.link.depth.min(MAX_READS)),
            _ => u64::from(self.base.link.depth),
        };
        let list_len = (depth / 4).max(1);
        let c = &mut self.conns[index];
        let size = point.size as usize;
        let slots = (WINDOW / size).max(1) as u64;
        // Post lists of a quarter of the depth: with shorter lists, calls would dominate.
        if *remaining > 0 && depth - c.outstanding < list_len {
            return Ok(());
        }
        while *remaining > 0 && c.outstanding < depth {
            let n = (depth - c.outstanding)
                .min(*remaining)
                .min(BATCH as u64)
                .min(list_len) as usize;
            let mut sges = [[Sge::default()]; BATCH];
            let mut remotes = [0u64; BATCH];
            for i in 0..n {
                let offset = ((c.started + i as u64) % slots) as usize * size;
                sges[i] = [c
                    .source
                    .sge(offset..offset + size)
                    .map_err(failed("buffer"))?];
                remotes[i] = c.remote.addr + offset as u64;
            }
            let rkey = c.remote.rkey;
            let mut wrs = [SendWr::send(0, &[]); BATCH];
            for (i, wr) in wrs.iter_mut().take(n).enumerate() {
                let sge = &sges[i];
                let to = remotes[i];
                *wr = match point.op {
                    Op::Write => SendWr::write(0, to, rkey, sge),
                    Op::Read => SendWr::read(0, to, rkey, sge),
                    Op::FetchAdd => SendWr::fetch_add(0, to, rkey, 1, sge),
                    Op::Send | Op::Tcp | Op::TcpPolls => SendWr::send(0, sge),
                };
            }
            // The completion of the last request covers the whole list.
            let last = &mut wrs[n - 1];
            last.wr_id = n as u64;
            *last = last.signaled();
            check_posted(c.connection.post_send(&wrs[..n]))?;
            c.started += n as u64;
            c.outstanding += n as u64;
            *remaining -= n as u64;
        }
        Ok(())
    }
}

impl Session for RdmaSession {
    fn prepare(&mut self, _: Role, _: &Point, _: u64) -> Result<()> {
        for index in 0..self.conns.len() {
            self.refill(index)?;
            let c = &mut self.conns[index];
            c.started = 0;
            // The last byte of a message numbers the round trips: clear those of the last point.
            for mr in [&c.target, &c.source] {
                for from in (0..mr.len()).step_by(ZEROS.len()) {
                    let zeros = &ZEROS[..ZEROS.len().min(mr.len() - from)];
                    mr.write_at(from, zeros)
                        .map_err(failed("clearing memory"))?;
                }
            }
        }
        Ok(())
    }

    fn latency(
        &mut self,
        role: Role,
        point: &Point,
        iters: u64,
        hist: &mut Latencies,
    ) -> Result<()> {
        let tag = |i: u64| (i % 255) as u8 + 1;
        match (role, point.op) {
            (Role::Client, Op::Read | Op::FetchAdd) => {
                for _ in 0..iters {
                    let start = Instant::now();
                    self.fetch(point)?;
                    hist.record(start.elapsed());
                }
                self.send_end()?;
                self.await_ends(point.poll, 0)?;
            }
            (Role::Server, Op::Read | Op::FetchAdd) => {
                self.await_ends(point.poll, 0)?;
                self.send_end()?;
            }
            (Role::Client, _) => {
                for i in 0..iters {
                    let start = Instant::now();
                    self.ping(point, tag(i))?;
                    self.pong(point, tag(i))?;
                    hist.record(start.elapsed());
                }
            }
            (Role::Server, _) => {
                for i in 0..iters {
                    self.pong(point, tag(i))?;
                    self.ping(point, tag(i))?;
                }
            }
        }
        self.await_idle(point.poll)
    }

    fn bandwidth(&mut self, role: Role, point: &Point, iters: u64) -> Result<Duration> {
        debug_assert_eq!(point.metric, Metric::Bandwidth);
        let start = Instant::now();
        match role {
            Role::Server => {
                let messages = if point.op == Op::Send { iters } else { 0 };
                self.await_ends(point.poll, messages)?;
                self.send_end()?;
            }
            Role::Client => {
                let conns = self.conns.len() as u64;
                let mut remaining: Vec<u64> = (0..conns)
                    .map(|i| iters / conns + u64::from(i < iters % conns))
                    .collect();
                let mut guard = SpinGuard::new();
                while remaining.iter().any(|n| *n > 0) {
                    for (index, remaining) in remaining.iter_mut().enumerate() {
                        self.fill(index, point, remaining)?;
                    }
                    let sleep = point.poll == Poll::Event && remaining.iter().any(|n| *n > 0);
                    if self.process_completions(sleep)? == 0 {
                        guard.no_progress()?;
                    } else {
                        guard.reset();
                    }
                }
                if matches!(point.op, Op::Read | Op::FetchAdd) {
                    self.await_idle(point.poll)?;
                }
                // The server answers this message after all data before it have arrived.
                self.send_end()?;
                self.await_ends(point.poll, 0)?;
            }
        }
        let elapsed = start.elapsed();
        self.await_idle(point.poll)?;
        Ok(elapsed)
    }
}

struct Listening {
    base: Base,
    listener: ListeningId,
}

impl Pending for Listening {
    fn port(&self) -> u16 {
        self.listener.local_addr().port()
    }

    fn accept(self: Box<Self>) -> Result<Box<dyn Session>> {
        let Self { base, listener } = *self;
        let qps = base.link.qps;
        let mut session = RdmaSession {
            base,
            conns: Vec::new(),
            arrived: 0,
        };
        for _ in 0..qps {
            let request = listener
                .accept(Some(STALL))
                .map_err(failed("waiting for the peer"))?;
            let memory = session.base.memory()?;
            let qp = session.base.queue_pair()?;
            let parameters = ConnectionParameters {
                private_data: memory.1.remote().to_bytes().to_vec(),
                ..ConnectionParameters::default()
            };
            let peer = request.private_data().to_vec();
            let connection = request
                .accept(qp, &parameters)
                .map_err(failed("accepting the peer"))?;
            session.add(connection, memory, &peer)?;
        }
        Ok(Box::new(session))
    }
}

impl Transport for Rdma {
    fn listen(&self, link: &Link, at: SocketAddr, from: IpAddr) -> Result<Box<dyn Pending>> {
        let ip = at.ip();
        let device = if ip.is_unspecified() {
            Device::list()
                .map_err(failed("listing devices"))?
                .into_iter()
                .next()
        } else {
            Device::by_address(ip).ok()
        };
        let device =
            device.ok_or_else(|| Error::failed(format!("no device has the address {ip}")))?;
        let base = Base::new(link, &device)?;
        // Refuse other addresses: their connections would make the measurement fail.
        let listener = ListeningId::builder(&base.ctx)
            .peers(from.into())
            .bind(at)
            .map_err(failed("listening"))?;
        Ok(Box::new(Listening { base, listener }))
    }

    fn connect(&self, link: &Link, to: SocketAddr) -> Result<Box<dyn Session>> {
        let device = Device::route_to(to).map_err(failed("looking for a device"))?;
        let base = Base::new(link, &device)?;
        let mut session = RdmaSession {
            base,
            conns: Vec::new(),
            arrived: 0,
        };
        for _ in 0..link.qps {
            let memory = session.base.memory()?;
            let qp = session.base.queue_pair()?;
            let connection = Connector::new(&session.base.ctx)
                .private_data(&memory.1.remote().to_bytes())
                .connect(to, qp)
                .map_err(failed("connecting"))?;
            let peer = connection.private_data().to_vec();
            session.add(connection, memory, &peer)?;
        }
        Ok(Box::new(session))
    }
}

#[cfg(test)]
mod tests {
    use super::super::point::{Poll, Wire};
    use super::*;
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpStream};

    /// Otherwise a connection from another address would make the client's measurement fail.
    #[test]
    fn foreign_address_is_refused() {
        let link = Link {
            wire: Wire::Rdma,
            crc: true,
            markers: false,
            poll: Poll::Event,
            qps: 1,
            depth: 1,
            max_size: 64,
        };
        let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let client = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));
        let pending = Rdma.listen(&link, here, client).unwrap();
        let mut stranger = TcpStream::connect((Ipv4Addr::LOCALHOST, pending.port())).unwrap();
        // The connection may be reset before or after this.
        let _ = stranger.write_all(b"MPA ID Req Frame\x40\x01\x00\x00");
        stranger.set_read_timeout(Some(STALL)).unwrap();
        let end = stranger.read(&mut [0]).map_err(|e| e.kind());
        assert!(
            matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)),
            "{end:?}"
        );
    }
}
