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
    /// The RDMA port that `iwarp perf serve` opens for a client.
    PerfRdma,
    Cp,
    Rping,
    /// The verbs server in C.
    CServer,
    /// The verbs server in C with markers.
    CServerMarkers,
    /// The verbs server in C on a given RDMA device, without windows and atomics, which some
    /// devices lack.
    CServerDevice,
}

impl Kind {
    /// The servers on the software RNIC.
    pub(super) const ALL: [Self; 7] = [
        Self::CServer,
        Self::CServerMarkers,
        Self::Ping,
        Self::Rping,
        Self::Cp,
        Self::Perf,
        Self::PerfRdma,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ping => "iwarp ping",
            Self::Perf => "iwarp perf",
            Self::PerfRdma => "iwarp perf, RDMA",
            Self::Cp => "iwarp cp",
            Self::Rping => "rping",
            Self::CServer => "C server",
            Self::CServerMarkers => "C server, markers",
            Self::CServerDevice => "C server, device",
        }
    }

    /// Returns `true` if the server suits an attack with these needs.
    pub(super) const fn has(self, needs: Needs) -> bool {
        match needs {
            Needs::Port => !matches!(self, Self::PerfRdma),
            Needs::Mpa => !matches!(self, Self::Perf),
            Needs::Listener | Needs::Short => !matches!(self, Self::Perf | Self::PerfRdma),
            Needs::Region => self.is_granting() || matches!(self, Self::PerfRdma),
            Needs::Atomic => self.has(Needs::Region) && !matches!(self, Self::CServerDevice),
            Needs::Grant => self.is_granting(),
            Needs::Window => matches!(self, Self::CServer | Self::CServerMarkers),
            Needs::Reader => matches!(self, Self::Ping | Self::Rping),
            Needs::Markers => matches!(self, Self::CServerMarkers),
        }
    }

    /// Returns how long the server may keep a connection that it has closed while the peer reads
    /// nothing. The kernel module's limit is a minute.
    pub(super) const fn release_limit(self) -> Duration {
        match self {
            Self::CServerDevice => Duration::from_secs(75),
            _ => Duration::from_secs(15),
        }
    }

    const fn is_granting(self) -> bool {
        matches!(
            self,
            Self::CServer | Self::CServerMarkers | Self::CServerDevice
        )
    }
}

/// Parameters to start the programs.
pub(super) struct Programs {
    /// The address on which servers listen.
    pub(super) address: Ipv4Addr,
    pub(super) iwarp: PathBuf,
    pub(super) granting: Option<PathBuf>,
    /// A directory for files.
    pub(super) dir: PathBuf,
}

impl Programs {
    /// Returns a command whose process is killed when this program ends.
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

    /// Runs a program and returns its output. Fails if the program fails.
    fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words).output().context("the good client")?;
        check_success(words, &output)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Programs {
    /// Like [`run`](Self::run), but sets `connected` at the first output line that contains `text`.
    fn run_and_notify(&self, words: &[&str], text: &str, connected: &AtomicBool) -> Result<String> {
        let mut child = self
            .command(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut output_text = String::new();
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).lines() {
                let line = line?;
                if line.contains(text) {
                    connected.store(true, Ordering::Release);
                } else {
                    output_text.push_str(&line);
                    output_text.push('\n');
                }
            }
        }
        check_success(words, &child.wait_with_output()?)?;
        Ok(output_text)
    }
}

fn check_success(words: &[&str], output: &Output) -> Result<()> {
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

/// Time limit for a server to start listening.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Number of round trips in one run of the good client.
const ROUNDS: &str = "200";
/// Size of the file that the good client of `cp` copies, in bytes.
const FILE: usize = 256 * 1024;
/// Number of copies in one run of the good client of `cp`.
const COPIES: usize = 4;

fn command_line(programs: &Programs, kind: Kind, port: &str) -> Result<Vec<String>> {
    let line = match kind {
        Kind::Ping => format!("ping serve -a 127.0.0.1 -p {port}"),
        Kind::Perf | Kind::PerfRdma => format!("perf serve --bind 127.0.0.1:{port}"),
        Kind::Cp => format!("cp serve --port {port}"),
        Kind::Rping => format!("run -- rping -s -P -a 127.0.0.1 -p {port}"),
        Kind::CServer => "run --".to_owned(),
        Kind::CServerMarkers => "run --markers on --".to_owned(),
        Kind::CServerDevice => return granting(programs, &["serve", port, "plain"]),
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
        Kind::CServer | Kind::CServerMarkers => words.extend(granting(programs, &["serve", port])?),
        Kind::Ping | Kind::Perf | Kind::PerfRdma | Kind::Rping | Kind::CServerDevice => {}
    }
    Ok(words)
}

/// Returns the command line of the program in C. Inserts the address after the first of `words`.
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
            server.check_alive()?;
            if start.elapsed() > START_LIMIT {
                bail!("{} did not start listening", kind.name());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Returns `true` if the server listens. Reads the kernel's table, because the server would
    /// treat a connection as its first client.
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
    pub(super) fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let output_text = std::fs::read_to_string(&self.output).unwrap_or_default();
            let last = output_text.lines().rfind(|line| !line.trim().is_empty());
            bail!(
                "the server exited: {status}; its last output: {}",
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

    /// Returns the server's number of descriptors and of threads.
    pub(super) fn descriptors_and_threads(&self) -> Result<(usize, usize)> {
        let count = |what: &str| -> Result<usize> {
            let path = format!("/proc/{}/{what}", self.child.id());
            Ok(std::fs::read_dir(path)?.count())
        };
        Ok((count("fd")?, count("task")?))
    }

    /// Runs the good client once. The client checks its data. Sets `connected` when it is
    /// connected.
    pub(super) fn measure(&self, connected: &AtomicBool) -> Result<Figures> {
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
                ping_figures(
                    &self
                        .programs
                        .run_and_notify(&words, "ping data", connected)?,
                )
            }
            Kind::Ping => {
                let output_text = self.programs.run(&[
                    &iwarp,
                    "ping",
                    "127.0.0.1",
                    "-p",
                    &port,
                    "-C",
                    ROUNDS,
                    "-V",
                ])?;
                ping_figures(&output_text)
            }
            Kind::CServer | Kind::CServerMarkers => {
                let mut words = [&iwarp, "run", "--"].map(String::from).to_vec();
                words.extend(granting(self.programs, &["measure", &port, ROUNDS])?);
                self.run_c_client(&words)
            }
            Kind::CServerDevice => self.run_c_client(&granting(
                self.programs,
                &["measure", &port, ROUNDS, "plain"],
            )?),
            Kind::Cp => self.run_cp_clients(&iwarp, &port),
            Kind::Perf => self.run_perf_client(&iwarp, &port),
            Kind::PerfRdma => self.run_perf_client_retrying(&iwarp, &port),
        }
    }

    fn run_c_client(&self, words: &[String]) -> Result<Figures> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        granting_figures(&self.programs.run(&words)?)
    }

    fn run_perf_client(&self, iwarp: &str, port: &str) -> Result<Figures> {
        let server = format!("127.0.0.1:{port}");
        let mut words = vec![iwarp, "perf", "connect", &server, "--iters", ROUNDS];
        words.extend(
            "--op write --size 64 --rounds 1 --poll event --crc on --no-pin --json -".split(' '),
        );
        perf_figures(&self.programs.run(&words)?)
    }

    /// Retries while the server is busy with another client.
    fn run_perf_client_retrying(&self, iwarp: &str, port: &str) -> Result<Figures> {
        let start = Instant::now();
        loop {
            match self.run_perf_client(iwarp, port) {
                Err(e)
                    if start.elapsed() < START_LIMIT && format!("{e:#}").contains("try again") => {}
                other => return other,
            }
        }
    }

    fn run_cp_clients(&self, iwarp: &str, port: &str) -> Result<Figures> {
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

/// Returns the content of the file to copy: bytes that depend on their offset.
fn content() -> Vec<u8> {
    (0..FILE).map(|n| (n * 7 + n / 251) as u8).collect()
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// `…, round trip min/avg/p50/p99/max 34/40/38/70/90 us`
fn ping_figures(output_text: &str) -> Result<Figures> {
    let find = || {
        let (_, rest) = output_text.split_once("min/avg/p50/p99/max ")?;
        let mut fields = rest.split(['/', ' ']).map(|field| field.parse().ok());
        Some(Figures {
            p50: fields.nth(2)??,
            p99: fields.next()??,
        })
    };
    find().with_context(|| format!("no latencies in the output of ping: {output_text}"))
}

/// `p50 38 p99 70 us`
fn granting_figures(output_text: &str) -> Result<Figures> {
    let mut words = output_text.split_whitespace();
    let mut after = |name| {
        words.find(|word| *word == name)?;
        words.next()?.parse().ok()
    };
    let find = after("p50").zip(after("p99"));
    let (p50, p99) = find.with_context(|| format!("no latencies in the output: {output_text}"))?;
    Ok(Figures { p50, p99 })
}

fn perf_figures(output_text: &str) -> Result<Figures> {
    let json: serde_json::Value = serde_json::from_str(output_text)?;
    let mut found = None;
    search(&json, &mut found);
    found.context("no latency in the report of perf")
}

/// Finds the first JSON object with a median and a 99th percentile.
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

/// Compiles the verbs server in C. The error is the compiler's message.
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
        let output_text = "10 pings, 64 octets, round trip min/avg/p50/p99/max 34/40/38/70/90 us\n";
        let want = Figures {
            p50: 38.0,
            p99: 70.0,
        };
        assert_eq!(ping_figures(output_text).unwrap(), want);
        assert_eq!(granting_figures("p50 38 p99 70 us\n").unwrap(), want);
        let json = r#"{"points": [{"latency": {"lat_us_p50": 38, "lat_us_p99": 70.0}}]}"#;
        assert_eq!(perf_figures(json).unwrap(), want);
        assert!(ping_figures("nothing").is_err() && granting_figures("p50 x").is_err());
    }
}
