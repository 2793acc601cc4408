//! `iwarp stat`: shows statistics of the processes that use the library.
//!
//! `document` parses the answer of a process, `table` and `openmetrics` format it, and `rates`
//! compares two answers.

mod document;
mod openmetrics;
mod rates;
mod table;

use clap::Args;
pub(crate) use document::{ProcessStats, QueuePair};
use iwarp::stat::{Answer, Question};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rates::Previous;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often, and after which delay, a process is queried again if it answered before and its
/// answer breaks off now. If it is ending, its socket closes soon; if not, it answers soon.
const RETRIES: usize = 40;
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Arguments of `iwarp stat`.
#[derive(Debug, Args)]
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
or Sends that wait for a receive.

EXAMPLES:
  iwarp stat                     all processes of this user (of all users for root)
  iwarp stat 4711 --watch        one process, with rates, every second
  iwarp stat --watch=0.2 --json  a line of JSON five times a second
  iwarp stat --openmetrics       for Prometheus, for example in a file for its textfile collector

A process can be queried as soon as it listens, connects, or creates a queue pair that is connected
by number. Only the same user and root can query it, and only on the same machine. To query a
process in a container, run this command inside the container, or share a directory with the
container: set IWARP_STAT=DIRECTORY for the process, and use --directory DIRECTORY here.
A process with IWARP_STAT=off cannot be queried.")]
pub(crate) struct StatArgs {
    /// Process ID [default: all processes]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Print JSON
    #[arg(long, conflicts_with = "openmetrics")]
    json: bool,
    /// Print OpenMetrics text
    #[arg(long, conflicts_with = "watch")]
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

/// Queries the processes and prints their answers.
pub(crate) fn run(args: &StatArgs) -> Result<()> {
    let question = question(args, std::env::var_os("IWARP_STAT"));
    let mut previous = Previous::default();
    let mut answered_before = false;
    let mut retries = 0;
    loop {
        let answers = question.ask().context("cannot query the processes")?;
        let (stats, silent) = separated(answers);
        if let Some(pid) = args.pid.filter(|_| stats.is_empty()) {
            if answered_before && retries < RETRIES && silent.iter().any(|s| !s.timed_out) {
                retries += 1;
                std::thread::sleep(RETRY_DELAY);
                continue;
            }
            return no_answer(pid, &silent, answered_before);
        }
        (answered_before, retries) = (true, 0);
        for s in &silent {
            eprintln!("iwarp: {}", s.sentence());
        }
        let text = show(args, &stats, &silent, &previous)?;
        if !print(args, &text) {
            return Ok(());
        }
        let Some(pause) = args.watch else {
            return Ok(());
        };
        previous = Previous::new(&stats);
        std::thread::sleep(pause);
    }
}

/// Returns the query: which processes, and in which directory their sockets are.
fn question(args: &StatArgs, set: Option<OsString>) -> Question {
    let mut question = Question::default();
    question.pid = args.pid;
    question.directory = directory(args.directory.as_ref(), set);
    question
}

/// Returns the directory of the sockets, from the option or from `IWARP_STAT`.
fn directory(named: Option<&PathBuf>, set: Option<OsString>) -> Option<PathBuf> {
    let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
    named.cloned().or(set)
}

/// Queries all processes that this user may query, and omits those that do not answer.
pub(crate) fn all_processes() -> std::io::Result<Vec<ProcessStats>> {
    let mut question = Question::default();
    question.directory = directory(None, std::env::var_os("IWARP_STAT"));
    Ok(separated(question.ask()?).0)
}

/// A process that has not answered, and the reason.
struct Silent {
    pid: Option<u32>,
    uid: u32,
    /// `true` if the process did not answer in time; `false` if its answer broke off or is invalid.
    timed_out: bool,
    why: String,
}

impl Silent {
    fn sentence(&self) -> String {
        let who = match self.pid {
            Some(pid) => format!("process {pid}"),
            None => "a process of another container".to_owned(),
        };
        format!("no statistics of {who}, user {}: {}", self.uid, self.why)
    }
}

/// Separates the answers, sorted by user and process ID, from the failures.
fn separated(answers: Vec<Answer>) -> (Vec<ProcessStats>, Vec<Silent>) {
    let (mut stats, mut silent) = (Vec::new(), Vec::new());
    for answer in answers {
        let timed_out = matches!(&answer.document, Err(e) if e.kind() == ErrorKind::TimedOut);
        let document = answer.document.map_err(|e| match timed_out {
            true => "it is stopped, or busy with other queries".to_owned(),
            false => e.to_string(),
        });
        let read = document.and_then(|text| ProcessStats::read(answer.pid, answer.uid, &text));
        match read {
            Ok(one) => stats.push(one),
            Err(why) => silent.push(Silent {
                pid: answer.pid,
                uid: answer.uid,
                timed_out,
                // The reason may contain text from the process.
                why: table::escaped(&why, 200),
            }),
        }
    }
    stats.sort_by_key(|one| (one.uid, one.pid));
    (stats, silent)
}

/// Returns the outcome if process `pid` did not answer. If it answered before and its socket is
/// closed now, it has ended, which is no error. Its process ID may still exist: the process may be
/// a zombie, or may have executed another program.
fn no_answer(pid: u32, silent: &[Silent], answered_before: bool) -> Result<()> {
    if let Some(silent) = silent.first() {
        return Err(Error::failed(silent.sentence()));
    }
    if answered_before {
        return Ok(());
    }
    if !Path::new("/proc").join(pid.to_string()).exists() {
        return Err(Error::failed(format!("there is no process {pid}")));
    }
    Err(Error::failed(format!(
        "process {pid} cannot be queried: it does not use iwarp (yet), has IWARP_STAT=off, belongs \
         to another user, or has a private /tmp (if it is in a container, run `iwarp stat` there)"
    )))
}

fn show(
    args: &StatArgs,
    stats: &[ProcessStats],
    silent: &[Silent],
    previous: &Previous,
) -> Result<String> {
    if args.openmetrics {
        return Ok(openmetrics::text(stats));
    }
    if args.json {
        let value = as_json(stats, silent);
        // With --watch, print one document per line, so that a program can read them one by one.
        let text = match args.watch {
            Some(_) => serde_json::to_string(&value),
            None => serde_json::to_string_pretty(&value),
        };
        return Ok(text.context("JSON")? + "\n");
    }
    if stats.is_empty() {
        return Ok("no process that uses iwarp\n".to_owned());
    }
    Ok(table::table(stats, previous))
}

fn as_json(stats: &[ProcessStats], silent: &[Silent]) -> Value {
    let stats: Vec<_> = stats
        .iter()
        .map(|one| json!({ "pid": one.pid, "uid": one.uid, "statistics": one.raw }))
        .collect();
    let silent: Vec<_> = silent
        .iter()
        .map(|one| json!({ "pid": one.pid, "uid": one.uid, "why": one.why }))
        .collect();
    json!({ "format": document::FORMAT, "processes": stats, "silent": silent })
}

/// Prints a table or a document. Returns `false` if stdout has been closed.
fn print(args: &StatArgs, text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    let mut all = String::new();
    if args.watch.is_some() && !args.json {
        if out.is_terminal() {
            // Home the cursor and clear the screen, so that the next table replaces the last one.
            all.push_str("\x1b[H\x1b[2J");
        } else {
            all.push_str("--\n");
        }
    }
    all.push_str(text);
    out.write_all(all.as_bytes())
        .and_then(|()| out.flush())
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Wrap {
        #[command(flatten)]
        args: StatArgs,
    }

    /// Each option with each value of `IWARP_STAT`.
    #[test]
    fn directory_option_wins_over_environment() {
        for (options, set, directory, pid) in [
            (&[][..], None, None, None),
            (&[], Some("on"), None, None),
            (&[], Some("off"), None, None),
            (&[], Some("relative/folder"), None, None),
            (&[], Some("/env"), Some("/env"), None),
            (&["7"], Some("/env"), Some("/env"), Some(7)),
            (&["--directory", "/arg"], None, Some("/arg"), None),
            (&["--directory", "/arg"], Some("/env"), Some("/arg"), None),
            (
                &["--directory", "arg", "7"],
                Some("off"),
                Some("arg"),
                Some(7),
            ),
        ] {
            let wrap = Wrap::parse_from([&["stat"], options].concat());
            let question = question(&wrap.args, set.map(Into::into));
            assert_eq!(
                (question.directory, question.pid),
                (directory.map(Into::into), pid),
                "{options:?} {set:?}"
            );
        }
    }

    #[test]
    fn intervals_are_validated() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "0.05", "-1", "NaN", "inf", "1e9", "x", ""] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
