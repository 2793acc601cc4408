//! Helpers for the tests of the `iwarp` command: they run the command, start servers on free ports
//! and create scratch directories. Servers and directories are removed when the test ends.

pub(crate) mod capture;
pub(crate) mod crowd;
pub(crate) mod raw;

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a run of the command; after it, the test fails.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Returns the `iwarp` command without environment variables that affect it.
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

/// Runs the command and waits for it, at most [`LIMIT`].
pub(crate) fn run(args: &[&str]) -> Output {
    finish(start(args), args)
}

/// Starts the command. Both outputs go to pipes.
pub(crate) fn start(args: &[&str]) -> Running {
    let child = iwarp(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    Running(child)
}

/// Waits for the process and returns its output, which must fit the pipes (64 KiB each).
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

/// Runs the command, expects success, and returns its standard output.
pub(crate) fn succeed(args: &[&str]) -> String {
    let out = run(args);
    assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

/// Runs the command, expects this exit code, and returns its standard error.
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

/// A process that is killed on drop.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Waits for the process. Returns `None` if that takes longer than `limit`.
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

/// A loopback port on which nothing listens. It is the local port of a connection, so no other
/// process can listen on it.
pub(crate) struct ClosedPort {
    connection: TcpStream,
    _listener: TcpListener,
}

impl ClosedPort {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("its address");
        Self {
            connection: TcpStream::connect(to).expect("a connection"),
            _listener: listener,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.connection.local_addr().expect("its address").port()
    }
}

/// Starts a server and returns the address that it prints in its first line.
pub(crate) fn serve(args: &[&str]) -> (Running, SocketAddr) {
    serve_as(iwarp(args))
}

/// Like [`serve`], with a prepared command.
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
    let at = at.unwrap_or_else(|| panic!("no address from {command:?}: '{line}'"));
    // Read the other output in a thread: the server would block if the pipe were full.
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    (running, at)
}

/// A directory that is removed when the value is dropped.
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

/// Compiles C source into the file `to`.
pub(crate) fn compile(to: &Path, source: &str, args: &[&str]) {
    let file = to.with_extension("c");
    std::fs::write(&file, source).expect("scratch file");
    let status = Command::new("cc")
        .arg("-o")
        .arg(to)
        .arg(&file)
        .args(args)
        .status()
        .expect("a C compiler, which linking Rust needs as well");
    assert!(status.success(), "{source}");
}

/// Returns `true` if a program is installed; otherwise prints that the test is skipped.
pub(crate) fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !found {
        println!("skipped: {program} is not installed");
    }
    found
}

pub(crate) fn str(path: &Path) -> &str {
    path.to_str().expect("scratch paths are UTF-8")
}

/// Returns pseudorandom, non-repeating bytes, so that a test detects exchanged parts.
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
