//! `iwarp stat`: a process with traffic is seen, in each form, and what cannot be asked is said.

mod common;

use common::{LIMIT, Running, Scratch, fail, iwarp, run, serve, succeed, text};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::time::Instant;

/// A server that pings come to, and its process number.
fn server() -> (Running, u16, String) {
    let (running, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let pid = running.0.id().to_string();
    (running, at.port(), pid)
}

fn ping(port: u16, count: &str) {
    succeed(&["ping", "127.0.0.1", "-p", &port.to_string(), "-C", count]);
}

fn json(pid: &str) -> Value {
    let all: Value = serde_json::from_str(&succeed(&["stat", pid, "--json"])).unwrap();
    assert_eq!(all["format"], 1);
    assert_eq!(all["processes"].as_array().unwrap().len(), 1, "{all}");
    all["processes"][0].clone()
}

/// Octets that the devices of a process have received.
fn received(process: &Value) -> u64 {
    let devices = process["statistics"]["devices"].as_array().unwrap();
    let counters = devices.iter().map(|d| d["counters"]["rx_bytes"].as_u64());
    counters.map(Option::unwrap).sum()
}

#[test]
fn the_figures_of_a_server_grow_with_its_work() {
    let (_running, port, pid) = server();
    let idle = json(&pid);
    assert_eq!(idle["pid"].to_string(), pid);
    let command = idle["statistics"]["process"]["command"].as_str().unwrap();
    assert!(
        command.ends_with("ping serve -a 127.0.0.1 -p 0"),
        "{command}"
    );
    ping(port, "5");
    let first = received(&json(&pid));
    assert!(first > received(&idle));
    ping(port, "50");
    assert!(received(&json(&pid)) > 2 * first);
}

#[test]
fn a_connection_is_a_row_of_the_table_and_a_sample() {
    let (_running, port, pid) = server();
    // A client that stays: it pings for ever, and is ended with the test.
    let mut client = iwarp(&["ping", "127.0.0.1", "-p", &port.to_string()]);
    let mut client = Running(client.stdout(Stdio::null()).spawn().unwrap());
    let begin = Instant::now();
    let table = loop {
        let table = succeed(&["stat", &pid]);
        if table.contains(" RTS ") {
            break table;
        }
        assert!(begin.elapsed() < LIMIT && client.0.try_wait().unwrap().is_none());
    };
    for line in table.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    assert!(
        table.starts_with(&format!("process {pid}, user ")),
        "{table}"
    );
    let row = table.lines().find(|l| l.contains(" RTS ")).unwrap();
    assert!(row.contains(" 127.0.0.1:") && row.contains("µs"), "{row}");

    let metrics = succeed(&["stat", "--openmetrics", &pid]);
    assert!(metrics.ends_with("\n# EOF\n"));
    let sample = format!("iwarp_connection_tcp_rtt_seconds{{pid=\"{pid}\",device=\"");
    assert!(metrics.lines().any(|l| l.starts_with(&sample)), "{metrics}");
    // Asking is no way to change anything.
    assert!(client.0.try_wait().unwrap().is_none());
}

#[test]
fn watching_asks_again_and_again_until_the_process_ends() {
    let (mut running, port, pid) = server();
    let mut watch = iwarp(&["stat", &pid, "--watch=0.1", "--json"]);
    let mut watch = Running(watch.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
    let mut next = || -> Option<Value> {
        let line = lines.next()?.unwrap();
        Some(serde_json::from_str(&line).unwrap())
    };
    let before = received(&next().unwrap()["processes"][0]);
    ping(port, "20");
    while received(&next().unwrap()["processes"][0]) == before {}
    running.0.kill().unwrap();
    // Nobody has waited for the process yet, so its number stays: it has ended nevertheless.
    while next().is_some() {}
    let status = watch.wait(LIMIT).expect("it ends");
    assert!(status.success(), "{status}");
    running.0.wait().unwrap();
}

/// Answers the questions about this process, one of these to each, and then listens no more. Returns where to look for it.
fn answers(scratch: &Scratch, answers: &'static [&'static str]) -> (String, String) {
    let own = std::process::id().to_string();
    let dir = scratch.sub("answers");
    let listener = UnixListener::bind(dir.join(format!("iwarp-stat.{own}.{:016x}", 7))).unwrap();
    std::thread::spawn(move || {
        let (last, first) = answers.split_last().unwrap();
        for answer in first {
            let (mut socket, _) = listener.accept().unwrap();
            let _ = socket.write_all(answer.as_bytes());
        }
        let (mut socket, _) = listener.accept().unwrap();
        drop(listener);
        let _ = socket.write_all(last.as_bytes());
    });
    (own, common::str(&dir).to_owned())
}

/// The answer of a process that ends breaks off, or there is none. After that nobody listens.
#[test]
fn a_process_may_end_while_it_answers() {
    const GOOD: &str = r#"{"format":1}"#;
    let watch = |lines: usize, said: &'static [&'static str]| {
        let scratch = Scratch::new();
        let (pid, dir) = answers(&scratch, said);
        let args = ["stat", &pid, "--directory", &dir, "--watch=0.1", "--json"];
        assert_eq!(succeed(&args).lines().count(), lines, "{said:?}");
    };
    watch(1, &[GOOD, ""]);
    watch(1, &[GOOD, r#"{"format""#]);
    // What breaks off once is no end.
    watch(2, &[GOOD, "", GOOD]);
    // A process that never gave an answer is an error.
    let scratch = Scratch::new();
    let (pid, dir) = answers(&scratch, &[""]);
    let error = fail(&["stat", &pid, "--directory", &dir, "--watch=0.1"], 1);
    assert!(error.contains("has not answered"), "{error}");
}

/// Redrawing is for a terminal: a file gets one table after the other, with rates from the second on.
#[test]
fn a_pipe_gets_one_table_after_the_other() {
    let (_running, port, pid) = server();
    ping(port, "1");
    let mut watch = iwarp(&["stat", &pid, "--watch=0.1"]);
    let mut watch = Running(watch.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        while lines.next().expect("it goes on").unwrap() != "--" {}
    }
    // Nobody reads any more, and that is its end.
    drop(lines);
    assert!(watch.wait(LIMIT).expect("it ends").success());
}

#[test]
fn what_cannot_be_asked_is_said() {
    let error = fail(&["stat", "4194304"], 1);
    assert!(error.contains("there is no process 4194304"), "{error}");
    let own = std::process::id().to_string();
    let error = fail(&["stat", &own], 1);
    assert!(
        error.contains(&format!("process {own} cannot be asked")),
        "{error}"
    );
    // Nobody there is no error if nobody was named.
    let scratch = Scratch::new();
    let dir = scratch.sub("empty");
    let dir = common::str(&dir);
    let said = succeed(&["stat", "--directory", dir]);
    assert_eq!(said, "no process that uses iwarp\n");
    assert_eq!(
        succeed(&["stat", "--directory", dir, "--openmetrics"])
            .lines()
            .last(),
        Some("# EOF")
    );
}

/// Whatever stands behind a socket of this user: nonsense, another version, escape sequences.
#[test]
fn a_strange_answer_is_named_and_harmless() {
    let scratch = Scratch::new();
    let dir = scratch.sub("strange");
    for (at, answer) in [
        "nonsense \u{1b}[2J",
        r#"{"format":99}"#,
        r#"{"format":1,"process":{"command":"\u001b]0;evil\u0007"},"queue_pairs":[{"end":"\u001b[2J","state":"\u202e"}]}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let listener = UnixListener::bind(dir.join(format!("iwarp-stat.1.{at:016x}"))).unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let _ = socket.unwrap().write_all(answer.as_bytes());
            }
        });
    }
    let out = run(&["stat", "--directory", common::str(&dir)]);
    let (said, complaints) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{complaints}");
    assert!(
        complaints.contains("is not JSON") && complaints.contains("format 99"),
        "{complaints}"
    );
    for s in [&said, &complaints] {
        assert!(!s.contains('\u{1b}') && !s.contains('\u{202e}'), "{s:?}");
    }
    assert!(said.contains("\\u{1b}]0;evil\\u{7}"), "{said}");
}
