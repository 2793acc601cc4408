//! Runs a program on this machine and its peer in the guest.

use std::cell::Cell;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::case::{Case, Verdict};
use crate::guest::host::{Host, Program};
use crate::guest::image::sbin;
use crate::guest::{Guest, LISTEN_LIMIT, Net, Output, Running, fill, last_lines};
use crate::needs::Need;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OurRole {
    Connect,
    Serve,
}

/// Environment variables (`IWARP_*`) of the program on this machine.
pub(super) type Settings = &'static [(&'static str, &'static str)];

pub(super) const NETS: [Net; 2] = [Net::User, Net::Tap];
pub(super) const ROLES: [OurRole; 2] = [OurRole::Connect, OurRole::Serve];

/// The setup of both ends of a case.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) name: String,
    /// Module parameters of siw; empty for the unmodified driver.
    pub(super) driver: &'static str,
    pub(super) settings: Settings,
    pub(super) net: Net,
    pub(super) we: OurRole,
}

impl Setup {
    pub(super) fn title(&self) -> String {
        let direction = match self.we {
            OurRole::Connect => "us->siw",
            OurRole::Serve => "siw->us",
        };
        format!("{} {direction} {}", self.name, self.net.name())
    }

    /// Returns a case with this setup. `run` runs it and returns a note for the table.
    pub(super) fn case(
        self,
        run: impl Fn(&Lab, &Self) -> Result<String> + Send + Sync + 'static,
    ) -> Case<Lab> {
        let mut needs = vec![Need::Siw(self.driver)];
        if self.net == Net::Tap {
            needs.push(Need::Tap);
        }
        let case = Case::named(self.title(), move |lab: &Lab| {
            let capture = match self.net {
                Net::Tap if lab.record => Some(lab.capture(&self.title())?),
                _ => None,
            };
            let result = run(lab, &self);
            if let Some(capture) = capture {
                capture.finish()?;
            }
            result.map(Verdict::Passed)
        });
        Case { needs, ..case }
    }
}

pub(super) struct Lab {
    pub(super) guest: Guest,
    pub(super) host: Host,
    port: Cell<u16>,
    captures: PathBuf,
    /// Capture the packets of all cases, not only of those that check packets.
    pub(super) record: bool,
}

pub(super) struct Both {
    pub(super) ours: Output,
    /// The program in the guest.
    pub(super) theirs: Output,
}

pub(super) struct Pair {
    pub(super) ours: Program,
    /// The program in the guest.
    pub(super) theirs: Running,
}

impl Pair {
    /// Waits for both programs, at most `limit` seconds for ours.
    pub(super) fn wait(self, limit: u64) -> Result<Both> {
        let ours = self.ours.wait(limit)?;
        let theirs = match ours.code {
            0 => self.theirs.wait()?,
            // If our program failed, its peer may wait for ever.
            _ => self.theirs.wait_at_most(10)?,
        };
        Ok(Both { ours, theirs })
    }
}

impl Both {
    /// Fails unless both exit codes are 0.
    pub(super) fn expect_success(self) -> Result<Self> {
        self.expect_status(0, 0)
    }

    /// Fails unless the exit codes are `ours` and `theirs`. The error contains the last lines of
    /// both outputs.
    pub(super) fn expect_status(self, ours: i32, theirs: i32) -> Result<Self> {
        if (self.ours.code, self.theirs.code) != (ours, theirs) {
            bail!(
                "our program exited with {} ({ours} expected): {} | \
                 siw's with {} ({theirs} expected): {}",
                self.ours.code,
                last_lines(&self.ours.text),
                self.theirs.code,
                last_lines(&self.theirs.text),
            );
        }
        Ok(self)
    }
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

    /// Starts a program on this machine and its peer in the guest, the server first. Replaces
    /// `{addr}` and `{port}` in their command lines.
    pub(super) fn start(
        &self,
        setup: &Setup,
        ours: &str,
        theirs: &str,
        limit: u64,
    ) -> Result<Pair> {
        match setup.we {
            OurRole::Connect => {
                let port = self.next_port();
                let theirs = fill(theirs, Guest::address(setup.net), port);
                let mut theirs = self.guest.start_command(&theirs, limit)?;
                self.guest.listens(port, &mut theirs)?;
                let at = self.guest.reach(setup.net, port)?;
                let ours = self.our_program(setup, &fill(ours, at.ip(), at.port()))?;
                Ok(Pair { ours, theirs })
            }
            OurRole::Serve => {
                let (bind, reach) = Guest::host(setup.net);
                let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
                    .local_addr()?
                    .port();
                let mut ours = self.our_program(setup, &fill(ours, bind, port))?;
                ours.listens(port, LISTEN_LIMIT)?;
                let theirs = self
                    .guest
                    .start_command(&fill(theirs, reach, port), limit)?;
                Ok(Pair { ours, theirs })
            }
        }
    }

    /// Starts both programs and waits for their exit.
    pub(super) fn run_both(
        &self,
        setup: &Setup,
        ours: &str,
        theirs: &str,
        limit: u64,
    ) -> Result<Both> {
        self.start(setup, ours, theirs, limit)?.wait(limit)
    }

    /// Returns the path of a case's capture file, without extension.
    fn capture_path(&self, title: &str) -> PathBuf {
        self.captures
            .join(title.replace(' ', "-").replace("->", "-to-"))
    }

    /// Captures TCP packets on the TAP device.
    pub(super) fn capture(&self, title: &str) -> Result<Capture> {
        self.capture_filtered(title, "tcp")
    }

    /// Captures packets that match a filter of tcpdump.
    pub(super) fn capture_filtered(&self, title: &str, filter: &str) -> Result<Capture> {
        let file = self.capture_path(title).with_extension("pcap");
        let words: Vec<String> = ["-i", "any", "-s", "0", "--immediate-mode", "-U", "-w"]
            .iter()
            .map(|word| (*word).to_owned())
            .chain([file.display().to_string(), filter.to_owned()])
            .collect();
        let mut tcpdump = Program::start(&self.guest, Net::Tap, &sbin("tcpdump"), &words, &[])?;
        tcpdump.wait_for("listening on", 20)?;
        Ok(Capture { tcpdump, file })
    }

    fn our_program(&self, setup: &Setup, words: &str) -> Result<Program> {
        let mut words = words.split_whitespace().map(str::to_owned);
        let name = words.next().context("no program")?;
        let program = self.host.program(&name)?;
        let mut settings = setup.settings.to_vec();
        let libraries = self.host.libraries.to_string_lossy();
        if name != "iwarp" {
            settings.push(("LD_LIBRARY_PATH", &libraries));
        }
        // tcpdump cannot capture the packets of the user-mode network, so our library captures
        // them.
        let record;
        if self.record && setup.net == Net::User {
            record = format!("{}-%p.pcapng", self.capture_path(&setup.title()).display());
            settings.push(("IWARP_CAPTURE", &record));
        }
        let args: Vec<String> = words.collect();
        Program::start(&self.guest, setup.net, &program, &args, &settings)
    }

    /// Starts a program on this machine with `iwarp run`.
    pub(super) fn on_our_library(
        &self,
        setup: &Setup,
        words: &[&str],
        settings: &[(&str, &str)],
    ) -> Result<Program> {
        let program = sbin(words.first().context("no program")?);
        let mut args = vec!["run".to_owned(), "--".to_owned()];
        args.push(program.display().to_string());
        args.extend(words[1..].iter().map(|word| (*word).to_owned()));
        let mut settings = settings.to_vec();
        let record;
        if self.record && setup.net == Net::User {
            record = format!("{}-%p.pcapng", self.capture_path(&setup.title()).display());
            settings.push(("IWARP_CAPTURE", &record));
        }
        Program::start(&self.guest, setup.net, &self.host.iwarp, &args, &settings)
    }

    /// Returns a different port of the guest for each server, because connections of an earlier
    /// case may still be open.
    pub(super) fn next_port(&self) -> u16 {
        let ports = crate::guest::GUEST_PORTS;
        let offset = self.port.get();
        self.port.set((offset + 1) % (ports.end - ports.start));
        ports.start + offset
    }
}

pub(super) struct Capture {
    tcpdump: Program,
    pub(super) file: PathBuf,
}

impl Capture {
    /// Stops the capture when all packets are written, and returns the file.
    pub(super) fn finish(self) -> Result<PathBuf> {
        // tcpdump gets the last packets with a delay.
        thread::sleep(Duration::from_millis(300));
        self.tcpdump.interrupt()?;
        let out = self.tcpdump.wait(20)?;
        if out.code == 124 {
            bail!("tcpdump does not exit");
        }
        Ok(self.file)
    }
}
