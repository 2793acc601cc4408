//! Programs under injected faults (`iwarp run --fault`): they report the fault and exit with an
//! error, or continue if they can.
//!
//! `rdma_client` is an exception, which a case documents: it ignores the status of completions,
//! even in releases after rdma-core 44 (see `docs/fault-injection.md`).

use anyhow::{Result, bail};

use super::checks::expect;
use super::stage::Stage;
use crate::case::{Case, Verdict};

/// A fault, and the program's message about it, or `None` if the program is to continue.
type Reported = (&'static str, Option<&'static str>);

const PINGPONG: &[Reported] = &[
    (
        "reset,bytes=64K",
        Some("transport retry counter exceeded (12)"),
    ),
    (
        "status=RNR_RETRY_EXC_ERR,op=send,nth=20",
        Some("RNR retry counter exceeded (13)"),
    ),
    (
        "status=LOC_PROT_ERR,op=recv,nth=20",
        Some("local protection error (4)"),
    ),
    ("crc,nth=30", Some("Failed status")),
    ("crc,op=recv,nth=30,dir=in", Some("Failed status")),
    ("close,nth=30", Some("Failed status")),
    ("event=DEVICE_FATAL,nth=30", Some("Failed status")),
    ("cq-overflow,nth=30", Some("poll CQ failed")),
    ("post,op=recv,nth=30", Some("Couldn't post receive")),
    ("post,op=send,nth=30", Some("Couldn't post send")),
    ("create=pd", Some("Couldn't allocate PD")),
    ("create=mr,errno=EPERM", Some("Couldn't register MR")),
    ("create=cq", Some("Couldn't create CQ")),
    ("create=qp", Some("Couldn't create QP")),
    ("stall=200ms,nth=30", None),
    ("rnr=200ms,nth=3", None),
    ("delay=2ms,p=5%", None),
    ("port-down=200ms,nth=30", None),
];

const WRITE_BW: &[Reported] = &[
    ("remote-access,nth=100", Some("Completion with error")),
    (
        "status=LOC_QP_OP_ERR,op=write",
        Some("Completion with error"),
    ),
    ("reset,bytes=1M", Some("Completion with error")),
    ("crc,op=write,nth=100", Some("Completion with error")),
    ("post,op=write,nth=300", Some("Couldn't post send")),
    ("refuse", Some("Unexpected CM event bl blka 8")),
    ("unreachable", Some("Unexpected CM event bl blka 7")),
    ("create=mr,errno=EAGAIN", Some("Couldn't allocate MR")),
    ("slow=8M", None),
];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let counted = |faults: &[Reported]| format!("`--fault`: {} faults", faults.len());
    vec![
        Case::new("ibv_rc_pingpong", counted(PINGPONG), |stage| {
            let options = &["-g", "0", "-n", "200"];
            each_fault(stage, "ibv_rc_pingpong", options, PINGPONG)
        })
        .needs(&["ibverbs-utils"])
        .limit(240),
        Case::new(
            "ib_write_bw",
            format!("`-R`, `--placed`, {}; a replay by seed", counted(WRITE_BW)),
            |stage| {
                each_fault(stage, "ib_write_bw", BW, WRITE_BW)?;
                replay(stage)
            },
        )
        .needs(&["perftest"])
        .limit(240),
        Case::new(
            "rdma_client",
            "`--fault reset,op=send`: a bug of its own, it does not notice",
            unnoticed,
        )
        .needs(&["rdmacm-utils"]),
    ]
}

const BW: &[&str] = &["-R", "-d", "iwarp0", "-n", "500", "-s", "4096", "-F"];

/// Runs the client once with each fault. The server runs without faults.
fn each_fault(
    stage: &Stage,
    program: &str,
    options: &[&str],
    faults: &[Reported],
) -> Result<Verdict> {
    for (fault, message) in faults {
        let (code, output) = run_with_fault(stage, program, options, &format!("seed=1;{fault}"))?;
        let Some(message) = message else {
            if code != 0 {
                bail!("{fault}: the program exits with status {code} instead of continuing");
            }
            continue;
        };
        if code == 0 {
            bail!("{fault}: the program exits with status 0 instead of failing");
        }
        expect(&output, "iwarp fault: ")?;
        if !output.contains(message) {
            bail!("{fault}: the program does not print {message:?}");
        }
    }
    Ok(Verdict::passed(format!("{} faults", faults.len())))
}

/// Runs a server, and a client with a fault. Returns the client's exit status and output.
fn run_with_fault(
    stage: &Stage,
    program: &str,
    options: &[&str],
    fault: &str,
) -> Result<(i32, String)> {
    let port = stage.port()?;
    let number = port.to_string();
    let words = [&[program, "-p", &number], options].concat();
    let _server = stage.start(&words)?;
    stage.wait_for_port(port)?;
    let words = [&words[..], &["127.0.0.1"]].concat();
    // Without `--placed`, Writes complete early, and the program may exit before the fault ends the
    // connection.
    let run = ["--placed", "--fault", fault];
    stage.start_with(&run, None, &[], &words)?.wait()
}

/// Checks that the same seed makes the same request fail.
fn replay(stage: &Stage) -> Result<Verdict> {
    let failed = |seed: u32| {
        let fault = format!("seed={seed};post,op=write,p=2%");
        let (_, output) = run_with_fault(stage, "ib_write_bw", BW, &fault)?;
        let line = output.lines().find(|line| line.contains(" rule=1 "));
        let n = line.and_then(|line| line.split(" n=").nth(1));
        n.map(str::to_owned)
            .ok_or_else(|| anyhow::anyhow!("{fault}: no fault was injected"))
    };
    let first = failed(7)?;
    for _ in 0..2 {
        let again = failed(7)?;
        if again != first {
            bail!("with the same seed, request {first} failed first, and request {again} later");
        }
    }
    Ok(Verdict::passed(format!("seed 7 fails request {first}")))
}

/// Checks that both ends report success although the client's message is never sent.
fn unnoticed(stage: &Stage) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let server = stage.start(&["rdma_server", "-p", &number])?;
    stage.wait_for_port(port)?;
    let words = ["rdma_client", "-s", "127.0.0.1", "-p", &number];
    let client = stage.start_with(&["--fault", "reset,op=send"], None, &[], &words)?;
    let (code, output) = client.wait()?;
    expect(&output, " reset qp=1 ")?;
    let (server_code, server_said) = server.wait()?;
    if (code, server_code) != (0, 0) {
        bail!("rdma_client now notices the fault ({code}, {server_code}): update this case");
    }
    expect(&output, "rdma_client: end 0")?;
    expect(&server_said, "rdma_server: end 0")?;
    Ok(Verdict::passed("both ends report success"))
}
