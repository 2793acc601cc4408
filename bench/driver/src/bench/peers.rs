//! Other software that is measured over TCP: UCX, libfabric, and perftest on our C libraries.
//!
//! Debian has no bandwidth test for libfabric, so we compile our own, `bench/peers/fi_bw.c`,
//! against libfabric's headers.
//!
//! Software that is not installed or does not run is omitted. The report lists it.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::output;
use super::plan::depth;
use xtask::context::{Context, find_program};

/// Time limit of a client.
const LIMIT: Duration = Duration::from_secs(40);
/// One MiB, the unit of UCX and perftest, in octets.
const MIB: f64 = 1_048_576.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ucx,
    Pingpong,
    Fabric,
    Verbs,
}

/// A test of other software.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    kind: Kind,
    test: &'static str,
    /// Work requests per posting call.
    list: u32,
}

/// Programs that peers need and that Debian's packages do not contain.
pub(super) struct Programs {
    /// The `iwarp` command, which runs perftest on our libraries.
    pub(super) iwarp: PathBuf,
    /// Our program for libfabric, or the reason why it cannot be compiled.
    fabric: std::result::Result<PathBuf, String>,
}

impl Programs {
    /// Compiles our program on libfabric into the target directory.
    pub(super) fn new(context: &Context) -> Self {
        let fabric = compile(
            &context.root.join("bench/peers/fi_bw.c"),
            &context.target.join("bench"),
        );
        Self {
            iwarp: context.target.join("release/iwarp"),
            fabric: fabric.map_err(|e| format!("{e:#}")),
        }
    }
}

fn compile(source: &Path, into: &Path) -> Result<PathBuf> {
    if find_program("cc").is_none() {
        bail!("no C compiler: `cc` is not in PATH");
    }
    std::fs::create_dir_all(into)?;
    let program = into.join(source.file_stem().context("the source file has no name")?);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&program, source])
        .arg("-lfabric");
    output(&mut cc, LIMIT)
        .context("cannot compile it; libfabric's headers are in Debian's package libfabric-dev")?;
    Ok(program)
}

impl Peer {
    /// Returns a test of `ucx_perftest`; `test` is the value of its option `-t`.
    pub(super) const fn ucx(test: &'static str) -> Self {
        Self {
            kind: Kind::Ucx,
            test,
            list: 1,
        }
    }

    /// Returns libfabric's own ping-pong.
    pub(super) const fn pingpong() -> Self {
        Self {
            kind: Kind::Pingpong,
            test: "fi_pingpong",
            list: 1,
        }
    }

    /// Returns a test of our program for libfabric: with `rma` it writes to the peer's memory, with
    /// `msg` it sends into posted receives.
    pub(super) const fn fabric(test: &'static str) -> Self {
        Self {
            kind: Kind::Fabric,
            test,
            list: 1,
        }
    }

    /// Returns a program of perftest, which is run by `iwarp run`.
    pub(super) const fn verbs(test: &'static str) -> Self {
        Self {
            kind: Kind::Verbs,
            test,
            list: 1,
        }
    }

    /// Returns the same test, but posting lists of `list` work requests.
    pub(super) const fn in_lists(self, list: u32) -> Self {
        Self { list, ..self }
    }

    pub(super) const fn program(&self) -> &'static str {
        match self.kind {
            Kind::Ucx => "ucx_perftest",
            Kind::Fabric => "fi_bw",
            Kind::Pingpong | Kind::Verbs => self.test,
        }
    }

    /// Returns the name of the test in the program.
    pub(super) const fn test(&self) -> &'static str {
        self.test
    }

    /// Returns `true` if a run takes long compared with our own measurements.
    pub(super) const fn takes_long(&self) -> bool {
        !matches!(self.kind, Kind::Verbs)
    }

    fn is_latency(&self) -> bool {
        self.kind == Kind::Pingpong || self.test.ends_with("_lat")
    }

    /// Returns why the peer cannot be run, or `None` if it can.
    pub(super) fn missing(&self, programs: &Programs) -> Option<String> {
        if self.kind == Kind::Fabric {
            return programs.fabric.as_ref().err().cloned();
        }
        if find_program(self.program()).is_none() {
            return Some("not installed".into());
        }
        if self.kind == Kind::Verbs {
            let mut help = Command::new(&programs.iwarp);
            help.args(["run", "--help"]);
            if let Err(e) = output(&mut help, LIMIT) {
                return Some(format!("`iwarp run` does not run: {e:#}"));
            }
        }
        None
    }

    fn iterations(&self, size: u64) -> u64 {
        match (self.is_latency(), size) {
            (true, 0..=4096) => 10_000,
            (true, 4097..=65_536) => 2000,
            (true, _) => 400,
            // perftest does not warm up, so the run must be long compared with TCP's slow start.
            // The numbers must be multiples of the list length.
            (false, 0..=256) if self.kind == Kind::Verbs => 960_000,
            (false, 257..=4096) if self.kind == Kind::Verbs => 100_000,
            (false, 4097..=65_536) if self.kind == Kind::Verbs => 8000,
            (false, _) if self.kind == Kind::Verbs => 800,
            (false, 0..=256) => 200_000,
            (false, 257..=4096) => 50_000,
            (false, 4097..=65_536) => 8000,
            (false, _) => 800,
        }
    }

    /// Returns the common arguments of server and client, and the client's additional arguments.
    fn arguments(&self, size: u64, port: u16) -> (Vec<String>, Vec<String>) {
        let n = self.iterations(size);
        let words =
            |text: String| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        match self.kind {
            Kind::Ucx => {
                // ucx_perftest does not support messages below 8 octets.
                let (size, warm) = (size.max(8), (n / 20).max(50));
                let test = format!(
                    "127.0.0.1 -t {} -s {size} -n {n} -w {warm} -f -v",
                    self.test
                );
                (words(format!("-p {port}")), words(test))
            }
            Kind::Pingpong => {
                let both = format!("-p tcp -e msg -I {n} -S {size}");
                // The option for the port is `-P` at the client, and `-B` at the server.
                (words(both), words(format!("-P {port} 127.0.0.1")))
            }
            Kind::Fabric => {
                let both = format!("{} {size} {n} {} {port}", self.test, depth(size));
                (words(both), words("127.0.0.1".into()))
            }
            Kind::Verbs => {
                let mut both = format!("-R -F -p {port} -s {size} -n {n}");
                if !self.is_latency() {
                    // Request one completion per quarter of the window, as our own programs do. By
                    // default, perftest requests only one per window if the window is small. Each
                    // window then starts only after the end of the previous window.
                    let depth = depth(size);
                    let every = (depth / 4).clamp(1, 64).max(self.list);
                    both.push_str(&format!(" -t {depth} --cq-mod {every}"));
                    if self.list > 1 {
                        both.push_str(&format!(" -l {}", self.list));
                    }
                }
                (words(both), words("127.0.0.1".into()))
            }
        }
    }

    fn command(&self, cpu: Option<usize>, programs: &Programs) -> Command {
        let mut words: Vec<std::ffi::OsString> = Vec::new();
        if let Some(cpu) = cpu.filter(|_| find_program("taskset").is_some()) {
            words.extend(["taskset".into(), "-c".into(), cpu.to_string().into()]);
        }
        if self.kind == Kind::Verbs {
            let iwarp = programs.iwarp.as_os_str();
            words.extend([iwarp.to_owned(), "run".into(), "--".into()]);
        }
        words.push(match &programs.fabric {
            Ok(program) if self.kind == Kind::Fabric => program.into(),
            _ => self.program().into(),
        });
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .env("UCX_TLS", "tcp")
            .env("UCX_NET_DEVICES", "lo")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .env("FI_LOG_LEVEL", "error")
            .env("FI_TCP_IFACE", "lo");
        command
    }

    /// Runs server and client, and returns the client's figures.
    ///
    /// # Errors
    /// Fails if the server does not start, the client fails, or its output cannot be parsed.
    pub(super) fn measure(
        &self,
        size: u64,
        cpus: Option<(usize, usize)>,
        programs: &Programs,
    ) -> Result<Value> {
        let port = free_port()?;
        let (both, client_only) = self.arguments(size, port);
        let mut server = self.command(cpus.map(|c| c.1), programs);
        server.args(&both);
        if self.kind == Kind::Pingpong {
            server.args(["-B", &port.to_string()]);
        }
        let server = Server::start(&mut server, port)?;
        let mut client = self.command(cpus.map(|c| c.0), programs);
        let text = output(client.args(&both).args(&client_only), LIMIT)?;
        drop(server);
        self.parse(&text).with_context(|| {
            format!(
                "cannot parse the output of {}: {:?}",
                self.program(),
                text.lines().last()
            )
        })
    }

    fn parse(&self, text: &str) -> Result<Value> {
        let line = text
            .lines()
            .map(str::trim)
            .rfind(|line| line.starts_with(|c: char| c.is_ascii_digit()))
            .context("no line begins with a number")?;
        let words: Vec<&str> = line
            .split([',', ' ', '\t'])
            .filter(|w| !w.is_empty())
            .collect();
        let number = |column: usize| -> Result<f64> {
            Ok(words.get(column).context("too few columns")?.parse()?)
        };
        let from_end = |n: usize| number(words.len().checked_sub(n).context("too few columns")?);
        Ok(match (self.kind, self.is_latency()) {
            // Columns: iterations; latency: median, average, overall; bandwidth: average, overall;
            // rate: average, overall.
            (Kind::Ucx, true) => json!({ "med_us": number(1)? }),
            (Kind::Ucx, false) => {
                json!({ "gbps": number(5)? * MIB / 1e9, "mmsg": number(7)? / 1e6 })
            }
            // The last columns: MB/s, microseconds per transfer (a mean), transfers per
            // microsecond.
            (Kind::Pingpong, _) => json!({ "med_us": from_end(2)? }),
            // Columns: octets, operations, depth, GB/s, rate.
            (Kind::Fabric, _) => json!({ "gbps": number(3)?, "mmsg": number(4)? }),
            // Columns: octets, iterations, minimum, maximum, typical, …
            (Kind::Verbs, true) => json!({ "med_us": number(4)? }),
            // Columns: octets, iterations, peak, average, rate.
            (Kind::Verbs, false) => json!({ "gbps": number(3)? * MIB / 1e9, "mmsg": number(4)? }),
        })
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

/// A server for one client. Dropping it waits up to 0.5 s until it exits, and then kills it.
struct Server(Child);

impl Server {
    fn start(command: &mut Command, port: u16) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let mut server = Self(child);
        let end = Instant::now() + Duration::from_secs(5);
        while !listens(port) {
            if let Some(status) = server.0.try_wait()? {
                bail!("the server exited: {status}");
            }
            if Instant::now() > end {
                bail!("the server does not listen on port {port} after 5 s");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(20));
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Some servers do not exit by themselves.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns `true` if a socket listens on the port, according to the kernel's tables.
fn listens(port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .iter()
        .any(|table| {
            std::fs::read_to_string(table).is_ok_and(|text| {
                text.lines().any(|line| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    words.get(1).is_some_and(|w| w.ends_with(&suffix))
                        && words.get(3) == Some(&"0A")
                })
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn peer_outputs_are_parsed() {
        let ucx = "iterations,...\n200000,0.5,0.6,0.7,10.0,2000.0,30,400000\n";
        let v = Peer::ucx("tag_bw").parse(ucx).unwrap();
        assert!((v["gbps"].as_f64().unwrap() - 2.097).abs() < 0.001 && v["mmsg"] == 0.4);
        assert_eq!(Peer::ucx("tag_lat").parse(ucx).unwrap()["med_us"], 0.5);
        let fi = "bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec\n\
                  64 10k =10k 1.2m 0.11s 11.9 5.35 0.19\n";
        assert_eq!(Peer::pingpong().parse(fi).unwrap()["med_us"], 5.35);
        let ib = " #bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n \
                  65536 5000 4000.1 3900.0 0.0624\n---\n";
        assert_eq!(
            Peer::verbs("ib_write_bw").parse(ib).unwrap()["mmsg"],
            0.0624
        );
        let lat = " 2 1000 4.1 90.0 5.0 5.5 1.0 9.0 20.0\n";
        assert_eq!(
            Peer::verbs("ib_write_lat").parse(lat).unwrap()["med_us"],
            5.0
        );
        let bw = Peer::fabric("rma")
            .parse("64 1000 256 0.0128 0.2\n")
            .unwrap();
        assert_eq!((&bw["gbps"], &bw["mmsg"]), (&json!(0.0128), &json!(0.2)));
        assert!(Peer::pingpong().parse("nothing").is_err());
    }

    #[test]
    fn our_program_on_libfabric_runs() {
        let headers = Path::new("/usr/include/rdma/fabric.h").exists();
        if !headers || find_program("cc").is_none() {
            eprintln!("not run: no headers of libfabric, or no C compiler");
            return;
        }
        let context = Context::new(true, false).unwrap();
        let dir = std::env::temp_dir().join(format!("bench-fi-bw-{}", std::process::id()));
        let programs = Programs {
            iwarp: PathBuf::new(),
            fabric: Ok(compile(&context.root.join("bench/peers/fi_bw.c"), &dir).unwrap()),
        };
        for (test, size) in [("rma", 64), ("msg", 64), ("rma", 1 << 20), ("msg", 1 << 20)] {
            let figures = Peer::fabric(test).measure(size, None, &programs).unwrap();
            assert!(figures["gbps"].as_f64().unwrap() > 0.0, "{test} {size}");
            assert!(figures["mmsg"].as_f64().unwrap() > 0.0, "{test} {size}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn listener_is_detected() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        assert!(listens(at.port()));
        // While the client is connected, no other program can listen on its port.
        let client = TcpStream::connect(at).unwrap();
        assert!(!listens(client.local_addr().unwrap().port()));
    }
}
