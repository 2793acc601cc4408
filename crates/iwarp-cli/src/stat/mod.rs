//! `iwarp stat`: shows statistics of the processes that use the library.
//!
//! `query` asks the processes, and `document` parses their answers. `table` and `metrics` format
//! them, `view` sorts and filters, and `rates` compares two answers. `watch` repeats the query, on
//! a terminal with `screen`, and `serve` answers Prometheus.

mod document;
mod metrics;
mod query;
mod rates;
mod screen;
mod serve;
mod table;
mod view;
mod watch;

use clap::{Args, Subcommand};
pub(crate) use document::{ProcessStats, QueuePair};
use iwarp_cli_common::error::{Context as _, Result};
use iwarp_cli_common::out;
use query::{Answers, Query};
use rates::Previous;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use view::{Column, Peers, View};
use watch::Repeater;

/// The JSON schema of `--json`.
const SCHEMA: &str = include_str!("schema.json");

/// Arguments of `iwarp stat`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(override_usage = "iwarp stat [OPTIONS] [PID]
       iwarp stat serve [OPTIONS]")]
#[command(after_help = "COLUMNS:
  QP          number of the queue pair; # in front: connected by number, not by rdma_cm
  STATE       state of the queue pair, as in ibv_query_qp(3)
  PEER        address at the other end
  SENT, RECEIVED          octets since the queue pair was created, framing included
  SENDING, RECEIVING      the same per second, with --watch
  OUT, IN     send requests that are not complete; receives that are posted (srq: in a shared queue)
  RETRANS     segments that TCP sent again
  RTT         TCP's round-trip time
More lines follow if there are CRC errors, Terminates, connections that ended (with the reason),
or Sends that wait for a receive. On a narrow terminal, --watch leaves columns out.

KEYS (with --watch on a terminal):
  up, down, page up, page down, home, end    scroll
  s                                          sort by the next column
  q, Ctrl-C                                  quit

EXAMPLES:
  iwarp stat                     all processes of this user (of all users for root)
  iwarp stat 4711 --watch        one process, with rates, every second
  iwarp stat --watch --sort sent --peer 10.0.0.0/8
                                 the busiest connections to a network
  iwarp stat --watch=0.2 --json  a line of JSON five times a second
  iwarp stat --prometheus        a file for node_exporter's textfile collector
  iwarp stat serve               a server for Prometheus

A process can be queried as soon as it listens, connects, or creates a queue pair that is connected
by number. Only the same user and root can query it, and only on the same machine. To query a
process in a container, run this command inside the container, or share a directory with the
container: set IWARP_STAT=DIRECTORY for the process, and use --directory DIRECTORY here.
A process with IWARP_STAT=off cannot be queried.")]
pub(crate) struct StatArgs {
    #[command(subcommand)]
    command: Option<StatCommand>,
    #[command(flatten)]
    show: ShowArgs,
}

#[derive(Debug, Subcommand)]
enum StatCommand {
    /// Serve the statistics of all processes to Prometheus, by HTTP
    Serve(serve::ServeArgs),
}

#[derive(Debug, Args)]
struct ShowArgs {
    /// Process ID [default: all processes]
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    process: Option<u32>,
    /// Process IDs, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "process",
        value_parser = clap::value_parser!(u32).range(1..))]
    pid: Vec<u32>,
    /// Show only queue pairs that are connected to these peers: an address, an address and a port,
    /// or networks, for example 10.0.0.0/8,2001:db8::/32
    #[arg(long, value_name = "PEER")]
    peer: Option<Peers>,
    /// Sort the queue pairs, and the processes by their first queue pair. Numbers descend
    #[arg(long, value_name = "COLUMN", conflicts_with = "json")]
    sort: Option<Column>,
    /// Print JSON; --schema describes it
    #[arg(long)]
    json: bool,
    /// Print the JSON schema of --json
    #[arg(long, exclusive = true)]
    schema: bool,
    /// Print Prometheus' text format
    #[arg(long, conflicts_with_all = ["json", "watch", "peer", "sort"])]
    prometheus: bool,
    /// Print text that is valid both in OpenMetrics and in Prometheus' format. Counters have no
    /// type, because the formats disagree about its name
    #[arg(long, conflicts_with_all = ["json", "watch", "peer", "sort", "prometheus"])]
    openmetrics: bool,
    /// Repeat every SECONDS (default 1, at least 0.1) and show rates
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
        default_missing_value = "1", value_parser = interval)]
    watch: Option<Duration>,
    /// Query the processes that have IWARP_STAT=DIRECTORY
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

fn interval(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.1..=86400.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("seconds, from 0.1 to 86400".to_owned()),
    }
}

impl ShowArgs {
    fn query(&self) -> Query {
        let pids = self.process.iter().chain(&self.pid).copied().collect();
        let set = std::env::var_os("IWARP_STAT");
        Query::new(pids, self.directory.as_ref(), set)
    }

    fn view(&self) -> View {
        View {
            sort: self.sort,
            peers: self.peer.clone(),
        }
    }
}

/// Queries the processes and prints their answers, or serves them.
pub(crate) fn run(args: &StatArgs) -> Result<()> {
    if let Some(StatCommand::Serve(args)) = &args.command {
        return serve::run(args);
    }
    let args = &args.show;
    if args.schema {
        return out::text(SCHEMA).map(drop);
    }
    let mut repeater = Repeater::new(args.query());
    let Some(pause) = args.watch else {
        return once(args, &mut repeater);
    };
    if args.json {
        return watch::lines(repeater, pause, |answers, _| {
            let document = serde_json::to_string(&as_json(answers, args)).context("JSON")?;
            Ok(document + "\n")
        });
    }
    if let Some(screen) = screen::Screen::open()? {
        return watch::screen(screen, repeater, pause, args.view());
    }
    watch::lines(repeater, pause, |answers, previous| {
        Ok("--\n".to_owned() + &as_table(answers, previous, &args.view()))
    })
}

/// Prints the answers to one query.
fn once(args: &ShowArgs, repeater: &mut Repeater) -> Result<()> {
    let Some(answers) = repeater.next()? else {
        return Ok(());
    };
    for silent in &answers.silent {
        eprintln!("iwarp: {}", silent.sentence());
    }
    let metrics = |format| {
        let options = metrics::Options {
            format,
            queue_pairs: usize::MAX,
        };
        metrics::text(&answers.stats, answers.silent.len(), options)
    };
    let text = if args.openmetrics {
        metrics(metrics::Format::Both)
    } else if args.prometheus {
        metrics(metrics::Format::Prometheus)
    } else if args.json {
        serde_json::to_string_pretty(&as_json(&answers, args)).context("JSON")? + "\n"
    } else {
        as_table(&answers, &Previous::default(), &args.view())
    };
    out::text(&text).map(drop)
}

fn as_table(answers: &Answers, previous: &Previous, view: &View) -> String {
    let table = table::table(&answers.stats, previous, view, None);
    match (table.is_empty(), answers.stats.is_empty()) {
        (false, _) => table,
        (true, true) => "no process that uses iwarp\n".to_owned(),
        (true, false) => "no queue pair is connected to such a peer\n".to_owned(),
    }
}

/// Returns the document of `--json`. Its form is in `schema.json`.
fn as_json(answers: &Answers, args: &ShowArgs) -> Value {
    let processes: Vec<_> = answers
        .stats
        .iter()
        .map(|one| {
            let mut statistics = one.raw.clone();
            if let (Some(peers), Some(queue_pairs)) =
                (&args.peer, statistics["queue_pairs"].as_array_mut())
            {
                let peer = |qp: &Value| qp["connection"]["peer"].as_str().map(str::to_owned);
                queue_pairs.retain(|qp| peer(qp).is_some_and(|peer| peers.contain(&peer)));
            }
            json!({ "pid": one.pid, "uid": one.uid, "statistics": statistics })
        })
        .collect();
    let silent: Vec<_> = answers
        .silent
        .iter()
        .map(|one| json!({ "pid": one.pid, "uid": one.uid, "why": one.why }))
        .collect();
    json!({ "format": document::FORMAT, "processes": processes, "silent": silent })
}

/// Queries all processes that this user may query, and omits those that do not answer.
pub(crate) fn all_processes() -> Result<Vec<ProcessStats>> {
    let query = Query::new(Vec::new(), None, std::env::var_os("IWARP_STAT"));
    Ok(query.ask()?.stats)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_validated() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "0.05", "-1", "NaN", "inf", "1e9", "x", ""] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
