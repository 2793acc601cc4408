//! The command line. Each subcommand defines its arguments in its own module.

use crate::{completions, devices, doctor, logging, man, netlink, perf, ping, run, stat};
use clap::{CommandFactory as _, Parser, Subcommand};
use iwarp_cli_common::error::Result;

/// RDMA (iWARP) in user space over plain TCP: no special hardware, no root
#[derive(Debug, Parser)]
#[command(name = "iwarp", version, arg_required_else_help = true)]
#[command(override_usage = "iwarp [-v] COMMAND [OPTIONS] [ARGUMENTS]")]
#[command(after_help = "EXAMPLES:
  iwarp perf --quick                 both ends on this machine, less than 20 s
  iwarp perf serve                   on one host, then on another:
  iwarp perf connect HOST            measure between the two
  iwarp cp serve /srv/drop --writable
                                     serve a directory to this host; then in another terminal:
  iwarp cp big.img 127.0.0.1:        copy a file by one-sided RDMA
  iwarp ping HOST                    a ping each second to an rping server
  iwarp run -- ib_write_bw -R        any verbs program on the software RNIC
  iwarp stat --watch                 show what all these programs are doing
  iwarp doctor                       check what the library needs from this machine

ENVIRONMENT:
  RUST_LOG          filter of the log on stderr, for example iwarp=debug; overrides -v
  IWARP_LOG_FORMAT  text or json

EXIT CODES:
  0    success
  1    failure while running
  2    wrong usage
  126  `run`: the program cannot be executed
  127  `run`: the program was not found
  If the program starts, `run` ends with its exit code, or by the signal that ended it.")]
pub(crate) struct Cli {
    /// Log more to stderr (repeat for even more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Format of the log on stderr [default: IWARP_LOG_FORMAT, or text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<logging::Format>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure latency and bandwidth of iWARP and of plain TCP
    Perf(Box<perf::PerfArgs>),
    /// Ping a host with RDMA Reads and Writes (protocol of rdma-core's rping)
    Ping(ping::PingArgs),
    /// Copy files by one-sided RDMA
    Cp(Box<iwarp_cp::CpArgs>),
    /// List the RDMA devices of this machine
    Devices(devices::DevicesArgs),
    /// Check what the library needs from this machine
    Doctor(doctor::DoctorArgs),
    /// Show statistics of the processes that use the library
    Stat(stat::StatArgs),
    /// Run a verbs program and its children on the software RNIC
    Run(Box<run::RunArgs>),
    /// Print shell commands for `eval` that set the environment of `run`
    Env(Box<run::EnvArgs>),
    /// Write the command, its libraries and the devices into a directory, for programs in other
    /// containers
    Unpack(Box<run::UnpackArgs>),
    /// Print a shell completion script
    Completions(completions::CompletionsArgs),
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man(man::ManArgs),
    /// Answer netlink requests on standard input
    #[command(hide = true)]
    Netlink(netlink::NetlinkArgs),
}

impl Cli {
    /// Returns the log level: the number of `-v` before and after the subcommand.
    pub(crate) fn log_level(&self) -> u8 {
        let inner = match &self.command {
            Command::Perf(a) => a.verbose(),
            Command::Cp(a) => a.verbose(),
            Command::Ping(a) => a.log_level(),
            // `devices -v` extends the listing, not the log.
            Command::Devices(_)
            | Command::Doctor(_)
            | Command::Completions(_)
            | Command::Man(_)
            | Command::Netlink(_)
            | Command::Stat(_)
            | Command::Run(_)
            | Command::Env(_)
            | Command::Unpack(_) => 0,
        };
        self.verbose.saturating_add(inner)
    }

    /// Returns the value of `--log-format`.
    pub(crate) const fn log_format(&self) -> Option<logging::Format> {
        self.log_format
    }

    /// Runs the chosen subcommand.
    pub(crate) fn run(self) -> Result<()> {
        match self.command {
            Command::Perf(a) => perf::run(*a),
            Command::Ping(a) => ping::run(&a),
            Command::Cp(a) => iwarp_cp::run(&a),
            Command::Devices(a) => devices::run(&a),
            Command::Doctor(a) => doctor::run(&a),
            Command::Stat(a) => stat::run(&a),
            Command::Run(a) => run::run(&a),
            Command::Env(a) => run::env(&a),
            Command::Unpack(a) => run::unpack(&a),
            Command::Completions(a) => completions::run(&a, Self::command()),
            Command::Man(a) => man::run(&a, Self::command()),
            Command::Netlink(a) => netlink::run(&a),
        }
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod options_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn usage_errors_exit_with_2() {
        for args in [
            &["iwarp", "perf", "--op", "sned"][..],
            &["iwarp", "perf", "--size", "4X"],
            &["iwarp", "perf", "--iters", "1", "--seconds", "1"],
            &["iwarp", "perf", "connect"],
            &["iwarp", "cp"],
            &["iwarp", "cp", "a"],
            &["iwarp", "ping"],
            &["iwarp", "stat", "0"],
            &["iwarp", "stat", "--json", "--openmetrics"],
            &["iwarp", "stat", "--prometheus", "--openmetrics"],
            &["iwarp", "stat", "--json", "--sort", "sent"],
            &["iwarp", "stat", "--sort", "colour"],
            &["iwarp", "stat", "--peer", "host"],
            &["iwarp", "stat", "--prometheus", "--peer", "::1"],
            &["iwarp", "stat", "7", "serve"],
            &["iwarp", "stat", "serve", "--max-queue-pairs", "x"],
            &["iwarp", "--log-format", "xml", "devices"],
            &["iwarp", "stat", "--watch=0"],
            &["iwarp", "nosuch"],
        ] {
            let e = Cli::try_parse_from(args).expect_err("must be refused");
            assert_eq!(e.exit_code(), 2, "{args:?}: {e}");
        }
    }

    #[test]
    fn usual_commands_parse() {
        for line in [
            "iwarp perf",
            "iwarp perf --quick --json - --plot a.svg",
            "iwarp perf --op write,read --size 4,64K --crc on --poll spin",
            "iwarp perf serve --bind 0.0.0.0",
            "iwarp perf connect host.example:7175 --quick",
            "iwarp ping serve -p 7174 -v",
            "iwarp ping 192.0.2.1 -C 10 -S 128 -V -d",
            "iwarp cp a host:b",
            "iwarp cp [::1]:b a --crc off --no-resume -q",
            "iwarp cp serve /srv --bind :: --port 9999 --anonymous",
            "iwarp devices -v --json",
            "iwarp stat --watch 4711",
            "iwarp stat 4711 --watch=0.2 --json",
            "iwarp stat --openmetrics --directory /srv",
            "iwarp stat --prometheus 4711",
            "iwarp stat --pid 1,2 --peer 10.0.0.0/8,::1 --sort rtt",
            "iwarp stat --watch --peer [::1]:5 --sort=retrans",
            "iwarp stat serve --bind [::1]:0 --max-queue-pairs 10",
            "iwarp --log-format json ping serve",
            "iwarp completions fish",
        ] {
            let args = line.split(' ');
            if let Err(e) = Cli::try_parse_from(args) {
                panic!("{line}: {e}");
            }
        }
    }
}
