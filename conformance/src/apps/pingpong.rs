//! The pingpong programs of libibverbs. They exchange addresses and queue pair numbers over a TCP connection of their own, without
//! rdma_cm. The addresses are GIDs with `-g`, and LIDs without it.
//!
//! `ibv_xsrq_pingpong` runs with one client: with more of them it expects that their processes share an XRC domain.

use anyhow::Result;

use super::case::{Case, Verdict, expect};
use super::stage::Stage;

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    let rc = "ibv_rc_pingpong";
    let srq = "ibv_srq_pingpong";
    let uc = "ibv_uc_pingpong";
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
        (rc, "IPv6 GIDs", vec!["-c", "-g", "1"]),
        (srq, "`-g 0`", vec![]),
        (srq, "`-e`", vec!["-e"]),
        (uc, "`-g 0 -c`", vec!["-c"]),
        (uc, "`-e -s 65536`", vec!["-e", "-s", "65536"]),
        (uc, "IPv6 GIDs", vec!["-c", "-g", "1"]),
        (ud, "`-g 0`", vec![]),
        (ud, "`-e`", vec!["-e"]),
        (ud, "`-s 4096`", vec!["-s", "4096"]),
        (ud, "IPv6 GIDs", vec!["-g", "1"]),
    ];
    let by_gid = list.into_iter().map(|(program, what, options)| {
        let options = [&["-g", "0"], &options[..]].concat();
        (program, what, options)
    });
    let by_lid = [
        (rc, "by LID", vec!["-c"]),
        (rc, "by LID, `-e -N`", vec!["-c", "-e", "-N"]),
        (srq, "by LID", vec!["-e"]),
        (uc, "by LID", vec!["-c"]),
        (uc, "by LID, `-e`", vec!["-c", "-e"]),
        (ud, "by LID", vec![]),
        (ud, "by LID, `-e`", vec!["-c", "-e"]),
        (rc, "by LID, `-j`", vec!["-j"]),
        (rc, "by LID, `-t`", vec!["-c", "-t"]),
    ];
    let as_rnic = by_gid.chain(by_lid).map(|(program, what, options)| {
        Case::new(program, what, move |stage| {
            run(stage, program, "rnic", &options)
        })
    });
    // Indices 0 and 1 are 127.0.0.1, 2 and 3 are ::1.
    let as_roce = ["0", "1", "2", "3"].map(|index| {
        Case::new(rc, format!("`--as roce`, `-g {index} -c`"), move |stage| {
            run(stage, rc, "roce", &["-c", "-g", index])
        })
    });
    let datagrams_as_roce = ["1", "3"].map(|index| {
        Case::new(ud, format!("`--as roce`, `-g {index}`"), move |stage| {
            run(stage, ud, "roce", &["-g", index])
        })
    });
    // LID 0 is that of every RoCE NIC, and stands for the device itself.
    let by_lid_as_roce = [rc, srq, uc].map(|program| {
        Case::new(program, "`--as roce`, by LID", move |stage| {
            run(stage, program, "roce", &["-c", "-e"])
        })
    });
    let others_as_roce = [
        (srq, "1", "-e"),
        (srq, "3", "-c"),
        (uc, "1", "-e"),
        (uc, "3", "-c"),
    ]
    .map(|(program, index, option)| {
        let what = format!("`--as roce`, `-g {index} {option}`");
        Case::new(program, what, move |stage| {
            run(stage, program, "roce", &["-g", index, option])
        })
    });
    let needs: &[&str] = &["ibverbs-utils"];
    let extended = [
        ("`-g 0`", "rnic", &["-g", "0"][..]),
        ("`-e`", "rnic", &["-g", "0", "-e"]),
        ("`-s 65536`", "rnic", &["-g", "0", "-s", "65536"]),
        ("IPv6 GIDs", "rnic", &["-g", "1"]),
        ("by LID", "rnic", &[]),
        ("`--as roce`, `-g 1`", "roce", &["-g", "1"]),
    ]
    .map(|(what, face, options)| {
        let run = move |stage: &Stage| run(stage, XSRQ, face, options);
        Case::new(XSRQ, what, run).own_tmp()
    });
    as_rnic
        .chain(as_roce)
        .chain(datagrams_as_roce)
        .chain(extended)
        .chain(by_lid_as_roce)
        .chain(others_as_roce)
        .map(|case| case.needs(needs))
        .collect()
}

const XSRQ: &str = "ibv_xsrq_pingpong";

/// Runs both ends three times: these programs exit at once after the last message, and errors at that moment do not happen every time.
fn run(stage: &Stage, program: &str, face: &str, options: &[&str]) -> Result<Verdict> {
    let start = |words: &[&str]| stage.start_with(&["--as", face], None, &[], words);
    for _ in 0..3 {
        let port = stage.port()?;
        let number = port.to_string();
        // Each message of the last one waits for the scheduler twice, because its ends spin.
        let count = if program == XSRQ { "100" } else { "500" };
        let mut words = vec![program, "-n", count, "-p", &number];
        words.extend(options);
        let server = start(&words)?;
        stage.wait_for_port(port)?;
        words.push("127.0.0.1");
        let client = start(&words)?;
        for said in [client.success()?, server.success()?] {
            match program {
                XSRQ => expect(&said, "success")?,
                _ => expect(&said, "500 iters in")?,
            }
        }
    }
    Ok(Verdict::passed("3 times"))
}
