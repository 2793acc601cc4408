//! Plain TCP as an efficient program would use it. The other measurements are compared with it.

use crate::peer::{self, ReceivingProcess};
use crate::stats::{Flow, Samples};
use crate::{Time, Wait, cpu};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Octets requested by one `recv`.
pub(crate) const RECV: usize = 256 * 1024;

#[derive(Debug, Args)]
pub(crate) struct BandwidthArgs {
    /// Octets per message
    #[arg(long)]
    size: usize,
    #[command(flatten)]
    time: Time,
    /// Let the kernel collect small messages (no TCP_NODELAY)
    #[arg(long)]
    nagle: bool,
    /// Let the receiver spin instead of sleeping
    #[arg(long)]
    spin: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LatencyArgs {
    /// Octets per message
    #[arg(long)]
    size: usize,
    /// Round trips; a tenth more are made before, to warm up
    #[arg(long, default_value_t = 10_000)]
    iters: u32,
    /// How both sides wait
    #[arg(long)]
    wait: Wait,
}

/// Listens on a free port of 127.0.0.1 and sends the address to the sender.
pub(crate) fn listen() -> Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    // If the accept queue overflowed, a SYN would be retransmitted after a time-out, which would
    // falsify the measurement.
    socket.listen(4096).context("cannot listen")?;
    let listener = TcpListener::from(socket);
    peer::send_line(listener.local_addr()?)?;
    Ok(listener)
}

pub(crate) fn accept(nodelay: bool) -> Result<TcpStream> {
    let stream = listen()?.accept().context("cannot accept")?.0;
    stream.set_nodelay(nodelay)?;
    Ok(stream)
}

pub(crate) fn connect(to: SocketAddr, nodelay: bool) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).context("cannot connect")?;
    stream.set_nodelay(nodelay)?;
    Ok(stream)
}

/// Runs the process that sends.
pub(crate) fn bandwidth(a: &BandwidthArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let stream = connect(peer.address()?, !a.nagle)?;
    let message = vec![0x5au8; a.size.max(1)];
    let cpu0 = cpu::process_us();
    let end = Instant::now() + Duration::from_millis(a.time.ms);
    let mut since_clock = 0;
    loop {
        send_all(&stream, &message, false)?;
        // Reading the clock after every small message would slow the measurement.
        since_clock += a.size + 2048;
        if since_clock >= 64 * 1024 {
            since_clock = 0;
            if Instant::now() >= end {
                break;
            }
        }
    }
    let tx_cpu_us = cpu::process_us() - cpu0;
    rustix::net::shutdown(&stream, Shutdown::Write)?;
    finish_flow(&mut peer, a.size, tx_cpu_us)
}

/// Combines the sender's CPU time with the receiver's report.
pub(crate) fn finish_flow(
    peer: &mut ReceivingProcess,
    size: usize,
    tx_cpu_us: f64,
) -> Result<Value> {
    let report = peer.report()?;
    if let Some(error) = report.get("error") {
        bail!("the receiver failed: {error}");
    }
    Ok(Flow {
        bytes: peer::number(&report, "bytes"),
        size: size as f64,
        ns: peer::number(&report, "ns"),
        tx_cpu_us,
        rx_cpu_us: peer::number(&report, "cpu_us"),
    }
    .report())
}

/// Runs the process that receives.
pub(crate) fn bandwidth_peer(a: &BandwidthArgs) -> Result<Value> {
    let stream = accept(!a.nagle)?;
    let mut buf = vec![1u8; RECV];
    let cpu0 = cpu::process_us();
    let mut start = None;
    let mut bytes = 0u64;
    loop {
        let n = recv_some(&stream, &mut buf, a.spin)?;
        if n == 0 {
            break;
        }
        start.get_or_insert_with(Instant::now);
        bytes += n as u64;
    }
    let ns = start.map_or(0, |s| s.elapsed().as_nanos() as u64);
    Ok(json!({ "bytes": bytes, "ns": ns, "cpu_us": cpu::process_us() - cpu0 }))
}

pub(crate) struct PingPong {
    stream: TcpStream,
    buf: Vec<u8>,
    spin: bool,
}

impl PingPong {
    pub(crate) fn new(stream: TcpStream, size: usize, wait: Wait) -> Self {
        Self {
            stream,
            buf: vec![0x5au8; size.max(1)],
            spin: wait == Wait::Spin,
        }
    }

    /// Sends a message and waits for the answer.
    pub(crate) fn ask(&mut self) -> Result<()> {
        send_all(&self.stream, &self.buf, self.spin)?;
        if !recv_all(&self.stream, &mut self.buf, self.spin)? {
            bail!("the receiver closed the connection");
        }
        Ok(())
    }

    /// Waits for a message and answers it. Returns `false` at the end of the stream.
    pub(crate) fn answer(&mut self) -> Result<bool> {
        if !recv_all(&self.stream, &mut self.buf, self.spin)? {
            return Ok(false);
        }
        send_all(&self.stream, &self.buf, self.spin)?;
        Ok(true)
    }
}

/// Runs the process that measures the time.
pub(crate) fn latency(a: &LatencyArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let mut end = PingPong::new(connect(peer.address()?, true)?, a.size, a.wait);
    Ok(Samples::of(a.iters.into(), || end.ask())?.report())
}

/// Runs the process that answers, until the other process closes the connection.
pub(crate) fn latency_peer(a: &LatencyArgs) -> Result<Value> {
    let mut end = PingPong::new(accept(true)?, a.size, a.wait);
    while end.answer()? {}
    Ok(json!({}))
}

pub(crate) fn send_all(s: &TcpStream, mut data: &[u8], spin: bool) -> Result<()> {
    let flags = if spin {
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT
    } else {
        SendFlags::NOSIGNAL
    };
    while !data.is_empty() {
        match rustix::net::send(s, data, flags) {
            Ok(n) => data = data.get(n..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => return Err(e).context("send"),
        }
    }
    Ok(())
}

/// Receives at least one octet. Returns how many, or 0 at the end of the stream.
pub(crate) fn recv_some(s: &TcpStream, buf: &mut [u8], spin: bool) -> Result<usize> {
    let flags = if spin {
        RecvFlags::DONTWAIT
    } else {
        RecvFlags::empty()
    };
    loop {
        match rustix::net::recv(s, &mut *buf, flags) {
            Ok((n, _)) => return Ok(n),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The other process closes the connection after the measurement, which may reset it.
            Err(Errno::CONNRESET) => return Ok(0),
            Err(e) => return Err(e).context("recv"),
        }
    }
}

/// Fills the buffer. Returns `false` at the end of the stream.
pub(crate) fn recv_all(s: &TcpStream, buf: &mut [u8], spin: bool) -> Result<bool> {
    let mut got = 0;
    while let Some(rest) = buf.get_mut(got..).filter(|r| !r.is_empty()) {
        match recv_some(s, rest, spin)? {
            0 => return Ok(false),
            n => got += n,
        }
    }
    Ok(true)
}
