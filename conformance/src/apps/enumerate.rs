//! Programs that list and watch devices.

use anyhow::{Result, bail};
use rustix::process::Signal;

use super::checks::{expect, expect_lines};
use super::stage::{Stage, WIRE};
use crate::case::{Case, Verdict};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let needs: &[&str] = &["ibverbs-utils"];
    vec![
        Case::new("ibv_devices", "no options", devices)
            .needs(needs)
            .wire(),
        Case::new("ibv_devinfo", "`-v`", devinfo).needs(needs),
        Case::new("ibv_devinfo", "`--as roce`, `-v`", devinfo_of_roce)
            .needs(needs)
            .wire(),
        Case::new("ibv_asyncwatch", "`-d iwarp0`", asyncwatch).needs(needs),
        Case::new("rdma", "`link`, `dev`, `resource`, with `-j`", rdma)
            .needs(&["iproute2", "rdmacm-utils"])
            .wire()
            // The sockets for statistics are in /tmp. `rdma` must not see those of other cases.
            .own_tmp(),
    ]
}

/// The list contains one device per interface, regardless of the number of addresses: one for
/// loopback and one for `wire0`.
fn devices(stage: &Stage) -> Result<Verdict> {
    let output = stage.start(&["ibv_devices"])?.success()?;
    let rows: Vec<Vec<&str>> = output
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.first().is_some_and(|word| word.starts_with("iwarp")))
        .collect();
    match &rows[..] {
        [lo, wire] if lo[0] == "iwarp0" && wire[0] == "iwarp1" && lo[1] != wire[1] => {
            Ok(Verdict::passed("2 devices, 2 GUIDs"))
        }
        _ => bail!("expected two devices with different GUIDs: {rows:?}"),
    }
}

/// A RoCE NIC has two GIDs for each address: RoCE v1 and RoCE v2.
fn devinfo_of_roce(stage: &Stage) -> Result<Verdict> {
    let output = stage
        .start_with(&["--as", "roce"], None, &[], &["ibv_devinfo", "-v"])?
        .success()?;
    for (text, count) in [
        ("InfiniBand (0)", 2),
        ("PORT_ACTIVE (4)", 2),
        ("::ffff:10.77.0.1, RoCE v2", 1),
        ("fd77::1, RoCE v2", 1),
        ("::ffff:127.0.0.1, RoCE v2", 1),
        ("GID[  1]:", 2),
    ] {
        expect_lines(&output, text, count)?;
    }
    // ibv_devinfo prints GIDs of RoCE v1 as eight hexadecimal groups.
    let v4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001, RoCE v1";
    expect_lines(&output, v4, 1)?;
    Ok(Verdict::passed("each address as RoCE v1 and v2"))
}

fn devinfo(stage: &Stage) -> Result<Verdict> {
    let output = stage.start(&["ibv_devinfo", "-v"])?.success()?;
    let devices = output
        .lines()
        .filter(|line| line.starts_with("hca_id:"))
        .count();
    if devices == 0 {
        bail!("no device");
    }
    // Each device has one port, so each of these texts occurs once per device.
    for text in [
        "iWARP (1)",
        "PORT_ACTIVE (4)",
        "link_layer:",
        "phys_port_cnt:",
    ] {
        expect_lines(&output, text, devices)?;
    }
    // ibv_devinfo prints GIDs that are not RoCE v2 as eight hexadecimal groups.
    expect(&output, "0000:0000:0000:0000:0000:ffff:7f00:0001")?;
    Ok(Verdict::passed(format!("{devices} devices, active")))
}

/// iproute2 queries the kernel for devices over netlink. Two connected processes run at the same
/// time.
fn rdma(stage: &Stage) -> Result<Verdict> {
    let output = |words: &[&str]| {
        let command = [&["rdma"], words].concat();
        stage.start(&command)?.success()
    };
    let link = output(&["-j", "link", "show"])?;
    for (device, interface) in [("iwarp0", "lo"), ("iwarp1", WIRE)] {
        expect(
            &link,
            &format!("\"ifname\":\"{device}\",\"port\":1,\"state\":\"ACTIVE\""),
        )?;
        expect(&link, &format!("\"netdev\":\"{interface}\""))?;
    }
    expect_lines(&output(&["dev"])?, "node_type rnic fw ", 2)?;
    let port = stage.port()?.to_string();
    let listening = ["rping", "-s", "-a", "127.0.0.1", "-p", &port];
    let _server = stage.start(&listening)?;
    stage.wait_for_port(port.parse()?)?;
    let _client = stage.start(&["rping", "-c", "-a", "127.0.0.1", "-p", &port])?;
    let mut pairs = String::new();
    while stage.time_left() > std::time::Duration::from_secs(5) {
        pairs = output(&["resource", "show", "qp"])?;
        if expect_lines(&pairs, "state RTS", 2).is_ok() {
            break;
        }
    }
    expect_lines(&pairs, "link iwarp0/1 lqpn", 2)?;
    expect_lines(&pairs, "comm rping", 2)?;
    let identifiers = output(&["resource", "show", "cm_id"])?;
    expect_lines(&identifiers, "state CONNECT ps TCP", 2)?;
    expect_lines(&identifiers, &format!("127.0.0.1:{port}"), 2)?;
    expect(
        &output(&["resource", "show"])?,
        "0: iwarp0: pd 2 cq 2 qp 2 cm_id 2 ",
    )?;
    Ok(Verdict::passed("2 devices, 2 queue pairs"))
}

/// The program waits for events. There are no events, so it must still be running when it is
/// interrupted.
fn asyncwatch(stage: &Stage) -> Result<Verdict> {
    let mut watch = stage.start(&["stdbuf", "-oL", "ibv_asyncwatch", "-d", "iwarp0"])?;
    watch.wait_for("async event FD")?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    if let Some(status) = watch.poll()? {
        bail!("ibv_asyncwatch exited: {status}");
    }
    watch.signal(Signal::INT);
    Ok(Verdict::passed("waits for events"))
}
