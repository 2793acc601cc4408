//! The pingpong programs of libibverbs. They exchange addresses and queue pair numbers over a TCP
//! connection, without rdma_cm. The addresses are GIDs with `-g`, otherwise LIDs.
//!
//! `ibv_xsrq_pingpong` runs with one client: it expects that several clients share an XRC domain.

use anyhow::Result;

use super::checks::expect;
use super::stage::Stage;
use crate::case::{Case, Verdict};

const RC: &str = "ibv_rc_pingpong";
const SRQ: &str = "ibv_srq_pingpong";
const UC: &str = "ibv_uc_pingpong";
const UD: &str = "ibv_ud_pingpong";
const XSRQ: &str = "ibv_xsrq_pingpong";

pub(super) fn cases() -> Vec<Case<Stage>> {
    by_gid()
        .chain(by_lid())
        .chain(as_roce())
        .chain(extended())
        .chain(others_as_roce())
        .map(|case| case.needs(&["ibverbs-utils"]))
        .collect()
}

fn case(
    program: &'static str,
    what: impl Into<String>,
    face: &'static str,
    options: &[&'static str],
) -> Case<Stage> {
    let options = options.to_vec();
    Case::new(program, what, move |stage| {
        run(stage, program, face, &options)
    })
}

fn by_gid() -> impl Iterator<Item = Case<Stage>> {
    let list: [(&str, &str, &[&str]); 14] = [
        (RC, "`-g 0 -c`", &["-c"]),
        (RC, "`-e`", &["-c", "-e"]),
        (RC, "`-N`", &["-c", "-N"]),
        (RC, "`-e -N -s 65536`", &["-c", "-e", "-N", "-s", "65536"]),
        (RC, "IPv6 GIDs", &["-c", "-g", "1"]),
        (SRQ, "`-g 0`", &[]),
        (SRQ, "`-e`", &["-e"]),
        (UC, "`-g 0 -c`", &["-c"]),
        (UC, "`-e -s 65536`", &["-e", "-s", "65536"]),
        (UC, "IPv6 GIDs", &["-c", "-g", "1"]),
        (UD, "`-g 0`", &[]),
        (UD, "`-e`", &["-e"]),
        (UD, "`-s 4096`", &["-s", "4096"]),
        (UD, "IPv6 GIDs", &["-g", "1"]),
    ];
    list.into_iter().map(|(program, what, options)| {
        // The programs use the last `-g`.
        let options = [&["-g", "0"], options].concat();
        case(program, what, "rnic", &options)
    })
}

fn by_lid() -> impl Iterator<Item = Case<Stage>> {
    let list: [(&str, &str, &[&str]); 9] = [
        (RC, "by LID", &["-c"]),
        (RC, "by LID, `-e -N`", &["-c", "-e", "-N"]),
        (SRQ, "by LID", &["-e"]),
        (UC, "by LID", &["-c"]),
        (UC, "by LID, `-e`", &["-c", "-e"]),
        (UD, "by LID", &[]),
        (UD, "by LID, `-e`", &["-c", "-e"]),
        (RC, "by LID, `-j`", &["-j"]),
        (RC, "by LID, `-t`", &["-c", "-t"]),
    ];
    list.into_iter()
        .map(|(program, what, options)| case(program, what, "rnic", options))
}

/// GID indices 0 and 1 are 127.0.0.1, 2 and 3 are ::1.
fn as_roce() -> impl Iterator<Item = Case<Stage>> {
    let connections = ["0", "1", "2", "3"].map(|index| {
        let what = format!("`--as roce`, `-g {index} -c`");
        case(RC, what, "roce", &["-c", "-g", index])
    });
    let datagrams = ["1", "3"].map(|index| {
        let what = format!("`--as roce`, `-g {index}`");
        case(UD, what, "roce", &["-g", index])
    });
    connections.into_iter().chain(datagrams)
}

fn others_as_roce() -> impl Iterator<Item = Case<Stage>> {
    // The LID of every RoCE NIC is 0, which refers to the device itself.
    let by_lid =
        [RC, SRQ, UC].map(|program| case(program, "`--as roce`, by LID", "roce", &["-c", "-e"]));
    let by_gid = [
        (SRQ, "1", "-e"),
        (SRQ, "3", "-c"),
        (UC, "1", "-e"),
        (UC, "3", "-c"),
    ]
    .map(|(program, index, option)| {
        let what = format!("`--as roce`, `-g {index} {option}`");
        case(program, what, "roce", &["-g", index, option])
    });
    by_lid.into_iter().chain(by_gid)
}

fn extended() -> impl Iterator<Item = Case<Stage>> {
    let list: [(&str, &str, &[&str]); 6] = [
        ("`-g 0`", "rnic", &["-g", "0"]),
        ("`-e`", "rnic", &["-g", "0", "-e"]),
        ("`-s 65536`", "rnic", &["-g", "0", "-s", "65536"]),
        ("IPv6 GIDs", "rnic", &["-g", "1"]),
        ("by LID", "rnic", &[]),
        ("`--as roce`, `-g 1`", "roce", &["-g", "1"]),
    ];
    list.into_iter()
        .map(|(what, face, options)| case(XSRQ, what, face, options).own_tmp())
}

/// Runs both ends three times: the programs exit immediately after the last message, and errors at
/// that time are sporadic.
fn run(stage: &Stage, program: &str, face: &str, options: &[&str]) -> Result<Verdict> {
    let start = |words: &[&str]| stage.start_with(&["--as", face], None, &[], words);
    for _ in 0..3 {
        let port = stage.port()?;
        let number = port.to_string();
        // Both ends of `ibv_xsrq_pingpong` busy-poll, so each message waits for the scheduler
        // twice.
        let count = if program == XSRQ { "100" } else { "500" };
        let mut words = vec![program, "-n", count, "-p", &number];
        words.extend(options);
        let server = start(&words)?;
        stage.wait_for_port(port)?;
        words.push("127.0.0.1");
        let client = start(&words)?;
        for output in [client.success()?, server.success()?] {
            match program {
                XSRQ => expect(&output, "success")?,
                _ => expect(&output, "500 iters in")?,
            }
        }
    }
    Ok(Verdict::passed("3 times"))
}
