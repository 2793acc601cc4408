//! What the tests of the command share: running it, servers on free ports that end with the test, scratch directories.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// No call takes longer, unless something hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// The command, with nothing of the caller's environment that changes what it does.
pub(crate) fn iwarp(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_iwarp"));
    c.args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("IWARP_") {
            c.env_remove(name);
        }
    }
    c
}

/// Runs it to its end, within [`LIMIT`].
pub(crate) fn run(args: &[&str]) -> Output {
    finish(start(args), args)
}

/// Starts it with its output kept.
pub(crate) fn start(args: &[&str]) -> Running {
    let child = iwarp(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    Running(child)
}

/// Waits for its end. What it prints must fit the pipe, 64 KiB.
pub(crate) fn finish(mut running: Running, what: &[&str]) -> Output {
    let status = running
        .wait(LIMIT)
        .unwrap_or_else(|| panic!("{what:?} hangs"));
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    if let Some(mut out) = running.0.stdout.take() {
        out.read_to_end(&mut stdout).expect("stdout");
    }
    if let Some(mut err) = running.0.stderr.take() {
        err.read_to_end(&mut stderr).expect("stderr");
    }
    Output {
        status,
        stdout,
        stderr,
    }
}

/// Runs it and expects success; gives what it printed.
pub(crate) fn succeed(args: &[&str]) -> String {
    let out = run(args);
    assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

/// Runs it and expects this exit code; gives what it complained about.
pub(crate) fn fail(args: &[&str], code: i32) -> String {
    let out = run(args);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
    assert!(!err.contains("panicked"), "{err}");
    err
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// A process that is killed when the test ends, however it ends.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Waits for its end; `None` when it takes longer.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait().expect("wait") {
                return Some(status);
            }
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server that says on its first line where it listens.
pub(crate) fn serve(args: &[&str]) -> (Running, SocketAddr) {
    serve_as(iwarp(args))
}

/// As [`serve`], with a command of the caller's making.
pub(crate) fn serve_as(mut command: Command) -> (Running, SocketAddr) {
    let child = command
        .stdout(Stdio::piped())
        .spawn()
        .expect("the server starts");
    let mut running = Running(child);
    let stdout = running.0.stdout.take().expect("piped");
    let mut lines = BufReader::new(stdout);
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    let at = line
        .split_whitespace()
        .find_map(|w| w.trim_end_matches(';').parse().ok());
    let at = at.unwrap_or_else(|| panic!("{command:?} says '{line}'"));
    // Its further output is read, so that it never waits for us.
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    (running, at)
}

/// A directory that goes with the test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("iwarp-test-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("scratch directory");
        Self(dir)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn sub(&self, name: &str) -> PathBuf {
        let dir = self.path(name);
        std::fs::create_dir_all(&dir).expect("scratch directory");
        dir
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn str(path: &Path) -> &str {
    path.to_str().expect("scratch paths are UTF-8")
}

/// Octets that do not repeat within any slot or FPDU.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        // xorshift64
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}
