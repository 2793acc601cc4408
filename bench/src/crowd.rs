//! Measures how many RDMA Writes per second one process, the target, receives from many peers. Its
//! program only waits, so the work is done by its progress threads, whose number is an option.
//!
//! The peers are plain TCP streams in one process. Writes of the same data to the same address are
//! identical FPDUs, so each stream repeats a block of FPDUs that was framed in advance (RFC 5044
//! section 4, RFC 5041 section 4.2). That costs the sending process little time, so the target
//! limits the rate.

use crate::peer::{self, ReceivingProcess};
use crate::rdma::{ALL_ACCESS, STALL_TIMEOUT};
use crate::{Time, cpu, tcp};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use crc_fast::{CrcAlgorithm, checksum};
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, ListeningId};
use iwarp::verbs::{Context, ProtectionDomain, QpInitAttr, RemoteMemory};
use iwarp::{Config, Device};
use iwarp_proto::ddp::{Stag, TaggedHeader};
use iwarp_proto::mpa::framing::pad_len;
use iwarp_proto::rdmap::Opcode;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use serde_json::{Value, json};
use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Length of a tagged header.
const TAGGED: usize = 14;
/// A request of MPA revision 1 with CRCs and without private data (RFC 5044 section 7.1.1).
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\x00\x00";
/// Approximate length of a block of FPDUs.
const BLOCK: usize = 64 * 1024;
/// Size of the target's memory.
const TARGET_SIZE: usize = 64 * 1024;
/// Longest Write. The length of an FPDU, which includes the header, has 16 bits.
const MAX_WRITE: usize = TARGET_SIZE - 1024;

#[derive(Debug, Args)]
pub(crate) struct CrowdArgs {
    /// Number of peers
    #[arg(long, default_value_t = 64)]
    n: usize,
    /// Octets of each Write
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Progress threads of the target
    #[arg(long, default_value_t = 1)]
    threads: u16,
    #[command(flatten)]
    time: Time,
}

struct Writer {
    stream: TcpStream,
    block: Vec<u8>,
    /// Number of octets of the block that have been sent.
    sent: usize,
}

impl Writer {
    fn connect(to: SocketAddr, size: usize) -> Result<Self> {
        let mut stream = TcpStream::connect(to)?;
        tcp::send_all(&stream, REQUEST, false)?;
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        if !head.starts_with(b"MPA ID Rep Frame") || head[16] & 0x20 != 0 {
            bail!("the target has rejected the connection");
        }
        let mut private = vec![0; usize::from(u16::from_be_bytes([head[18], head[19]]))];
        stream.read_exact(&mut private)?;
        let remote = RemoteMemory::from_bytes(&private)
            .context("the target's private data do not describe its memory")?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            block: fpdu_block(&remote, size),
            sent: 0,
        })
    }

    /// Sends as much of the block's rest as the socket takes in one call.
    fn write(&mut self) -> Result<()> {
        match send(&self.stream, &self.block[self.sent..], SendFlags::NOSIGNAL) {
            Ok(n) => self.sent = (self.sent + n) % self.block.len(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => return Err(e).context("cannot send to the target"),
        }
        Ok(())
    }
}

/// Returns a block of complete FPDUs. Each contains a Write of `size` octets.
fn fpdu_block(remote: &RemoteMemory, size: usize) -> Vec<u8> {
    let mut fpdu = ((TAGGED + size) as u16).to_be_bytes().to_vec();
    let mut head = [0; TAGGED];
    TaggedHeader {
        last: true,
        opcode: Opcode::WRITE,
        stag: Stag(remote.rkey),
        to: remote.addr,
    }
    .emit(&mut head);
    fpdu.extend_from_slice(&head);
    fpdu.resize(2 + TAGGED + size + pad_len(TAGGED + size), 0x5a);
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, &fpdu) as u32;
    fpdu.extend_from_slice(&crc.to_le_bytes());
    fpdu.repeat(BLOCK.div_ceil(fpdu.len()))
}

/// Starts the target, lets all peers write to it, and returns the rate.
pub(crate) fn measure(a: &CrowdArgs) -> Result<Value> {
    if a.n == 0 || a.size == 0 || a.size > MAX_WRITE {
        bail!("there must be at least one peer, and Writes of 1 to {MAX_WRITE} octets");
    }
    let mut target = ReceivingProcess::start()?;
    let to = target.address()?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut writers = Vec::with_capacity(a.n);
    for index in 0..a.n as u64 {
        let writer = Writer::connect(to, a.size)?;
        let data = epoll::EventData::new_u64(index);
        epoll::add(&epoll, &writer.stream, data, epoll::EventFlags::OUT)?;
        writers.push(writer);
    }
    let time = Duration::from_millis(a.time.ms);
    write_for(&epoll, &mut writers, time / 5)?;
    let (before, cpu0) = (progress(&mut target)?, cpu::process_us());
    let begin = Instant::now();
    write_for(&epoll, &mut writers, time)?;
    let (after, elapsed) = (progress(&mut target)?, begin.elapsed());
    target.say("end")?;
    if target.report()?.get("written") != Some(&json!(true)) {
        bail!("the target's memory does not contain the written data");
    }
    let increase = |name| peer::number(&after, name) - peer::number(&before, name);
    let us = elapsed.as_secs_f64() * 1e6;
    Ok(json!({
        "writes_per_s": increase("writes") / elapsed.as_secs_f64(),
        // CPU time per elapsed time: 1 if one processor was busy all the time.
        "target_processors": increase("cpu_us") / us,
        "peers_processors": (cpu::process_us() - cpu0) / us,
    }))
}

/// Returns the target's number of Writes and its CPU time.
fn progress(target: &mut ReceivingProcess) -> Result<Value> {
    target.say("count")?;
    target.report()
}

/// Lets all peers write for `time`.
fn write_for(epoll: &OwnedFd, writers: &mut [Writer], time: Duration) -> Result<()> {
    let mut events = Vec::with_capacity(writers.len());
    let patience = Timespec {
        tv_sec: 0,
        tv_nsec: 10_000_000,
    };
    let begin = Instant::now();
    while begin.elapsed() < time {
        events.clear();
        match epoll::wait(epoll, spare_capacity(&mut events), Some(&patience)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).context("epoll"),
        }
        for event in &events {
            let index = { event.data }.u64() as usize;
            writers
                .get_mut(index)
                .context("an event for an unknown stream")?
                .write()?;
        }
    }
    Ok(())
}

/// Runs the target. Its program only waits.
pub(crate) fn target(a: &CrowdArgs) -> Result<Value> {
    let mut config = Config::from_env();
    config.progress_threads = a.threads;
    let ctx = Context::open(&Device::by_address(Ipv4Addr::LOCALHOST.into())?, config)?;
    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(64, None)?;
    let memory = pd.reg_mr(TARGET_SIZE, ALL_ACCESS)?;
    let listener = ListeningId::bind(&ctx, (Ipv4Addr::LOCALHOST, 0).into())?;
    peer::send_line(listener.local_addr())?;
    let parameters = ConnectionParameters {
        private_data: memory.remote().to_bytes().to_vec(),
        ..ConnectionParameters::default()
    };
    let accept = |_| -> Result<ConnectedId> {
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq).cap(4, 4))?;
        Ok(listener
            .accept(Some(STALL_TIMEOUT))?
            .accept(qp, &parameters)?)
    };
    let connections = (0..a.n).map(accept).collect::<Result<Vec<_>>>()?;
    while peer::read_line()? == "count" {
        let writes: u64 = connections.iter().map(|c| c.counters().rx_fpdus).sum();
        peer::send_line(json!({ "writes": writes, "cpu_us": cpu::process_us() }))?;
    }
    let mut data = vec![0; a.size];
    memory.read_at(0, &mut data)?;
    let written = data.iter().all(|octet| *octet == 0x5a);
    peer::send_line(json!({ "written": written }))?;
    Ok(json!({}))
}
