//! fio's rdma engine. The client selects the verb: `write`, `read` or `send`. With `send`, the
//! server uses the fourth verb, `recv`. There is no case for a client with `recv`: fio posts an
//! uninitialized work request and crashes. The engine supports IPv4 only.

use anyhow::{Result, bail};

use super::checks::expect;
use super::program::Program;
use super::stage::Stage;
use crate::case::{Case, Verdict};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let needs: &[&str] = &["fio"];
    let verb = |what: &'static str, verb: &'static str| {
        Case::new("fio", what, move |stage| transfer(stage, verb)).needs(needs)
    };
    vec![
        verb("`--verb=write`", "write"),
        verb("`--verb=read`", "read"),
        verb("`--verb=send` (its server: `recv`)", "send"),
        Case::new("fio", "`--verb=send --verify=crc32c`", verified).needs(needs),
        Case::new(
            "fio",
            "`--verify=crc32c` of data without checksums is refused",
            without_checksums,
        )
        .needs(needs),
    ]
}

fn start(
    stage: &Stage,
    verb: &str,
    size: &str,
    server: &[&str],
    client: &[&str],
) -> Result<(Program, Program)> {
    let port = stage.port()?;
    let (port_option, size) = (format!("--port={port}"), format!("--size={size}"));
    let common = [
        "--ioengine=rdma",
        &port_option,
        "--bs=64k",
        &size,
        "--iodepth=16",
    ];
    let run = |name: &str, options: &[&str], more: &[&str]| {
        let words = [&["fio", name][..], &common[..], options, more].concat();
        stage.start(&words)
    };
    let server = run("--name=server", &["--rw=read"], server)?;
    stage.wait_for_port(port)?;
    let verb = format!("--verb={verb}");
    let options = ["--hostname=127.0.0.1", &verb, "--rw=write"];
    Ok((server, run("--name=client", &options, client)?))
}

fn transfer(stage: &Stage, verb: &str) -> Result<Verdict> {
    let (server, client) = start(stage, verb, "64m", &[], &[])?;
    let output = client.success()?;
    expect(&output, "err= 0")?;
    expect(&output, "io=64.0MiB")?;
    let output = server.success()?;
    expect(&output, "err= 0")?;
    if verb == "send" {
        expect(&output, "io=64.0MiB")?;
    }
    Ok(Verdict::passed("64 MiB"))
}

/// The receiver verifies the checksum of each block.
fn verified(stage: &Stage) -> Result<Verdict> {
    let verify = &["--verify=crc32c"][..];
    let (server, client) = start(stage, "send", "64m", verify, verify)?;
    expect(&client.success()?, "err= 0")?;
    let output = server.success()?;
    expect(&output, "err= 0")?;
    expect(&output, "io=64.0MiB")?;
    Ok(Verdict::passed("64 MiB"))
}

/// The receiver must reject blocks without checksums. This shows that it verifies checksums.
fn without_checksums(stage: &Stage) -> Result<Verdict> {
    let (server, client) = start(stage, "send", "1m", &["--verify=crc32c"], &[])?;
    let (code, output) = server.wait()?;
    drop(client);
    expect(&output, "bad magic header")?;
    if code == 0 {
        bail!("the server accepted blocks without checksums");
    }
    Ok(Verdict::passed("refused"))
}
