//! The environment of a case, called its stage: namespaces, a working directory, ports, and the
//! user ID of its programs.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::case::{Case, Verdict};

use super::program::{POLL_INTERVAL, Program};
use crate::needs::Need;

/// The addresses of the interface that [`Case::wire`] adds.
pub(super) const WIRE_V4: &str = "10.77.0.1";
pub(super) const WIRE_V6: &str = "fd77::1";
/// The name of this interface.
pub(super) const WIRE: &str = "wire0";

/// The user and group ID of `nobody`.
const NOBODY: &str = "65534";
/// Ports that cases may use.
const PORTS: Range<u16> = 20_000..30_000;
/// If this program is killed, the namespaces end this many seconds after the case's time limit.
const HOLDER_EXTRA_S: u64 = 30;

/// How cases are isolated from each other and from the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isolation {
    /// Root creates namespaces and runs the programs in them as `nobody`.
    Root,
    /// An ordinary user creates namespaces in a user namespace.
    User,
    /// This machine does not permit namespaces: programs run on its loopback.
    None,
}

impl Isolation {
    /// Tries whether this machine permits namespaces.
    pub(super) fn probe() -> Self {
        let kind = if rustix::process::geteuid().is_root() {
            Self::Root
        } else {
            Self::User
        };
        let permitted = kind
            .unshare()
            .args(["sh", "-c", "ip link set lo up"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if permitted { kind } else { Self::None }
    }

    /// Returns a description for the terminal.
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::Root => "each case runs as nobody in separate namespaces",
            Self::User => "each case runs in a separate user namespace",
            Self::None => {
                "no namespaces permitted: cases run on the machine's loopback, one by one"
            }
        }
    }

    /// Returns a command that runs its arguments in new namespaces. If the command is killed, the
    /// kernel kills all processes in the namespaces.
    fn unshare(self) -> Command {
        let mut command = Command::new("unshare");
        if self == Self::User {
            command.args(["--user", "--map-current-user", "--keep-caps"]);
        }
        command.args([
            "--net",
            "--pid",
            "--mount-proc",
            "--fork",
            "--kill-child",
            "--",
        ]);
        command
    }
}

/// Directories and isolation, which are the same for all cases.
pub(super) struct Environment<'a> {
    pub(super) prefix: &'a Path,
    pub(super) home: &'a Path,
    pub(super) logs: &'a Path,
    pub(super) isolation: Isolation,
}

/// The environment of one case. Dropping it kills all processes that the case started.
pub(super) struct Stage {
    /// Must be the first field, so that it is dropped first, which kills all processes in the
    /// namespaces.
    holder: Option<Holder>,
    isolation: Isolation,
    prefix: PathBuf,
    dir: PathBuf,
    log: PathBuf,
    deadline: Instant,
    count: Cell<usize>,
    port: Cell<u16>,
    outputs: RefCell<Vec<(String, PathBuf)>>,
}

/// The process that created the namespaces, and the PID of the first process in them (`inside`).
/// When that process exits, the kernel kills all processes in the namespaces.
struct Holder {
    _program: Program,
    inside: u32,
}

impl Stage {
    pub(super) fn open(
        environment: &Environment<'_>,
        case: &Case<Self>,
        number: usize,
    ) -> Result<Self> {
        let dir = environment.home.join(number.to_string());
        std::fs::create_dir(&dir)?;
        // The programs run as another user, which must be able to write to the directory.
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777))?;
        let deadline = Instant::now() + case.limit;
        let holder = match environment.isolation {
            Isolation::None => None,
            kind => {
                let keep = [environment.home, environment.prefix];
                Some(Holder::start(kind, case, &dir, &keep, deadline)?)
            }
        };
        let mut name: String = case
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        let _ = write!(name, "-{number}.log");
        Ok(Self {
            holder,
            isolation: environment.isolation,
            prefix: environment.prefix.to_owned(),
            dir,
            log: environment.logs.join(name),
            deadline,
            count: Cell::new(0),
            port: Cell::new(first_port(number)),
            outputs: RefCell::new(Vec::new()),
        })
    }

    /// Returns the working directory of the programs, to which they may write.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory that contains our libraries under the names of rdma-core's.
    pub(super) fn libraries(&self) -> PathBuf {
        self.prefix.join("lib/iwarp")
    }

    pub(super) fn command_path(&self) -> String {
        self.prefix.join("bin/iwarp").display().to_string()
    }

    /// Allocates a port. The port is below 32768, because tgtd stores ports in signed 16-bit
    /// integers. Ephemeral ports are above that.
    pub(super) fn port(&self) -> Result<u16> {
        loop {
            let port = self.port.get();
            if !PORTS.contains(&port) {
                bail!("no free port in the range for cases");
            }
            self.port.set(port + 1);
            // In a new network namespace every port is free.
            if self.holder.is_some() || is_free(port) {
                return Ok(port);
            }
        }
    }

    /// Starts a program with `iwarp run`.
    pub(super) fn start(&self, words: &[&str]) -> Result<Program> {
        self.start_with(&[], None, &[], words)
    }

    /// Starts a program with `iwarp run` and these options, standard input and environment
    /// variables.
    pub(super) fn start_with(
        &self,
        options: &[&str],
        input: Option<&Path>,
        variables: &[(&str, &str)],
        words: &[&str],
    ) -> Result<Program> {
        let iwarp = self.command_path();
        let mut all = vec![iwarp.as_str(), "run"];
        all.extend(options);
        all.push("--");
        all.extend(words);
        let mut command = self.command(&all);
        command.envs(variables.iter().copied());
        self.launch(&mut command, words.join(" "), input)
    }

    /// Starts a program that does not use verbs, without `iwarp run`.
    pub(super) fn start_plain(&self, words: &[&str]) -> Result<Program> {
        self.launch(&mut self.command(words), words.join(" "), None)
    }

    fn launch(
        &self,
        command: &mut Command,
        shown: String,
        input: Option<&Path>,
    ) -> Result<Program> {
        self.count.set(self.count.get() + 1);
        let output = self.dir.join(format!("output.{}", self.count.get()));
        self.outputs
            .borrow_mut()
            .push((shown.clone(), output.clone()));
        Program::start(
            command.current_dir(&self.dir),
            shown,
            input,
            output,
            self.deadline,
        )
    }

    /// Returns a command that runs in the namespaces as an ordinary user.
    fn command(&self, words: &[&str]) -> Command {
        let mut all: Vec<String> = Vec::new();
        if let Some(holder) = &self.holder {
            all.push("nsenter".into());
            if self.isolation == Isolation::User {
                all.extend(["--preserve-credentials", "--user"].map(String::from));
            }
            all.extend(["--net", "--pid", "--mount"].map(String::from));
            // Entering a mount namespace changes the working directory.
            all.push(format!("--wd={}", self.dir.display()));
            all.extend(["--target".into(), holder.inside.to_string(), "--".into()]);
        }
        if rustix::process::geteuid().is_root() {
            all.extend(
                [
                    "setpriv",
                    "--reuid",
                    NOBODY,
                    "--regid",
                    NOBODY,
                    "--clear-groups",
                ]
                .map(String::from),
            );
            all.push("--".into());
        }
        // nsenter may still start the program in the root directory.
        all.extend(["env".into(), format!("--chdir={}", self.dir.display())]);
        all.extend(words.iter().map(|&word| word.to_owned()));
        let mut command = Command::new(&all[0]);
        command
            .args(&all[1..])
            // Use Debian's programs, not programs of the same name that a developer may have
            // installed.
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", &self.dir)
            .env("LC_ALL", "C")
            .env_remove("LD_LIBRARY_PATH");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("IWARP_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// Waits until a TCP server listens on the port. Does not connect to it.
    pub(super) fn wait_for_port(&self, port: u16) -> Result<()> {
        while !self.listens(port) {
            if Instant::now() >= self.deadline {
                bail!("no server listens on port {port}");
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until a UDP socket is bound to the port.
    pub(super) fn wait_for_datagrams(&self, port: u16) -> Result<()> {
        while !self.has_socket(&["udp", "udp6"], UNCONNECTED, port) {
            if Instant::now() >= self.deadline {
                bail!("no UDP socket is bound to port {port}");
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    pub(super) fn listens(&self, port: u16) -> bool {
        self.has_socket(&["tcp", "tcp6"], LISTEN, port)
    }

    /// Returns `true` if one of these tables in `/proc/net` contains a socket in this state on the
    /// port.
    fn has_socket(&self, tables: &[&str], state: &str, port: u16) -> bool {
        let process = self
            .holder
            .as_ref()
            .map_or_else(|| "self".into(), |holder| holder.inside.to_string());
        tables.iter().any(|table| {
            std::fs::read_to_string(format!("/proc/{process}/net/{table}")).is_ok_and(|text| {
                text.lines()
                    .skip(1)
                    .any(|line| is_socket(line, state, port))
            })
        })
    }

    /// Returns the time that is left until the case's time limit.
    pub(super) fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Kills all processes of the case, and writes the programs' outputs and the result to the
    /// case's log.
    pub(super) fn close(mut self, result: &Result<Verdict>) {
        self.holder = None;
        let mut text = String::new();
        for (shown, output) in self.outputs.borrow().iter() {
            let output_bytes = std::fs::read(output).unwrap_or_default();
            let _ = writeln!(
                text,
                "$ {shown}\n{}",
                String::from_utf8_lossy(&output_bytes)
            );
        }
        let _ = match result {
            Ok(verdict) => writeln!(text, "{verdict:?}"),
            Err(error) => writeln!(text, "error: {error:#}"),
        };
        let _ = std::fs::write(&self.log, text);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Holder {
    /// Creates the namespaces. `keep` lists directories, besides `dir`, that must stay visible.
    fn start(
        kind: Isolation,
        case: &Case<Stage>,
        dir: &Path,
        keep: &[&Path],
        deadline: Instant,
    ) -> Result<Self> {
        let mut script = String::from("set -e; ip link set lo up; ");
        if case.needs.contains(&Need::Wire) {
            script.push_str(
                "ip link add wire0 type veth peer name wire1; \
                 ip addr add 10.77.0.1/24 dev wire0; ip addr add fd77::1/64 dev wire0 nodad; \
                 ip link set wire0 up; ip link set wire1 up; ",
            );
        }
        if case.needs.contains(&Need::OwnTmp) {
            script.push_str(&own_tmp(dir, keep));
        }
        // If this program is killed, the namespaces exist only until `sleep` exits.
        let _ = write!(
            script,
            "echo ready; exec sleep {}",
            case.limit.as_secs() + HOLDER_EXTRA_S
        );
        let mut command = kind.unshare();
        command.args(["sh", "-c", &script]);
        let output = dir.join("namespace");
        let mut program = Program::start(&mut command, "unshare".into(), None, output, deadline)?;
        program.wait_for("ready")?;
        let id = program.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))
            .context("cannot find the first process of the namespace")?;
        let inside = children
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .context("the namespace has no process")?;
        Ok(Self {
            _program: program,
            inside,
        })
    }
}

/// Returns the commands that mount a private directory over `/tmp`. The directories in `keep` that
/// are below `/tmp` stay visible.
fn own_tmp(dir: &Path, keep: &[&Path]) -> String {
    let new = dir.join("tmp");
    let mut script = format!("mkdir -m 1777 {}; ", new.display());
    for path in keep {
        if let Ok(below) = path.strip_prefix("/tmp") {
            let to = new.join(below);
            let _ = write!(
                script,
                "mkdir -p {to}; mount --bind {path} {to}; ",
                to = to.display(),
                path = path.display()
            );
        }
    }
    let _ = write!(script, "mount --rbind {} /tmp; ", new.display());
    script
}

/// Returns the first port of a case. Cases have different ports, because connections of earlier
/// cases may be in TIME_WAIT.
fn first_port(number: usize) -> u16 {
    const EACH: usize = 50;
    let offset = number * EACH % PORTS.len();
    PORTS.start + u16::try_from(offset).unwrap_or_default()
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
        && TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).is_ok()
}

/// Socket states in `/proc/net`: a TCP listener, and an unconnected UDP socket.
const LISTEN: &str = "0A";
const UNCONNECTED: &str = "07";

/// Returns `true` if a line of `/proc/net/tcp` or `udp` is a socket in this state on the port.
fn is_socket(line: &str, state: &str, port: u16) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let local = words.get(1).and_then(|local| local.rsplit_once(':'));
    words.get(3) == Some(&state)
        && local.and_then(|(_, hex)| u16::from_str_radix(hex, 16).ok()) == Some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_do_not_share_ports() {
        assert_eq!(first_port(0), PORTS.start);
        assert!((0..1000).all(|number| PORTS.contains(&first_port(number))));
        assert_ne!(first_port(7), first_port(8));
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        assert!(!is_free(taken.local_addr().unwrap().port()));
    }

    #[test]
    fn finds_sockets_by_state_and_port() {
        let line = "   0: 0100007F:1C06 00000000:0000 0A 00000000:00000000 \
                    00:00000000 00000000     0        0 1 1";
        let is_listener = |line: &str, port| is_socket(line, LISTEN, port);
        assert!(is_listener(line, 0x1c06));
        assert!(!is_listener(line, 0x1c07));
        assert!(!is_listener(&line.replace(" 0A ", " 01 "), 0x1c06));
        let v6 = "   1: 00000000000000000000000001000000:0050 \
                  00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 1 1";
        assert!(is_listener(v6, 80));
        let udp = "  277: 0100007F:1C06 00000000:0000 07 00000000:00000000 \
                   00:00000000 00000000     0        0 1 2";
        assert!(is_socket(udp, UNCONNECTED, 0x1c06));
        assert!(!is_socket(udp, UNCONNECTED, 0x1c07) && !is_listener(udp, 0x1c06));
    }
}
