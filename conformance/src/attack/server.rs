//! The attacked servers, and a good client for each.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::kind::Needs;

/// A server program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ping,
    Perf,
    /// The RDMA port that `iwarp perf` opens for a client.
    Measured,
    Cp,
    Rping,
    /// The verbs server in C.
    Granting,
    /// The verbs server in C with markers.
    Marking,
    /// The verbs server in C on a given RDMA device, without windows and atomics, which some
    /// devices lack.
    Device,
}

impl Kind {
    /// The servers on the software RNIC.
    pub(super) const ALL: [Self; 7] = [
        Self::Granting,
        Self::Marking,
        Self::Ping,
        Self::Rping,
        Self::Cp,
        Self::Perf,
        Self::Measured,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ping => "iwarp ping",
            Self::Perf => "iwarp perf",
            Self::Measured => "iwarp perf, RDMA",
            Self::Cp => "iwarp cp",
            Self::Rping => "rping",
            Self::Granting => "C server",
            Self::Marking => "C server, markers",
            Self::Device => "C server, device",
        }
    }

    /// Returns `true` if the server has the property that an attack needs.
    pub(super) const fn has(self, needs: Needs) -> bool {
        match needs {
            Needs::Port => !matches!(self, Self::Measured),
            Needs::Mpa => !matches!(self, Self::Perf),
            Needs::Listener | Needs::Short => !matches!(self, Self::Perf | Self::Measured),
            Needs::Region => self.is_granting() || matches!(self, Self::Measured),
            Needs::Atomic => self.has(Needs::Region) && !matches!(self, Self::Device),
            Needs::Grant => self.is_granting(),
            Needs::Window => matches!(self, Self::Granting | Self::Marking),
            Needs::Reader => matches!(self, Self::Ping | Self::Rping),
            Needs::Markers => matches!(self, Self::Marking),
        }
    }

    /// Returns how long the server may keep a closed connection whose peer reads nothing. The
    /// kernel module's own limit is a minute.
    pub(super) const fn release_limit(self) -> Duration {
        match self {
            Self::Device => Duration::from_secs(75),
            _ => Duration::from_secs(15),
        }
    }

    const fn is_granting(self) -> bool {
        matches!(self, Self::Granting | Self::Marking | Self::Device)
    }
}

/// The paths of the programs, and a directory for files.
pub(super) struct Programs {
    /// The address on which servers listen.
    pub(super) address: Ipv4Addr,
    pub(super) iwarp: PathBuf,
    pub(super) granting: Option<PathBuf>,
    pub(super) dir: PathBuf,
}

impl Programs {
    /// Returns a command that the kernel kills when this program ends.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(words);
        command
            .current_dir(&self.dir)
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("IWARP_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// Runs a program and returns its output. Fails if it fails.
    fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words).output().context("the good client")?;
        succeeded(words, &output)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Programs {
    /// Does the same as [`run`](Self::run), and sets `begun` at the first line with this text.
    fn run_and_notify(&self, words: &[&str], text: &str, begun: &AtomicBool) -> Result<String> {
        let mut child = self
            .command(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).lines() {
                let line = line?;
                if line.contains(text) {
                    begun.store(true, Ordering::Release);
                } else {
                    said.push_str(&line);
                    said.push('\n');
                }
            }
        }
        succeeded(words, &child.wait_with_output()?)?;
        Ok(said)
    }
}

fn succeeded(words: &[&str], output: &Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    bail!(
        "the good client `{}`: {}: {}",
        words.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    )
}

/// Latencies of the good client, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(super) struct Figures {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

pub(super) struct Server<'a> {
    programs: &'a Programs,
    pub(super) kind: Kind,
    child: Child,
    output: PathBuf,
    pub(super) address: SocketAddr,
}

/// Time limit for a server to listen.
const PATIENCE: Duration = Duration::from_secs(20);
/// Round trips in one run of the good client.
const ROUNDS: &str = "200";
/// Size of the file that the good client of `cp` copies, in bytes.
const FILE: usize = 256 * 1024;
/// Copies in one run of the good client of `cp`.
const COPIES: usize = 4;

fn command_line(programs: &Programs, kind: Kind, port: &str) -> Result<Vec<String>> {
    let line = match kind {
        Kind::Ping => format!("ping serve -a 127.0.0.1 -p {port}"),
        Kind::Perf | Kind::Measured => format!("perf serve --bind 127.0.0.1:{port}"),
        Kind::Cp => format!("cp serve --port {port}"),
        Kind::Rping => format!("run -- rping -s -P -a 127.0.0.1 -p {port}"),
        Kind::Granting => "run --".to_owned(),
        Kind::Marking => "run --markers on --".to_owned(),
        Kind::Device => return granting(programs, &["serve", port, "plain"]),
    };
    let mut words = vec![programs.iwarp.display().to_string()];
    words.extend(line.split(' ').map(String::from));
    // Paths may contain spaces.
    match kind {
        Kind::Cp => {
            let served = programs.dir.join("served");
            std::fs::create_dir_all(&served)?;
            std::fs::write(served.join("file"), content())?;
            words.push(served.display().to_string());
        }
        Kind::Granting | Kind::Marking => words.extend(granting(programs, &["serve", port])?),
        Kind::Ping | Kind::Perf | Kind::Measured | Kind::Rping | Kind::Device => {}
    }
    Ok(words)
}

/// Returns the command line of the program in C. Its second argument is the address.
fn granting(programs: &Programs, words: &[&str]) -> Result<Vec<String>> {
    let path = programs.granting.as_ref().context("needs a C compiler")?;
    let mut all = vec![path.display().to_string()];
    all.extend(words.iter().map(|word| (*word).to_owned()));
    all.insert(2, programs.address.to_string());
    Ok(all)
}

impl<'a> Server<'a> {
    pub(super) fn start(programs: &'a Programs, kind: Kind) -> Result<Self> {
        let port = free_port()?.to_string();
        let words = command_line(programs, kind, &port)?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = programs
            .dir
            .join(format!("{}.output", kind.name().replace([' ', ','], "-")));
        let file = File::create(&output)?;
        let child = programs
            .command(&words)
            .stderr(file.try_clone()?)
            .stdout(file)
            .spawn()
            .with_context(|| format!("starting `{}`", words.join(" ")))?;
        let mut server = Self {
            programs,
            kind,
            child,
            output,
            address: (programs.address, port.parse()?).into(),
        };
        let start = Instant::now();
        while !server.listens()? {
            server.alive()?;
            if start.elapsed() > PATIENCE {
                bail!("{} does not listen", kind.name());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Checks the kernel's table, because a connection would count as the first client.
    fn listens(&self) -> Result<bool> {
        let wanted = format!(":{:04X} ", self.address.port());
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
        for table in tables {
            let found = table?.lines().any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let local = fields.next().unwrap_or_default();
                format!("{local} ").ends_with(&wanted) && fields.nth(1) == Some("0A")
            });
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Fails if the server has exited.
    pub(super) fn alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let said = std::fs::read_to_string(&self.output).unwrap_or_default();
            let last = said.lines().rfind(|line| !line.trim().is_empty());
            bail!(
                "the server has ended: {status}: {}",
                last.unwrap_or("no output")
            );
        }
        Ok(())
    }

    /// Returns the server's resident memory in KiB.
    pub(super) fn resident(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok())
            .context("no VmRSS")
    }

    /// Returns the numbers of the server's descriptors and threads.
    pub(super) fn holds(&self) -> Result<(usize, usize)> {
        let count = |what: &str| -> Result<usize> {
            let path = format!("/proc/{}/{what}", self.child.id());
            Ok(std::fs::read_dir(path)?.count())
        };
        Ok((count("fd")?, count("task")?))
    }

    /// Runs the good client once, which checks its data. Sets `begun` when the client is connected.
    pub(super) fn measure(&self, begun: &AtomicBool) -> Result<Figures> {
        let iwarp = self.programs.iwarp.display().to_string();
        let port = self.address.port().to_string();
        match self.kind {
            Kind::Rping => {
                let words = [
                    &iwarp,
                    "ping",
                    "127.0.0.1",
                    "-p",
                    &port,
                    "-C",
                    ROUNDS,
                    "-V",
                    "-v",
                ];
                ping_figures(&self.programs.run_and_notify(&words, "ping data", begun)?)
            }
            Kind::Ping => {
                let said = self.programs.run(&[
                    &iwarp,
                    "ping",
                    "127.0.0.1",
                    "-p",
                    &port,
                    "-C",
                    ROUNDS,
                    "-V",
                ])?;
                ping_figures(&said)
            }
            Kind::Granting | Kind::Marking => {
                let mut words = [&iwarp, "run", "--"].map(String::from).to_vec();
                words.extend(granting(self.programs, &["measure", &port, ROUNDS])?);
                self.grants(&words)
            }
            Kind::Device => self.grants(&granting(
                self.programs,
                &["measure", &port, ROUNDS, "plain"],
            )?),
            Kind::Cp => self.copies(&iwarp, &port),
            Kind::Perf => self.performs(&iwarp, &port),
            Kind::Measured => self.performs_in_turn(&iwarp, &port),
        }
    }

    fn grants(&self, words: &[String]) -> Result<Figures> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        granting_figures(&self.programs.run(&words)?)
    }

    fn performs(&self, iwarp: &str, port: &str) -> Result<Figures> {
        let server = format!("127.0.0.1:{port}");
        let mut words = vec![iwarp, "perf", "connect", &server, "--iters", ROUNDS];
        words.extend(
            "--op write --size 64 --rounds 1 --poll event --crc on --no-pin --json -".split(' '),
        );
        perf_figures(&self.programs.run(&words)?)
    }

    /// Retries while the server is busy with another client.
    fn performs_in_turn(&self, iwarp: &str, port: &str) -> Result<Figures> {
        let start = Instant::now();
        loop {
            match self.performs(iwarp, port) {
                Err(e) if start.elapsed() < PATIENCE && format!("{e:#}").contains("try again") => {}
                other => return other,
            }
        }
    }

    fn copies(&self, iwarp: &str, port: &str) -> Result<Figures> {
        let target = self.programs.dir.join("copied");
        let mut times = Vec::new();
        for _ in 0..COPIES {
            let _ = std::fs::remove_file(&target);
            let start = Instant::now();
            self.programs.run(&[
                iwarp,
                "cp",
                "--quiet",
                "--port",
                port,
                "127.0.0.1:file",
                &target.display().to_string(),
            ])?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            if std::fs::read(&target)? != content() {
                bail!("the good client of cp received wrong data");
            }
        }
        times.sort_by(f64::total_cmp);
        let at = |n: usize| times.get(n).copied().unwrap_or_default();
        Ok(Figures {
            p50: at(COPIES / 2),
            p99: at(COPIES - 1),
        })
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the copied data: bytes that depend on their offset.
fn content() -> Vec<u8> {
    (0..FILE).map(|n| (n * 7 + n / 251) as u8).collect()
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// `…, round trip min/avg/p50/p99/max 34/40/38/70/90 us`
fn ping_figures(said: &str) -> Result<Figures> {
    let find = || {
        let (_, rest) = said.split_once("min/avg/p50/p99/max ")?;
        let mut fields = rest.split(['/', ' ']).map(|field| field.parse().ok());
        Some(Figures {
            p50: fields.nth(2)??,
            p99: fields.next()??,
        })
    };
    find().with_context(|| format!("no figures of ping in: {said}"))
}

/// `p50 38 p99 70 us`
fn granting_figures(said: &str) -> Result<Figures> {
    let mut words = said.split_whitespace();
    let mut after = |name| {
        words.find(|word| *word == name)?;
        words.next()?.parse().ok()
    };
    let find = after("p50").zip(after("p99"));
    let (p50, p99) = find.with_context(|| format!("no figures in: {said}"))?;
    Ok(Figures { p50, p99 })
}

fn perf_figures(said: &str) -> Result<Figures> {
    let json: serde_json::Value = serde_json::from_str(said)?;
    let mut found = None;
    search(&json, &mut found);
    found.context("no latency in the report of perf")
}

/// Finds the first object with a median and a 99th percentile.
fn search(json: &serde_json::Value, found: &mut Option<Figures>) {
    if found.is_some() {
        return;
    }
    match json {
        serde_json::Value::Object(map) => {
            let number = |name: &str| map.get(name).and_then(serde_json::Value::as_f64);
            if let (Some(p50), Some(p99)) = (number("lat_us_p50"), number("lat_us_p99")) {
                *found = Some(Figures { p50, p99 });
            }
            map.values().for_each(|value| search(value, found));
        }
        serde_json::Value::Array(all) => all.iter().for_each(|value| search(value, found)),
        _ => {}
    }
}

/// Compiles the verbs server. The error says why that is impossible, such as missing headers.
pub(super) fn compile(source: &Path, to: &Path) -> std::result::Result<(), String> {
    let output = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(to)
        .arg(source)
        .args(["-lrdmacm", "-libverbs", "-lpthread"])
        .output()
        .map_err(|e| format!("no C compiler: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed() {
        let said = "10 pings, 64 octets, round trip min/avg/p50/p99/max 34/40/38/70/90 us\n";
        let want = Figures {
            p50: 38.0,
            p99: 70.0,
        };
        assert_eq!(ping_figures(said).unwrap(), want);
        assert_eq!(granting_figures("p50 38 p99 70 us\n").unwrap(), want);
        let json = r#"{"points": [{"latency": {"lat_us_p50": 38, "lat_us_p99": 70.0}}]}"#;
        assert_eq!(perf_figures(json).unwrap(), want);
        assert!(ping_figures("nothing").is_err() && granting_figures("p50 x").is_err());
    }
}
