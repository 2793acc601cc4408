//! The UD programs of Debian's package rdmacm-utils: `udaddy` resolves a queue pair with rdma_cm,
//! `mckey` joins a multicast group.

use anyhow::{Result, bail};

use super::checks::{expect, expect_lines};
use super::stage::{Stage, WIRE_V4, WIRE_V6};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["rdmacm-utils"];
/// The fixed port of `udaddy`.
const PORT: u16 = 7174;

pub(super) fn cases() -> Vec<Case<Stage>> {
    let addresses = |what, face, address, options: &'static [&str]| {
        Case::new("udaddy", what, move |stage| {
            udaddy(stage, face, address, options)
        })
    };
    let groups = |what, face, (group, address), options: &'static [&str], more| {
        Case::new("mckey", what, move |stage| {
            mckey(stage, face, (group, address), options, more)
        })
    };
    // The loopback interface does not support IPv6 multicast.
    let v4 = ("239.1.2.3", "127.0.0.1");
    let v6 = ("ff05::77", WIRE_V6);
    let many = &["-c", "4", "-C", "50", "-S", "2000"];
    let several = &["-c", "3", "-C", "20", "-S", "1000"];
    vec![
        addresses("no options", "rnic", "127.0.0.1", &[]),
        addresses("`-c 4 -C 50 -S 2000`", "rnic", "127.0.0.1", many),
        addresses("IPv6", "rnic", "::1", &[]),
        addresses("another interface", "rnic", WIRE_V4, &[]).wire(),
        addresses("`--as roce`", "roce", "127.0.0.1", &[]),
        addresses("`--as roce`, IPv6", "roce", "::1", many),
        Case::new("udaddy", "without a server", without_server),
        Case::new("udaddy", "`-P ipoib` is refused", refused),
        groups("`-m 239.1.2.3`", "rnic", v4, &[], &[]),
        groups("`-c 3 -C 20 -S 1000`", "rnic", v4, several, &[]),
        groups("`-o`: its sender only sends", "rnic", v4, &[], &["-o"]),
        groups("`-l`: no loopback", "rnic", v4, &["-l"], &[]),
        groups("IPv6", "rnic", v6, &[], &[]).wire(),
        groups("`--as roce`", "roce", v4, &[], &[]),
        groups("`--as roce`, IPv6", "roce", v6, several, &["-o"]).wire(),
    ]
    .into_iter()
    .map(|case| case.needs(NEEDS))
    .collect()
}

/// Runs both ends. The server replies to the source address of each datagram.
fn udaddy(stage: &Stage, face: &str, address: &str, options: &[&str]) -> Result<Verdict> {
    let start = |role: &str| {
        let words = [&["udaddy", role, address], options].concat();
        stage.start_with(&["--as", face], None, &[], &words)
    };
    let server = start("-b")?;
    stage.wait_for_datagrams(PORT)?;
    let client = start("-s")?;
    for output in [client.success()?, server.success()?] {
        expect(&output, "data transfers complete")?;
        expect(&output, "return status 0")?;
    }
    Ok(Verdict::passed("both ends"))
}

/// Without a server, the client gets InfiniBand's status for an unknown service ID.
fn without_server(stage: &Stage) -> Result<Verdict> {
    let (code, output) = stage.start(&["udaddy", "-s", "127.0.0.1"])?.wait()?;
    if code == 0 {
        bail!("it reports success");
    }
    expect(&output, "RDMA_CM_EVENT_UNREACHABLE, error: 1")?;
    Ok(Verdict::passed("UNREACHABLE"))
}

fn refused(stage: &Stage) -> Result<Verdict> {
    let words = ["udaddy", "-P", "ipoib", "-b", "127.0.0.1"];
    let (code, output) = stage.start(&words)?.wait()?;
    if code == 0 {
        bail!("it reports success");
    }
    expect(
        &output,
        "udaddy: listen request failed: Protocol not supported",
    )?;
    expect(&output, "RDMA_PS_UDP")?;
    Ok(Verdict::passed("EPROTONOSUPPORT"))
}

/// Runs a receiver, and starts a sender when the receiver has joined the group.
fn mckey(
    stage: &Stage,
    face: &str,
    (group, address): (&str, &str),
    options: &[&str],
    sender_options: &[&str],
) -> Result<Verdict> {
    let start = |more: &[&str]| {
        let words = ["stdbuf", "-oL", "mckey", "-m", group, "-b", address];
        let words = [&words[..], options, more].concat();
        stage.start_with(&["--as", face], None, &[], &words)
    };
    let at = options.iter().position(|word| *word == "-c");
    let count = at.map_or(1, |at| options[at + 1].parse().unwrap_or(1));
    let mut receiver = start(&[])?;
    receiver.wait_for("receiving data transfers")?;
    let sender = start(&[&["-s"], sender_options].concat())?;
    for output in [sender.success()?, receiver.success()?] {
        expect_lines(&output, "mckey: joined dgid: ", count)?;
        expect(&output, "data transfers complete")?;
        expect(&output, "return status 0")?;
        if output.contains("failure") {
            bail!("mckey reports a failure");
        }
    }
    Ok(Verdict::passed("both ends"))
}
