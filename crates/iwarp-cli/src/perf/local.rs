//! The peer process of a run with both ends on this machine: this very program, started as `perf
//! serve --child`.
//!
//! It must never outlive its parent. Three ropes hold it: the kernel kills it when the parent's
//! thread ends, it ends itself when its stdin reaches the end (the parent holds the other end of
//! that pipe), and the parent kills it on drop.

use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

/// A running peer.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    /// Where its control port is.
    pub(crate) addr: SocketAddr,
}

impl Peer {
    /// Starts the peer and waits until it listens.
    ///
    /// # Errors
    /// When it cannot be started or ends at once.
    pub(crate) fn spawn(cpu: Option<usize>) -> Result<Self> {
        let exe = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(exe);
        command.args(["perf", "serve", "--bind", "127.0.0.1:0", "--child"]);
        // Its failures come back over the control connection and are reported once, by this end.
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
    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Errors mean that it is dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Child: makes sure that this process ends when its parent does.
///
/// # Errors
/// When the watching thread cannot be started.
pub(crate) fn end_with_parent() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot bind to the parent process")?;
    // Covers a parent that had died before the line above.
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

/// Child: tells the parent where it listens.
///
/// # Errors
/// When the parent has gone.
pub(crate) fn announce(at: SocketAddr) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{{\"listening\":\"{at}\"}}")
        .and_then(|()| out.flush())
        .context("cannot reach the parent process")
}
