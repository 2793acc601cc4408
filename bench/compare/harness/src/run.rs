//! Runs one program once.

use crate::programs::Program;
use anyhow::{Context as _, bail};
use compare_harness::Outcome;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs a program, both ends, and returns its result.
///
/// # Errors
/// If the program fails or does not end within `limit` seconds. The text is the end of what it has
/// printed.
pub(crate) fn measure(
    program: &Program,
    work: &str,
    target: &Path,
    iwarp: &Path,
    limit: u64,
) -> anyhow::Result<Outcome> {
    let file = target
        .join("release")
        .join(format!("compare-{}", program.folder));
    let mut command = if program.verbs {
        let mut command = Command::new(iwarp);
        command.args(["run", "--bind", "127.0.0.1", "--"]).arg(file);
        command
    } else {
        Command::new(file)
    };
    command
        .arg(work)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // The client is in the server's group, so both can be ended.
    let mut server = command
        .process_group(0)
        .spawn()
        .context("cannot start the program")?;
    let end = Instant::now() + Duration::from_secs(limit);
    let group = Pid::from_child(&server);
    let status = loop {
        match server.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() > end => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // A client whose server has failed would wait.
    let _ = kill_process_group(group, Signal::KILL);
    if status.is_none() {
        server.wait()?;
    }
    let (mut out, mut errors) = (String::new(), String::new());
    server
        .stdout
        .take()
        .context("a pipe")?
        .read_to_string(&mut out)?;
    server
        .stderr
        .take()
        .context("a pipe")?
        .read_to_string(&mut errors)?;
    let said: Vec<_> = errors
        .lines()
        .filter(|line| !line.is_empty())
        .take(3)
        .collect();
    match status {
        None => bail!("no end after {limit} s; {}", said.join("; ")),
        Some(status) if !status.success() => bail!("{status}; {}", said.join("; ")),
        Some(_) => serde_json::from_str(&out).with_context(|| format!("no result: {out}")),
    }
}
