//! Measures many connections between two processes: set-up time, memory per idle connection, and
//! the rate of 64-octet echoes with one outstanding message per connection. Plain TCP uses `epoll`;
//! `iwarp` uses one completion queue per process.
//!
//! The connections of `iwarp` are set up as in a server with thousands of connections: with the
//! identifiers of `iwarp::runtime::cm`, whose events arrive on a single channel, and with several
//! concurrent attempts to connect.

use crate::peer::{self, ReceivingProcess};
use crate::rdma::{ALL_ACCESS, Link, STALL_TIMEOUT, posted};
use crate::tcp::{self, recv_some, send_all};
use crate::{Wait, cpu};
use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use iwarp::runtime::cm::{CmEventChannel, CmEventKind, CmId, ConnectionParameters};
use iwarp::runtime::create_event_channel;
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr, QueuePair, RecvWr,
    SendWr, WcOpcode, WcStatus,
};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Length of an echoed message.
const MESSAGE: usize = 64;
/// Maximum number of events or completions that are polled at a time.
const BATCH: usize = 256;
/// Depths of the queues of a queue pair. At most one message is outstanding, and every fourth Send
/// is signaled.
const SEND_DEPTH: u32 = 8;
const RECV_DEPTH: u32 = 2;
const SIGNAL_EVERY: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Tcp,
    Iwarp,
}

#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    /// Kind of connection
    #[arg(long)]
    kind: Kind,
    /// Number of connections
    #[arg(long)]
    n: u32,
    /// Duration of the echo in milliseconds; a fifth more is run before, to warm up
    #[arg(long, default_value_t = 1000)]
    ms: u64,
    #[command(flatten)]
    link: Link,
    /// Maximum number of concurrent attempts to connect (only iwarp)
    #[arg(long, default_value_t = 64)]
    window: usize,
}

/// Raises the limit on open files to the maximum of this process.
fn raise_file_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    )
    .context("cannot raise the limit on open files")
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Memory and open files of a process without connections.
struct Baseline {
    resident: u64,
    files: usize,
}

impl Baseline {
    fn now() -> Self {
        Self {
            resident: cpu::resident(),
            files: open_files(),
        }
    }

    /// Returns the increase in bytes and in open files per connection.
    fn per_connection(&self, n: u32) -> (f64, f64) {
        let n = f64::from(n);
        (
            cpu::resident().saturating_sub(self.resident) as f64 / n,
            open_files().saturating_sub(self.files) as f64 / n,
        )
    }
}

/// All connections in one process.
trait End {
    /// Sends the first message of every connection.
    fn start(&mut self) -> Result<()>;
    /// Waits for messages, and sends each of them back. Returns their number.
    fn echo_arrived(&mut self) -> Result<u64>;
}

struct Tcp {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
    streams: Vec<TcpStream>,
}

impl Tcp {
    fn new(n: u32) -> Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(BATCH),
            streams: Vec::with_capacity(n as usize),
        })
    }

    fn add(&mut self, stream: TcpStream) -> Result<()> {
        stream.set_nodelay(true)?;
        let data = epoll::EventData::new_u64(self.streams.len() as u64);
        epoll::add(&self.epoll, &stream, data, epoll::EventFlags::IN)?;
        self.streams.push(stream);
        Ok(())
    }
}

impl End for Tcp {
    fn start(&mut self) -> Result<()> {
        self.streams
            .iter()
            .try_for_each(|s| send_all(s, &[1; MESSAGE], false))
    }

    fn echo_arrived(&mut self) -> Result<u64> {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        self.events.clear();
        let events = spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, events, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("epoll"),
        }
        let mut messages = 0;
        let mut buf = [0u8; 4096];
        for event in &self.events {
            let index = { event.data }.u64() as usize;
            let stream = self
                .streams
                .get(index)
                .context("an event for an unknown stream")?;
            let n = recv_some(stream, &mut buf, false)?;
            if n == 0 {
                // The measurement is over, and the other process has closed the connection.
                epoll::delete(&self.epoll, stream)?;
                continue;
            }
            messages += (n / MESSAGE) as u64;
            send_all(stream, &buf[..n], false)?;
        }
        Ok(messages)
    }
}

/// A connection identifier and its queue pair.
struct Connection {
    id: CmId,
    qp: QueuePair,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.id.destroy();
    }
}

struct Rdma {
    // The first field, so that connections are dropped before the objects that they use.
    connections: Vec<Connection>,
    channel: CmEventChannel,
    sent: Vec<u32>,
    done: Vec<Cqe>,
    ctx: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    memory: MemoryRegion,
    wait: Wait,
}

impl Rdma {
    fn new(link: &Link, n: u32) -> Result<Self> {
        let ctx = link.open()?;
        let pd = ProtectionDomain::new(&ctx);
        let memory = pd.reg_mr(n as usize * MESSAGE, ALL_ACCESS)?;
        memory.write_at(0, &vec![1; n as usize * MESSAGE])?;
        Ok(Self {
            connections: Vec::with_capacity(n as usize),
            channel: create_event_channel()?,
            sent: vec![0; n as usize],
            done: vec![Cqe::default(); BATCH],
            cq: ctx.create_cq(n * 8 + 64, None)?,
            ctx,
            pd,
            memory,
            wait: link.wait,
        })
    }

    fn queue_pair(&self) -> Result<QueuePair> {
        let qp = self.pd.create_qp(
            &QpInitAttr::new(&self.cq, &self.cq)
                .cap(SEND_DEPTH, RECV_DEPTH)
                .max_sge(1, 1)
                .max_inline_data(0)
                .rd_atomic(1, 1),
        )?;
        let index = self.connections.len();
        posted(qp.post_recv(&[RecvWr {
            wr_id: index as u64,
            sges: &[self.slot(index)?],
        }]))?;
        Ok(qp)
    }

    /// Connects `n` queue pairs, with at most `window` concurrent attempts.
    fn connect(&mut self, to: SocketAddr, n: u32, window: usize) -> Result<()> {
        let parameters = ConnectionParameters::default();
        let device = self.ctx.device();
        let own = device.source_for(to).map(|ip| device.socket_addr(ip, 0));
        let (n, mut established) = (n as usize, 0);
        while established < n {
            while self.connections.len() < n && self.connections.len() - established < window.max(1)
            {
                let qp = self.queue_pair()?;
                let id = CmId::create(&self.channel, Some(&self.ctx));
                id.resolve_addr(own, to)?;
                id.resolve_route()?;
                id.set_queue_pair(Some(&qp));
                id.connect(&parameters)?;
                self.connections.push(Connection { id, qp });
            }
            let event = self.channel.next(Some(STALL_TIMEOUT))?;
            match event.kind {
                CmEventKind::AddrResolved | CmEventKind::RouteResolved => {}
                CmEventKind::Established => established += 1,
                other => bail!("connecting failed: {other:?}, status {}", event.status),
            }
        }
        Ok(())
    }

    fn accept(&mut self, listener: &CmId, n: u32) -> Result<()> {
        let parameters = ConnectionParameters::default();
        listener.listen(4096)?;
        let (local, _) = listener.addresses();
        peer::send_line(local.context("the listener has no address")?)?;
        let mut established = 0;
        while established < n {
            let event = self.channel.next(Some(STALL_TIMEOUT))?;
            match event.kind {
                CmEventKind::ConnectRequest => {
                    let qp = self.queue_pair()?;
                    event.id.set_queue_pair(Some(&qp));
                    event.id.accept(&parameters)?;
                    self.connections.push(Connection { id: event.id, qp });
                }
                CmEventKind::Established => established += 1,
                other => bail!("accepting failed: {other:?}, status {}", event.status),
            }
        }
        Ok(())
    }

    fn slot(&self, index: usize) -> Result<iwarp::verbs::Sge> {
        Ok(self.memory.sge(index * MESSAGE..(index + 1) * MESSAGE)?)
    }

    fn send(&mut self, index: usize) -> Result<()> {
        let sges = [self.slot(index)?];
        let mut wr = SendWr::send(index as u64, &sges);
        self.sent[index] += 1;
        if self.sent[index].is_multiple_of(SIGNAL_EVERY) {
            wr = wr.signaled();
        }
        posted(self.connections[index].qp.post_send(&[wr]))
    }
}

impl End for Rdma {
    fn start(&mut self) -> Result<()> {
        (0..self.connections.len()).try_for_each(|index| self.send(index))
    }

    fn echo_arrived(&mut self) -> Result<u64> {
        let n = match self.wait {
            Wait::Spin => self.cq.poll(&mut self.done).map_err(iwarp::Error::from)?,
            Wait::Event => match self
                .cq
                .wait(&mut self.done, Some(Duration::from_millis(100)))
            {
                Err(iwarp::Error::TimedOut(_)) => 0,
                n => n?,
            },
        };
        let mut messages = 0;
        for i in 0..n {
            let cqe = self.done[i];
            if cqe.status == WcStatus::Flushed {
                // The measurement is over, and the other process has disconnected.
                continue;
            }
            if cqe.status != WcStatus::Success {
                bail!("a work request failed with {:?}", cqe.status);
            }
            if cqe.opcode == WcOpcode::Recv {
                messages += 1;
                let index = cqe.wr_id as usize;
                // The answer is sent from the memory that receives the next message. That is safe:
                // the peer sends the next message only after it has received the answer.
                posted(self.connections[index].qp.post_recv(&[RecvWr {
                    wr_id: cqe.wr_id,
                    sges: &[self.slot(index)?],
                }]))?;
                self.send(index)?;
            }
        }
        Ok(messages)
    }
}

/// Runs the process that connects and measures the time.
pub(crate) fn measure(a: &ScaleArgs) -> Result<Value> {
    raise_file_limit()?;
    let slab = cpu::slab();
    let mut peer = ReceivingProcess::start()?;
    let to = peer.address()?;
    match a.kind {
        Kind::Tcp => {
            let mut end = Tcp::new(a.n)?;
            let before = Baseline::now();
            let start = Instant::now();
            for _ in 0..a.n {
                end.add(TcpStream::connect(to)?)?;
            }
            echo(a, &mut peer, end, &before, start, slab)
        }
        Kind::Iwarp => {
            let mut end = Rdma::new(&a.link, a.n)?;
            let before = Baseline::now();
            let start = Instant::now();
            end.connect(to, a.n, a.window)?;
            echo(a, &mut peer, end, &before, start, slab)
        }
    }
}

fn echo(
    a: &ScaleArgs,
    peer: &mut ReceivingProcess,
    mut end: impl End,
    before: &Baseline,
    start: Instant,
    slab: u64,
) -> Result<Value> {
    let theirs = peer.report()?;
    let setup = start.elapsed();
    let (bytes, files) = before.per_connection(a.n);
    let slab = cpu::slab().saturating_sub(slab);
    end.start()?;
    let warm_up = Duration::from_millis(a.ms / 5);
    let echo_for = |end: &mut dyn End, time: Duration| -> Result<(u64, Duration)> {
        let start = Instant::now();
        let (mut messages, mut last) = (0, start);
        loop {
            let n = end.echo_arrived()?;
            messages += n;
            if n > 0 {
                last = Instant::now();
            } else if last.elapsed() > STALL_TIMEOUT {
                bail!("no message for {} s", STALL_TIMEOUT.as_secs());
            }
            if start.elapsed() >= time {
                return Ok((messages, start.elapsed()));
            }
        }
    };
    echo_for(&mut end, warm_up)?;
    let cpu0 = cpu::process_us();
    let (messages, time) = echo_for(&mut end, Duration::from_millis(a.ms))?;
    let cpu_us = cpu::process_us() - cpu0;
    peer.say("enough")?;
    // Both processes measure the memory per connection; `bytes` is the larger value.
    let their_bytes = peer::number(&theirs, "bytes");
    Ok(json!({
        "setup_s": setup.as_secs_f64(),
        "setup_us": setup.as_secs_f64() * 1e6 / f64::from(a.n),
        "client_bytes": bytes,
        "server_bytes": their_bytes,
        "bytes": bytes.max(their_bytes),
        "client_files": files,
        "server_files": peer::number(&theirs, "files"),
        "slab_bytes_both": slab as f64 / f64::from(a.n),
        "echo_kmsg": messages as f64 / time.as_secs_f64() / 1e3,
        "client_cpu_us_per_echo": cpu_us / messages.max(1) as f64,
    }))
}

/// Runs the process that answers, until the sender ends the measurement.
pub(crate) fn peer(a: &ScaleArgs) -> Result<Value> {
    raise_file_limit()?;
    match a.kind {
        Kind::Tcp => {
            let mut end = Tcp::new(a.n)?;
            let listener = tcp::listen()?;
            let before = Baseline::now();
            for _ in 0..a.n {
                end.add(listener.accept()?.0)?;
            }
            answer(a, end, &before)
        }
        Kind::Iwarp => {
            let mut end = Rdma::new(&a.link, a.n)?;
            let listener = CmId::create(&end.channel, Some(&end.ctx));
            listener.bind((Ipv4Addr::LOCALHOST, 0).into())?;
            let before = Baseline::now();
            end.accept(&listener, a.n)?;
            listener.destroy();
            answer(a, end, &before)
        }
    }
}

fn answer(a: &ScaleArgs, mut end: impl End, before: &Baseline) -> Result<Value> {
    let (bytes, files) = before.per_connection(a.n);
    peer::send_line(json!({ "bytes": bytes, "files": files }))?;
    let enough = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&enough);
    std::thread::spawn(move || {
        // The end of the pipe has the same meaning as a line.
        let _ = peer::read_line();
        flag.store(true, Ordering::Relaxed);
    });
    while !enough.load(Ordering::Relaxed) {
        match end.echo_arrived() {
            Ok(_) => {}
            // The other process needs some time to close ten thousand connections. Ignore errors
            // during that time.
            Err(_) if enough.load(Ordering::Relaxed) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(json!({}))
}
