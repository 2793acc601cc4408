//! Performs one measurement per run, for `cargo xtask bench`, and prints it as one line of JSON.
//!
//! Each measurement uses two processes on two CPUs. This process sends and measures the time. It
//! starts itself again as the receiving process, called the peer. Plain TCP and bare framing (FPDUs
//! without an RNIC) show the limits of the machine; `iwarp` is measured beside them through its
//! public interface. RFC 5044 section 4 and RFC 5041 section 4 describe the framing.

mod cpu;
mod crowd;
mod host;
mod idle;
mod peer;
mod probe;
mod rdma;
mod rsockets;
mod scale;
mod served;
mod spin;
mod stats;
mod streams;
mod tcp;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Parser)]
#[command(
    name = "iwarp-bench",
    about = "Performs one measurement and prints it as one line of JSON",
    version
)]
struct Cli {
    /// CPUs of the sending and the receiving process; an empty text lets the kernel choose
    #[arg(long, value_name = "A,B", default_value = "0,1", global = true)]
    cpus: String,
    /// This process is the receiver (started by the sender).
    #[arg(long, hide = true, global = true)]
    peer: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Plain TCP in one direction: one `send` per message, `recv` of 256 KiB into one buffer
    TcpBw(tcp::BandwidthArgs),
    /// Plain TCP ping-pong: half of the round trip
    TcpLat(tcp::LatencyArgs),
    /// Only FPDU framing and direct placement, in one direction: the upper limit for iWARP
    ProbeBw(probe::BandwidthArgs),
    /// Ping-pong with only FPDU framing and direct placement
    ProbeLat(probe::LatencyArgs),
    /// RDMA operations in one direction
    IwarpBw(rdma::BandwidthArgs),
    /// Ping-pong of RDMA Writes or Sends, or half the time of an RDMA Read or FetchAdd
    IwarpLat(rdma::LatencyArgs),
    /// Ping-pongs of plain TCP, bare framing and RDMA Writes, alternating within one run, so that
    /// changes of the machine's speed affect all of them equally
    SpinLat(spin::SpinArgs),
    /// Many connections: set-up time, memory, and the rate of 64-octet echoes
    Scale(scale::ScaleArgs),
    /// CPU time of idle processes with connections
    Idle(idle::IdleArgs),
    /// CPU time of a process that is only the target of RDMA Writes
    Passive(idle::PassiveArgs),
    /// Latency of FetchAdds, depending on what the target's program does
    Served(served::ServedArgs),
    /// RDMA Writes of many peers to a waiting process, depending on the number of its progress
    /// threads
    Crowd(crowd::CrowdArgs),
    /// Streams, channels and replicated logs, and tokio's TCP, alternating
    Streams(streams::StreamsArgs),
    /// iperf3 over `librspreload.so` and over TCP, alternating
    Rsockets(rsockets::RsocketsArgs),
    /// Print facts about this machine
    Host,
}

/// A switch: `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnOff {
    /// Used
    On,
    /// Not used
    Off,
}

impl OnOff {
    const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

/// How a process waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wait {
    /// Poll without sleeping
    Spin,
    /// Sleep in the kernel until there is something to do
    Event,
}

/// Duration of a measurement in one direction.
#[derive(Debug, Clone, Args)]
struct Time {
    /// Duration of the measurement in milliseconds
    #[arg(long, default_value_t = 400)]
    ms: u64,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let cpus = peer::parse_cpus(&cli.cpus)?;
    let (sender, receiver) = match cli.command {
        Command::Host | Command::Rsockets(_) => (None, None),
        _ => cpus,
    };
    if let Some(cpu) = if cli.peer { receiver } else { sender } {
        cpu::pin_to(cpu)?;
    }
    let is_peer = cli.peer;
    let result = match &cli.command {
        Command::TcpBw(a) if is_peer => tcp::bandwidth_peer(a)?,
        Command::TcpBw(a) => tcp::bandwidth(a)?,
        Command::TcpLat(a) if is_peer => tcp::latency_peer(a)?,
        Command::TcpLat(a) => tcp::latency(a)?,
        Command::ProbeBw(a) if is_peer => probe::bandwidth_peer(a)?,
        Command::ProbeBw(a) => probe::bandwidth(a)?,
        Command::ProbeLat(a) if is_peer => probe::latency_peer(a)?,
        Command::ProbeLat(a) => probe::latency(a)?,
        Command::IwarpBw(a) if is_peer => rdma::bandwidth_peer(a)?,
        Command::IwarpBw(a) => rdma::bandwidth(a)?,
        Command::IwarpLat(a) if is_peer => rdma::latency_peer(a)?,
        Command::IwarpLat(a) => rdma::latency(a)?,
        Command::SpinLat(a) if is_peer => spin::peer(a)?,
        Command::SpinLat(a) => spin::measure(a)?,
        Command::Scale(a) if is_peer => scale::peer(a)?,
        Command::Scale(a) => scale::measure(a)?,
        Command::Idle(a) if is_peer => idle::idle_peer(a)?,
        Command::Idle(a) => idle::idle(a)?,
        Command::Passive(a) if is_peer => idle::passive_peer(a)?,
        Command::Passive(a) => idle::passive(a)?,
        Command::Served(a) if is_peer => served::peer(a)?,
        Command::Served(a) => served::measure(a)?,
        Command::Crowd(a) if is_peer => crowd::target(a)?,
        Command::Crowd(a) => crowd::measure(a)?,
        Command::Streams(a) if is_peer => streams::peer(a)?,
        Command::Streams(a) => streams::measure(a)?,
        Command::Rsockets(a) => rsockets::measure(a, cpus.into())?,
        Command::Host => host::facts(),
    };
    println!("{result}");
    Ok(())
}
