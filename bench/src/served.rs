//! Measures the latency of one-sided operations, depending on what the target's program does: it
//! waits, it alternates between polling and sleeping or working, or another of its threads polls
//! another queue. The initiator sleeps between its operations, and waits for each completion
//! without polling, as most programs do.
//!
//! In some rows, each process has *vain pollers*: threads that poll queues whose peers send
//! nothing, as transfer engines have. These rows are compared with a blocking ping-pong over TCP
//! beside the same pollers.

use crate::peer::{self, ReceivingProcess};
use crate::rdma::{ALL_ACCESS, Link, STALL_TIMEOUT, posted};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, ProtectionDomain, QpInitAttr, RemoteMemory, SendWr, WcStatus,
};
use iwarp_figures::Latencies;
use serde_json::{Map, Value, json};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct ServedArgs {
    /// Operations for each behaviour of the target; 200 more are made before, to warm up
    #[arg(long, default_value_t = 2000)]
    iters: u32,
    /// Measure only behaviours whose name contains this text, and `waits` for comparison
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    link: Link,
}

/// What the target's program does. The others are compared with the first.
const BEHAVIOURS: [(&str, Behaviour); 10] = [
    ("waits", Behaviour::Waits),
    ("polls 16 times, sleeps 450 µs", Behaviour::Sleeps(450)),
    ("polls 16 times, sleeps 1.95 ms", Behaviour::Sleeps(1950)),
    ("polls 16 times, works 500 µs", Behaviour::Works(16, 500)),
    ("polls once, works 100 µs", Behaviour::Works(1, 100)),
    (
        "another thread polls its idle queue and works",
        Behaviour::Other,
    ),
    ("polls 32 times, waits 1 ms, works 200 µs", Behaviour::Loop),
    ("2 vain pollers in each process", Behaviour::Pollers(2)),
    ("4 vain pollers in each process", Behaviour::Pollers(4)),
    ("8 vain pollers in each process", Behaviour::Pollers(8)),
];
/// Maximum number of vain pollers in a process.
const POLLERS_MAX: usize = 8;

#[derive(Debug, Clone, Copy)]
enum Behaviour {
    Waits,
    Sleeps(u64),
    Works(u32, u64),
    Other,
    Loop,
    /// Waits, while this many other threads poll in both processes.
    Pollers(usize),
}

/// Number of operations that are not counted, to warm up.
const WARM_UP: u32 = 200;
/// Longest pause between two operations, in microseconds.
const PAUSE: u64 = 300;

struct End {
    pd: ProtectionDomain,
    ctx: Context,
    /// The queue of the connection that is used.
    used: CompletionQueue,
    /// The queues of idle connections, each of which one thread polls.
    idle: Vec<CompletionQueue>,
}

impl End {
    fn new(link: &Link) -> Result<Self> {
        let ctx = link.open()?;
        Ok(Self {
            pd: ProtectionDomain::new(&ctx),
            used: ctx.create_cq(64, None)?,
            idle: (0..POLLERS_MAX)
                .map(|_| ctx.create_cq(64, None))
                .collect::<iwarp::Result<_>>()?,
            ctx,
        })
    }

    fn queue_pair(&self, cq: &CompletionQueue) -> Result<iwarp::verbs::QueuePair> {
        Ok(self.pd.create_qp(&QpInitAttr::new(cq, cq))?)
    }
}

fn is_selected(a: &ServedArgs, name: &str, behaviour: Behaviour) -> bool {
    let only = a.only.as_deref();
    matches!(behaviour, Behaviour::Waits) || only.is_none_or(|only| name.contains(only))
}

/// Runs the initiator.
pub(crate) fn measure(a: &ServedArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let end = End::new(&a.link)?;
    let to = peer.address()?;
    let connect = |cq| -> Result<ConnectedId> {
        Ok(Connector::new(&end.ctx).connect(to, end.queue_pair(cq)?)?)
    };
    let connection = connect(&end.used)?;
    let idle: Vec<_> = end.idle.iter().map(connect).collect::<Result<_>>()?;
    let mut tcp = TcpStream::connect(peer.address()?)?;
    tcp.set_nodelay(true)?;
    let mut rows = Map::new();
    for (name, behaviour) in BEHAVIOURS {
        if !is_selected(a, name, behaviour) {
            continue;
        }
        peer.say(name)?;
        peer.report()?;
        let row = match behaviour {
            Behaviour::Pollers(count) => beside_pollers(&end.idle[..count], || {
                let times = fetch_adds(&end, &connection, a.iters)?;
                Ok(compared(&times, &ping_pongs(&mut tcp, a.iters)?))
            })?,
            _ => summary(&fetch_adds(&end, &connection, a.iters)?),
        };
        peer.say("enough")?;
        peer.report()?;
        rows.insert(name.to_owned(), row);
    }
    drop(idle);
    Ok(Value::Object(rows))
}

fn fetch_adds(end: &End, connection: &ConnectedId, iters: u32) -> Result<Latencies> {
    let remote = RemoteMemory::from_bytes(connection.private_data())
        .context("the target's private data do not describe its memory")?;
    let memory = end.pd.reg_mr(8, ALL_ACCESS)?;
    let sges = [memory.sge(0..8)?];
    with_pauses(iters, || {
        let wr = SendWr::fetch_add(1, remote.addr, remote.rkey, 1, &sges);
        posted(connection.post_send(&[wr.signaled()]))?;
        let mut done = [Cqe::default()];
        end.used.wait(&mut done, Some(STALL_TIMEOUT))?;
        if done[0].status != WcStatus::Success {
            bail!("a FetchAdd failed: {:?}", done[0].status);
        }
        Ok(())
    })
}

fn ping_pongs(tcp: &mut TcpStream, iters: u32) -> Result<Latencies> {
    with_pauses(iters, || {
        tcp.write_all(&[1; 8])?;
        Ok(tcp.read_exact(&mut [0; 8])?)
    })
}

/// Measures `iters` calls of `operation`, with random pauses between them.
fn with_pauses(iters: u32, mut operation: impl FnMut() -> Result<()>) -> Result<Latencies> {
    let mut times = Latencies::default();
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for i in 0..WARM_UP + iters {
        let begin = Instant::now();
        operation()?;
        if i >= WARM_UP {
            times.record(begin.elapsed());
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(random % PAUSE));
    }
    Ok(times)
}

/// Calls `f` while a thread polls each of the queues.
fn beside_pollers<T>(idle: &[CompletionQueue], f: impl FnOnce() -> Result<T>) -> Result<T> {
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let poll_queue = |queue| -> Result<()> {
            while !enough.load(Ordering::Relaxed) {
                poll(queue, 64)?;
            }
            Ok(())
        };
        let pollers: Vec<_> = idle
            .iter()
            .map(|queue| scope.spawn(move || poll_queue(queue)))
            .collect();
        let result = f();
        enough.store(true, Ordering::Relaxed);
        for poller in pollers {
            poller.join().expect("a poller panicked")?;
        }
        result
    })
}

fn summary(times: &Latencies) -> Value {
    let us = |share| times.quantile_us(share).unwrap_or(0.0);
    json!({
        "p50_us": us(0.5),
        "p90_us": us(0.9),
        "p99_us": us(0.99),
    })
}

fn compared(times: &Latencies, tcp: &Latencies) -> Value {
    let p50 = |times: &Latencies| times.quantile_us(0.5).unwrap_or(0.0);
    let mut row = summary(times);
    row["tcp"] = summary(tcp);
    row["p50_to_tcp"] = json!(p50(times) / p50(tcp).max(f64::MIN_POSITIVE));
    row
}

/// Runs the target.
pub(crate) fn peer(a: &ServedArgs) -> Result<Value> {
    let end = End::new(&a.link)?;
    let listener = ListeningId::bind(&end.ctx, (Ipv4Addr::LOCALHOST, 0).into())?;
    peer::send_line(listener.local_addr())?;
    let memory = end.pd.reg_mr(8, ALL_ACCESS)?;
    let parameters = ConnectionParameters {
        private_data: memory.remote().to_bytes().to_vec(),
        ..ConnectionParameters::default()
    };
    let accept = |cq| -> Result<ConnectedId> {
        let request = listener.accept(Some(STALL_TIMEOUT))?;
        Ok(request.accept(end.queue_pair(cq)?, &parameters)?)
    };
    let connection = accept(&end.used)?;
    let idle: Vec<_> = end.idle.iter().map(accept).collect::<Result<_>>()?;
    echo_over_tcp()?;
    for (name, behaviour) in BEHAVIOURS {
        if !is_selected(a, name, behaviour) {
            continue;
        }
        let requested = peer::read_line()?;
        if requested != name {
            bail!("the initiator requested {requested:?} instead of {name:?}");
        }
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<()> {
            let program = scope.spawn(|| run_program(behaviour, &end, &enough));
            peer::send_line(json!({}))?;
            let line = peer::read_line();
            enough.store(true, Ordering::Relaxed);
            program.join().expect("the program's thread panicked")?;
            line.map(drop)
        })?;
        peer::send_line(json!({}))?;
    }
    drop((connection, idle));
    Ok(json!({}))
}

/// Starts a thread that echoes 8 bytes at a time over TCP, until the initiator ends.
fn echo_over_tcp() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    peer::send_line(listener.local_addr()?)?;
    let mut tcp = listener.accept()?.0;
    tcp.set_nodelay(true)?;
    std::thread::spawn(move || {
        let mut octets = [0; 8];
        while tcp.read_exact(&mut octets).is_ok() && tcp.write_all(&octets).is_ok() {}
    });
    Ok(())
}

/// Behaves as the target's program, until `enough` is set.
fn run_program(behaviour: Behaviour, end: &End, enough: &AtomicBool) -> Result<()> {
    let used = &end.used;
    if let Behaviour::Pollers(count) = behaviour {
        return beside_pollers(&end.idle[..count], || {
            run_program(Behaviour::Waits, end, enough)
        });
    }
    while !enough.load(Ordering::Relaxed) {
        match behaviour {
            Behaviour::Waits | Behaviour::Pollers(_) => wait(used, Duration::from_millis(50))?,
            Behaviour::Sleeps(us) => {
                poll(used, 16)?;
                std::thread::sleep(Duration::from_micros(us));
            }
            Behaviour::Works(polls, us) => {
                poll(used, polls)?;
                work(us);
            }
            Behaviour::Other => {
                poll(&end.idle[0], 64)?;
                work(500);
            }
            Behaviour::Loop => {
                poll(used, 32)?;
                wait(used, Duration::from_millis(1))?;
                work(200);
            }
        }
    }
    Ok(())
}

/// Waits until the time-out. Fails if there is a completion: one-sided operations create none here.
fn wait(cq: &CompletionQueue, time: Duration) -> Result<()> {
    match cq.wait(&mut [Cqe::default()], Some(time)) {
        Ok(_) => bail!("unexpected completion at the target"),
        Err(iwarp::Error::TimedOut(..)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn poll(cq: &CompletionQueue, times: u32) -> Result<()> {
    for _ in 0..times {
        cq.poll(&mut [Cqe::default()]).map_err(iwarp::Error::from)?;
    }
    Ok(())
}

fn work(us: u64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_micros(us) {
        std::hint::spin_loop();
    }
}
