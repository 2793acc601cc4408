//! qperf: its tests of reliable connections with rdma_cm (`-cm1`), and all its tests without it,
//! where qperf exchanges LIDs. With rdma_cm, qperf supports IPv4 only. On RoCE NICs, its datagram
//! tests do not work, because it sends to LID 0.

use anyhow::{Context as _, Result, bail};

use crate::case::{Case, Verdict};

use super::stage::Stage;

/// Tests of reliable connections, and the output row that contains the result.
const RELIABLE: &[(&str, &str)] = &[
    ("rc_bw", "bw"),
    ("rc_bi_bw", "bw"),
    ("rc_lat", "latency"),
    ("rc_rdma_write_bw", "bw"),
    ("rc_rdma_write_lat", "latency"),
    ("rc_rdma_write_poll_lat", "latency"),
    ("rc_rdma_read_bw", "bw"),
    ("rc_rdma_read_lat", "latency"),
    ("rc_compare_swap_mr", "msg_rate"),
    ("rc_fetch_add_mr", "msg_rate"),
    ("ver_rc_compare_swap", "msg_rate"),
    ("ver_rc_fetch_add", "msg_rate"),
];

const UNRELIABLE: &[(&str, &str)] = &[
    ("uc_bw", "recv_bw"),
    ("uc_bi_bw", "recv_bw"),
    ("uc_lat", "latency"),
    ("uc_rdma_write_bw", "recv_bw"),
    ("uc_rdma_write_lat", "latency"),
    ("uc_rdma_write_poll_lat", "latency"),
];

const DATAGRAMS: &[(&str, &str)] = &[
    ("ud_bw", "recv_bw"),
    ("ud_bi_bw", "recv_bw"),
    ("ud_lat", "latency"),
];

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        case(
            "`-cm1`, all `rc_*` and `ver_rc_*` tests",
            "rnic",
            &["-cm1"],
            RELIABLE,
        ),
        case("by LID, the same tests", "rnic", &[], RELIABLE),
        case("by LID, all `uc_*` tests", "rnic", &[], UNRELIABLE),
        case("by LID, all `ud_*` tests", "rnic", &[], DATAGRAMS),
        case(
            "`--as roce`, by LID, all `rc_*` and `ver_rc_*` tests",
            "roce",
            &[],
            RELIABLE,
        )
        .long(),
        case(
            "`--as roce`, by LID, all `uc_*` tests",
            "roce",
            &[],
            UNRELIABLE,
        ),
    ]
}

fn case(
    what: &str,
    face: &'static str,
    options: &'static [&'static str],
    tests: &'static [(&'static str, &'static str)],
) -> Case<Stage> {
    Case::new("qperf", what, move |stage| all(stage, face, options, tests))
        .needs(&["qperf"])
        .busy_polls()
        .limit(150)
}

/// Runs all tests against one server, one after the other.
fn all(stage: &Stage, face: &str, options: &[&str], tests: &[(&str, &str)]) -> Result<Verdict> {
    let start = |words: &[&str]| stage.start_with(&["--as", face], None, &[], words);
    let port = stage.port()?;
    let number = port.to_string();
    let server = start(&["qperf", "-lp", &number])?;
    stage.wait_for_port(port)?;
    let mut words = vec!["qperf", "-lp", &number];
    words.extend(options);
    words.extend(["-t", "1", "127.0.0.1"]);
    words.extend(tests.iter().map(|(name, _)| *name));
    let output = start(&words)?.success()?;
    for (name, metric) in tests {
        let value = value_of(&output, name, metric)
            .with_context(|| format!("no result of {name} in the output"))?;
        if value <= 0.0 {
            bail!("{name}: {metric} is {value}");
        }
    }
    if output.contains("errors") {
        bail!("qperf reports errors: {output}");
    }
    start(&["qperf", "-lp", &number, "127.0.0.1", "quit"])?.success()?;
    server.success()?;
    Ok(Verdict::passed(format!("{} tests", tests.len())))
}

/// Returns the number after `metric =` in the lines of a test.
fn value_of(output: &str, test: &str, metric: &str) -> Option<f64> {
    let heading = format!("{test}:");
    let mut lines = output.lines().skip_while(|line| *line != heading).skip(1);
    let line = lines
        .by_ref()
        .take_while(|line| line.starts_with(' '))
        .find(|line| line.trim_start().starts_with(metric))?;
    line.split_once('=')?
        .1
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_belong_to_their_test() {
        let output = "rc_bw:\n    bw  =  1.67 GB/sec\nrc_lat:\n    latency  =  21.2 us\nrc_x:\n";
        assert_eq!(value_of(output, "rc_bw", "bw"), Some(1.67));
        assert_eq!(value_of(output, "rc_lat", "latency"), Some(21.2));
        assert_eq!(value_of(output, "rc_lat", "bw"), None);
        assert_eq!(value_of(output, "rc_x", "bw"), None);
    }
}
