//! qperf: all its tests of reliable connections, connected by rdma_cm (`-cm1`), and by LIDs that it exchanges itself. qperf uses
//! rdma_cm with IPv4 only.

use anyhow::{Context as _, Result, bail};

use super::case::{Case, Verdict};
use super::stage::Stage;

/// The tests, and for each the row of its output that has the result.
const TESTS: &[(&str, &str)] = &[
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

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    vec![
        case("`-cm1`, all `rc_*` and `ver_rc_*` tests", &["-cm1"]),
        case("by LID, the same tests", &[]),
    ]
}

fn case(what: &str, options: &'static [&'static str]) -> Case {
    Case::new("qperf", what, move |stage| all(stage, options))
        .needs(&["qperf"])
        .spins()
        .limit(150)
}

/// Runs all tests one after another against a single server.
fn all(stage: &Stage, options: &[&str]) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let server = stage.start(&["qperf", "-lp", &number])?;
    stage.wait_for_port(port)?;
    let mut words = vec!["qperf", "-lp", &number];
    words.extend(options);
    words.extend(["-t", "1", "127.0.0.1"]);
    words.extend(TESTS.iter().map(|(name, _)| *name));
    let said = stage.start(&words)?.success()?;
    for (name, metric) in TESTS {
        let value =
            value_of(&said, name, metric).with_context(|| format!("{name} has no result"))?;
        if value <= 0.0 {
            bail!("{name}: {metric} is {value}");
        }
    }
    if said.contains("errors") {
        bail!("operations failed: {said}");
    }
    stage
        .start(&["qperf", "-lp", &number, "127.0.0.1", "quit"])?
        .success()?;
    server.success()?;
    Ok(Verdict::passed(format!("{} tests", TESTS.len())))
}

/// Returns the number after `metric =` in the lines of a test.
fn value_of(said: &str, test: &str, metric: &str) -> Option<f64> {
    let heading = format!("{test}:");
    let mut lines = said.lines().skip_while(|line| *line != heading).skip(1);
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
        let said = "rc_bw:\n    bw  =  1.67 GB/sec\nrc_lat:\n    latency  =  21.2 us\nrc_x:\n";
        assert_eq!(value_of(said, "rc_bw", "bw"), Some(1.67));
        assert_eq!(value_of(said, "rc_lat", "latency"), Some(21.2));
        assert_eq!(value_of(said, "rc_lat", "bw"), None);
        assert_eq!(value_of(said, "rc_x", "bw"), None);
    }
}
