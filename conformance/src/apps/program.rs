//! A running program of a case, whose output goes to a file.

use std::fs::File;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

/// Interval between checks of a program or its output.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running program, the leader of its process group. Dropping it kills the group.
pub(super) struct Program {
    child: Child,
    shown: String,
    output: PathBuf,
    deadline: Instant,
    status: Option<ExitStatus>,
}

impl Program {
    /// Starts a program. Standard output and standard error go to the file `output`.
    pub(super) fn start(
        command: &mut Command,
        shown: String,
        input: Option<&Path>,
        output: PathBuf,
        deadline: Instant,
    ) -> Result<Self> {
        // Both outputs share one file description, which preserves the order of lines.
        let file = File::create(&output)?;
        let input = match input {
            Some(path) => File::open(path)?.into(),
            None => Stdio::null(),
        };
        let child = command
            .stdin(input)
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start `{shown}`"))?;
        Ok(Self {
            child,
            shown,
            output,
            deadline,
            status: None,
        })
    }

    pub(super) fn output_so_far(&self) -> String {
        let bytes = std::fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the output contains the text. Start the program with `stdbuf -oL` unless it
    /// flushes its output, because the C library buffers output to files.
    ///
    /// Fails if the program exits without printing the text, or at the time limit of the case.
    pub(super) fn wait_for(&mut self, text: &str) -> Result<()> {
        loop {
            if self.output_so_far().contains(text) {
                return Ok(());
            }
            if let Some(status) = self.poll()? {
                if self.output_so_far().contains(text) {
                    return Ok(());
                }
                bail!(
                    "`{}` exited ({status}) without printing {text:?}",
                    self.shown
                );
            }
            if Instant::now() >= self.deadline {
                bail!("`{}` did not print {text:?} in time", self.shown);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the exit status if the program has exited.
    ///
    /// Fails if the process cannot be queried.
    pub(super) fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Waits until the program exits. Returns its exit status and its output.
    ///
    /// Fails if a signal kills the program, or it does not exit before the time limit of the case.
    pub(super) fn wait(mut self) -> Result<(i32, String)> {
        loop {
            if let Some(status) = self.poll()? {
                let Some(code) = status.code() else {
                    let signal = status.signal().unwrap_or_default();
                    bail!(
                        "`{}` was killed by signal {signal}; its last output: {}",
                        self.shown,
                        last(&self.output_so_far())
                    );
                };
                return Ok((code, self.output_so_far()));
            }
            if Instant::now() >= self.deadline {
                bail!(
                    "`{}` did not exit in time; its last output: {}",
                    self.shown,
                    last(&self.output_so_far())
                );
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until the program exits successfully, and returns its output.
    ///
    /// Fails like [`Program::wait`], or if the exit status is not 0.
    pub(super) fn success(self) -> Result<String> {
        let shown = self.shown.clone();
        match self.wait()? {
            (0, said) => Ok(said),
            (code, said) => bail!(
                "`{shown}` exited with status {code}; its last output: {}",
                last(&said)
            ),
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        if self.status.is_some() {
            return;
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // An error means that no process of the group exists.
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Returns the process ID outside the namespaces.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Returns the last line of an output that is not empty.
fn last(said: &str) -> &str {
    said.lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())
        .unwrap_or("no output")
}
