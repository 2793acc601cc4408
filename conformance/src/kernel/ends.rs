//! An endpoint on which programs run: our library on this machine, or a device in a guest.

use std::cell::Cell;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

use anyhow::{Context as _, Result, bail};

use crate::guest::host::{self, Host};
use crate::guest::{Guest, HOST_TAP, HOST_TAP_V6, LISTEN_LIMIT, Net, Output, Running, fill};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Display for Family {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// An endpoint on which programs run.
pub(crate) enum Endpoint<'a> {
    /// On this machine, on our library, in the network namespace of a guest's TAP device.
    Library { host: &'a Host, guest: &'a Guest },
    /// In a guest, on a device that has these addresses.
    Device {
        guest: &'a Guest,
        device: &'static str,
        v4: Ipv4Addr,
        v6: Ipv6Addr,
    },
}

/// A running program. Dropping the value kills the program.
pub(crate) enum Process {
    OnHost(host::Program),
    InGuest(Running),
}

impl Process {
    /// Waits for the program to exit. If it does not exit within `limit` seconds, the returned exit
    /// code is 124.
    pub(crate) fn wait(self, limit: u64) -> Result<Output> {
        match self {
            Self::OnHost(program) => program.wait(limit),
            Self::InGuest(running) => running.wait_at_most(limit),
        }
    }

    pub(crate) fn output_so_far(&mut self) -> String {
        match self {
            Self::OnHost(program) => program.output_so_far().to_owned(),
            Self::InGuest(running) => running.output_so_far(),
        }
    }
}

/// Allocates ports for servers. Consecutive servers get different ports, because connections of an
/// earlier server may still be open.
#[derive(Default)]
pub(crate) struct Ports(Cell<u16>);

impl Ports {
    const FIRST: u16 = 7100;
    const COUNT: u16 = 1000;

    fn next(&self) -> u16 {
        let offset = self.0.get();
        self.0.set((offset + 1) % Self::COUNT);
        Self::FIRST + offset
    }
}

impl Endpoint<'_> {
    /// Returns the address to which the other end connects.
    pub(crate) fn address(&self, family: Family) -> IpAddr {
        match (self, family) {
            (Self::Library { .. }, Family::V4) => HOST_TAP.into(),
            (Self::Library { .. }, Family::V6) => HOST_TAP_V6.into(),
            (Self::Device { v4, .. }, Family::V4) => (*v4).into(),
            (Self::Device { v6, .. }, Family::V6) => (*v6).into(),
        }
    }

    /// Returns a port for a server on this endpoint.
    pub(crate) fn port(&self, ports: &Ports) -> Result<u16> {
        match self {
            Self::Library { .. } => Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
                .local_addr()?
                .port()),
            Self::Device { .. } => Ok(ports.next()),
        }
    }

    /// Starts a program. Replaces `{addr}` and `{port}` in its command line, and `{device}` by the
    /// option that selects the device.
    pub(crate) fn start(
        &self,
        words: &str,
        address: IpAddr,
        port: u16,
        limit: u64,
    ) -> Result<Process> {
        let words = fill(words, address, port);
        match self {
            Self::Library { host, guest } => {
                let words = words.replace("{device}", "");
                let mut words = words.split_whitespace().map(str::to_owned);
                let name = words.next().context("no program")?;
                let program = host.program(&name)?;
                let libraries = host.libraries.to_string_lossy();
                let settings = [("LD_LIBRARY_PATH", &*libraries)];
                let words: Vec<String> = words.collect();
                host::Program::start(guest, Net::Tap, &program, &words, &settings)
                    .map(Process::OnHost)
            }
            Self::Device { guest, device, .. } => {
                let words = words.replace("{device}", &format!("-d {device}"));
                // The guest's agent passes the command line to a shell.
                let words = words.replace(';', "\\;");
                guest.start_command(&words, limit).map(Process::InGuest)
            }
        }
    }

    /// Waits until a server listens on `port`.
    pub(crate) fn listens(&self, server: &mut Process, port: u16) -> Result<()> {
        match (self, server) {
            (Self::Library { .. }, Process::OnHost(program)) => program.listens(port, LISTEN_LIMIT),
            (Self::Device { guest, .. }, Process::InGuest(running)) => guest.listens(port, running),
            _ => bail!("the program does not run on this endpoint"),
        }
    }

    /// Runs a shell script on the endpoint's machine. Fails if the script fails.
    pub(crate) fn shell(&self, script: &str) -> Result<()> {
        match self {
            Self::Library { .. } => {
                let out = std::process::Command::new("sh")
                    .args(["-c", script])
                    .output()?;
                if !out.status.success() {
                    bail!("{script}: {}", String::from_utf8_lossy(&out.stderr).trim());
                }
                Ok(())
            }
            Self::Device { guest, .. } => guest.run_checked(script, 60).map(drop),
        }
    }
}
