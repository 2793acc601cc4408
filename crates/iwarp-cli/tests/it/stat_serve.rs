//! `iwarp stat serve`: what it answers, what it refuses, and that Prometheus' own programs accept
//! it.

use crate::common::{LIMIT, Running, Scratch, fail, installed, iwarp, serve, str, succeed, text};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

/// Starts a server for the processes whose sockets are in `directory`.
fn server(directory: &str, options: &[&str]) -> (Running, SocketAddr) {
    let args = [
        "stat",
        "serve",
        "--bind",
        "127.0.0.1:0",
        "--directory",
        directory,
    ];
    serve(&[&args, options].concat())
}

/// Starts a process with statistics in `directory`, and returns it with its process ID.
fn process(directory: &str) -> (Running, String) {
    let mut command = iwarp(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    command.env("IWARP_STAT", directory);
    let (running, _) = crate::common::serve_as(command);
    let pid = running.0.id().to_string();
    (running, pid)
}

/// Sends a request and returns everything until the server closes the connection.
fn send(at: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // A refused connection may be reset before all is written.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    text(&answer)
}

fn get(at: SocketAddr, path: &str, header: &str) -> String {
    send(
        at,
        &format!("GET {path} HTTP/1.1\r\nHost: {at}\r\n{header}\r\n"),
    )
}

#[test]
fn server_answers_in_the_accepted_format() {
    let scratch = Scratch::new();
    let dir = scratch.sub("stat");
    let (_process, pid) = process(str(&dir));
    let (_server, at) = server(str(&dir), &[]);
    let answer = get(at, "/metrics", "");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(
        answer.contains("content-type: text/plain; version=0.0.4"),
        "{answer}"
    );
    assert!(
        answer.contains("# TYPE iwarp_device_sent_bytes_total counter\n"),
        "{answer}"
    );
    let sample = format!("\niwarp_device_queue_pairs{{pid=\"{pid}\",device=\"iwarp0\"}} 0\n");
    assert!(answer.contains(&sample), "{answer}");

    let open = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    let answer = get(at, "/metrics", open);
    assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"));
    assert!(
        answer.contains("# TYPE iwarp_device_sent_bytes counter\n"),
        "{answer}"
    );
    assert!(
        answer.contains(&sample) && answer.ends_with("\n# EOF\n"),
        "{answer}"
    );
}

#[test]
fn server_is_read_only() {
    let scratch = Scratch::new();
    let (_server, at) = server(str(&scratch.sub("stat")), &[]);
    let status = |request: &str, status: &str| {
        let answer = send(at, request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{request}: {answer}"
        );
        answer
    };
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let answer = status(
            &format!("{method} /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n"),
            "405 ",
        );
        assert!(answer.contains("allow: GET, HEAD\r\n"), "{answer}");
    }
    let head = status(
        &format!("HEAD /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n"),
        "200 ",
    );
    assert!(head.ends_with("\r\n\r\n"), "{head}");
    status(&format!("GET /x HTTP/1.1\r\nHost: {at}\r\n\r\n"), "404 ");
    status(
        "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "403 ",
    );
    status("nonsense\r\n\r\n", "400 ");
    let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    assert!(!send(at, &long).contains(" 200 "));
    assert!(get(at, "/", "").contains("href=\"/metrics\""));
}

/// Clients that send nothing lose their places, so others are served.
#[test]
fn silent_clients_are_evicted() {
    let scratch = Scratch::new();
    let (_server, at) = server(str(&scratch.sub("stat")), &["--max-clients", "2"]);
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(at).unwrap()).collect();
    let begin = std::time::Instant::now();
    // A client that is refused tries again.
    while !get(at, "/metrics", "").starts_with("HTTP/1.1 200 ") {
        assert!(begin.elapsed() < LIMIT);
    }
    drop(silent);
}

#[test]
fn other_networks_are_refused() {
    let scratch = Scratch::new();
    let (_server, at) = server(str(&scratch.sub("stat")), &["--allow", "192.0.2.0/24"]);
    assert_eq!(get(at, "/metrics", ""), "");
    let error = fail(&["stat", "serve", "--bind", &at.to_string()], 1);
    assert!(error.contains(&format!("cannot listen on {at}")), "{error}");
}

/// `promtool` parses the text as Prometheus does, and knows the conventions for names.
#[test]
fn promtool_accepts_all_texts() {
    if !installed("promtool") {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.sub("stat");
    let (_process, _) = process(str(&dir));
    let (_server, at) = server(str(&dir), &[]);
    let served = get(at, "/metrics", "");
    let (_, served) = served.split_once("\r\n\r\n").unwrap();
    let printed = |option| succeed(&["stat", "--directory", str(&dir), option]);
    for text in [served, &printed("--prometheus"), &printed("--openmetrics")] {
        assert!(text.contains("iwarp_process_info{"), "{text}");
        let mut promtool = Command::new("promtool");
        promtool
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped());
        let mut promtool = promtool.spawn().unwrap();
        promtool
            .stdin
            .take()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        let out = promtool.wait_with_output().unwrap();
        let said = crate::common::text(&out.stderr);
        assert!(out.status.success() && said.is_empty(), "{said}\n{text}");
    }
}
