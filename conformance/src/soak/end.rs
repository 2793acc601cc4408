//! One end of the connections: the current server or client process, which may be stopped, killed
//! and replaced, and its output.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::network::{Network, Side};

/// Number of connections that the client keeps open.
const PAIRS: u64 = 64;

struct Running {
    child: Child,
    lines: Receiver<String>,
    /// Counters of the latest `stat` line.
    counters: BTreeMap<String, u64>,
}

/// An end: its current process, and the results of all its processes.
pub(super) struct End {
    side: Side,
    seed: u64,
    /// Number of processes started.
    starts: u64,
    running: Option<Running>,
    /// Counters of earlier processes.
    earlier_counters: BTreeMap<String, u64>,
    /// The `lost` lines since [`forget_losses`](Self::forget_losses).
    lost: Vec<String>,
    /// Counts of the reasons for losses and failed attempts since the last
    /// [`take_reasons`](Self::take_reasons).
    reasons: BTreeMap<String, u64>,
    /// The last line of output.
    last_line: String,
}

impl End {
    pub(super) fn new(side: Side, seed: u64) -> Self {
        Self {
            side,
            seed: seed.wrapping_mul(2) + u64::from(side == Side::Client),
            starts: 0,
            running: None,
            earlier_counters: BTreeMap::new(),
            lost: Vec::new(),
            reasons: BTreeMap::new(),
            last_line: String::new(),
        }
    }

    pub(super) fn start(&mut self, network: &Network) -> Result<()> {
        self.starts += 1;
        let seed = self.seed.wrapping_add(self.starts << 32);
        let mut child = network
            .command(self.side, seed)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("the output is not a pipe")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        self.running = Some(Running {
            child,
            lines,
            counters: BTreeMap::new(),
        });
        Ok(())
    }

    pub(super) fn pid(&self) -> Result<Pid> {
        let id = self.running.as_ref().map(|running| running.child.id());
        id.and_then(|id| Pid::from_raw(id as i32))
            .context("the process is not running")
    }

    /// Returns the number of the current process, counted from 1.
    pub(super) const fn process_number(&self) -> u64 {
        self.starts
    }

    pub(super) const fn side(&self) -> Side {
        self.side
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.pid()?, signal)?)
    }

    /// Kills the process and starts a new one.
    pub(super) fn replace(&mut self, network: &Network) -> Result<()> {
        self.read_lines()?;
        let mut old = self.running.take().context("the process is not running")?;
        old.child.kill()?;
        old.child.wait()?;
        for (name, count) in old.counters {
            *self.earlier_counters.entry(name).or_default() += count;
        }
        self.start(network)
    }

    /// Sends a command to the process.
    pub(super) fn send_command(&mut self, command: &str) {
        let input = self
            .running
            .as_mut()
            .and_then(|running| running.child.stdin.as_mut());
        if let Some(input) = input {
            // `read_lines` notices if the process has exited.
            let _ = writeln!(input, "{command}");
        }
    }

    /// Reads the output of the process.
    ///
    /// Fails if the process reported an error or exited.
    pub(super) fn read_lines(&mut self) -> Result<()> {
        loop {
            let Some(running) = &mut self.running else {
                return Ok(());
            };
            match running.lines.try_recv() {
                Ok(line) => self.handle_line(line)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) if self.last_line == "end" => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    let status = running.child.wait()?;
                    bail!("the {} process exited: {status}", self.side.name());
                }
            }
        }
    }

    fn handle_line(&mut self, line: String) -> Result<()> {
        if let Some(stat) = line.strip_prefix("stat ") {
            let counters = stat.split(' ').filter_map(|pair| {
                let (name, value) = pair.split_once('=')?;
                Some((name.to_owned(), value.parse().ok()?))
            });
            if let Some(running) = &mut self.running {
                running.counters = counters.collect();
            }
        } else if line.starts_with("WRONG ") {
            bail!("{}: {line}", self.side.name());
        } else if let Some(why) = ["lost", "failed"].iter().find_map(|kind| {
            let rest = line.strip_prefix(kind)?;
            Some(format!("{kind}: {}", rest.split_once("why=")?.1))
        }) {
            if line.starts_with("lost") {
                self.lost.push(line.clone());
            }
            *self.reasons.entry(why).or_default() += 1;
        }
        self.last_line = line;
        Ok(())
    }

    /// Fails if a connection was lost since [`forget_losses`](Self::forget_losses).
    pub(super) fn check_no_loss(&self) -> Result<()> {
        if self.lost.is_empty() {
            return Ok(());
        }
        bail!(
            "the {} lost {} connections without a disturbance: {}",
            self.side.name(),
            self.lost.len(),
            self.lost.join("; ")
        )
    }

    /// Discards the recorded losses.
    pub(super) fn forget_losses(&mut self) {
        self.lost.clear();
    }

    /// Returns and resets the counts of reasons for losses and failed attempts.
    pub(super) fn take_reasons(&mut self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.reasons)
    }

    /// Returns `true` if all connections are up, and none is being set up or torn down.
    pub(super) fn has_all_connections(&self) -> bool {
        let Some(running) = &self.running else {
            return false;
        };
        let equals = |name: &str, count| running.counters.get(name) == Some(&count);
        equals("live", PAIRS) && equals("draining", 0) && equals("others", 0)
    }

    pub(super) fn last_line(&self) -> &str {
        &self.last_line
    }

    /// Returns a counter of the running process.
    pub(super) fn counter(&self, name: &str) -> u64 {
        let running = self.running.as_ref();
        running
            .and_then(|r| r.counters.get(name))
            .copied()
            .unwrap_or(0)
    }

    /// Returns a counter, summed over all processes of this end.
    pub(super) fn total(&self, name: &str) -> u64 {
        let now = self.running.iter().filter_map(|r| r.counters.get(name));
        now.chain(self.earlier_counters.get(name)).sum()
    }

    /// Waits until the process exits by itself.
    ///
    /// Fails if the process does not exit in time, or reports an error.
    pub(super) fn wait_for_success(&mut self, timeout: Duration) -> Result<()> {
        let end = Instant::now() + timeout;
        while self.last_line != "end" {
            self.read_lines()?;
            self.check_no_loss()?;
            if Instant::now() > end {
                bail!(
                    "the {} process does not exit; its last output: {}",
                    self.side.name(),
                    self.last_line
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let running = self.running.as_mut().context("the process does not run")?;
        let status = running.child.wait()?;
        if !status.success() {
            bail!("the {} process exited: {status}", self.side.name());
        }
        Ok(())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}
