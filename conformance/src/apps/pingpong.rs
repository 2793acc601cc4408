//! The pingpong programs of libibverbs. They exchange GIDs and queue pair numbers over a TCP connection of their own, without rdma_cm.

use anyhow::Result;

use super::case::{Case, Verdict, expect};
use super::stage::Stage;

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    let rc = "ibv_rc_pingpong";
    let srq = "ibv_srq_pingpong";
    let ud = "ibv_ud_pingpong";
    let list: Vec<(&'static str, &str, Vec<&str>)> = vec![
        (rc, "`-g 0 -c`", vec!["-c"]),
        (rc, "`-e`", vec!["-c", "-e"]),
        (rc, "`-N`", vec!["-c", "-N"]),
        (
            rc,
            "`-e -N -s 65536`",
            vec!["-c", "-e", "-N", "-s", "65536"],
        ),
        (rc, "IPv6 GIDs", vec!["-c", "-d", "iwarp1"]),
        (srq, "`-g 0`", vec![]),
        (srq, "`-e`", vec!["-e"]),
        (ud, "`-g 0`", vec![]),
        (ud, "`-e`", vec!["-e"]),
        (ud, "`-s 4096`", vec!["-s", "4096"]),
        (ud, "IPv6 GIDs", vec!["-d", "iwarp1"]),
    ];
    list.into_iter()
        .map(|(program, what, options)| {
            Case::new(program, what, move |stage| run(stage, program, &options))
                .needs(&["ibverbs-utils"])
        })
        .collect()
}

/// Runs both ends three times: these programs exit at once after the last message, and errors at that moment do not happen every time.
fn run(stage: &Stage, program: &str, options: &[&str]) -> Result<Verdict> {
    for _ in 0..3 {
        let port = stage.port()?;
        let number = port.to_string();
        let mut words = vec![program, "-g", "0", "-n", "500", "-p", &number];
        words.extend(options);
        let server = stage.start(&words)?;
        stage.wait_for_port(port)?;
        words.push("127.0.0.1");
        let client = stage.start(&words)?;
        for said in [client.success()?, server.success()?] {
            expect(&said, "500 iters in")?;
        }
    }
    Ok(Verdict::passed("3 times 500 messages"))
}
