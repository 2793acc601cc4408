//! Runs one test program with time limits, and names the tests that hung.
//!
//! cargo starts every test program through `xtask/watch-tests.sh`, which passes it to the program
//! `watch-tests`. libtest prints the name of a test after it has run for 60 seconds; with a single
//! thread, also when the test begins. This module derives from the output which tests are running.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::process;

/// Time between two comparisons with the limits.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the output is read after the program has ended. A child of the program may still run
/// and keep the pipe open.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// Octets of an incomplete line that are kept. Longer lines do not begin with the name of a test.
const LONGEST_NAME: usize = 4096;

/// Time limits. They are much longer than any test takes, so only hanging tests reach them.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The limit of each test.
    pub test: Duration,
    /// The limit of the test program, for a program that hangs outside of its tests.
    pub program: Duration,
}

impl Limits {
    /// Limits of 5 minutes for a test, or of `seconds`, and of four times as much for a program.
    #[must_use]
    pub fn new(seconds: Option<u64>) -> Self {
        let test = Duration::from_secs(seconds.unwrap_or(300).max(1));
        Self {
            test,
            program: test * 4,
        }
    }
}

/// A test that has begun and not ended.
struct Running {
    name: String,
    since: Instant,
}

/// The state of the tests, as read from libtest's output.
#[derive(Default)]
struct Progress {
    /// The end of the output, if it is not a complete line.
    partial: Vec<u8>,
    /// The test that `partial` announces.
    announced: Option<Running>,
    /// Tests that libtest has reported as slow and that have not ended.
    slow: Vec<Running>,
    /// The last complete line that is not empty.
    last: String,
}

impl Progress {
    fn read(&mut self, output: &[u8], now: Instant) {
        self.partial.extend_from_slice(output);
        while let Some(end) = self.partial.iter().position(|&octet| octet == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            self.announced = None;
            self.line(String::from_utf8_lossy(&line).trim_end(), now);
        }
        if self.partial.len() > LONGEST_NAME {
            self.partial.clear();
        }
        let text = String::from_utf8_lossy(&self.partial);
        let name = text
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... "));
        if let (Some(name), None) = (name, &self.announced) {
            let name = name.to_owned();
            self.announced = Some(Running { name, since: now });
        }
    }

    fn line(&mut self, line: &str, now: Instant) {
        if !line.is_empty() {
            line.clone_into(&mut self.last);
        }
        let Some(rest) = line.strip_prefix("test ") else {
            return;
        };
        if let Some((name, time)) = rest.split_once(" has been running for over ") {
            let seconds = time
                .split(' ')
                .next()
                .and_then(|number| number.parse().ok());
            let ran = Duration::from_secs(seconds.unwrap_or(0));
            self.slow.push(Running {
                name: name.to_owned(),
                since: now.checked_sub(ran).unwrap_or(now),
            });
        } else {
            // The name may be followed by a remark such as ` - should panic`.
            let ended = |name: &str| {
                let after = rest.strip_prefix(name);
                after.is_some_and(|after| after.starts_with(" ... ") || after.starts_with(" - "))
            };
            self.slow.retain(|test| !ended(&test.name));
        }
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.slow.iter().chain(&self.announced)
    }

    /// Returns a line for each test that exceeds its limit. If the program exceeds its own limit,
    /// returns a line for each running test; if none is known, a line with the last output.
    fn hung(&self, program: &str, start: Instant, now: Instant, limits: &Limits) -> Vec<String> {
        let exceeds = |since: Instant, limit| now.saturating_duration_since(since) >= limit;
        let program_hangs = exceeds(start, limits.program);
        let named: Vec<String> = self
            .running()
            .filter(|test| program_hangs || exceeds(test.since, limits.test))
            .map(|test| {
                let seconds = now.saturating_duration_since(test.since).as_secs();
                let name = &test.name;
                format!("hung: test {name} of {program} has been running for {seconds} s")
            })
            .collect();
        if program_hangs && named.is_empty() {
            let seconds = limits.program.as_secs();
            let last = &self.last;
            return vec![format!(
                "hung: {program} did not end within {seconds} s; its last output: {last}"
            )];
        }
        named
    }
}

fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a test program and copies its standard output to `output`. If a test or the program
/// exceeds its limit, writes the names to `report` and kills the program and its descendants.
///
/// Without `output`, the program writes to the standard output of this process and no test can be
/// named; only the limit of the program applies.
///
/// Returns `None` if the program was killed.
///
/// # Errors
/// If the program cannot be started or waited for.
pub fn run(
    command: &mut Command,
    limits: &Limits,
    output: Option<Box<dyn Write + Send>>,
    report: &mut dyn Write,
) -> io::Result<Option<ExitStatus>> {
    let name = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default();
    let mut name = name.to_string_lossy().into_owned();
    // Prefix the package, because most packages have a test program `it`. cargo sets the variable.
    if let Ok(package) = std::env::var("CARGO_PKG_NAME") {
        name = format!("{package}/{name}");
    }
    let progress = Arc::new(Mutex::new(Progress::default()));
    let start = Instant::now();
    if output.is_some() {
        command.stdout(Stdio::piped());
    }
    let mut child = command.spawn()?;
    let id = child.id();
    let copied = output.and_then(|output| copy(&mut child, output, &progress));
    let ended = wait_in_thread(child);
    let status = loop {
        match ended.recv_timeout(POLL_INTERVAL) {
            Ok(status) => break status?,
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let hung = lock(&progress).hung(&name, start, Instant::now(), limits);
        if !hung.is_empty() {
            for line in hung.iter().chain(&process::describe_tree(id)) {
                writeln!(report, "{line}")?;
            }
            process::kill_tree(id);
            let _ = ended.recv_timeout(DRAIN_TIME);
            return Ok(None);
        }
    };
    if let Some(copied) = copied {
        let _ = copied.recv_timeout(DRAIN_TIME);
    }
    Ok(Some(status))
}

/// Copies the output of a child in a thread. At the end of the output, the channel gets a value.
fn copy(
    child: &mut Child,
    mut output: Box<dyn Write + Send>,
    progress: &Arc<Mutex<Progress>>,
) -> Option<Receiver<()>> {
    let mut from = child.stdout.take()?;
    let progress = Arc::clone(progress);
    let (done, copied) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            lock(&progress).read(&buffer[..n], Instant::now());
            // Ignore a closed output: the program must run to its end nevertheless.
            let _ = output.write_all(&buffer[..n]).and_then(|()| output.flush());
        }
        let _ = done.send(());
    });
    Some(copied)
}

/// Waits for the end of a child in a thread.
fn wait_in_thread(mut child: Child) -> Receiver<io::Result<ExitStatus>> {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(child.wait()));
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        test: Duration::from_secs(100),
        program: Duration::from_secs(1000),
    };

    /// Returns the lines about hanging tests, `after` seconds after this output.
    fn hung_after(output: &[&str], after: u64) -> Vec<String> {
        let now = Instant::now() + Duration::from_secs(2000);
        let start = now - Duration::from_secs(70);
        let mut progress = Progress::default();
        for piece in output {
            progress.read(piece.as_bytes(), now);
        }
        progress.hung("x-1", start, now + Duration::from_secs(after), &LIMITS)
    }

    #[test]
    fn slow_tests_are_named() {
        let slow = "test a::slow has been running for over 60 seconds\n";
        for (output, after, named) in [
            (&["running 2 tests\n", slow][..], 41, true),
            (&[slow], 39, false),
            (&[&slow[..20], &slow[20..]], 41, true),
            (&[slow, "test a::slow ... ok\n"], 41, false),
            (&[slow, "test a::slow ... FAILED\n"], 41, false),
            (&[slow, "test a::slow - should panic ... ok\n"], 41, false),
            (
                &[slow, "test a::slower ... ok\n", "test slow ... ok\n"],
                41,
                true,
            ),
            (&["test a::slow ... "], 101, true),
            (&["test a::slow ... "], 99, false),
            (&["test a::slow ... ", "ok\n"], 101, false),
        ] {
            let lines = hung_after(output, after);
            assert_eq!(lines.len(), usize::from(named), "{output:?}: {lines:?}");
            let name = "hung: test a::slow of x-1 has been running for ";
            assert!(lines.iter().all(|line| line.starts_with(name)), "{lines:?}");
        }
    }

    #[test]
    fn program_without_running_test_is_named() {
        let lines = hung_after(&["test a ... ok\n", "\ntest result: ok\n\n"], 931);
        let expected = "hung: x-1 did not end within 1000 s; its last output: test result: ok";
        assert_eq!(lines, [expected]);
        assert!(hung_after(&["test a ... ok\n"], 929).is_empty());
    }

    #[test]
    fn ended_program_keeps_status_and_output() {
        struct Shared(Arc<Mutex<Vec<u8>>>);
        impl Write for Shared {
            fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(octets)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = Arc::new(Mutex::new(Vec::new()));
        let mut report = Vec::new();
        // `sleep` outlives the program and keeps the pipe open.
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 4 & echo out; exit 3"]);
        let output = Box::new(Shared(Arc::clone(&written)));
        let status = run(&mut command, &LIMITS, Some(output), &mut report);
        assert_eq!(status.unwrap().unwrap().code(), Some(3));
        assert_eq!(*written.lock().unwrap(), b"out\n");
        assert!(report.is_empty());
    }
}
