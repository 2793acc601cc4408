//! Arguments of `iwarp perf`.

#[cfg(test)]
use super::plan::Plan;
use super::point::{MAX_DEPTH, MAX_QPS, Op, Poll};
use clap::{Args, Subcommand, ValueEnum};
use iwarp_cli_common::service::Limits;
use iwarp_cli_common::units;
use std::path::PathBuf;

/// Arguments of `iwarp perf`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(override_usage = "iwarp perf [OPTIONS]
       iwarp perf serve [OPTIONS]
       iwarp perf connect [OPTIONS] HOST[:PORT]")]
#[command(
    after_help = "Each RDMA figure is printed beside one of plain TCP, measured shortly before or \
after it. A ratio is iWARP ÷ TCP in one round; the median over the rounds is printed. Latency is \
half a round trip. A Read or FetchAdd is a round trip by itself, so its latency is half of the \
time of the operation.

EXAMPLES:
  iwarp perf                             everything, both ends on this host, < 2 min
  iwarp perf --quick                     fewer sizes, < 20 s
  iwarp perf --op write --size 64K --crc on
  iwarp perf --op tcp                    only the TCP baseline
  iwarp perf --quick --json - | jq .results
  iwarp perf --plot curves.svg           latency and bandwidth curves
  iwarp perf serve --bind 192.0.2.7      on one host, then on another:
  iwarp perf connect 192.0.2.7 --quick"
)]
pub(crate) struct PerfArgs {
    #[command(subcommand)]
    pub(crate) command: Option<PerfCommand>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// The two ends of a measurement between hosts.
#[derive(Debug, Subcommand)]
pub(crate) enum PerfCommand {
    /// Wait for `iwarp perf connect` from another host
    Serve(ServeArgs),
    /// Measure against `iwarp perf serve` on another host. Retries for 10 s if the server is busy
    Connect(ConnectArgs),
}

/// Arguments of `iwarp perf serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "The server measures with one client at a time. Any client that can reach the \
port can keep a core busy, so listen on a trusted network only (--bind).

EXAMPLES:
  iwarp perf serve
  iwarp perf serve --bind [2001:db8::7]:9000"
)]
pub(crate) struct ServeArgs {
    /// Address to listen on, with or without a port (default 7175)
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0")]
    pub(crate) bind: String,
    /// Memory for the connections of the measuring client
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = units::parse_size)]
    pub(crate) memory: u64,
    // Before the limits, because their help heading applies to all options after them.
    /// Log more to stderr (repeat for even more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    #[command(flatten)]
    pub(crate) limits: Limits,
    /// Serve the parent process: exit when it exits, and print the address as JSON.
    #[arg(long, hide = true)]
    pub(crate) child: bool,
    /// Run on this CPU only.
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) cpu: Option<usize>,
}

/// Arguments of `iwarp perf connect`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp perf connect 192.0.2.7
  iwarp perf connect server.example:9000 --op read --size 1M --seconds 2")]
pub(crate) struct ConnectArgs {
    /// Host with or without a port (default 7175)
    #[arg(value_name = "ADDR")]
    pub(crate) addr: String,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// What to measure and how to show it.
#[derive(Debug, Clone, Args)]
pub(crate) struct MeasureArgs {
    /// Measure fewer sizes for a shorter time; takes less than 20 s
    #[arg(long)]
    pub(crate) quick: bool,
    /// Operations to measure [default: send,write,read,fetchadd]
    #[arg(long, value_name = "OP", value_delimiter = ',')]
    pub(crate) op: Vec<Op>,
    /// Message sizes, for example 4,64K,1M (FetchAdd always uses 8 bytes)
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = units::parse_size)]
    pub(crate) size: Vec<u64>,
    /// Operations per measurement
    #[arg(long, value_name = "N", conflicts_with = "seconds",
        value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub(crate) iters: Option<u64>,
    /// Seconds per measurement
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    pub(crate) seconds: Option<f64>,
    /// Measurements per point; TCP and iWARP alternate [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: Option<u32>,
    /// Parallel connections in bandwidth measurements
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_QPS)))]
    pub(crate) qps: u32,
    /// Outstanding operations per connection in bandwidth measurements
    #[arg(long, value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub(crate) depth: u32,
    /// MPA CRC [default: both]
    #[arg(long, value_name = "on|off")]
    pub(crate) crc: Option<OnOff>,
    /// Use MPA markers
    #[arg(long)]
    pub(crate) markers: bool,
    /// How to wait for completions [default: both]
    #[arg(long, value_name = "spin|event")]
    pub(crate) poll: Option<Poll>,
    /// Let the kernel choose the CPUs. By default, two ends on this host get one CPU each
    #[arg(long)]
    pub(crate) no_pin: bool,
    /// Write the results as JSON to a file ('-': to stdout, without other output)
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
    /// Draw latency and bandwidth curves into a file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Log more to stderr (repeat for even more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    /// Enabled
    On,
    /// Disabled
    Off,
}

impl OnOff {
    /// Returns `true` for `on`.
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}

impl PerfArgs {
    /// Checks the measurement options.
    #[cfg(test)]
    pub(crate) fn check(&self) -> iwarp_cli_common::error::Result<()> {
        match &self.command {
            None => Plan::new(&self.measure).map(drop),
            Some(PerfCommand::Connect(c)) => Plan::new(&c.measure).map(drop),
            Some(PerfCommand::Serve(_)) => Ok(()),
        }
    }

    pub(crate) fn verbose(&self) -> u8 {
        match &self.command {
            None => self.measure.verbose,
            Some(PerfCommand::Serve(s)) => s.verbose,
            Some(PerfCommand::Connect(c)) => c.measure.verbose,
        }
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.001..=3600.0).contains(&s) => Ok(s),
        _ => Err("between 0.001 and 3600".to_owned()),
    }
}
