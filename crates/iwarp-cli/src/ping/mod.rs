//! `iwarp ping`: client and server for the protocol of rdma-core's `rping`.

mod client;
mod link;
mod server;
mod wire;

use clap::Args;
use iwarp_cli_common::error::{Error, Result};
use iwarp_cli_common::service::Limits;
use std::time::Duration;

/// Default port, as in `rping`.
pub(crate) const DEFAULT_PORT: u16 = 7174;
/// Smallest message: it contains `rping`'s text with the counter.
pub(crate) const MIN_SIZE: u32 = 16;
/// Largest message. `rping`'s own limit is one less.
pub(crate) const MAX_SIZE: u32 = 64 * 1024;
/// Default of `--size`.
const DEFAULT_SIZE: u32 = 64;
/// Longest interval in seconds. A server disconnects clients that are silent for longer.
const MAX_INTERVAL: f64 = 10.0;

/// Arguments of `iwarp ping`.
#[derive(Debug, Args)]
#[command(override_usage = "iwarp ping [OPTIONS] HOST
       iwarp ping serve [OPTIONS]")]
#[command(after_help = "EXAMPLES:
  iwarp ping serve                      answer pings on port 7174
  iwarp ping 192.0.2.7                  a ping each second until Ctrl-C
  iwarp ping 192.0.2.7 -C 10 -v         ten pings without pauses, show the data
  iwarp ping 192.0.2.7 -C 10 -i 0.2     ten pings in two seconds, a line for each
  iwarp ping 192.0.2.7 -S 4096 -V       4 KiB each, compare what comes back
  rping -s -a 0.0.0.0 -v                rping as the server of `iwarp ping ADDR`
  rping -c -a 192.0.2.7 -C 10 -v        rping as the client of `iwarp ping serve`")]
pub(crate) struct PingArgs {
    /// `serve` to answer pings, or the address of a server to ping
    #[arg(value_name = "serve|ADDR")]
    pub(crate) target: String,
    /// Address to listen on (with `serve`)
    #[arg(short = 'a', long, value_name = "ADDR")]
    pub(crate) bind: Option<std::net::IpAddr>,
    /// TCP port; with `serve`, 0 selects a free one
    #[arg(short, long, default_value_t = DEFAULT_PORT)]
    pub(crate) port: u16,
    /// Number of pings [default: until interrupted with Ctrl-C]
    #[arg(short = 'C', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Seconds between pings, 0 to 10. Unless it is 0, each ping prints a line [default: 1; with
    /// -C: 0]
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_interval)]
    pub(crate) interval: Option<Duration>,
    /// Bytes per ping [default: 64]
    #[arg(short = 'S', long, value_name = "OCTETS",
        value_parser = clap::value_parser!(u32).range(i64::from(MIN_SIZE)..=i64::from(MAX_SIZE)))]
    size: Option<u32>,
    /// Print the data of each ping
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Check that the returned data equal the sent data
    #[arg(short = 'V', long)]
    pub(crate) validate: bool,
    /// Log every step to stderr
    #[arg(short, long)]
    pub(crate) debug: bool,
    #[command(flatten)]
    pub(crate) limits: Limits,
}

impl PingArgs {
    /// Returns the log level. Only `-d` raises it: `-v` prints ping data as in `rping`.
    pub(crate) fn log_level(&self) -> u8 {
        if self.debug { 2 } else { 0 }
    }

    /// Returns the interval between pings.
    pub(crate) fn interval(&self) -> Duration {
        self.interval.unwrap_or(match self.count {
            Some(_) => Duration::ZERO,
            None => Duration::from_secs(1),
        })
    }

    /// Returns the size of a ping in bytes.
    pub(crate) fn size(&self) -> u32 {
        self.size.unwrap_or(DEFAULT_SIZE)
    }

    /// Returns the pause after ping `number` (from 0), which began `elapsed` ago, or `None` after
    /// the last one.
    pub(crate) fn pause(&self, number: u64, elapsed: Duration) -> Option<Duration> {
        let next = number.checked_add(1)?;
        match self.count {
            Some(count) if next >= count => None,
            _ => Some(self.interval().saturating_sub(elapsed)),
        }
    }

    /// Checks that each option is valid in this role, client or server.
    ///
    /// # Errors
    /// Returns a usage error that names the first invalid option.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_server() {
            let client_options = [
                (self.interval.is_some(), "--interval"),
                (self.size.is_some(), "--size"),
                (self.validate, "--validate"),
            ];
            return match client_options.iter().find(|(given, _)| *given) {
                Some((_, option)) => Err(Error::usage(format!(
                    "{option} is not valid with 'iwarp ping serve'"
                ))),
                None => Ok(()),
            };
        }
        let server_option = match (self.bind, self.port) {
            (Some(_), _) => Some("--bind"),
            (_, 0) => Some("--port 0"),
            _ => self.limits.given(),
        };
        match server_option {
            Some(option) => Err(Error::usage(format!(
                "{option} is valid with 'iwarp ping serve' only"
            ))),
            None => Ok(()),
        }
    }

    pub(crate) fn is_server(&self) -> bool {
        self.target == "serve"
    }
}

fn parse_interval(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.0..=MAX_INTERVAL).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!("between 0 and {MAX_INTERVAL} seconds")),
    }
}

/// Runs the client or the server.
pub(crate) fn run(args: &PingArgs) -> Result<()> {
    args.check()?;
    tracing::debug!(?args, "ping");
    if args.is_server() {
        server::run(args)
    } else {
        client::run(args)
    }
}
