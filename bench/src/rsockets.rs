//! Compares iperf3 over `librspreload.so` with iperf3 over TCP, alternating.

use crate::cpu;
use crate::stats::median;
use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::{Map, Value, json};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names of the libraries in the build folder, and the names that programs load.
const LIBRARIES: [(&str, &str); 3] = [
    ("libiwarp_verbs.so", "libibverbs.so.1"),
    ("libiwarp_verbs.so", "librdmacm.so.1"),
    (PRELOADED, PRELOADED),
];
const PRELOADED: &str = "librspreload.so";
/// Sizes of a write in octets.
const SIZES: [u32; 3] = [128 << 10, 4 << 10, 64];
const START_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct RsocketsArgs {
    /// Rounds; each measures every row once
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Duration of one transfer in seconds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// The folder with `libiwarp_verbs.so` and `librspreload.so`; by default, that of this program
    #[arg(long, value_name = "DIR")]
    libraries: Option<PathBuf>,
}

/// A folder in which the libraries have the names that programs load. Dropping it removes it.
struct Links(PathBuf);

impl Links {
    fn create(libraries: &Path) -> Result<Self> {
        let name = format!("iwarp-bench-rsockets-{}", std::process::id());
        let links = Self(std::env::temp_dir().join(name));
        std::fs::create_dir(&links.0).context("cannot create a folder for the libraries")?;
        for (built, loaded) in LIBRARIES {
            let library = libraries.join(built);
            ensure!(library.exists(), "{} is missing", library.display());
            std::os::unix::fs::symlink(library, links.0.join(loaded))?;
        }
        Ok(links)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The rate in Gbit/s, and the CPU time of both ends in seconds per second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Transfer {
    gbits: f64,
    cpu: f64,
}

/// Measures all rows, and reports the medians.
pub(crate) fn measure(a: &RsocketsArgs, cpus: [Option<usize>; 2]) -> Result<Value> {
    let own = std::env::current_exe()?;
    let folder = match &a.libraries {
        Some(folder) => std::fs::canonicalize(folder)?,
        None => own.parent().context("this program has a folder")?.into(),
    };
    let links = Links::create(&folder)?;
    let mut rows = Map::new();
    let mut times = SIZES.map(|_| Vec::new());
    for _ in 0..a.rounds {
        for (size, times) in SIZES.iter().zip(&mut times) {
            let tcp = transfer(a, *size, None, cpus)?;
            times.push((tcp, transfer(a, *size, Some(&links), cpus)?));
        }
    }
    for (size, times) in SIZES.iter().zip(&times) {
        rows.insert(format!("{size} octets"), report(times));
    }
    Ok(Value::Object(rows))
}

/// Runs a server and a client of iperf3, over rsockets if `links` is given.
fn transfer(
    a: &RsocketsArgs,
    size: u32,
    links: Option<&Links>,
    cpus: [Option<usize>; 2],
) -> Result<Transfer> {
    let port = free_port()?.to_string();
    let mut server = start(&["-s", "-1", "-p", &port], links, cpus[1])?;
    let result = wait_for_listener(&port, &mut server).and_then(|()| {
        let (size, seconds) = (size.to_string(), a.seconds.to_string());
        let client = ["-c", "127.0.0.1", "-p", &port, "-l", &size, "-t", &seconds];
        let client = start(&[&client[..], &["-J"]].concat(), links, cpus[0])?;
        Ok(client.wait_with_output()?)
    });
    if result.is_err() {
        let _ = server.kill();
    }
    server.wait()?;
    parse(&result?.stdout)
}

/// Returns a port that is free for TCP and for rsockets, which use TCP ports.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

fn start(args: &[&str], links: Option<&Links>, cpu: Option<usize>) -> Result<Child> {
    if let Some(cpu) = cpu {
        cpu::pin_to(cpu)?;
    }
    let mut command = Command::new("iperf3");
    command.args(args).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    if let Some(Links(folder)) = links {
        command.env("LD_LIBRARY_PATH", folder);
        command.env("LD_PRELOAD", folder.join(PRELOADED));
    }
    command.spawn().context("cannot start iperf3")
}

/// Waits until a socket listens on the port. A connection would end the server, so this reads the
/// kernel's table.
fn wait_for_listener(port: &str, server: &mut Child) -> Result<()> {
    let port: u16 = port.parse()?;
    let local = format!(":{port:04X}");
    let begin = Instant::now();
    loop {
        let listens = ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
            let table = std::fs::read_to_string(table).unwrap_or_default();
            table.lines().any(|line| is_listener(line, &local))
        });
        if listens {
            return Ok(());
        }
        if let Some(status) = server.try_wait()? {
            bail!("the server of iperf3 ended: {status}");
        }
        ensure!(begin.elapsed() < START_TIMEOUT, "iperf3 does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns `true` if this line of `/proc/net/tcp` describes a listener on the port.
fn is_listener(line: &str, port: &str) -> bool {
    let mut fields = line.split_whitespace().skip(1);
    let local = fields.next().is_some_and(|local| local.ends_with(port));
    local && fields.nth(1) == Some("0A")
}

/// Reads iperf3's report.
fn parse(report: &[u8]) -> Result<Transfer> {
    let report: Value = serde_json::from_slice(report).context("iperf3 printed no JSON")?;
    if let Some(error) = report.get("error") {
        bail!("iperf3 failed: {error}");
    }
    let number = |path: &str| {
        let value = report.pointer(path).and_then(Value::as_f64);
        value.with_context(|| format!("iperf3's report has no {path}"))
    };
    let percent = number("/end/cpu_utilization_percent/host_total")?
        + number("/end/cpu_utilization_percent/remote_total")?;
    Ok(Transfer {
        gbits: number("/end/sum_received/bits_per_second")? / 1e9,
        cpu: percent / 100.0,
    })
}

/// Returns the medians of TCP and rsockets, and of their ratios in one round with the range.
fn report(times: &[(Transfer, Transfer)]) -> Value {
    let values =
        |value: fn(&(Transfer, Transfer)) -> f64| times.iter().map(value).collect::<Vec<_>>();
    let mut ratios = values(|(tcp, own)| own.gbits / tcp.gbits);
    let ratio = median(&mut ratios);
    json!({
        "tcp_gbits": median(&mut values(|(tcp, _)| tcp.gbits)),
        "rsockets_gbits": median(&mut values(|(_, own)| own.gbits)),
        "ratio": ratio,
        "range": [ratios.first(), ratios.last()],
        "tcp_cpu_s_per_gib": median(&mut values(|(tcp, _)| seconds_per_gib(*tcp))),
        "rsockets_cpu_s_per_gib": median(&mut values(|(_, own)| seconds_per_gib(*own))),
    })
}

/// CPU seconds of both ends for each GiB.
fn seconds_per_gib(transfer: Transfer) -> f64 {
    let gib_per_s = transfer.gbits * 1e9 / 8.0 / f64::from(1 << 30);
    transfer.cpu / gib_per_s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_recognized() {
        let listener = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000";
        assert!(is_listener(listener, ":1F90"));
        assert!(!is_listener(listener, ":1F91"));
        assert!(!is_listener(&listener.replace(" 0A ", " 01 "), ":1F90"));
        assert!(!is_listener(
            "  sl  local_address rem_address   st",
            ":1F90"
        ));
    }

    #[test]
    fn report_of_iperf3_is_read() {
        let end = json!({
            "sum_received": {"bits_per_second": 8e9},
            "cpu_utilization_percent": {"host_total": 60.0, "remote_total": 90.0},
        });
        let transfer = parse(json!({ "end": end }).to_string().as_bytes()).unwrap();
        let expected = Transfer {
            gbits: 8.0,
            cpu: 1.5,
        };
        assert_eq!(transfer, expected);
        assert!(parse(br#"{"error": "unable to connect"}"#).is_err());
        assert!(parse(b"{}").is_err());
    }

    #[test]
    fn ratios_belong_to_rounds() {
        let at = |gbits| Transfer { gbits, cpu: 1.0 };
        let rounds = [(at(1.0), at(2.0)), (at(4.0), at(2.0)), (at(2.0), at(2.0))];
        let row = report(&rounds);
        assert_eq!(row["ratio"], 1.0);
        assert_eq!(row["range"], json!([0.5, 2.0]));
        assert_eq!(row["tcp_gbits"], 2.0);
    }
}
