//! Measures CPU time that should be nearly zero: the CPU time of idle processes with connections,
//! and that of a program whose process is only the target of RDMA Writes.

use crate::peer::{self, ReceivingProcess};
use crate::rdma::{ALL_ACCESS, Link, STALL_TIMEOUT, posted};
use crate::{Time, cpu};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr, RemoteMemory,
    SendWr, WcStatus,
};
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// Number of connections of the idle processes.
const CONNECTIONS: usize = 10;
/// Octets of each Write.
const PIECE: usize = 64 * 1024;
const DEPTH: u64 = 16;

#[derive(Debug, Args)]
pub(crate) struct IdleArgs {
    /// Duration of the measurement in seconds
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[command(flatten)]
    link: Link,
}

#[derive(Debug, Args)]
pub(crate) struct PassiveArgs {
    #[command(flatten)]
    time: Time,
    #[command(flatten)]
    link: Link,
}

struct Endpoint {
    ctx: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    memory: MemoryRegion,
}

impl Endpoint {
    fn new(link: &Link) -> Result<Self> {
        let ctx = link.open()?;
        let pd = ProtectionDomain::new(&ctx);
        Ok(Self {
            cq: ctx.create_cq(1024, None)?,
            memory: pd.reg_mr(DEPTH as usize * PIECE, ALL_ACCESS)?,
            ctx,
            pd,
        })
    }

    fn queue_pair(&self) -> Result<iwarp::verbs::QueuePair> {
        Ok(self
            .pd
            .create_qp(&QpInitAttr::new(&self.cq, &self.cq).cap(64, 4))?)
    }

    fn connect(&self, to: std::net::SocketAddr) -> Result<ConnectedId> {
        Ok(Connector::new(&self.ctx).connect(to, self.queue_pair()?)?)
    }

    fn accept(&self, listener: &ListeningId) -> Result<ConnectedId> {
        let parameters = ConnectionParameters {
            private_data: self.memory.remote().to_bytes().to_vec(),
            ..ConnectionParameters::default()
        };
        let request = listener.accept(Some(STALL_TIMEOUT))?;
        Ok(request.accept(self.queue_pair()?, &parameters)?)
    }

    fn listen(&self) -> Result<ListeningId> {
        let listener = ListeningId::bind(&self.ctx, (Ipv4Addr::LOCALHOST, 0).into())?;
        peer::send_line(listener.local_addr())?;
        Ok(listener)
    }
}

/// Sleeps for `time`. Returns the CPU time and the wake-ups of this process during that time.
fn stay_idle(time: Duration) -> Value {
    // First wait for the end of set-up: an initiator that has received nothing sends up to three
    // reminders, because siw may have missed its first message. The last reminder is sent 4.25 s
    // after connecting, or up to 5.3 s with a coarse clock.
    std::thread::sleep(Duration::from_secs(6));
    let sleeps0 = cpu::sleeps();
    let cpu0 = cpu::process_us();
    std::thread::sleep(time);
    let cpu_us = cpu::process_us() - cpu0;
    // Do not count the wake-up from the `sleep` above.
    json!({
        "cpu_us": cpu_us,
        "wakeups": cpu::sleeps().saturating_sub(sleeps0 + 1),
    })
}

/// Runs the idle process that connects.
pub(crate) fn idle(a: &IdleArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let base = Endpoint::new(&a.link)?;
    let to = peer.address()?;
    let connections = (0..CONNECTIONS)
        .map(|_| base.connect(to))
        .collect::<Result<Vec<_>>>()?;
    let time = Duration::from_secs_f64(a.seconds);
    let ours = stay_idle(time);
    let theirs = peer.report()?;
    drop(connections);
    let maximum = |name| peer::number(&ours, name).max(peer::number(&theirs, name));
    Ok(json!({
        "cpu_us_per_s": maximum("cpu_us") / a.seconds,
        "wakeups_per_s": maximum("wakeups") / a.seconds,
        "connections": CONNECTIONS,
    }))
}

/// Runs the idle process that listens.
pub(crate) fn idle_peer(a: &IdleArgs) -> Result<Value> {
    let base = Endpoint::new(&a.link)?;
    let listener = base.listen()?;
    let connections = (0..CONNECTIONS)
        .map(|_| base.accept(&listener))
        .collect::<Result<Vec<_>>>()?;
    peer::send_line(stay_idle(Duration::from_secs_f64(a.seconds)))?;
    // Keep the connections until the other process has finished its measurement, too.
    peer::read_line()?;
    drop(connections);
    Ok(json!({}))
}

/// Runs the process that writes.
pub(crate) fn passive(a: &PassiveArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let base = Endpoint::new(&a.link)?;
    let connection = base.connect(peer.address()?)?;
    let remote = RemoteMemory::from_bytes(connection.private_data())
        .context("the target's private data do not describe its memory")?;
    // Wait until the target's application thread sleeps.
    peer.say("begin")?;
    peer.report()?;
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    let (mut posted_count, mut completed) = (0u64, 0u64);
    let time = Duration::from_millis(a.time.ms);
    let mut done = [Cqe::default(); DEPTH as usize];
    loop {
        let more = start.elapsed() < time;
        while more && posted_count - completed < DEPTH {
            let at = (posted_count % DEPTH) as usize * PIECE;
            let sges = [base.memory.sge(at..at + PIECE)?];
            let wr = SendWr::write(0, remote.addr + at as u64, remote.rkey, &sges);
            posted(connection.post_send(&[wr.signaled()]))?;
            posted_count += 1;
        }
        let n = base.cq.poll(&mut done).map_err(iwarp::Error::from)?;
        if done[..n].iter().any(|c| c.status != WcStatus::Success) {
            bail!("a Write failed");
        }
        completed += n as u64;
        if start.elapsed() > time + STALL_TIMEOUT {
            bail!("no completion for {} s", STALL_TIMEOUT.as_secs());
        }
        if !more && completed == posted_count {
            break;
        }
    }
    let ns = start.elapsed().as_nanos() as f64;
    peer.say("enough")?;
    let theirs = peer.report()?;
    let pieces = posted_count as f64;
    let placed = peer::number(&theirs, "placed");
    if placed < pieces * PIECE as f64 {
        bail!("the target has received only {placed} octets of {pieces} Writes");
    }
    Ok(json!({
        "gbps": pieces * PIECE as f64 / ns,
        "application_cpu_us": peer::number(&theirs, "thread_us"),
        "target_cpu_us_64k": peer::number(&theirs, "process_us") / pieces,
    }))
}

/// Runs the target. Its only application thread waits for the end of the measurement.
pub(crate) fn passive_peer(a: &PassiveArgs) -> Result<Value> {
    let base = Endpoint::new(&a.link)?;
    let connection = base.accept(&base.listen()?)?;
    peer::read_line()?;
    peer::send_line(json!({}))?;
    let (process0, thread0) = (cpu::process_us(), cpu::thread_us());
    peer::read_line()?;
    let thread_us = cpu::thread_us() - thread0;
    let end = Instant::now() + STALL_TIMEOUT;
    let (mut placed, mut before) = (connection.counters().rx_payload, u64::MAX);
    // Wait until the data that are still in the sockets have been placed.
    while placed != before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        before = placed;
        placed = connection.counters().rx_payload;
    }
    peer::send_line(json!({
        "placed": placed,
        "thread_us": thread_us,
        "process_us": cpu::process_us() - process0,
    }))?;
    Ok(json!({}))
}
