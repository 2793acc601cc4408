//! What the command writes, and what happens if it cannot be written.

use crate::common::{ClosedPort, Running, fail, iwarp, serve_as, succeed, text};
use serde_json::Value;
use std::fs::OpenOptions;
use std::process::Stdio;

/// A full disk is an error, whatever the command writes. A closed pipe is none, as in `… | head`.
#[test]
fn full_disk_fails_closed_pipe_does_not() {
    for args in [
        &["devices"][..],
        &["devices", "--json"],
        &["stat"],
        &["stat", "--json"],
        &["stat", "--openmetrics"],
        &["stat", "--schema"],
        &["stat", "--watch"],
        &["completions", "bash"],
        &["run", "--fault", "help"],
        &["perf", "--op", "tcp", "--size", "4", "--iters", "10"],
        &["--help"],
        &["stat", "--help"],
        &["--version"],
    ] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = iwarp(args)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let errors = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {errors}");
        let reason = "iwarp: cannot write to stdout: No space left on device";
        assert_eq!(errors.matches(reason).count(), 1, "{args:?}: {errors}");

        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = iwarp(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let errors = text(&out.stderr);
        assert!(
            out.status.success() && !errors.contains("panicked"),
            "{args:?}: {errors}"
        );
    }
}

fn json_lines(errors: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {errors}"));
    errors.lines().map(parse).collect()
}

/// By the option or the variable, each line of the log is a JSON object, and so is the reason of a
/// failure.
#[test]
fn log_is_json_on_request() {
    let port = ClosedPort::new();
    let port = port.port().to_string();
    let ping = ["ping", "127.0.0.1", "-C", "1", "-p", &port];
    let by_option = fail(&[&["--log-format", "json"], &ping[..]].concat(), 1);
    let mut by_variable = iwarp(&ping);
    by_variable
        .env("IWARP_LOG_FORMAT", "json")
        .env("RUST_LOG", "debug");
    let by_variable = text(&by_variable.output().unwrap().stderr);
    for errors in [by_option, by_variable] {
        let lines = json_lines(&errors);
        let last = lines.last().unwrap();
        assert_eq!(last["level"], "ERROR", "{errors}");
        let message = last["message"].as_str().unwrap();
        assert!(message.contains("connection refused"), "{errors}");
        assert!(last["timestamp"].is_string(), "{errors}");
    }
    let text = fail(&ping, 1);
    assert!(text.starts_with("iwarp: cannot connect to "), "{text}");
    let mut wrong = iwarp(&["devices"]);
    let wrong = wrong.env("IWARP_LOG_FORMAT", "xml").output().unwrap();
    let wrong = crate::common::text(&wrong.stderr);
    assert!(
        wrong.contains("IWARP_LOG_FORMAT=\"xml\" is ignored"),
        "{wrong}"
    );
}

/// A server logs a client that vanishes once, also with everything that `-v` shows.
#[test]
fn server_logs_lost_client_once() {
    let mut server = iwarp(&[
        "--log-format",
        "json",
        "ping",
        "serve",
        "-a",
        "127.0.0.1",
        "-p",
        "0",
    ]);
    server.env("RUST_LOG", "info").stderr(Stdio::piped());
    let (mut server, at) = serve_as(server);
    let mut client = iwarp(&["ping", "127.0.0.1", "-p", &at.port().to_string()]);
    let mut client = Running(client.stdout(Stdio::piped()).spawn().unwrap());
    let mut first = [0; 1];
    let mut pings = client.0.stdout.take().unwrap();
    std::io::Read::read_exact(&mut pings, &mut first).unwrap();
    drop(client);
    // A second client shows that the server has dealt with the first.
    succeed(&[
        "ping",
        "127.0.0.1",
        "-p",
        &at.port().to_string(),
        "-C",
        "77",
    ]);
    let begin = std::time::Instant::now();
    let stderr = server.0.stderr.take().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stderr));
    let mut of_first = Vec::new();
    while begin.elapsed() < crate::common::LIMIT {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        if line["message"].as_str().unwrap() == "77 pings answered" {
            break;
        }
        of_first.push(line);
    }
    assert!(of_first.len() <= 1, "{of_first:#?}");
}
