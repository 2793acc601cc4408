//! The second process of a measurement, the receiver. It is started with the same arguments as the
//! first process, the sender. The two processes exchange lines of text through pipes.

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The sender's handle to the receiving process. Dropping it waits for the process, or kills it.
#[derive(Debug)]
pub(crate) struct ReceivingProcess {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl ReceivingProcess {
    /// Starts this program again as the receiver.
    pub(crate) fn start() -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--peer")
            .args(std::env::args_os().skip(1))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the receiving process")?;
        let input = child.stdin.take();
        let output = child
            .stdout
            .take()
            .context("the process has no output pipe")?;
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
        })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("the receiving process ended early");
        }
        Ok(line)
    }

    /// Waits for the address that the receiver listens on.
    pub(crate) fn address(&mut self) -> Result<SocketAddr> {
        self.line()?
            .trim()
            .parse()
            .context("the receiving process has not printed its address")
    }

    /// Waits for a line of JSON from the receiver.
    pub(crate) fn report(&mut self) -> Result<Value> {
        serde_json::from_str(&self.line()?).context("the receiving process has not printed JSON")
    }

    /// Sends a line to the receiver.
    pub(crate) fn say(&mut self, word: &str) -> Result<()> {
        let input = self.input.as_mut().context("the pipe is closed")?;
        writeln!(input, "{word}")?;
        Ok(input.flush()?)
    }
}

impl Drop for ReceivingProcess {
    fn drop(&mut self) {
        self.input = None;
        // After a successful measurement, the receiver exits by itself. If it has not exited after
        // 5 s, kill it.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
            while std::time::Instant::now() < deadline {
                if matches!(self.child.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Sends a line to the sender. Called by the receiver.
pub(crate) fn send_line(text: impl std::fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Waits for a line from the sender. Called by the receiver. Returns an empty line if the sender
/// has closed the pipe, so that the receiver does not outlive it.
pub(crate) fn read_line() -> Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// Returns the number with this name in a report, or 0 if it is missing.
pub(crate) fn number(report: &Value, name: &str) -> f64 {
    report.get(name).and_then(Value::as_f64).unwrap_or(0.0)
}

/// Parses `"0,1"` as two CPUs, and `""` as no CPUs.
pub(crate) fn parse_cpus(text: &str) -> Result<(Option<usize>, Option<usize>)> {
    if text.is_empty() {
        return Ok((None, None));
    }
    let (a, b) = text
        .split_once(',')
        .context("--cpus: expected two numbers, for example 0,1")?;
    Ok((Some(a.trim().parse()?), Some(b.trim().parse()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(parse_cpus("").unwrap(), (None, None));
        assert_eq!(parse_cpus("2, 3").unwrap(), (Some(2), Some(3)));
        assert!(parse_cpus("1").is_err() && parse_cpus("a,b").is_err());
    }
}
