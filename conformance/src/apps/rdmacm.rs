//! The programs of Debian's package rdmacm-utils, which test connection set-up.

use anyhow::{Context as _, Result, bail};

use super::checks::{expect, expect_lines};
use super::program::Program;
use super::stage::{Stage, WIRE_V4};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["rdmacm-utils"];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let pings = |what, address, options: &'static [&str]| {
        Case::new("rping", what, move |stage| {
            rping(stage, address, 10, options)
        })
    };
    let cmatose = |what, address, options: &'static [&str]| {
        Case::new("ucmatose", what, move |stage| {
            ucmatose(stage, address, options)
        })
    };
    let example = |program, what, peer, address: &'static str, options: &'static [&str]| {
        Case::new(program, what, move |stage| {
            rdma_example(stage, peer, program, address, options)
        })
    };
    vec![
        pings("`-C 10 -V`", "127.0.0.1", &["-V"]),
        pings("IPv6", "::1", &["-V"]),
        pings("`-q`", "127.0.0.1", &["-V", "-q"]),
        Case::new("rping", "`-S 64 … 65000`", |stage| {
            for size in ["64", "100", "1000", "4096", "10000", "65000"] {
                rping(stage, "127.0.0.1", 20, &["-V", "-S", size])?;
            }
            Ok(Verdict::passed("6 sizes"))
        }),
        Case::new("rping", "`-P` with 16 clients", persistent),
        Case::new("rping", "loopback, `--bind` another interface", |stage| {
            rping_under(stage, &["--bind", WIRE_V4], "127.0.0.1", 10, &["-V"])
        })
        .wire(),
        Case::new("rping", "to a host that is down", dead_neighbour).wire(),
        cmatose(
            "`-c 10 -C 10`",
            "127.0.0.1",
            &["-c", "10", "-C", "10", "-S", "4096"],
        ),
        cmatose("`-m`", "127.0.0.1", &["-c", "10", "-C", "10", "-m"]),
        cmatose("IPv6", "::1", &["-c", "10", "-C", "10"]),
        Case::new("cmtime", "`-c 1000`", |stage| {
            cmtime(stage, "127.0.0.1", "1000")
        }),
        Case::new("cmtime", "IPv6", |stage| cmtime(stage, "::1", "100")),
        example(
            "rdma_client",
            "with `rdma_server`",
            "rdma_server",
            "127.0.0.1",
            &[],
        ),
        example("rdma_client", "IPv6", "rdma_server", "::1", &[]),
        example(
            "rdma_xclient",
            "`-c r`, with `rdma_xserver`",
            "rdma_xserver",
            "127.0.0.1",
            &["-c", "r"],
        ),
        example(
            "rdma_xclient",
            "`-c x`, with `rdma_xserver`",
            "rdma_xserver",
            "127.0.0.1",
            &["-c", "x"],
        ),
    ]
    .into_iter()
    .map(|case| case.needs(NEEDS))
    .collect()
}

/// Runs a server and a client that exchange `count` pings. With `-v` both print each ping.
fn rping(stage: &Stage, address: &str, count: usize, options: &[&str]) -> Result<Verdict> {
    rping_under(stage, &[], address, count, options)
}

/// Runs rping with options of `iwarp run`.
fn rping_under(
    stage: &Stage,
    run: &[&str],
    address: &str,
    count: usize,
    options: &[&str],
) -> Result<Verdict> {
    let (port, pings) = (stage.port()?, count.to_string());
    let number = port.to_string();
    let common = ["-a", address, "-p", &number, "-C", &pings, "-v"];
    let start = |role| {
        let words = [&["rping", role], &common[..], options].concat();
        stage.start_with(run, None, &[], &words)
    };
    let server = start("-s")?;
    stage.wait_for_port(port)?;
    let output = start("-c")?.success()?;
    expect_lines(&output, "ping data: rdma-ping-", count)?;
    expect(&output, &format!("rdma-ping-{}", count - 1))?;
    let output = server.success()?;
    expect_lines(&output, "server ping data: rdma-ping-", count)?;
    Ok(Verdict::passed(format!("{count} pings")))
}

/// Connects to an address that no host has. rping must get an error after its address resolution
/// time-out of 2 s, although TCP's own time-out is longer.
fn dead_neighbour(stage: &Stage) -> Result<Verdict> {
    let client = stage.start(&["rping", "-c", "-a", "10.77.0.9", "-C", "1"])?;
    let (code, output) = client.wait()?;
    if code == 0 {
        bail!("rping exits with status 0");
    }
    expect(&output, "RDMA_CM_EVENT_ADDR_ERROR, error -110")?;
    Ok(Verdict::passed("ADDR_ERROR"))
}

/// Connects 16 clients to one server (`-P`). The clients start one after another, because rping's
/// server loses one of two simultaneous connection requests, on any device (fixed in rdma-core 57).
fn persistent(stage: &Stage) -> Result<Verdict> {
    const CLIENTS: usize = 16;
    const PINGS: usize = 1500;
    let port = stage.port()?;
    let (number, pings) = (port.to_string(), PINGS.to_string());
    let mut server = stage.start(&["rping", "-s", "-P", "-a", "127.0.0.1", "-p", &number])?;
    stage.wait_for_port(port)?;
    let mut clients: Vec<Program> = Vec::new();
    for _ in 0..CLIENTS {
        let words = [
            "stdbuf",
            "-oL",
            "rping",
            "-c",
            "-a",
            "127.0.0.1",
            "-p",
            &number,
        ];
        let more = ["-C", &pings, "-v", "-V"];
        let mut client = stage.start(&[&words[..], &more].concat())?;
        client.wait_for("ping data: rdma-ping-0")?;
        clients.push(client);
    }
    let mut concurrent = 0;
    for client in &mut clients {
        concurrent += usize::from(client.poll()?.is_none());
    }
    for client in clients {
        expect_lines(&client.success()?, "ping data: rdma-ping-", PINGS)?;
    }
    // The server runs until it is killed.
    if let Some(status) = server.poll()? {
        bail!("the server exited: {status}");
    }
    Ok(Verdict::passed(format!(
        "{CLIENTS} clients, {concurrent} of them concurrently"
    )))
}

fn ucmatose(stage: &Stage, address: &str, options: &[&str]) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let server = stage.start(&[&["ucmatose", "-b", address, "-p", &number], options].concat())?;
    stage.wait_for_port(port)?;
    let client = stage.start(&[&["ucmatose", "-s", address, "-p", &number], options].concat())?;
    for output in [client.success()?, server.success()?] {
        expect(&output, "data transfers complete")?;
        expect(&output, "return status 0")?;
    }
    Ok(Verdict::passed("10 connections"))
}

/// Measures connection set-up. cmtime's server exits only after an error.
fn cmtime(stage: &Stage, address: &str, count: &str) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut server = stage.start(&["cmtime", "-b", address, "-p", &number])?;
    stage.wait_for_port(port)?;
    let output = stage
        .start(&["cmtime", "-s", address, "-p", &number, "-c", count])?
        .success()?;
    for failure in ["event:", "failure", "error"] {
        if output.contains(failure) {
            bail!(
                "connections failed: {}",
                output
                    .lines()
                    .find(|line| line.contains(failure))
                    .unwrap_or_default()
            );
        }
    }
    for step in [
        "create id",
        "resolve addr",
        "create qp",
        "connect",
        "disconnect",
        "destroy",
    ] {
        let line = output
            .lines()
            .find(|line| line.starts_with(step) && line.contains(':'))
            .with_context(|| format!("no result for {step}"))?;
        if line
            .split_whitespace()
            .filter(|word| word.parse::<f64>().is_ok())
            .count()
            != 4
        {
            bail!("the row does not contain four numbers: {line}");
        }
    }
    if let Some(status) = server.poll()? {
        bail!("the server exited: {status}");
    }
    Ok(Verdict::passed(format!("{count} connections")))
}

fn rdma_example(
    stage: &Stage,
    server_name: &str,
    client_name: &str,
    address: &str,
    options: &[&str],
) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut server = vec![server_name, "-p", &number];
    // Only rdma_server has an option for the address.
    if server_name == "rdma_server" {
        server.extend(["-s", address]);
    }
    server.extend(options);
    let server = stage.start(&server)?;
    stage.wait_for_port(port)?;
    let client = stage.start(&[&[client_name, "-s", address, "-p", &number], options].concat())?;
    expect(&client.success()?, &format!("{client_name}: end 0"))?;
    expect(&server.success()?, &format!("{server_name}: end 0"))?;
    Ok(Verdict::passed("done"))
}
