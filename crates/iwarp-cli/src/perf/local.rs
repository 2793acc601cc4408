//! The peer process of a run on one machine: the same program, started as `perf serve --child`.
//!
//! Three mechanisms ensure that it never outlives its parent: the kernel kills it when the parent's
//! thread ends; it exits at the end of its stdin, a pipe that the parent holds open; and the parent
//! kills it on drop.

use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    /// Address of its control port.
    pub(crate) addr: SocketAddr,
}

impl Peer {
    /// Starts the peer and waits until it listens.
    pub(crate) fn spawn(cpu: Option<usize>) -> Result<Self> {
        let exe = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(exe);
        command.args(["perf", "serve", "--bind", "127.0.0.1:0", "--child"]);
        // This process gets the peer's failures over the control connection and reports them.
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "error");
        }
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the peer process")?;
        let mut line = String::new();
        let read = child
            .stdout
            .take()
            .map(|o| BufReader::new(o.take(256)).read_line(&mut line));
        let addr = serde_json::from_str::<serde_json::Value>(&line)
            .ok()
            .and_then(|v| v.get("listening")?.as_str()?.parse().ok());
        match addr {
            Some(addr) => Ok(Self { child, addr }),
            None => {
                tracing::debug!(?read, line, "peer did not announce itself");
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::failed("the peer process did not start"))
            }
        }
    }
}

impl Peer {
    /// Returns the process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // An error means that the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the child: makes this process end with its parent.
pub(crate) fn end_with_parent() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot request a signal for the parent's end")?;
    // Detects a parent that ended before the call above.
    std::thread::Builder::new()
        .name("parent".to_owned())
        .spawn(|| {
            let mut sink = [0; 64];
            while matches!(std::io::stdin().read(&mut sink), Ok(n) if n > 0) {}
            std::process::exit(0);
        })
        .context("cannot watch the parent process")?;
    Ok(())
}

/// In the child: reports the listening address to the parent.
pub(crate) fn announce(at: SocketAddr) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{{\"listening\":\"{at}\"}}")
        .and_then(|()| out.flush())
        .context("cannot reach the parent process")
}
