//! Two network namespaces, one for each end, connected by a veth pair. The namespaces and their
//! processes end with this program.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Server,
    Client,
}

impl Side {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

const SERVER: (&str, &str) = ("10.77.1.1", "7471");
const CLIENT: &str = "10.77.1.2";
/// Time-out of a silent peer, in seconds. A disturbance is either much shorter or much longer.
const PEER_TIMEOUT: &str = "4";

const PROGRAM: &str = "soak-worker";
const SOURCES: [&str; 4] = ["main.c", "connections.c", "operations.c", "content.c"];

/// Returns a command that runs its arguments in new namespaces.
pub(super) fn namespaces(root: bool) -> Command {
    let mut command = Command::new("unshare");
    if !root {
        command.args(["--user", "--map-root-user"]);
    }
    command.args([
        "--net",
        "--pid",
        "--mount-proc",
        "--fork",
        "--kill-child",
        "--",
    ]);
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    command.env("PATH", path);
    command
}

/// Returns why the namespaces cannot be created, or `None` if they can.
pub(super) fn namespaces_unavailable(root: bool) -> Option<String> {
    let probe = "ip link add near type veth peer name far && unshare --net true";
    match namespaces(root).args(["sh", "-c", probe]).output() {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    }
}

pub(super) fn compile(context: &Context, prefix: &Path) -> Result<()> {
    let sources = context.root.join("conformance/src/soak");
    let built = Command::new("cc")
        .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(prefix.join(PROGRAM))
        .args(SOURCES.map(|name| sources.join(name)))
        .arg("-L")
        .arg(prefix.join("lib/iwarp"))
        .args(["-l:libibverbs.so.1", "-l:librdmacm.so.1"])
        .output()
        .context("the C compiler")?;
    if !built.status.success() {
        bail!("{}", String::from_utf8_lossy(&built.stderr));
    }
    Ok(())
}

pub(super) struct Network {
    prefix: PathBuf,
    /// An idle process that keeps the client's namespace alive.
    holder: Child,
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Network {
    /// Creates the client's namespace and the veth pair. The calling process is in the server's
    /// namespace.
    pub(super) fn new(prefix: &Path) -> Result<Self> {
        let holder = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "echo in; exec sleep infinity"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut network = Self {
            prefix: prefix.to_owned(),
            holder,
        };
        // The process writes a line when the namespace exists.
        let mut output = std::io::BufReader::new(
            network
                .holder
                .stdout
                .take()
                .context("the output is not a pipe")?,
        );
        std::io::BufRead::read_line(&mut output, &mut String::new())?;
        let pid = network.holder.id();
        ip(&format!(
            "link add server type veth peer name client netns {pid}"
        ))?;
        ip("link set lo up")?;
        network.attach(Side::Server)?;
        network.ip(Side::Client, "link set lo up")?;
        network.attach(Side::Client)?;
        Ok(network)
    }

    fn attach(&self, side: Side) -> Result<()> {
        self.set_address(side, true)?;
        self.ip(side, &format!("link set {} up", side.name()))
    }

    /// Adds or removes the address of an end.
    pub(super) fn set_address(&self, side: Side, present: bool) -> Result<()> {
        let what = if present { "add" } else { "del" };
        let set_address = match side {
            Side::Server => SERVER.0,
            Side::Client => CLIENT,
        };
        self.ip(
            side,
            &format!("addr {what} {set_address}/24 dev {}", side.name()),
        )
    }

    /// Sets the link up or down.
    pub(super) fn set_link(&self, up: bool) -> Result<()> {
        self.ip(
            Side::Server,
            &format!("link set server {}", if up { "up" } else { "down" }),
        )
    }

    pub(super) fn set_mtu(&self, octets: u32) -> Result<()> {
        for side in [Side::Server, Side::Client] {
            self.ip(side, &format!("link set {} mtu {octets}", side.name()))?;
        }
        Ok(())
    }

    /// Runs `ip` in the namespace of a side.
    fn ip(&self, side: Side, words: &str) -> Result<()> {
        match side {
            Side::Server => ip(words),
            Side::Client => run(Command::new("nsenter")
                .arg(format!("--net=/proc/{}/ns/net", self.holder.id()))
                .arg("ip")
                .args(words.split(' '))),
        }
    }

    /// Returns the command that starts the process of a side.
    pub(super) fn command(&self, side: Side, seed: u64) -> Command {
        let program = self.prefix.join(PROGRAM);
        let mut command = match side {
            Side::Server => Command::new(program),
            Side::Client => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/proc/{}/ns/net", self.holder.id()));
                command.arg(program);
                command
            }
        };
        command
            .args([side.name(), SERVER.0, SERVER.1, &seed.to_string()])
            .env("LD_LIBRARY_PATH", self.prefix.join("lib/iwarp"))
            .env("IWARP_PEER_TIMEOUT_S", PEER_TIMEOUT)
            // Without this, free blocks in a thread's cache, up to 230 KiB per thread, count as
            // allocated.
            .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0");
        command
    }
}

fn ip(words: &str) -> Result<()> {
    run(Command::new("ip").args(words.split(' ')))
}

fn run(command: &mut Command) -> Result<()> {
    let out = command.output()?;
    if !out.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}
