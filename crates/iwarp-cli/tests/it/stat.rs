//! `iwarp stat` in each output format, with a busy process and with a process that cannot be
//! queried.

use crate::common;
use crate::common::{LIMIT, Running, Scratch, fail, iwarp, run, serve, succeed, text};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Starts a ping server and returns it with its port and its process ID.
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

/// Returns how many bytes the devices of a process have received.
fn received(process: &Value) -> u64 {
    let devices = process["statistics"]["devices"].as_array().unwrap();
    let counters = devices.iter().map(|d| d["counters"]["rx_bytes"].as_u64());
    counters.map(Option::unwrap).sum()
}

#[test]
fn figures_grow_with_work() {
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
fn connection_is_row_and_sample() {
    let (_running, port, pid) = server();
    // This client pings until it is killed at the end of the test.
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
    // The last column is TCP's round-trip time. On a busy machine it may take milliseconds.
    let unit = row.split_whitespace().next_back().unwrap();
    assert!(
        row.contains(" 127.0.0.1:") && ["µs", "ms", "s"].contains(&unit),
        "{row}"
    );

    let metrics = succeed(&["stat", "--openmetrics", &pid]);
    assert!(metrics.ends_with("\n# EOF\n"));
    let sample = format!("iwarp_connection_tcp_rtt_seconds{{pid=\"{pid}\",device=\"");
    assert!(metrics.lines().any(|l| l.starts_with(&sample)), "{metrics}");
    // The requests of `iwarp stat` have not ended the connection.
    assert!(client.0.try_wait().unwrap().is_none());
}

#[test]
fn watch_ends_with_the_process() {
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
    // The server is a zombie now, so its process ID still exists. `iwarp stat` must end
    // nevertheless.
    while next().is_some() {}
    let status = watch.wait(LIMIT).expect("iwarp stat ends");
    assert!(status.success(), "{status}");
    running.0.wait().unwrap();
}

/// Answers the queries of this process with these texts in turn, and then closes the socket.
/// Returns the process ID and the directory of the socket.
fn answer_with(scratch: &Scratch, answers: &'static [&'static str]) -> (String, String) {
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

/// A process that is ending sends a truncated or empty answer, and then its socket is closed.
#[test]
fn process_may_end_while_answering() {
    const GOOD: &str = r#"{"format":1}"#;
    let watch = |lines: usize, answers: &'static [&'static str]| {
        let scratch = Scratch::new();
        let (pid, dir) = answer_with(&scratch, answers);
        let args = ["stat", &pid, "--directory", &dir, "--watch=0.1", "--json"];
        assert_eq!(succeed(&args).lines().count(), lines, "{answers:?}");
    };
    watch(1, &[GOOD, ""]);
    watch(1, &[GOOD, r#"{"format""#]);
    // After a truncated answer, `iwarp stat` repeats the query.
    watch(2, &[GOOD, "", GOOD]);
    // A process that never answered is an error.
    let scratch = Scratch::new();
    let (pid, dir) = answer_with(&scratch, &[""]);
    let error = fail(&["stat", &pid, "--directory", &dir, "--watch=0.1"], 1);
    assert!(error.contains("no statistics of"), "{error}");
}

/// On a terminal the table is redrawn. A file or pipe gets successive tables.
#[test]
fn pipe_gets_successive_tables() {
    let (_running, port, pid) = server();
    ping(port, "1");
    let mut watch = iwarp(&["stat", &pid, "--watch=0.1"]);
    let mut watch = Running(watch.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        while lines.next().expect("another table").unwrap() != "--" {}
    }
    // When the pipe has no reader, the command ends.
    drop(lines);
    assert!(watch.wait(LIMIT).expect("iwarp stat ends").success());
}

#[test]
fn unavailable_process_is_an_error() {
    let error = fail(&["stat", "4194304"], 1);
    assert!(error.contains("there is no process 4194304"), "{error}");
    let other = Command::new("sleep").arg("1000").spawn().unwrap();
    let other = Running(other);
    let pid = other.0.id().to_string();
    let error = fail(&["stat", &pid], 1);
    assert!(
        error.contains(&format!("process {pid} cannot be queried")),
        "{error}"
    );
    // Without a process ID, an empty list is no error.
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

/// Any program of this user can create such a socket. Its answer may be invalid, may have another
/// format, or may contain escape sequences.
#[test]
fn invalid_answers_are_reported_and_escaped() {
    let scratch = Scratch::new();
    let dir = scratch.sub("strange");
    for (i, answer) in [
        "nonsense \u{1b}[2J",
        r#"{"format":99}"#,
        r#"{"format":1,"process":{"command":"\u001b]0;evil\u0007"},
            "queue_pairs":[{"end":"\u001b[2J","state":"\u202e"}]}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let listener = UnixListener::bind(dir.join(format!("iwarp-stat.1.{i:016x}"))).unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let _ = socket.unwrap().write_all(answer.as_bytes());
            }
        });
    }
    let out = run(&["stat", "--directory", common::str(&dir)]);
    let (output, errors) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{errors}");
    assert!(
        errors.contains("is not JSON") && errors.contains("format 99"),
        "{errors}"
    );
    for s in [&output, &errors] {
        assert!(!s.contains('\u{1b}') && !s.contains('\u{202e}'), "{s:?}");
    }
    assert!(output.contains("\\u{1b}]0;evil\\u{7}"), "{output}");
}

/// Rates are relative to the previous answer, not to the first one. `--directory` takes precedence
/// over the environment.
#[test]
fn rates_are_since_last_answer() {
    const ANSWERS: [&str; 4] = [
        r#"{"format":1,"process":{"age_ns":1000000000},
            "queue_pairs":[{"number":5,"counters":{"tx_bytes":0}}]}"#,
        r#"{"format":1,"process":{"age_ns":2000000000},
            "queue_pairs":[{"number":5,"counters":{"tx_bytes":8000}}]}"#,
        r#"{"format":1,"process":{"age_ns":4000000000},
            "queue_pairs":[{"number":5,"counters":{"tx_bytes":9000}}]}"#,
        "",
    ];
    let scratch = Scratch::new();
    let (pid, dir) = answer_with(&scratch, &ANSWERS);
    let mut command = iwarp(&["stat", &pid, "--directory", &dir, "--watch=0.1"]);
    let out = command.env("IWARP_STAT", scratch.sub("empty")).output();
    let shown = text(&out.unwrap().stdout);
    let rows = shown.lines().filter(|l| l.trim_start().starts_with("5 "));
    let sent: Vec<String> = rows
        .map(|row| row.split_whitespace().skip(2).take(2).collect())
        .collect();
    assert_eq!(sent.len(), 3, "{shown}");
    assert_eq!(sent[1..], ["8.00kB/s", "500B/s"], "{shown}");
}

/// Returns where `value` differs from a JSON schema, or has members that the schema lacks. Supports
/// the keywords that our schema uses.
fn mismatch(root: &Value, schema: &Value, value: &Value, at: &str) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.strip_prefix("#/$defs/").unwrap();
        return mismatch(root, &root["$defs"][name], value, at);
    }
    if let Some(options) = schema["anyOf"].as_array() {
        let mut tried = options.iter().map(|o| mismatch(root, o, value, at));
        let found = tried.find(Option::is_none);
        return found.map_or_else(|| Some(format!("{at}: no alternative")), |_| None);
    }
    let wrong = || Some(format!("{at}: {value} and {schema}"));
    if let Some(values) = schema["enum"].as_array() {
        return if values.contains(value) {
            None
        } else {
            wrong()
        };
    }
    if let Some(one) = schema.get("const") {
        return if one == value { None } else { wrong() };
    }
    let kind = match value {
        Value::Null => "null",
        Value::String(_) => "string",
        Value::Number(n) if n.is_u64() => "integer",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
        _ => "unexpected",
    };
    let types = &schema["type"];
    if types != kind
        && !types
            .as_array()
            .is_some_and(|all| all.iter().any(|t| t == kind))
    {
        return wrong();
    }
    if let Some(items) = value.as_array() {
        let mut items = items.iter().enumerate();
        return items.find_map(|(i, v)| mismatch(root, &schema["items"], v, &format!("{at}/{i}")));
    }
    let members = value.as_object()?;
    let properties = schema["properties"].as_object().unwrap();
    let mut required = schema["required"].as_array().unwrap().iter();
    if let Some(missing) = required.find(|name| !members.contains_key(name.as_str().unwrap())) {
        return Some(format!("{at}: {missing} is missing"));
    }
    members
        .iter()
        .find_map(|(name, value)| match properties.get(name) {
            Some(schema) => mismatch(root, schema, value, &format!("{at}/{name}")),
            None => Some(format!("{at}/{name}: not documented")),
        })
}

/// Each member of the document is documented, with its type.
#[test]
fn json_obeys_its_schema() {
    let (_running, port, pid) = server();
    let mut client = iwarp(&["ping", "127.0.0.1", "-p", &port.to_string()]);
    let _client = Running(client.stdout(Stdio::null()).spawn().unwrap());
    let schema: Value = serde_json::from_str(&succeed(&["stat", "--schema"])).unwrap();
    let begin = Instant::now();
    let mut document = loop {
        let document: Value = serde_json::from_str(&succeed(&["stat", &pid, "--json"])).unwrap();
        let statistics = &document["processes"][0]["statistics"];
        if statistics["queue_pairs"][0]["connection"].is_object() {
            break document;
        }
        assert!(begin.elapsed() < LIMIT, "{document}");
    };
    assert_eq!(mismatch(&schema, &schema, &document, ""), None);

    // A process that does not answer is in the document, too.
    let scratch = Scratch::new();
    let (pid, dir) = answer_with(&scratch, &[r#"{"format":99}"#]);
    let silent = run(&["stat", "--directory", &dir, "--json"]);
    let silent: Value = serde_json::from_slice(&silent.stdout).unwrap();
    assert_eq!(silent["silent"][0]["pid"].to_string(), pid, "{silent}");
    assert_eq!(mismatch(&schema, &schema, &silent, ""), None);

    // The check itself finds what it should.
    let queue_pair = &mut document["processes"][0]["statistics"]["queue_pairs"][0];
    queue_pair["state"] = "BUSY".into();
    assert!(mismatch(&schema, &schema, &document, "").is_some());
    document["new"] = 1.into();
    document["processes"] = Value::Array(Vec::new());
    assert!(
        mismatch(&schema, &schema, &document, "")
            .unwrap()
            .contains("/new")
    );
}
