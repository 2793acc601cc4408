//! perftest: every operation, connected by rdma_cm (`-R`) and without it, by GID and queue pair
//! number.
//!
//! With `-c XRC`, the programs do not support `-R`, and both ends use fixed file names in `/tmp`.
//!
//! The programs do not support some combinations: the latency programs have no `-b` and `-q`, RDMA
//! Write has no `-e`, atomics have one size and therefore no `-a`, and `-R` supports IPv4 only. On
//! an iWARP NIC, `ib_send_bw` needs `-R`: without `-R`, its server sends credits from a queue pair
//! that it never moved from RTR to RTS, and with `-b` it does not deregister the memory of the
//! credits. With `-c UD`, even with `-R`, it does not leave room for a GRH in front of the credits.
//! On a RoCE NIC it sends no credits, and moves the queue pair to RTS.
//!
//! For each row, the programs calibrate the processor's cycle counter with the clock. If other
//! processes interrupt the calibration, the programs print its correlation coefficient and, with
//! `-F`, the value 0 or infinity for the row. Without `-F`, some of them exit with 1.

use anyhow::{Context as _, Result, bail};

use super::checks::expect;
use super::stage::Stage;
use crate::case::{Case, Verdict};

/// A program and the options that it supports.
struct Program {
    name: &'static str,
    /// The program measures latency; otherwise bandwidth.
    latency: bool,
    /// The program supports `-a`.
    all_sizes: bool,
    /// The program supports `-e`.
    events: bool,
    /// The program works without `-R` on an iWARP NIC.
    without_cm: bool,
    /// The program supports unreliable connections (`-c UC`), only without `-R`.
    unreliable: bool,
    /// The program works with datagrams (`-c UD`).
    datagrams: bool,
}

const fn program(name: &'static str) -> Program {
    Program {
        name,
        latency: false,
        all_sizes: true,
        events: true,
        without_cm: true,
        unreliable: false,
        datagrams: false,
    }
}

const PROGRAMS: &[Program] = &[
    Program {
        events: false,
        unreliable: true,
        ..program("ib_write_bw")
    },
    program("ib_read_bw"),
    Program {
        without_cm: false,
        ..program("ib_send_bw")
    },
    Program {
        all_sizes: false,
        ..program("ib_atomic_bw")
    },
    Program {
        latency: true,
        events: false,
        unreliable: true,
        ..program("ib_write_lat")
    },
    Program {
        latency: true,
        ..program("ib_read_lat")
    },
    Program {
        latency: true,
        unreliable: true,
        datagrams: true,
        ..program("ib_send_lat")
    },
    Program {
        latency: true,
        all_sizes: false,
        ..program("ib_atomic_lat")
    },
];

/// The options for extended reliable connections.
const XRC: [&str; 2] = ["-c", "XRC"];

/// Returns the options for several queue pairs. For each completion, the programs count as many
/// messages as `-Q` says, even for the last completion of a queue pair. So unless `-Q` divides the
/// number of messages, they stop polling before the last queue pair has sent all messages. For
/// small messages, the default is 100; 3 divides our numbers of messages.
fn queue_pairs(count: &str) -> [&str; 4] {
    ["-q", count, "-Q", "3"]
}

/// Number of sizes with `-a`: the powers of two from 2 bytes to 8 MiB.
pub(super) const SIZES: usize = 23;

pub(super) fn cases() -> Vec<Case<Stage>> {
    PROGRAMS.iter().flat_map(program_cases).collect()
}

fn program_cases(program: &'static Program) -> Vec<Case<Stage>> {
    // The latency programs get fewer messages: they spin on memory, so on a busy machine each
    // message waits for the scheduler. The numbers are odd because of a defect of `ib_send_bw` (see
    // `without_cm.rs`).
    let count = if program.latency { "201" } else { "501" };
    let few = if program.latency { "11" } else { "31" };
    let mut out: Vec<(&str, Vec<&'static str>, usize)> = vec![("`-R`", vec!["-R", "-n", count], 1)];
    let mut roce = vec![
        ("`--as roce`, without `-R`", vec!["-x", "1", "-n", count], 1),
        ("`--as roce`, IPv6 GIDs", vec!["-x", "3", "-n", count], 1),
        ("`--as roce`, `-R`", vec!["-R", "-n", count], 1),
    ];
    if program.name.starts_with("ib_send") {
        // With 64 bytes, all datagrams fit into the socket buffer while the receiver waits for the
        // scheduler.
        let options = vec!["-R", "-c", "UD", "-s", "64", "-n", count];
        roce.push(("`--as roce`, `-R -c UD`", options, 1));
    }
    if program.all_sizes {
        out.push(("`-R -a`", vec!["-R", "-a", "-n", few], SIZES));
    }
    if program.events {
        out.push(("`-R -e`", vec!["-R", "-e", "-n", count], 1));
    }
    if !program.latency {
        let options = [&["-R", "-n", count][..], &queue_pairs("8")].concat();
        out.push(("`-R -q 8`", options, 1));
        out.push(("`-R -b`", vec!["-R", "-b", "-n", count], 1));
    }
    out.push(("`-R -D 3`", vec!["-R", "-D", "3"], 1));
    if program.datagrams {
        out.push(("`-c UD`", vec!["-c", "UD", "-x", "0", "-n", count], 1));
        let events = vec!["-c", "UD", "-e", "-x", "0", "-n", count];
        out.push(("`-c UD -e`", events, 1));
        let v6 = vec!["-c", "UD", "-x", "1", "-n", count];
        out.push(("`-c UD`, IPv6 GIDs", v6, 1));
        out.push(("`-R -c UD`", vec!["-R", "-c", "UD", "-n", count], 1));
    }
    if program.without_cm {
        out.push(("without `-R`", vec!["-x", "0", "-n", count], 1));
        let v6 = vec!["-x", "1", "-n", count];
        out.push(("without `-R`, IPv6 GIDs", v6, 1));
    }
    if program.unreliable {
        let options = vec!["-c", "UC", "-x", "0", "-n", count];
        out.push(("`-c UC`", options, 1));
    }
    out.extend(roce);
    // The limitation on iWARP NICs applies to XRC, too.
    let extended = match program.without_cm {
        true => "`-c XRC`",
        false => "`--as roce`, `-c XRC`",
    };
    out.push((extended, vec![XRC[0], XRC[1], "-x", "0", "-n", count], 1));
    if !program.latency {
        let both = match program.without_cm {
            true => "`-c XRC -b -q 4`",
            false => "`--as roce`, `-c XRC -b -q 4`",
        };
        let options = [XRC[0], XRC[1], "-b", "-x", "0", "-n", count];
        let options = [&options[..], &queue_pairs("4")].concat();
        out.push((both, options, 1));
    }
    out.into_iter()
        .map(|(what, options, rows)| case(program, what, options, rows))
        .collect()
}

fn case(
    program: &'static Program,
    what: &str,
    options: Vec<&'static str>,
    rows: usize,
) -> Case<Stage> {
    // The latency programs calibrate the cycle counter for each size, which takes seconds on a busy
    // machine.
    let long = program.latency && rows == SIZES;
    let face = if what.starts_with("`--as roce`") {
        "roce"
    } else {
        "rnic"
    };
    let extended = options.starts_with(&XRC);
    let case = Case::new(program.name, what, move |stage| {
        run(stage, program.name, face, &options, rows)
    });
    let case = case.needs(&["perftest"]).busy_polls().limit(240);
    let case = if extended { case.own_tmp() } else { case };
    if long { case.long() } else { case }
}

/// Runs both ends and checks the client's table.
pub(super) fn run(
    stage: &Stage,
    name: &str,
    face: &str,
    options: &[&str],
    rows: usize,
) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut words = vec![name, "-F", "-p", &number];
    words.extend(options);
    words.extend(["-d", "iwarp0"]);
    let start = |words: &[&str]| stage.start_with(&["--as", face], None, &[], words);
    let server = start(&words)?;
    stage.wait_for_port(port)?;
    words.push("127.0.0.1");
    let output = start(&words)?.success()?;
    server.success()?;
    let transport = if face == "roce" { "IB" } else { "IW" };
    expect(&output, &format!("Transport type : {transport}"))?;
    expect(&output, "Link type       : Ethernet")?;
    let connected_by = if options.contains(&"-R") {
        "Data ex. method : rdma_cm"
    } else {
        "Data ex. method : Ethernet"
    };
    expect(&output, connected_by)?;
    let results = results(&output)?;
    if results.len() != rows {
        bail!("{} result rows instead of {rows}", results.len());
    }
    for (at, (size, _)) in results.iter().enumerate() {
        if rows > 1 && *size != 2 << at {
            bail!("row {at} is for {size} bytes");
        }
    }
    let empty = without_value(&results);
    let unmeasured = output.matches(UNMEASURED).count();
    if empty.len() > unmeasured {
        bail!("no value for the sizes {empty:?}");
    }
    Ok(Verdict::passed(match empty.len() {
        0 => format!("{rows} rows"),
        some => {
            format!("{rows} rows, {some} without a value because the calibration was interrupted")
        }
    }))
}

/// The message of the programs if they could not calibrate the cycle counter.
const UNMEASURED: &str = "Correlation coefficient";

/// Returns the sizes of the rows without a value. A 0 counts as a value for sizes up to 4096,
/// because the table has only two decimals.
fn without_value(results: &[(u64, f64)]) -> Vec<u64> {
    results
        .iter()
        .filter(|(size, value)| !value.is_finite() || *value < 0.0 || *value == 0.0 && *size > 4096)
        .map(|(size, _)| *size)
        .collect()
}

/// Returns the size and the average of each row. The position of the average column is taken from
/// the heading.
fn results(output: &str) -> Result<Vec<(u64, f64)>> {
    let head = output
        .lines()
        .map(str::trim_start)
        .find(|line| line.starts_with("#bytes"))
        .context("no result table in the output")?;
    let average = head
        .replace("BW ", "BW_")
        .replace("99% percentile", "99%")
        .replace("99.9% percentile", "99.9%")
        .split_whitespace()
        .position(|word| word.contains("average") || word.contains("avg"))
        .context("the table has no average column")?;
    let mut out = Vec::new();
    for line in output.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(Ok(size)), Some(Ok(_))) = (
            words.first().map(|word| word.parse()),
            words.get(1).map(|word| word.parse::<u64>()),
        ) else {
            continue;
        };
        let value = words
            .get(average)
            .and_then(|word| word.parse().ok())
            .with_context(|| format!("no average in: {line}"))?;
        out.push((size, value));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_are_parsed() {
        let bw = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   \
                  MsgRate[Mpps]\n \
                  65536      500              2640.92            1116.98\t\t   0.017872\n---\n";
        assert_eq!(results(bw).unwrap(), [(65536, 1116.98)]);
        let lat = " #bytes #iterations    t_min[usec]    t_max[usec]  \
                   t_typical[usec]    t_avg[usec]    \
                   t_stdev[usec]   \
                   99% percentile[usec]   99.9% percentile[usec] \n \
                   2       100          14.67          283.22       15.00    \t       21.75       \
                   \t24.29  \t\t283.22  \t\t283.22 \n";
        assert_eq!(results(lat).unwrap(), [(2, 21.75)]);
        assert!(results("nothing").is_err());
    }

    #[test]
    fn interrupted_calibrations_have_no_value() {
        let output = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   \
                    MsgRate[Mpps]\n \
                    4096       30         0.00               0.00   \t\t   0.000001\n \
                    8192       30         0.84               0.28   \t\t   0.009290\
                    Correlation coefficient r^2: 0.89 < 0.9\n\n \
                    16384      30         0.00               0.00   \t\t   0.000000\n---\n";
        let rows = results(output).unwrap();
        assert_eq!(rows, [(4096, 0.0), (8192, 0.28), (16384, 0.0)]);
        assert_eq!(without_value(&rows), [16384]);
        assert_eq!(output.matches(UNMEASURED).count(), 1);
        assert_eq!(
            without_value(&[(2, f64::INFINITY), (4, -1.0), (8, 0.5)]),
            [2, 4]
        );
    }
}
