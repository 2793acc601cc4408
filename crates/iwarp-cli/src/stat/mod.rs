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
use rates::Since;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a known process whose answer broke off is asked again, and the delay. A process that
/// is ending soon stops answering; one that is alive answers soon.
const AGAIN: usize = 40;
const AGAIN_PAUSE: Duration = Duration::from_millis(50);

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

A process can be asked as soon as it listens, connects, or creates a queue pair that is connected
by number. Only the same user and root can ask it, and only on the same machine. To ask a process
in a container, run this command inside the container, or share a directory with the container:
set IWARP_STAT=DIRECTORY for the process, and use --directory DIRECTORY here.
A process with IWARP_STAT=off cannot be asked.")]
pub(crate) struct StatArgs {
    /// Process number [default: all processes]
    /// Process number [default: all processes]
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
    /// Ask the processes that have IWARP_STAT=DIRECTORY
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

fn interval(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.1..=86400.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("seconds, from 0.1 to 86400".to_owned()),
    }
}

/// Asks the processes and prints their answers.
pub(crate) fn run(args: &StatArgs) -> Result<()> {
    let question = question(args, std::env::var_os("IWARP_STAT"));
    let mut before = Since::default();
    let mut seen = false;
    let mut again = 0;
    loop {
        let answers = question.ask().context("cannot ask")?;
        let (stats, silent) = sorted(answers);
        if let Some(pid) = args.pid.filter(|_| stats.is_empty()) {
            if seen && again < AGAIN && silent.iter().any(|s| !s.overdue) {
                again += 1;
                std::thread::sleep(AGAIN_PAUSE);
                continue;
            }
            return ended(pid, &silent, seen);
        }
        (seen, again) = (true, 0);
        for s in &silent {
            eprintln!("iwarp: {}", s.sentence());
        }
        let text = show(args, &stats, &silent, &before)?;
        if !print(args, &text) {
            return Ok(());
        }
        let Some(pause) = args.watch else {
            return Ok(());
        };
        before = Since::remember(&stats);
        std::thread::sleep(pause);
    }
}

/// Returns the question: which processes to ask, and where.
fn question(args: &StatArgs, set: Option<OsString>) -> Question {
    let mut question = Question::default();
    question.pid = args.pid;
    question.directory = directory(args.directory.as_ref(), set);
    question
}

/// Returns the directory that the user names. If `IWARP_STAT` is set for the programs of a shell,
/// it applies to this command, too.
fn directory(named: Option<&PathBuf>, set: Option<OsString>) -> Option<PathBuf> {
    let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
    named.cloned().or(set)
}

/// Asks all processes that this user may ask, and omits those that do not answer.
pub(crate) fn all_processes() -> std::io::Result<Vec<ProcessStats>> {
    let mut question = Question::default();
    question.directory = directory(None, std::env::var_os("IWARP_STAT"));
    Ok(sorted(question.ask()?).0)
}

/// A process that has not answered, and the reason.
struct Silent {
    pid: Option<u32>,
    uid: u32,
    /// The process accepted the question and did not answer in time. Otherwise the answer broke off
    /// or is invalid.
    overdue: bool,
    why: String,
}

impl Silent {
    fn sentence(&self) -> String {
        let who = match self.pid {
            Some(pid) => format!("process {pid}"),
            None => "a process of another container".to_owned(),
        };
        format!("{who} of user {} did not answer: {}", self.uid, self.why)
    }
}

/// Separates the answers, sorted by user and process number, from the failures.
fn sorted(answers: Vec<Answer>) -> (Vec<ProcessStats>, Vec<Silent>) {
    let (mut stats, mut silent) = (Vec::new(), Vec::new());
    for answer in answers {
        let overdue = matches!(&answer.document, Err(e) if e.kind() == ErrorKind::TimedOut);
        let document = answer.document.map_err(|e| match overdue {
            true => "it is stopped, or busy with other queries".to_owned(),
            false => e.to_string(),
        });
        let read = document.and_then(|text| ProcessStats::read(answer.pid, answer.uid, &text));
        match read {
            Ok(one) => stats.push(one),
            Err(why) => silent.push(Silent {
                pid: answer.pid,
                uid: answer.uid,
                overdue,
                // The reason may contain text from the process.
                why: table::harmless(&why, 200),
            }),
        }
    }
    stats.sort_by_key(|one| (one.uid, one.pid));
    (stats, silent)
}

/// Decides what to report if process `pid` did not answer. If it answered before (`seen`) and its
/// socket is closed now, it has ended, which is no error. Its number may still exist: as a zombie,
/// or because it runs another program now.
fn ended(pid: u32, silent: &[Silent], seen: bool) -> Result<()> {
    if let Some(silent) = silent.first() {
        return Err(Error::failed(silent.sentence()));
    }
    if seen {
        return Ok(());
    }
    if !Path::new("/proc").join(pid.to_string()).exists() {
        return Err(Error::failed(format!("there is no process {pid}")));
    }
    Err(Error::failed(format!(
        "process {pid} cannot be asked: it does not use iwarp (or not yet), has IWARP_STAT=off, \
         belongs to another user, or has a /tmp of its own (a container: run `iwarp stat` inside)"
    )))
}

fn show(
    args: &StatArgs,
    stats: &[ProcessStats],
    silent: &[Silent],
    before: &Since,
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
    Ok(table::table(stats, before))
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
            let asked = question(&wrap.args, set.map(Into::into));
            let seen = (asked.directory, asked.pid);
            assert_eq!(
                seen,
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
