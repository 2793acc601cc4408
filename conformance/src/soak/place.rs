//! Where the ends run: two network namespaces with a virtual cable between them. They and all
//! processes in them end with this program.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;

/// Which end.
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

/// The server's address, and its port.
const SERVER: (&str, &str) = ("10.77.1.1", "7471");
const CLIENT: &str = "10.77.1.2";
/// Seconds after which a silent peer is given up. Cut cables are shorter or much longer.
const PEER_TIMEOUT: &str = "4";

/// The C program that both ends run.
const PROGRAM: &str = "soak-worker";
const SOURCES: [&str; 4] = ["main.c", "connections.c", "operations.c", "content.c"];

/// Returns a command that runs its arguments in namespaces of their own.
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

/// Returns why there can be no such namespaces; `None` if there can.
pub(super) fn obstacle(root: bool) -> Option<String> {
    let probe = "ip link add near type veth peer name far && unshare --net true";
    match namespaces(root).args(["sh", "-c", probe]).output() {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    }
}

/// Compiles the program of both ends into `prefix`.
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

/// The two namespaces.
pub(super) struct Place {
    prefix: PathBuf,
    /// A process that does nothing and is in the client's namespace.
    holder: Child,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Place {
    /// Lays the cable. This process is in the server's namespace.
    pub(super) fn new(prefix: &Path) -> Result<Self> {
        let holder = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "echo in; exec sleep infinity"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut place = Self {
            prefix: prefix.to_owned(),
            holder,
        };
        // The namespace is there when the process has said so.
        let mut said = std::io::BufReader::new(place.holder.stdout.take().context("a pipe")?);
        std::io::BufRead::read_line(&mut said, &mut String::new())?;
        let pid = place.holder.id();
        ip(&format!(
            "link add server type veth peer name client netns {pid}"
        ))?;
        ip("link set lo up")?;
        place.attach(Side::Server)?;
        place.ip(Side::Client, "link set lo up")?;
        place.attach(Side::Client)?;
        Ok(place)
    }

    fn attach(&self, side: Side) -> Result<()> {
        self.address(side, true)?;
        self.ip(side, &format!("link set {} up", side.name()))
    }

    /// Adds the address of this end, or removes it.
    pub(super) fn address(&self, side: Side, there: bool) -> Result<()> {
        let what = if there { "add" } else { "del" };
        let address = match side {
            Side::Server => SERVER.0,
            Side::Client => CLIENT,
        };
        self.ip(
            side,
            &format!("addr {what} {address}/24 dev {}", side.name()),
        )
    }

    /// Plugs the cable in, or pulls it.
    pub(super) fn cable(&self, there: bool) -> Result<()> {
        self.ip(
            Side::Server,
            &format!("link set server {}", if there { "up" } else { "down" }),
        )
    }

    /// Sets the MTU of both ends.
    pub(super) fn mtu(&self, octets: u32) -> Result<()> {
        for side in [Side::Server, Side::Client] {
            self.ip(side, &format!("link set {} mtu {octets}", side.name()))?;
        }
        Ok(())
    }

    /// Runs the command `ip` at this end.
    fn ip(&self, side: Side, words: &str) -> Result<()> {
        match side {
            Side::Server => ip(words),
            Side::Client => run(Command::new("nsenter")
                .arg(format!("--net=/proc/{}/ns/net", self.holder.id()))
                .arg("ip")
                .args(words.split(' '))),
        }
    }

    /// Returns the command of this end.
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
            // Freed blocks that the allocator keeps for a thread count as allocated, some 230 KiB
            // of each thread at most.
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
