//! Runs programs on this machine. For cases over the TAP device, they run in its network namespace.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use xtask::context::Context;
use xtask::process::{Log, cargo};

use super::image::sbin;
use super::{Guest, Net, Output, killed_with_parent};

/// The paths of the programs and libraries that were built for this machine.
pub(crate) struct Host {
    pub(crate) iwarp: PathBuf,
    /// `guest/peer.c`, compiled for this machine.
    pub(crate) peer: PathBuf,
    /// The directory that contains our `libibverbs.so.1` and `librdmacm.so.1`.
    pub(crate) libraries: PathBuf,
}

impl Host {
    /// Builds the `iwarp` command, the C library and the program `peer` for this machine.
    pub(crate) fn build(context: &Context, cache: &Path, log: &mut Log) -> Result<Self> {
        log.say("building our programs");
        log.run(cargo(&context.root).args([
            "build",
            "--release",
            "--package",
            "iwarp-cli",
            "--package",
            "iwarp-verbs",
        ]))?;
        let release = context.target.join("release");
        // Unmodified programs load our library under these names.
        let libraries = cache.join("libraries");
        std::fs::create_dir_all(&libraries)?;
        let library = release
            .join("libiwarp_verbs.so")
            .canonicalize()
            .context("the C library was not built")?;
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            let link = libraries.join(name);
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&library, link)?;
        }
        let peer = cache.join("host-peer");
        let source: PathBuf = context.root.join("conformance/guest/peer.c");
        log.run(
            Command::new("gcc")
                .args(["-O1", "-Wall", "-Werror", "-o"])
                .arg(&peer)
                .arg(source)
                .args(["-lrdmacm", "-libverbs"]),
        )?;
        Ok(Self {
            iwarp: release.join("iwarp"),
            peer,
            libraries,
        })
    }

    /// Returns the path of one of our programs, or of an installed program.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        match name {
            "iwarp" => Ok(self.iwarp.clone()),
            "peer" => Ok(self.peer.clone()),
            other => xtask::context::find_program(other)
                .with_context(|| format!("{other} is not installed")),
        }
    }
}

/// A running program on this machine. Dropping it kills the program.
pub(crate) struct Program {
    child: Child,
    lines: Receiver<String>,
    seen: String,
    name: String,
}

impl Program {
    /// Starts a program with the environment variables `env`.
    pub(crate) fn start(
        guest: &Guest,
        net: Net,
        program: &Path,
        args: &[String],
        env: &[(&str, &str)],
    ) -> Result<Self> {
        let mut command = match (net, guest.namespace()) {
            (Net::User, _) => killed_with_parent(program),
            (Net::Tap, Some(namespace)) => {
                let mut command = killed_with_parent(sbin("ip"));
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            (Net::Tap, None) => bail!("the guest has no TAP device"),
        };
        let name = program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let mut child = command
            .args(args)
            .envs(env.iter().copied())
            .env(
                "RUST_LOG",
                std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned()),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let (sender, lines) = channel();
        let outputs: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|out| Box::new(out) as _),
            child.stderr.take().map(|out| Box::new(out) as _),
        ];
        for out in outputs.into_iter().flatten() {
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self {
            child,
            lines,
            seen: String::new(),
            name,
        })
    }

    /// Waits at most `limit` seconds for a line that contains `text`. Returns the line.
    pub(crate) fn wait_for(&mut self, text: &str, limit: u64) -> Result<String> {
        let deadline = Instant::now() + Duration::from_secs(limit);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                bail!(
                    "{}: no {text:?} within {limit} s in the output: {}",
                    self.name,
                    self.seen.trim()
                );
            };
            self.seen.push_str(&line);
            self.seen.push('\n');
            if line.contains(text) {
                return Ok(line);
            }
        }
    }

    /// Waits for the program to exit. If it does not exit within `limit` seconds, the returned exit
    /// code is 124.
    pub(crate) fn wait(mut self, limit: u64) -> Result<Output> {
        let end = Instant::now() + Duration::from_secs(limit);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push_str(&line);
                    self.seen.push('\n');
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    return Ok(Output {
                        code: 124,
                        text: std::mem::take(&mut self.seen),
                    });
                }
            }
        }
        let status = self.child.wait()?;
        Ok(Output {
            code: status.code().unwrap_or(-1),
            text: std::mem::take(&mut self.seen),
        })
    }

    /// Waits until the program listens on a port.
    ///
    /// Fails if the program exits, or does not listen in time.
    pub(crate) fn listens(&mut self, port: u16, limit: Duration) -> Result<()> {
        let start = Instant::now();
        let wanted = format!(":{port:04X}");
        while start.elapsed() < limit {
            // Read the tables of the program's network namespace.
            let listening = ["tcp", "tcp6"].iter().any(|table| {
                let table = format!("/proc/{}/net/{table}", self.id());
                let text = std::fs::read_to_string(table).unwrap_or_default();
                text.lines().any(|line| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    matches!(words[..], [_, local, _, "0A", ..] if local.ends_with(&wanted))
                })
            });
            if listening {
                return Ok(());
            }
            if self.has_exited()? {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!(
            "the server on this machine does not listen; its output: {}",
            self.output_so_far()
        )
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn interrupt(&self) -> Result<()> {
        let pid = i32::try_from(self.id())
            .ok()
            .and_then(Pid::from_raw)
            .context("no process id")?;
        Ok(kill_process(pid, Signal::INT)?)
    }

    /// Returns `true` if the program has exited.
    ///
    /// Fails if the process cannot be queried.
    pub(crate) fn has_exited(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Returns the output so far.
    pub(crate) fn output_so_far(&mut self) -> &str {
        while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(50)) {
            self.seen.push_str(&line);
            self.seen.push('\n');
        }
        self.seen.trim()
    }

    /// Kills the program and waits for its exit.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
