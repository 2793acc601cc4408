//! `cargo xtask kernel bench`: compares the performance of the module with the kernel's siw, and
//! with plain TCP, in one guest.
//!
//! Both drivers run the same programs, with both ends in the guest. The order of the drivers
//! alternates from round to round, and each result is the median of all rounds. The guest's
//! processors are emulated, so results can only be compared with each other. By default, the guest
//! has one processor, and its clock counts instructions.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use iwarp_figures::Spread;
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

use super::boot::{self, Boot};
use super::ends::{Family, Ports};
use super::matrix::{self, USER};
use crate::guest::{self, Clock, Guest, Machine};
use crate::needs::{self, Suite};
use crate::programs::{self, Program, Rules};

/// Arguments of `cargo xtask kernel bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Number of measurements of each row
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Measure only rows whose names contain one of these
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// What to measure: instructions on one processor, which repeat within one per cent also on a
    /// busy machine, or time on two processors
    #[arg(long, value_enum, value_name = "CLOCK", default_value_t = Clock::Instructions)]
    clock: Clock,
    /// Measure kernel storage (NVMe and NFS) instead, over RDMA and over TCP
    #[arg(long)]
    storage: bool,
    #[command(flatten)]
    boot: Boot,
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(4 * 3600);
/// Time limits of one program, in seconds of this machine: by wall time, and by instructions, of
/// which a busy machine executes few.
const PROGRAM_LIMIT: u64 = 120;
const PROGRAM_LIMIT_INSTRUCTIONS: u64 = 1200;

/// Maximum number of attempts to measure a row.
const ATTEMPTS: usize = 4;

/// Programs of perftest: name, message size in bytes, number of messages.
const PERFTEST: &[(&str, u32, u32)] = &[
    ("ib_read_lat", 64, 1000),
    ("ib_send_lat", 64, 1000),
    ("ib_write_lat", 64, 1000),
    ("ib_write_bw", 4096, 2000),
    ("ib_write_bw", 65536, 500),
    ("ib_write_bw", 1 << 20, 50),
    ("ib_read_bw", 4096, 2000),
    ("ib_read_bw", 65536, 500),
    ("ib_read_bw", 1 << 20, 50),
    ("ib_send_bw", 4096, 2000),
    ("ib_send_bw", 65536, 500),
    ("ib_send_bw", 1 << 20, 50),
];

/// Makes the kernel's CRC use the processor's instruction, as on any real machine: `libcrc32c`
/// chooses the fastest function when it is loaded.
const FAST_CRC: &str = "rmmod libcrc32c; modprobe crc32c_intel && modprobe libcrc32c && \
                        grep -q '^crc32c_intel' /proc/modules";
const CONNECTIONS: &str = "1,000 connections";
const TCP: &str = "plain TCP, 64 KiB";
/// The server's and the client's command lines. cmtime cannot create more than about 50 queue
/// pairs, so 20 clients run one after the other. The client prints the uptime in seconds before and
/// after.
const CMTIME: (&str, &str) = (
    "cmtime -b {addr} -p {port}",
    "cut -d' ' -f1 /proc/uptime\nfor i in $(seq 20)\ndo cmtime -s {addr} -p {port} -c 50\ndone\n\
     cut -d' ' -f1 /proc/uptime",
);
/// The server's and the client's command lines. The client sends 64 KiB at a time over the kernel's
/// TCP.
const QPERF: (&str, &str) = (
    "qperf -lp {port}",
    "qperf -lp {port} -t 2 -m 64K {addr} tcp_bw",
);

/// Storage measurements: name, client's command line, the word before the result in its output, and
/// the unit. The disk discards data and answers immediately.
const STORAGE: &[(&str, &str, &str, &str)] = &[
    (
        "NVMe, random reads of 4 KiB, one at a time",
        "nvme-disk measure {addr} {port} randread 4k 1",
        "latency",
        "µs",
    ),
    (
        "NVMe, random reads of 4 KiB, 32 at a time",
        "nvme-disk measure {addr} {port} randread 4k 32",
        "operations",
        "1/s",
    ),
    (
        "NVMe, random writes of 4 KiB, 32 at a time",
        "nvme-disk measure {addr} {port} randwrite 4k 32",
        "operations",
        "1/s",
    ),
    (
        "NVMe, sequential reads of 128 KiB, 8 at a time",
        "nvme-disk measure {addr} {port} read 128k 8",
        "bandwidth",
        "MB/s",
    ),
    (
        "NVMe, sequential writes of 128 KiB, 8 at a time",
        "nvme-disk measure {addr} {port} write 128k 8",
        "bandwidth",
        "MB/s",
    ),
    (
        "NFS 4.2, 5,000 files copied to the server",
        "nfs-disk measure {addr} {port} 5000",
        "seconds",
        "s",
    ),
];
/// Rows over TCP, which use neither driver: the suffix of their names, and the prefix of their
/// commands.
const OVER_TCP: (&str, &str) = (" (TCP)", "TRANSPORT=tcp ");

fn storage() -> Vec<Program> {
    let row = |&(name, client, ..): &(&str, &str, &str, &str)| {
        let (tcp, transport) = OVER_TCP;
        let over_tcp = format!("{name}{tcp}");
        [
            programs::storage_measurement(name, client, ""),
            programs::storage_measurement(&over_tcp, client, transport),
        ]
    };
    STORAGE.iter().flat_map(row).collect()
}

/// Returns the storage row with this name, over RDMA or TCP.
fn storage_row(
    name: &str,
) -> Option<&'static (&'static str, &'static str, &'static str, &'static str)> {
    let name = name.strip_suffix(OVER_TCP.0).unwrap_or(name);
    STORAGE.iter().find(|row| row.0 == name)
}

/// A driver. `kind` is its link type; `load` has the commands that load it without and with CRC.
struct Driver {
    name: &'static str,
    kind: &'static str,
    load: [&'static str; 2],
    unload: &'static str,
}

const DRIVERS: [Driver; 2] = [
    Driver {
        name: "module",
        kind: "iwarp",
        load: [
            "insmod /lib/iwarp/iwarp_rnic.ko mpa_crc=0",
            "insmod /lib/iwarp/iwarp_rnic.ko mpa_crc=1",
        ],
        unload: "rmmod iwarp_rnic",
    },
    Driver {
        name: "siw",
        kind: "siw",
        load: [
            "insmod /lib/siw/siw.ko",
            "insmod /lib/siw/siw-parameters.ko mpa_crc_required=1",
        ],
        unload: "rdma link delete iwarp0 && rmmod siw",
    },
];
const CRC: [&str; 2] = ["no CRC", "CRC"];

/// Results by row, driver and CRC setting.
type Figures = BTreeMap<(String, &'static str, &'static str), Vec<f64>>;

pub(crate) fn command(args: &BenchArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("kernel-bench.log"), LIMIT)?;
    needs::require_packages(Suite::Guest, &mut log)?;
    let (image, cache) = match boot::prepare(&context, &args.boot, args.storage, &mut log)? {
        Ok(prepared) => prepared,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    log.say(format!("booting Linux {}", image.release));
    let machine = Machine {
        clock: args.clock,
        ..args.boot.machine()
    };
    let guest = Guest::start(&image, &cache, &machine, &mut log)?;
    guest.run_checked(FAST_CRC, 60)?;
    let limit = match args.clock {
        Clock::Wall => PROGRAM_LIMIT,
        Clock::Instructions => PROGRAM_LIMIT_INSTRUCTIONS,
    };
    let rows: Vec<Program> = if args.storage {
        storage()
    } else {
        rows(args.clock)
    }
    .into_iter()
    .filter(|row| {
        args.only.is_empty()
            || args
                .only
                .iter()
                .any(|text| row.name.contains(text.as_str()))
    })
    .collect();
    let mut figures = Figures::new();
    let ports = Ports::default();
    for round in 0..args.rounds {
        for (crc, setting) in CRC.iter().enumerate() {
            for turn in 0..DRIVERS.len() {
                let driver = &DRIVERS[(turn + round) % DRIVERS.len()];
                log.say(format!(
                    "round {} of {}: {}, {setting}",
                    round + 1,
                    args.rounds,
                    driver.name
                ));
                guest.run_checked(driver.load[crc], 60)?;
                USER.link(&guest, driver.kind)?;
                for row in &rows {
                    measure(
                        &guest,
                        &ports,
                        row,
                        limit,
                        (driver.name, setting),
                        &mut figures,
                        &mut log,
                    );
                }
                guest.run_checked(driver.unload, 120)?;
            }
        }
    }
    print(&rows, &figures, &mut log);
    Ok(Outcome::Passed)
}

/// Returns the programs to measure on each driver.
fn rows(clock: Clock) -> Vec<Program> {
    let mut rows: Vec<Program> = PERFTEST
        .iter()
        .map(|&(name, size, rounds)| match (clock, name) {
            (Clock::Wall, _) => programs::measurement(name, size, rounds),
            (Clock::Instructions, "ib_write_lat") => {
                programs::waiting_measurement("ib_write_bw", size, rounds)
            }
            (Clock::Instructions, _) => programs::waiting_measurement(name, size, rounds),
        })
        .collect();
    let no_errors = Rules {
        forbidden: &["event:", "failure", "error"],
        ..programs::STAYS
    };
    rows.push(Program::new(CONNECTIONS, CMTIME, no_errors));
    rows.push(Program::new(TCP, QPERF, programs::STAYS));
    rows
}

/// Runs a row, up to [`ATTEMPTS`] times, until it yields a result. Failures are only logged: siw
/// fails sporadically, and perftest prints no result if it could not measure the CPU frequency.
fn measure(
    guest: &Guest,
    ports: &Ports,
    row: &Program,
    limit: u64,
    (driver, setting): (&'static str, &'static str),
    figures: &mut Figures,
    log: &mut Log,
) {
    let end = USER.end(guest);
    let limit = limit.max(row.rules.limit);
    for _ in 0..ATTEMPTS {
        let result = matrix::run_program(ports, &end, &end, row, Family::V4, limit, log).and_then(
            |(note, output)| figure(row, &note, &output).context("no result in the output"),
        );
        match result {
            Ok(figure) => {
                figures
                    .entry((row.name.clone(), driver, setting))
                    .or_default()
                    .push(figure);
                return;
            }
            Err(error) => log.say(format!(
                "{} on {driver}: {}",
                row.name,
                guest::last_lines(&format!("{error:#}"))
            )),
        }
    }
}

/// Returns the result from a client's output, or from the note if the row is of perftest.
fn figure(row: &Program, note: &str, output: &str) -> Option<f64> {
    let number = |text: &str| {
        text.parse::<f64>()
            .ok()
            .filter(|value| value.is_finite() && *value > 0.0)
    };
    if let Some((_, _, word, _)) = storage_row(&row.name) {
        let mut words = output.split_whitespace();
        words.find(|found| found == word)?;
        return number(words.next()?);
    }
    match row.name.as_str() {
        CONNECTIONS => {
            let times: Vec<f64> = output
                .lines()
                .filter_map(|line| number(line.trim()))
                .collect();
            Some(times.last()? - times.first()?)
        }
        TCP => {
            let row = output
                .lines()
                .find_map(|line| line.trim().strip_prefix("bw"))?;
            let words: Vec<&str> = row.split_whitespace().collect();
            let scale = match *words.get(2)? {
                "GB/sec" => 1000.0,
                "MB/sec" => 1.0,
                _ => return None,
            };
            Some(number(words.get(1)?)? * scale)
        }
        _ => number(note.split_whitespace().next()?),
    }
}

fn unit(name: &str) -> &'static str {
    if let Some((_, _, _, unit)) = storage_row(name) {
        return unit;
    }
    match name {
        CONNECTIONS => "s",
        _ if name == TCP || name.contains("_bw") => "MB/s",
        _ => "µs",
    }
}

/// Logs a Markdown table. A ratio is the module's result divided by siw's.
fn print(rows: &[Program], figures: &Figures, log: &mut Log) {
    let mut text = String::from(
        "| | unit | siw, no CRC | module, no CRC | ratio | siw, CRC | module, CRC | ratio |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows {
        let _ = write!(text, "| {} | {} |", row.name, unit(&row.name));
        for setting in CRC {
            let median = |driver| {
                figures
                    .get(&(row.name.clone(), driver, setting))
                    .and_then(|values| Spread::of(values.clone()))
                    .map(|spread| spread.median)
            };
            let (siw, module) = (median("siw"), median("module"));
            let format_value = |value: Option<f64>| {
                value.map_or("–".to_owned(), |value| match value {
                    ..10.0 => format!("{value:.2}"),
                    _ => format!("{value:.1}"),
                })
            };
            let ratio = match (siw, module) {
                (Some(siw), Some(module)) => format!("{:.2}", module / siw),
                _ => "–".to_owned(),
            };
            let _ = write!(
                text,
                " {} | {} | {ratio} |",
                format_value(siw),
                format_value(module)
            );
        }
        text.push('\n');
    }
    log.say(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_parsed() {
        let row = |name| Program::new(name, CMTIME, programs::STAYS);
        assert_eq!(
            figure(&row(CONNECTIONS), "", "10.50\ncreate id : 1 2\n12.75\n"),
            Some(2.25)
        );
        for (output, value) in [("1.5 GB", 1500.0), ("92.5 MB", 92.5)] {
            let output = format!("tcp_bw:\n    bw  =  {output}/sec\n");
            assert_eq!(figure(&row(TCP), "", &output), Some(value));
        }
        assert_eq!(
            figure(&row("ib_write_bw-4096"), "12.5 MB/s", ""),
            Some(12.5)
        );
        assert_eq!(figure(&row("ib_write_lat-64"), "inf us", ""), None);
        let output = "disk\nbandwidth 1.5 operations 300 latency 22.5\n";
        for row in storage() {
            let (output, figure) = (output, figure(&row, "", output));
            let wanted = match unit(&row.name) {
                "µs" => Some(22.5),
                "1/s" => Some(300.0),
                "MB/s" => Some(1.5),
                _ => None,
            };
            assert_eq!(figure, wanted, "{} in {output}", row.name);
        }
        let copied = storage().pop().unwrap();
        assert_eq!(figure(&copied, "", "seconds 3.5\n"), Some(3.5));
    }
}
