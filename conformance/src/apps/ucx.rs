//! UCX's tools: `ucx_info`, and `ucx_perftest` for the lower layer (UCT), where two processes
//! exchange queue pair addresses over TCP. Cases of the upper layer are in `ucp`.
//!
//! UCX uses InfiniBand and RoCE NICs and ignores iWARP NICs. It searches `/dev/infiniband` without
//! libibverbs. It uses atomics only on NICs of an internal table, which does not contain ours.

use anyhow::{Result, bail};

use super::checks::{expect, expect_lines};
use super::stage::{Stage, WIRE_V4};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["ucx-utils"];
const ROCE: &[&str] = &["--as", "roce"];
/// A shell script that runs its arguments where mounts are not permitted, as in most containers.
const WITHOUT_MOUNTS: &str = "echo 0 > /proc/sys/user/max_mnt_namespaces && exec \"$@\"";

pub(super) fn cases() -> Vec<Case<Stage>> {
    let tests: [&'static [&'static str]; 6] = [
        &["am_lat", "-s", "8"],
        &["am_bw", "-s", "4096", "-D", "bcopy"],
        &["am_bw", "-s", "4096", "-D", "zcopy"],
        &["put_lat", "-s", "8"],
        &["put_bw", "-s", "65536", "-D", "zcopy"],
        &["get", "-s", "65536", "-D", "zcopy"],
    ];
    let perftest = tests.map(|test| {
        let what = format!("`--as roce`, `-x rc_verbs -t {}`", test.join(" "));
        let case = Case::new("ucx_perftest", what, move |stage| perftest(stage, test));
        case.busy_polls()
    });
    [
        Case::new("ucx_info", "`--as roce`, `-d`", info),
        Case::new(
            "ucx_info",
            "`--as roce`, `-d`, without mount namespaces",
            info_without_mounts,
        ),
        Case::new("ucx_info", "`-d`: a hint, as iWARP NIC", hint),
    ]
    .into_iter()
    .chain(perftest)
    .map(|case| case.needs(NEEDS).wire())
    .collect()
}

/// Checks that UCX lists both transports on each device, and the connection manager.
fn info(stage: &Stage) -> Result<Verdict> {
    let output = stage
        .start_with(ROCE, None, &[], &["ucx_info", "-d"])?
        .success()?;
    lists_devices(&output)
}

fn info_without_mounts(stage: &Stage) -> Result<Verdict> {
    let iwarp = stage.command_path();
    let unshare = ["unshare", "--user", "--map-current-user", "--keep-caps"];
    let namespace = [&unshare[..], &["sh", "-c", WITHOUT_MOUNTS, "sh"]].concat();
    let probe = [&namespace[..], &["true"]].concat();
    if stage.start_plain(&probe)?.wait()?.0 != 0 {
        return Ok(Verdict::skipped("needs unprivileged user namespaces"));
    }
    let words = [
        &namespace[..],
        &[&iwarp, "run"],
        ROCE,
        &["--", "ucx_info", "-d"],
    ];
    lists_devices(&stage.start_plain(&words.concat())?.success()?)
}

fn lists_devices(output: &str) -> Result<Verdict> {
    expect_lines(output, "Transport: rc_verbs", 2)?;
    expect_lines(output, "Transport: ud_verbs", 2)?;
    expect_lines(output, "Connection manager: rdmacm", 1)?;
    for text in ["Device: iwarp0:1", "Device: iwarp1:1"] {
        expect(output, text)?;
    }
    Ok(Verdict::passed(
        "rc_verbs and ud_verbs on 2 devices, rdmacm",
    ))
}

/// UCX ignores iWARP NICs silently, so our library prints a hint, once.
fn hint(stage: &Stage) -> Result<Verdict> {
    let output = stage.start(&["ucx_info", "-d"])?.success()?;
    if output.contains("rc_verbs") {
        bail!("UCX uses an iWARP NIC");
    }
    expect_lines(
        &output,
        "UCX ignores iWARP NICs; try `iwarp run --as roce`",
        1,
    )?;
    Ok(Verdict::passed("one hint"))
}

/// Measures one operation. The programs exit with an error if a queue pair fails.
fn perftest(stage: &Stage, test: &[&str]) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    #[rustfmt::skip]
    let options = ["-p", &number, "-d", "iwarp1:1", "-x", "rc_verbs", "-n", "2000", "-t"];
    let mut words = vec!["ucx_perftest"];
    words.extend(options);
    words.extend(test);
    let server = stage.start_with(ROCE, None, &[], &words)?;
    stage.wait_for_port(port)?;
    words.insert(1, WIRE_V4);
    let output = stage.start_with(ROCE, None, &[], &words)?.success()?;
    server.success()?;
    let last = output.lines().find(|line| line.starts_with("Final:"));
    let done = last.and_then(|line| line.split_whitespace().nth(1));
    if done != Some("2000") {
        bail!("ucx_perftest did not complete 2000 iterations: {last:?}");
    }
    Ok(Verdict::passed("2000 iterations"))
}
