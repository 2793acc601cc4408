//! `iwarp` through its public interface, as a program would use it.
//!
//! Each process has one completion queue. A spinning process polls it, which drives the socket. A
//! sleeping process waits for completions, while the progress thread drives the socket. An RDMA
//! Write creates no completion at its target. So a spinning target watches the last octet of its
//! memory while it polls; for a sleeping target, Writes with immediate data are used.

use crate::peer::{self, ReceivingProcess};
use crate::stats::{Flow, Samples};
use crate::{OnOff, Time, Wait, cpu};
use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, PostFailed, ProtectionDomain, QpInitAttr, RecvWr,
    RemoteMemory, SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus,
};
use iwarp::{Access, Config, Device};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Maximum number of work requests per posting call.
const LIST: usize = 64;
/// Maximum number of completions per poll.
const POLL: usize = 64;
/// Size of the memory through which small messages cycle, so that they do not all use the same
/// cache line.
const WINDOW: usize = 256 * 1024;
/// Maximum number of Reads in flight.
const MAX_READS: u32 = 4096;
/// A measurement without progress for this long fails.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// All access rights.
pub(crate) const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Op {
    Write,
    Send,
    Read,
    Fetchadd,
}

impl Op {
    /// Returns `true` if the peer's RNIC sends a response.
    const fn has_response(self) -> bool {
        matches!(self, Self::Read | Self::Fetchadd)
    }
}

/// How work requests are posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Post {
    /// In lists of up to 64 per call
    List,
    /// One per call
    Single,
}

#[derive(Debug, Args)]
pub(crate) struct BandwidthArgs {
    /// The operation
    #[arg(long)]
    op: Op,
    /// Octets per message; must be 8 for FetchAdd
    #[arg(long)]
    size: usize,
    #[command(flatten)]
    time: Time,
    #[command(flatten)]
    link: Link,
    /// Maximum number of outstanding operations
    #[arg(long, default_value_t = 64)]
    depth: u32,
    /// How work requests are posted
    #[arg(long, default_value = "list")]
    post: Post,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct LatencyArgs {
    /// The operation
    #[arg(long)]
    op: Op,
    /// Octets per message; must be 8 for FetchAdd
    #[arg(long)]
    size: usize,
    /// Round trips; a tenth more are made before, to warm up
    #[arg(long, default_value_t = 10_000)]
    iters: u32,
    #[command(flatten)]
    link: Link,
}

/// Settings of both processes.
#[derive(Debug, Clone, Args)]
pub(crate) struct Link {
    /// Use CRCs
    #[arg(long, default_value = "on")]
    crc: OnOff,
    /// How both sides wait
    #[arg(long, default_value = "spin")]
    pub(crate) wait: Wait,
    /// Limit FPDUs to this maximum segment size of TCP
    #[arg(long)]
    mss: Option<u32>,
    /// Maximum number of Reads and atomics in flight [default: the depth]
    #[arg(long)]
    reads: Option<u16>,
}

impl LatencyArgs {
    /// Returns the arguments for RDMA Writes with both sides spinning.
    pub(crate) const fn writes(size: usize, crc: OnOff) -> Self {
        Self {
            op: Op::Write,
            size,
            iters: 0,
            link: Link {
                crc,
                wait: Wait::Spin,
                mss: None,
                reads: None,
            },
        }
    }
}

impl Link {
    /// Opens the loopback device with these settings.
    pub(crate) fn open(&self) -> Result<Context> {
        let device = Device::by_address(Ipv4Addr::LOCALHOST.into())?;
        let mut config = Config::from_env();
        config.crc = self.crc.is_on();
        config.mss = self.mss.or(config.mss);
        Ok(Context::open(&device, config)?)
    }
}

/// Converts the result of a posting call.
///
/// # Errors
/// Returns the error of the first request that was not posted.
pub(crate) fn posted(r: std::result::Result<(), PostFailed>) -> Result<()> {
    r.map_err(iwarp::Error::from)
        .context("cannot post a work request")
}

/// The objects of one process, before it is connected.
struct End {
    ctx: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    wait: Wait,
    reads: Option<u16>,
    depth: u32,
    receives: u32,
    len: usize,
}

impl End {
    fn new(link: &Link, depth: u32, size: usize) -> Result<Self> {
        let ctx = link.open()?;
        let receives = depth.max(16) + 8;
        let cq = ctx.create_cq(depth + receives + 64, None)?;
        Ok(Self {
            pd: ProtectionDomain::new(&ctx),
            ctx,
            cq,
            wait: link.wait,
            reads: link.reads,
            depth,
            receives,
            len: size.max(WINDOW),
        })
    }

    fn queue_pair(&self) -> Result<iwarp::verbs::QueuePair> {
        let max_reads = self.reads.map_or(MAX_READS, u32::from);
        let reads = self.depth.clamp(1, max_reads.clamp(1, MAX_READS)) as u16;
        Ok(self.pd.create_qp(
            &QpInitAttr::new(&self.cq, &self.cq)
                .cap(self.depth + 8, self.receives)
                .max_sge(1, 1)
                .rd_atomic(reads, reads),
        )?)
    }

    fn connect(self, to: SocketAddr) -> Result<Wire> {
        let memory = self.memory()?;
        let connection = Connector::new(&self.ctx)
            .private_data(&memory.1.remote().to_bytes())
            .connect(to, self.queue_pair()?)?;
        let remote = RemoteMemory::from_bytes(connection.private_data());
        Wire::new(self, connection, memory, remote)
    }

    fn accept(self) -> Result<Wire> {
        let listener = ListeningId::bind(&self.ctx, (Ipv4Addr::LOCALHOST, 0).into())?;
        peer::send_line(listener.local_addr())?;
        let request = listener.accept(Some(STALL_TIMEOUT))?;
        let memory = self.memory()?;
        let remote = RemoteMemory::from_bytes(request.private_data());
        let parameters = ConnectionParameters {
            private_data: memory.1.remote().to_bytes().to_vec(),
            ..ConnectionParameters::default()
        };
        let connection = request.accept(self.queue_pair()?, &parameters)?;
        Wire::new(self, connection, memory, remote)
    }

    /// Registers the memory to send from, and the memory for receives and for the peer's Writes.
    fn memory(&self) -> Result<(MemoryRegion, MemoryRegion)> {
        let register = || -> Result<MemoryRegion> {
            let mr = self.pd.reg_mr(self.len, ALL_ACCESS)?;
            mr.write_at(0, &vec![0; self.len])?;
            Ok(mr)
        };
        Ok((register()?, register()?))
    }
}

/// One end of the connection under test.
struct Wire {
    // The first field, so that the connection is dropped before the objects of its queue pair.
    connection: ConnectedId,
    end: End,
    source: MemoryRegion,
    target: MemoryRegion,
    remote: RemoteMemory,
    /// Number of posted receives.
    posted_receives: u32,
    /// Number of send requests posted so far.
    started: u64,
    /// Number of send requests that are not complete.
    outstanding: u64,
    /// Number of messages that have arrived and are not yet handled.
    arrived: u64,
    /// The peer's last message (see [`Wire::send_end`]) has arrived.
    end_received: bool,
    /// Buffer for completions. It is reused, because clearing it for each poll would take as long
    /// as the poll.
    done: Box<[Cqe; POLL]>,
}

impl Wire {
    fn new(
        end: End,
        connection: ConnectedId,
        memory: (MemoryRegion, MemoryRegion),
        remote: Option<RemoteMemory>,
    ) -> Result<Self> {
        let (source, target) = memory;
        let mut wire = Self {
            connection,
            end,
            source,
            target,
            remote: remote.context("the peer's private data do not describe its memory")?,
            posted_receives: 0,
            started: 0,
            outstanding: 0,
            arrived: 0,
            end_received: false,
            done: Box::new([Cqe::default(); POLL]),
        };
        wire.refill()?;
        Ok(wire)
    }

    /// Posts the missing receives.
    fn refill(&mut self) -> Result<()> {
        let sges = [self.target.sge(..)?];
        let list = [RecvWr {
            wr_id: 0,
            sges: &sges,
        }; LIST];
        while self.posted_receives < self.end.receives {
            let n = (self.end.receives - self.posted_receives).min(LIST as u32);
            posted(self.connection.post_recv(&list[..n as usize]))?;
            self.posted_receives += n;
        }
        Ok(())
    }

    /// Polls and counts completions. If `may_sleep` is set and this process sleeps, waits for at
    /// least one. Returns the number of completions.
    fn poll_cq(&mut self, may_sleep: bool) -> Result<usize> {
        let cq = &self.end.cq;
        let n = if may_sleep && self.end.wait == Wait::Event {
            cq.wait(&mut self.done[..], Some(STALL_TIMEOUT))?
        } else {
            cq.poll(&mut self.done[..]).map_err(iwarp::Error::from)?
        };
        for i in 0..n {
            let cqe = self.done[i];
            self.count_completion(&cqe)?;
        }
        Ok(n)
    }

    fn count_completion(&mut self, cqe: &Cqe) -> Result<()> {
        if self.end_received && cqe.status == WcStatus::Flushed {
            // The peer disconnects after its last message, which flushes the posted receives.
            return Ok(());
        }
        if cqe.status != WcStatus::Success {
            let fault = self.connection.fault().map(|f| f.to_string());
            bail!("a work request failed with {:?}: {fault:?}", cqe.status);
        }
        match cqe.opcode {
            WcOpcode::Recv | WcOpcode::RecvWriteImm => {
                self.posted_receives -= 1;
                // Sends without immediate data, and Writes with immediate data, are messages. A
                // Send with immediate data is the peer's last message.
                if cqe.opcode == WcOpcode::Recv && cqe.flags.contains(WcFlags::WITH_IMM) {
                    self.end_received = true;
                } else {
                    self.arrived += 1;
                }
                // Post receives in lists, but before the peer runs out of them.
                if self.posted_receives <= self.end.receives / 2 {
                    self.refill()?;
                }
            }
            // The `wr_id` is the number of requests that this completion covers.
            _ => self.outstanding -= cqe.wr_id,
        }
        Ok(())
    }

    fn wait_until(&mut self, condition: impl Fn(&Self) -> bool) -> Result<()> {
        let mut idle = StallCheck::default();
        while !condition(self) {
            let n = self.poll_cq(true)?;
            idle.check(n)?;
        }
        Ok(())
    }

    fn await_idle(&mut self) -> Result<()> {
        self.wait_until(|w| w.outstanding == 0)
    }

    fn await_message(&mut self) -> Result<()> {
        self.wait_until(|w| w.arrived > 0)?;
        self.arrived -= 1;
        Ok(())
    }

    /// Sends the last message: "end of data" from the sender, "all data arrived" from the receiver.
    fn send_end(&mut self) -> Result<()> {
        self.outstanding += 1;
        let wr = SendWr {
            op: SendOp::SendImm(0),
            ..SendWr::inline(1, &[&[1u8]])
        };
        posted(self.connection.post_send(&[wr.signaled()]))
    }

    fn await_end(&mut self) -> Result<()> {
        self.wait_until(|w| w.end_received)
    }

    /// Posts as many operations as the depth allows, in lists of a quarter of the depth. With
    /// shorter lists, the posting calls would take most of the time.
    fn fill(&mut self, a: &BandwidthArgs, depth: u64) -> Result<()> {
        let every = (depth / 4).clamp(1, LIST as u64);
        if depth - self.outstanding < every {
            return Ok(());
        }
        let slots = (self.end.len / a.size).max(1) as u64;
        let per_call = match a.post {
            Post::List => every,
            Post::Single => 1,
        };
        while self.outstanding < depth {
            let n = (depth - self.outstanding).min(per_call) as usize;
            let mut sges = [[Sge::default()]; LIST];
            let mut list = [SendWr::send(0, &[]); LIST];
            for (i, sge) in sges.iter_mut().take(n).enumerate() {
                let slot = (self.started + i as u64) % slots;
                let at = slot as usize * a.size;
                *sge = [self.source.sge(at..at + a.size)?];
            }
            for (i, (wr, sge)) in list.iter_mut().zip(&sges).take(n).enumerate() {
                let slot = (self.started + i as u64) % slots;
                let to = self.remote.addr + slot * a.size as u64;
                let rkey = self.remote.rkey;
                *wr = match a.op {
                    Op::Write => SendWr::write(0, to, rkey, sge),
                    Op::Send => SendWr::send(0, sge),
                    Op::Read => SendWr::read(0, to, rkey, sge),
                    Op::Fetchadd => SendWr::fetch_add(0, to, rkey, 1, sge),
                };
            }
            self.started += n as u64;
            self.outstanding += n as u64;
            // Only the last request of a list is signaled; of single requests, only each `every`th
            // one. Its completion covers all requests before it.
            let covered = match a.post {
                Post::List => n as u64,
                Post::Single if self.started.is_multiple_of(every) => every,
                Post::Single => 0,
            };
            if covered > 0 {
                list[n - 1].wr_id = covered;
                list[n - 1] = list[n - 1].signaled();
            }
            posted(self.connection.post_send(&list[..n]))?;
        }
        Ok(())
    }

    /// Counts the last unsignaled single requests as complete: the completion of the last message
    /// (see [`Wire::send_end`]) covers them.
    fn forget_unsignaled(&mut self, a: &BandwidthArgs, every: u64) {
        if a.post == Post::Single {
            self.outstanding -= self.started % every;
        }
    }

    /// Sends one message of the ping-pong. Its last octet is `tag`.
    fn ping(&mut self, a: &LatencyArgs, tag: u8) -> Result<()> {
        self.source.write_at(a.size - 1, &[tag])?;
        let sges = [self.source.sge(..a.size)?];
        let RemoteMemory { addr, rkey, .. } = self.remote;
        let wr = match (a.op, self.end.wait) {
            (Op::Write, Wait::Spin) => SendWr::write(1, addr, rkey, &sges),
            (Op::Write, Wait::Event) => SendWr::new(
                1,
                SendOp::WriteImm {
                    remote_addr: addr,
                    rkey,
                    imm: 0,
                },
                &sges,
            ),
            _ => SendWr::send(1, &sges),
        };
        self.outstanding += 1;
        posted(self.connection.post_send(&[wr.signaled()]))
    }

    /// Waits for one message of the ping-pong. Returns `false` if the peer's last message has
    /// arrived instead.
    fn pong(&mut self, a: &LatencyArgs, tag: u8) -> Result<bool> {
        if a.op == Op::Write && self.end.wait == Wait::Spin {
            let mut idle = StallCheck::default();
            while self.target.load_u8(a.size - 1)? != tag {
                let n = self.poll_cq(false)?;
                if self.end_received {
                    return Ok(false);
                }
                idle.check(n)?;
            }
            return Ok(true);
        }
        self.wait_until(|w| w.arrived > 0 || w.end_received)?;
        if self.arrived == 0 {
            return Ok(false);
        }
        self.await_message()?;
        Ok(true)
    }

    /// Posts one Read or FetchAdd and waits for its completion.
    fn fetch(&mut self, a: &LatencyArgs) -> Result<()> {
        let sges = [self.source.sge(..a.size)?];
        let RemoteMemory { addr, rkey, .. } = self.remote;
        let wr = match a.op {
            Op::Fetchadd => SendWr::fetch_add(1, addr, rkey, 1, &sges),
            _ => SendWr::read(1, addr, rkey, &sges),
        };
        self.outstanding += 1;
        posted(self.connection.post_send(&[wr.signaled()]))?;
        self.await_idle()
    }
}

/// Fails a polling loop that makes no progress for [`STALL_TIMEOUT`]. Reads the clock only in
/// every 16384th iteration.
#[derive(Debug, Default)]
struct StallCheck {
    iterations: u32,
    since: Option<Instant>,
}

impl StallCheck {
    fn check(&mut self, progress: usize) -> Result<()> {
        if progress > 0 {
            *self = Self::default();
            return Ok(());
        }
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations.is_multiple_of(1 << 14) {
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() > STALL_TIMEOUT {
                bail!("no completion for {} s", STALL_TIMEOUT.as_secs());
            }
        }
        Ok(())
    }
}

fn check_size(op: Op, size: usize) -> Result<()> {
    match (op, size) {
        (Op::Fetchadd, 8) => Ok(()),
        (Op::Fetchadd, _) => bail!("--size must be 8 for FetchAdd"),
        (_, 1..=0x400_0000) => Ok(()),
        _ => bail!("--size must be 1 to 64 Mi octets"),
    }
}

fn depth(a: &BandwidthArgs) -> u32 {
    let maximum = if a.op.has_response() { MAX_READS } else { 4096 };
    a.depth.clamp(1, maximum)
}

/// Runs the process that posts the operations.
pub(crate) fn bandwidth(a: &BandwidthArgs) -> Result<Value> {
    check_size(a.op, a.size)?;
    let depth = depth(a);
    let mut peer = ReceivingProcess::start()?;
    let mut wire = End::new(&a.link, depth, a.size)?.connect(peer.address()?)?;
    let every = u64::from(depth / 4).clamp(1, LIST as u64);
    let cpu0 = cpu::process_us();
    let start = Instant::now();
    let end = start + Duration::from_millis(a.time.ms);
    let mut since_clock = 0;
    let mut idle = StallCheck::default();
    loop {
        let before = wire.started;
        wire.fill(a, u64::from(depth))?;
        since_clock += (wire.started - before) as usize * (a.size + 2048);
        let n = wire.poll_cq(true)?;
        idle.check(n)?;
        if since_clock >= 64 * 1024 {
            since_clock = 0;
            if Instant::now() >= end {
                break;
            }
        }
    }
    wire.forget_unsignaled(a, every);
    if a.op.has_response() {
        wire.await_idle()?;
    }
    // This message follows the data, so all data have arrived when the peer answers it.
    wire.send_end()?;
    wire.await_end()?;
    let ns = start.elapsed().as_nanos() as f64;
    let tx_cpu_us = cpu::process_us() - cpu0;
    wire.await_idle()?;
    let c = wire.connection.counters();
    let report = peer.report()?;
    let messages = wire.started;
    if a.op == Op::Send && peer::number(&report, "arrived") as u64 != messages {
        bail!("{messages} messages were sent, but the receiver counted: {report}");
    }
    let flow = Flow {
        bytes: messages as f64 * a.size as f64,
        size: a.size as f64,
        ns,
        tx_cpu_us,
        rx_cpu_us: peer::number(&report, "cpu_us"),
    };
    let mut out = flow.report();
    out["fpdus_per_message"] = json!(c.tx_fpdus as f64 / messages.max(1) as f64);
    Ok(out)
}

pub(crate) fn bandwidth_peer(a: &BandwidthArgs) -> Result<Value> {
    let mut wire = End::new(&a.link, depth(a), a.size)?.accept()?;
    let cpu0 = cpu::process_us();
    wire.await_end()?;
    wire.send_end()?;
    let cpu_us = cpu::process_us() - cpu0;
    wire.await_idle()?;
    Ok(json!({ "cpu_us": cpu_us, "arrived": wire.arrived }))
}

const fn tag(i: u32) -> u8 {
    (i % 255) as u8 + 1
}

pub(crate) struct PingPong {
    wire: Wire,
    args: LatencyArgs,
    round_trip: u32,
}

impl PingPong {
    /// Connects as the process that sends first.
    pub(crate) fn connect(args: &LatencyArgs, to: SocketAddr) -> Result<Self> {
        check_size(args.op, args.size)?;
        Ok(Self {
            wire: End::new(&args.link, 16, args.size)?.connect(to)?,
            args: args.clone(),
            round_trip: 0,
        })
    }

    /// Listens, sends the address to the other process, and accepts a connection as the process
    /// that answers.
    pub(crate) fn accept(args: &LatencyArgs) -> Result<Self> {
        Ok(Self {
            wire: End::new(&args.link, 16, args.size)?.accept()?,
            args: args.clone(),
            round_trip: 0,
        })
    }

    /// Makes one round trip: a message and its answer, or a Read or FetchAdd.
    pub(crate) fn ask(&mut self) -> Result<()> {
        if self.args.op.has_response() {
            return self.wire.fetch(&self.args);
        }
        let tag = tag(self.round_trip);
        self.round_trip = self.round_trip.wrapping_add(1);
        self.wire.ping(&self.args, tag)?;
        if !self.wire.pong(&self.args, tag)? {
            bail!("the receiver closed the connection");
        }
        Ok(())
    }

    /// Waits for a message and answers it. Returns `false` if the peer's last message has arrived
    /// instead.
    pub(crate) fn answer(&mut self) -> Result<bool> {
        let tag = tag(self.round_trip);
        if !self.wire.pong(&self.args, tag)? {
            return Ok(false);
        }
        self.round_trip = self.round_trip.wrapping_add(1);
        self.wire.ping(&self.args, tag)?;
        Ok(true)
    }

    /// Sends the last message and waits for the peer's answer.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.wire.send_end()?;
        self.wire.await_end()?;
        self.wire.await_idle()
    }

    /// Waits for the peer's last message and answers it.
    pub(crate) fn answer_end(mut self) -> Result<()> {
        self.wire.await_end()?;
        self.wire.send_end()?;
        self.wire.await_idle()
    }
}

/// Runs the process that measures the time.
pub(crate) fn latency(a: &LatencyArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let mut end = PingPong::connect(a, peer.address()?)?;
    let samples = Samples::of(a.iters.into(), || end.ask())?;
    end.finish()?;
    Ok(samples.report())
}

/// Runs the process that answers, until the peer's last message.
pub(crate) fn latency_peer(a: &LatencyArgs) -> Result<Value> {
    let mut end = PingPong::accept(a)?;
    while !a.op.has_response() && end.answer()? {}
    end.answer_end()?;
    Ok(json!({}))
}
