//! Sockets over RDMA (rsockets): rdma-core's test programs for streams and datagrams, and TCP
//! programs with the preload library.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::checks::{expect, expect_lines};
use super::stage::Stage;
use crate::case::{Case, Verdict};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let rdmacm: &[&str] = &["rdmacm-utils"];
    // Only the first case sends all sizes. The others test other kinds of calls, with one size.
    let short = ["-S", "65536", "-C", "100", "-I", "50"];
    let streams = [
        (
            "rstream",
            "`-T v`, all sizes",
            "127.0.0.1",
            vec!["-T", "v"],
            8,
        ),
        (
            "rstream",
            "`-T a`",
            "127.0.0.1",
            [&["-T", "a"], &short[..]].concat(),
            1,
        ),
        (
            "rstream",
            "`-T f`",
            "127.0.0.1",
            [&["-T", "f"], &short[..]].concat(),
            1,
        ),
        ("rstream", "IPv6", "::1", short.to_vec(), 1),
        (
            "riostream",
            "`-T v`",
            "127.0.0.1",
            [&["-T", "v"], &short[..]].concat(),
            1,
        ),
        (
            "riostream",
            "IPv6",
            "::1",
            [&["-T", "v"], &short[..]].concat(),
            1,
        ),
    ];
    let mut cases: Vec<Case<Stage>> = streams
        .into_iter()
        .map(|(program, what, address, options, rows)| {
            Case::new(program, what, move |stage| {
                stream(stage, program, address, &options, rows)
            })
            .needs(rdmacm)
            .limit(120)
        })
        .collect();
    cases.extend(datagram_cases());
    cases.push(Case::new("rcopy", "a file of 64 MiB", rcopy).needs(rdmacm));
    for (what, address) in [
        ("over `librspreload.so`, both directions", "127.0.0.1"),
        ("IPv6", "::1"),
    ] {
        let case = Case::new("iperf3", what, move |stage| iperf3(stage, address));
        cases.push(case.needs(&["iperf3"]));
    }
    for (what, address) in [
        ("64 MiB over `librspreload.so`", "127.0.0.1"),
        ("64 MiB over `librspreload.so`, IPv6", "::1"),
    ] {
        let case = Case::new("netcat", what, move |stage| netcat(stage, address));
        cases.push(case.needs(&["netcat-openbsd"]));
    }
    cases
}

fn datagram_cases() -> Vec<Case<Stage>> {
    const V4: &str = "127.0.0.1";
    // By default, each end busy-polls with nonblocking calls. A client that waits for echoes
    // retransmits after 1 ms, and never exits if the last echo is lost. So the servers of such
    // clients use blocking calls, and the counts are small.
    let case = |what, address, server: &'static [&str], client: &'static [&str]| {
        Case::new("udpong", what, move |stage| {
            datagrams(stage, address, server, client)
        })
        .needs(&["rdmacm-utils"])
    };
    let echo: &[&str] = &["-T", "b", "-T", "e", "-C", "100"];
    let polled: &[&str] = &["-T", "a", "-T", "e", "-C", "100", "-S", "200"];
    let bulk: &[&str] = &["-T", "a", "-B", "65536", "-S", "2000"];
    let server_is_udp = "its server with `-T s`, a UDP socket";
    let client_is_udp = "its client with `-T s`, a UDP socket";
    let (plain, plain_echo) = (
        &["-T", "s", "-T", "b"],
        &["-T", "s", "-T", "e", "-C", "100"],
    );
    vec![
        case("`-S 1000`", V4, &[], &["-S", "1000"]).busy_polls(),
        case("`-T b`", V4, &["-T", "b"], &["-T", "b", "-S", "64"]),
        case("`-T b -T e`", V4, &["-T", "b"], echo),
        case("`-T a -T e`", V4, &["-T", "a"], polled),
        case("`-T a -B 65536 -S 2000`", V4, bulk, bulk),
        case("IPv6, `-T b -T e`", "::1", &["-T", "b"], echo),
        case("IPv6, `-T a -T e`", "::1", &["-T", "a"], polled),
        case(server_is_udp, V4, plain, echo),
        case(client_is_udp, V4, &["-T", "b"], plain_echo),
    ]
}

/// Runs udpong and checks that its client prints a row of results. The row contains the number of
/// datagrams that arrived at the server or, with echoes, at the client, which retransmits each
/// until its echo arrives.
fn datagrams(stage: &Stage, address: &str, server: &[&str], client: &[&str]) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    // The server does not exit by itself, so its output must not stay in a buffer.
    let words = ["stdbuf", "-oL", "udpong", "-b", address, "-p", &number];
    let words = [&words[..], server].concat();
    let mut server = stage.start(&words)?;
    stage.wait_for_datagrams(port)?;
    let words = [&["udpong", "-s", address, "-p", &number], client].concat();
    let output = stage.start(&words)?.success()?;
    expect_lines(&output, "usec/xfer", 1)?;
    let Some(row) = output.lines().find(|line| is_datagram_row(line)) else {
        bail!("the client printed no result");
    };
    server.wait_for(&format!("client login from {address}"))?;
    let columns: Vec<&str> = row.split_whitespace().collect();
    Ok(Verdict::passed(format!("{} transfers", columns[2])))
}

/// Returns `true` for a row of results: name, size, transfers, total, time, rate, time per
/// transfer. The time per transfer is infinite if no datagram arrived.
fn is_datagram_row(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.len() == 7
        && words[6]
            .parse::<f64>()
            .is_ok_and(|time| time > 0.0 && time.is_finite())
}

/// Runs both ends and checks that the client prints `rows` result rows, one for each size.
fn stream(
    stage: &Stage,
    program: &str,
    address: &str,
    options: &[&str],
    rows: usize,
) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut server = vec![program, "-b", address, "-p", &number];
    server.extend(options);
    let server = stage.start(&server)?;
    stage.wait_for_port(port)?;
    let mut client = vec![program, "-s", address, "-p", &number];
    client.extend(options);
    let output = stage.start(&client)?.success()?;
    server.success()?;
    expect_lines(&output, "usec/xfer", 1)?;
    let found = output.lines().filter(|line| is_row(line)).count();
    if found != rows {
        bail!("{found} result rows instead of {rows}");
    }
    Ok(Verdict::passed(format!("{rows} rows")))
}

/// Returns `true` for a row of results: name, size, transfers, iterations, total, time, rate, time
/// per transfer.
fn is_row(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.len() == 8 && words[7].parse::<f64>().is_ok_and(|time| time > 0.0)
}

const SIZE: usize = 64 << 20;

/// Writes a file of pseudorandom bytes. With them, a comparison also detects swapped parts.
fn make_file(path: &Path) -> Result<Vec<u8>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .take(SIZE / 8)
    .flatten()
    .collect();
    std::fs::write(path, &bytes)?;
    Ok(bytes)
}

fn compare(path: &Path, wanted: &[u8]) -> Result<()> {
    let found = std::fs::read(path).with_context(|| format!("no {}", path.display()))?;
    if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
        bail!("the copy differs at byte {at}");
    }
    if found.len() != wanted.len() {
        bail!(
            "the copy has {} bytes instead of {}",
            found.len(),
            wanted.len()
        );
    }
    Ok(())
}

/// Copies a file over IPv4. rcopy does not support IPv6 addresses, because it parses the first
/// colon as the start of the path.
fn rcopy(stage: &Stage) -> Result<Verdict> {
    let (source, copy) = (stage.dir().join("source"), stage.dir().join("copy"));
    let bytes = make_file(&source)?;
    let port = stage.port()?;
    let number = port.to_string();
    // The server serves one file after another until it is killed.
    let _server = stage.start(&["rcopy", "-p", &number])?;
    stage.wait_for_port(port)?;
    let target = format!("127.0.0.1:{}", copy.display());
    let client = stage.start(&[
        "rcopy",
        &source.display().to_string(),
        &target,
        "-p",
        &number,
    ])?;
    expect(&client.success()?, &format!("{SIZE} bytes in"))?;
    compare(&copy, &bytes)?;
    Ok(Verdict::passed("equal"))
}

fn iperf3(stage: &Stage, address: &str) -> Result<Verdict> {
    for direction in [&["-t", "2"][..], &["-t", "2", "-R"]] {
        let port = stage.port()?;
        let number = port.to_string();
        let server = ["iperf3", "-s", "-1", "-p", &number];
        let mut server = stage.start_with(
            &["--rsockets"],
            None,
            &[],
            &[&["stdbuf", "-oL"], &server[..]].concat(),
        )?;
        server.wait_for("Server listening")?;
        let mut client = vec!["iperf3", "-c", address, "-p", &number];
        client.extend(direction);
        let output = stage
            .start_with(&["--rsockets"], None, &[], &client)?
            .success()?;
        server.success()?;
        expect(&output, "receiver")?;
        expect(&output, "iperf Done.")?;
    }
    Ok(Verdict::passed("both directions"))
}

fn netcat(stage: &Stage, address: &str) -> Result<Verdict> {
    let source = stage.dir().join("source");
    let bytes = make_file(&source)?;
    let port = stage.port()?;
    let number = port.to_string();
    let copy = stage.dir().join("copy");
    let command = format!("exec nc.openbsd -N -l {address} {number} > copy");
    let server = stage.start_with(&["--rsockets"], None, &[], &["sh", "-c", &command])?;
    stage.wait_for_port(port)?;
    stage
        .start_with(
            &["--rsockets"],
            Some(&source),
            &[],
            &["nc.openbsd", "-N", address, &number],
        )?
        .success()?;
    server.success()?;
    compare(&copy, &bytes)?;
    Ok(Verdict::passed("equal"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_rows_are_recognized() {
        assert!(is_row(
            "64_lat    64      1       100k    12m         4.18s      0.02      20.88"
        ));
        assert!(!is_row(
            "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer"
        ));
        assert!(!is_row(""));
        assert!(is_datagram_row(
            "custom    1000    4k      3m          0.02s      1.13       7.04"
        ));
        assert!(!is_datagram_row(
            "custom    64      0       0           0.05s      0.00        inf"
        ));
    }
}
