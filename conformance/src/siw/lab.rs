//! Starts a program on our side and one in the guest, which connect to each other.

use std::cell::Cell;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::cases::{Case, We};
use super::guest::{Guest, Net, Output, Running};
use super::host::{Host, Program};
use super::image::sbin;

/// Longest time from the start of a server until it listens.
pub(crate) const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// The running guest, our programs, and the recordings. All cases work with it.
pub(super) struct Lab {
    pub(super) guest: Guest,
    pub(super) host: Host,
    port: Cell<u16>,
    captures: PathBuf,
    /// All cases are recorded, not only those that examine their packets.
    pub(super) record: bool,
}

/// The outputs and exit codes of both programs.
pub(super) struct Both {
    /// Our program.
    pub(super) ours: Output,
    /// The guest's.
    pub(super) theirs: Output,
}

/// Both programs while they run.
pub(super) struct Pair {
    /// Our program.
    pub(super) ours: Program,
    /// The guest's.
    pub(super) theirs: Running,
}

impl Pair {
    /// Waits for both programs. Ours may take `limit` seconds.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub(super) fn wait(self, limit: u64) -> Result<Both> {
        let ours = self.ours.wait(limit)?;
        let theirs = match ours.code {
            0 => self.theirs.wait()?,
            // After our program has failed the other one may wait for ever.
            _ => self.theirs.wait_at_most(10)?,
        };
        Ok(Both { ours, theirs })
    }
}

impl Both {
    /// Checks that both programs ended with exit code 0.
    ///
    /// # Errors
    /// When one did not. The error contains the end of both outputs.
    pub(super) fn succeeded(self) -> Result<Self> {
        self.ended(0, 0)
    }

    /// Checks that the programs ended with these exit codes.
    ///
    /// # Errors
    /// When one did not. The error contains the end of both outputs.
    pub(super) fn ended(self, ours: i32, theirs: i32) -> Result<Self> {
        if (self.ours.code, self.theirs.code) != (ours, theirs) {
            bail!(
                "ours ended with {} ({ours} expected): {} | theirs with {} ({theirs} expected): {}",
                self.ours.code,
                last_lines(&self.ours.text),
                self.theirs.code,
                last_lines(&self.theirs.text),
            );
        }
        Ok(self)
    }
}

/// Returns the last lines of an output, joined into one line.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| {
            !line.is_empty()
                && !line.starts_with("---")
                && !line.starts_with("GID")
                && !line.contains(" : ")
                && !line.contains("address: LID")
        })
        .collect();
    lines[lines.len().saturating_sub(14)..].join(" / ")
}

impl Lab {
    pub(super) fn new(guest: Guest, host: Host, captures: PathBuf, record: bool) -> Result<Self> {
        std::fs::create_dir_all(&captures)?;
        Ok(Self {
            guest,
            host,
            port: Cell::new(0),
            captures,
            record,
        })
    }

    /// Starts a program on our side and one in the guest. `{addr}` and `{port}` in their command lines are replaced. The case says
    /// which of them is the server; it is started first.
    ///
    /// # Errors
    /// When one of them cannot be started or the server does not listen.
    pub(super) fn start(&self, case: &Case, ours: &str, theirs: &str, limit: u64) -> Result<Pair> {
        match case.we {
            We::Connect => {
                let port = self.next_port();
                let theirs = fill(theirs, Guest::address(case.net), port);
                let mut theirs = self.guest.start_command(&theirs, limit)?;
                self.guest.listens(port, &mut theirs)?;
                let at = self.guest.reach(case.net, port)?;
                let ours = self.our_program(case, &fill(ours, at.ip(), at.port()))?;
                Ok(Pair { ours, theirs })
            }
            We::Serve => {
                let (bind, reach) = Guest::host(case.net);
                let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
                    .local_addr()?
                    .port();
                let mut ours = self.our_program(case, &fill(ours, bind, port))?;
                ours.listens(port, LISTEN_LIMIT)?;
                let theirs = self
                    .guest
                    .start_command(&fill(theirs, reach, port), limit)?;
                Ok(Pair { ours, theirs })
            }
        }
    }

    /// Starts both programs and waits for their ends.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub(super) fn talk(&self, case: &Case, ours: &str, theirs: &str, limit: u64) -> Result<Both> {
        self.start(case, ours, theirs, limit)?.wait(limit)
    }

    /// Returns the path for the recording of a case, without extension.
    fn file(&self, title: &str) -> PathBuf {
        self.captures
            .join(title.replace(' ', "-").replace("->", "-to-"))
    }

    /// Records the packets on the TAP device.
    ///
    /// # Errors
    /// When tcpdump cannot be started.
    pub(super) fn capture(&self, title: &str) -> Result<Capture> {
        self.capture_of(title, "tcp")
    }

    /// Records the packets that pass a filter of tcpdump.
    ///
    /// # Errors
    /// As [`capture`](Self::capture).
    pub(super) fn capture_of(&self, title: &str, filter: &str) -> Result<Capture> {
        let file = self.file(title).with_extension("pcap");
        let words: Vec<String> = ["-i", "any", "-s", "0", "--immediate-mode", "-U", "-w"]
            .iter()
            .map(|word| (*word).to_owned())
            .chain([file.display().to_string(), filter.to_owned()])
            .collect();
        let mut tcpdump = Program::start(&self.guest, Net::Tap, &sbin("tcpdump"), &words, &[])?;
        tcpdump.wait_for("listening on", 20)?;
        Ok(Capture { tcpdump, file })
    }

    fn our_program(&self, case: &Case, words: &str) -> Result<Program> {
        let mut words = words.split_whitespace().map(str::to_owned);
        let name = words.next().context("no program")?;
        let program = self.host.program(&name)?;
        let mut settings = case.settings.to_vec();
        let libraries = self.host.libraries.to_string_lossy();
        if name != "iwarp" {
            settings.push(("LD_LIBRARY_PATH", &libraries));
        }
        // tcpdump cannot see the packets of the user-mode network, so our library records the connection.
        let record;
        if self.record && case.net == Net::User {
            record = format!("{}-%p.pcapng", self.file(&case.title()).display());
            settings.push(("IWARP_CAPTURE", &record));
        }
        let args: Vec<String> = words.collect();
        Program::start(&self.guest, case.net, &program, &args, &settings)
    }

    /// Starts a program of this machine under `iwarp run`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn on_our_library(
        &self,
        case: &Case,
        words: &[&str],
        settings: &[(&str, &str)],
    ) -> Result<Program> {
        let program = sbin(words.first().context("no program")?);
        let mut args = vec!["run".to_owned(), "--".to_owned()];
        args.push(program.display().to_string());
        args.extend(words[1..].iter().map(|word| (*word).to_owned()));
        let mut settings = settings.to_vec();
        let record;
        if self.record && case.net == Net::User {
            record = format!("{}-%p.pcapng", self.file(&case.title()).display());
            settings.push(("IWARP_CAPTURE", &record));
        }
        Program::start(&self.guest, case.net, &self.host.iwarp, &args, &settings)
    }

    /// Returns the next of the guest's ports in turn, so that a case does not meet connections that an earlier one left behind.
    pub(super) fn next_port(&self) -> u16 {
        let ports = super::guest::GUEST_PORTS;
        let turn = self.port.get();
        self.port.set((turn + 1) % (ports.end - ports.start));
        ports.start + turn
    }
}

/// A recording of packets.
pub(super) struct Capture {
    tcpdump: Program,
    /// The file with the packets.
    pub(super) file: PathBuf,
}

impl Capture {
    /// Ends the recording after all packets have been written, and returns the file.
    ///
    /// # Errors
    /// When tcpdump does not end.
    pub(super) fn finish(self) -> Result<PathBuf> {
        // The last packets take a moment from the kernel to tcpdump.
        thread::sleep(Duration::from_millis(300));
        self.tcpdump.interrupt()?;
        let out = self.tcpdump.wait(20)?;
        if out.code == 124 {
            bail!("tcpdump does not end");
        }
        Ok(self.file)
    }
}

/// Replaces `{addr}` and `{port}`.
pub(crate) fn fill(words: &str, address: impl ToString, port: u16) -> String {
    words
        .replace("{addr}", &address.to_string())
        .replace("{port}", &port.to_string())
}

impl Program {
    /// Waits until the program listens on a port.
    ///
    /// # Errors
    /// When the program does not listen in time, or has ended.
    pub(crate) fn listens(&mut self, port: u16, limit: Duration) -> Result<()> {
        let start = Instant::now();
        let wanted = format!(":{port:04X} ");
        while start.elapsed() < limit {
            // The table of the network namespace that the program runs in.
            let listening = ["tcp", "tcp6"].iter().any(|table| {
                let text = std::fs::read_to_string(format!("/proc/{}/net/{table}", self.id())).unwrap_or_default();
                text.lines().any(|line| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    matches!(words[..], [_, local, _, "0A", ..] if format!("{local} ").contains(&wanted))
                })
            });
            if listening {
                return Ok(());
            }
            if self.has_ended()? {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!("our server does not listen: {}", self.said())
    }
}
