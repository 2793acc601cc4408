//! rdma-core's pyverbs test suite, from Debian's package python3-pyverbs.
//!
//! All tests must pass, except those that `pyverbs.toml` lists with their messages, which may be
//! skipped.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};

use crate::case::{Case, Verdict};

use super::huge_pages::HugePages;
use super::pyverbs_skips::Expected;
use super::stage::{Stage, WIRE_V4};

/// The directory of the tests in the package. Debian compresses the larger files.
const TESTS: &str = "/usr/share/doc/rdma-core/tests";
/// Debian's Python, for which the package's modules are built.
const PYTHON: &str = "/usr/bin/python3";
/// Number of 2 MiB pages for the tests of huge pages. A connection needs two, but Python frees
/// those of earlier connections late.
const HUGE_PAGES: u64 = 16;
/// The program that runs the tests and records the results.
const RUNNER: &str = include_str!("pyverbs.py");

/// The tests that may be skipped with our library.
pub(super) const EXPECTED: &str = include_str!("pyverbs.toml");

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new(
            "pyverbs",
            "rdma-core's own tests that need no raw packets",
            suite,
        )
        .needs(&["python3-pyverbs", "iproute2"])
        .wire()
        .limit(120),
    ]
}

fn suite(stage: &Stage) -> Result<Verdict> {
    match unpack(stage)? {
        Some(why) => Ok(Verdict::skipped(why)),
        None => check_ours(&run(stage, &[], &[PYTHON])?),
    }
}

/// Copies the tests to the stage's directory, and decompresses them. Returns a reason to skip the
/// case if the tests are not installed.
pub(super) fn unpack(stage: &Stage) -> Result<Option<&'static str>> {
    // The tests are in /usr/share/doc, which some installations omit.
    if !std::path::Path::new(TESTS).join("run_tests.py").exists() {
        return Ok(Some(
            "the tests of python3-pyverbs are not installed (in /usr/share/doc)",
        ));
    }
    stage.start_plain(&["cp", "-r", TESTS, "."])?.success()?;
    stage.start_plain(&["gunzip", "-rf", "tests"])?.success()?;
    std::fs::write(stage.dir().join("runner.py"), RUNNER)?;
    Ok(None)
}

/// Runs the tests. `words` is the command that starts Python. Returns the results that the runner
/// recorded.
pub(super) fn run(stage: &Stage, variables: &[(&str, &str)], words: &[&str]) -> Result<String> {
    // Some tests check the peer's memory as soon as their Write is complete, so use `--placed`:
    // Writes complete only after they are placed.
    let mut options = vec!["--bind", WIRE_V4, "--placed"];
    // The tests of rdma_cm search for the interface in sysfs. If `--sysfs` is not possible, they
    // skip themselves.
    let (status, _) = stage
        .start_with(&["--sysfs"], None, &[], &["true"])?
        .wait()?;
    if status == 0 {
        options.push("--sysfs");
    }
    // Without huge pages, the tests that need them skip themselves.
    let _huge_pages = HugePages::reserve(HUGE_PAGES);
    let mut all = words.to_vec();
    all.extend(["-B", "-W", "ignore", "runner.py", "tests", "results"]);
    all.extend(["--dev", "iwarp0", "--port", "1"]);
    stage
        .start_with(&options, None, variables, &all)?
        .success()?;
    std::fs::read_to_string(stage.dir().join("results")).context("the results of the tests")
}

#[derive(Default)]
struct Counts<'a> {
    passed: usize,
    skipped: BTreeMap<&'a str, usize>,
}

enum Classification<'a> {
    Passed,
    /// A test for the devices of one vendor only.
    OtherVendor,
    Skipped(&'a str),
}

fn classify<'a>(
    expected: &'a Expected,
    what: &str,
    name: &str,
    why: &str,
) -> Result<Classification<'a>> {
    match (what, expected.fail_reason(name)) {
        ("failed", Some(reason)) => Ok(Classification::Skipped(reason)),
        ("passed", Some(_)) => {
            bail!("{name} passes now: remove it from the list of tests that fail")
        }
        ("passed", None) => Ok(Classification::Passed),
        ("skipped", _) if name.starts_with("test_mlx5") || name.starts_with("test_efa") => {
            Ok(Classification::OtherVendor)
        }
        ("skipped", _) => match expected.skip_reason(name, why) {
            Some(reason) => Ok(Classification::Skipped(reason)),
            None => bail!("{name} is skipped with a message that is not listed: {why}"),
        },
        _ => bail!("{name}: {what}: {why}"),
    }
}

/// Checks results with our library.
pub(super) fn check_ours(results: &str) -> Result<Verdict> {
    check(&Expected::parse(EXPECTED)?, results).map(Verdict::passed)
}

/// Checks all results. Returns a note with the counts for each file.
///
/// Fails if a test fails or is skipped although the list does not permit it.
pub(crate) fn check(expected: &Expected, results: &str) -> Result<String> {
    let mut files: BTreeMap<&str, Counts<'_>> = BTreeMap::new();
    let (mut passed, mut skipped, mut foreign) = (0, 0, 0);
    let mut failures = Vec::new();
    let mut total = None;
    for line in results.lines() {
        let mut cells = line.splitn(3, '\t');
        let mut cell = || cells.next().unwrap_or_default();
        let (what, name, why) = (cell(), cell(), cell());
        if what == "end" {
            total = name.parse().ok();
            continue;
        }
        let file = name.split('.').next().unwrap_or(name);
        match classify(expected, what, name, why) {
            Ok(Classification::OtherVendor) => foreign += 1,
            Ok(Classification::Passed) => {
                passed += 1;
                files.entry(file).or_default().passed += 1;
            }
            Ok(Classification::Skipped(reason)) => {
                skipped += 1;
                let counts = files.entry(file).or_default();
                *counts.skipped.entry(reason).or_default() += 1;
            }
            Err(error) => failures.push(error.to_string()),
        }
    }
    if !failures.is_empty() {
        bail!(
            "{} unexpected results of rdma-core's tests: {}",
            failures.len(),
            failures.join("; ")
        );
    }
    if total != Some(passed + skipped + foreign) {
        bail!("some tests have no result; {total:?} should have run");
    }
    if passed == 0 {
        bail!("no test passed");
    }
    let mut note =
        format!("{passed} passed, {skipped} skipped, {foreign} of other devices' own skipped");
    for (file, counts) in files {
        let _ = write!(note, "\n    {file}: {} passed", counts.passed);
        for (reason, n) in counts.skipped {
            let _ = write!(note, ", {n} skipped ({reason})");
        }
    }
    Ok(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlisted_skips_and_failures_fail() {
        let good = "passed\ttest_pd.PDTest.test_alloc_pd\t\n\
                     skipped\ttest_rss_traffic.RSSTrafficTest.test_rss_traffic\t\
                    Create QP type 8 is not supported\n\
                    skipped\ttest_mlx5_cq.X.y\twhatever\n\
                    failed\ttest_rdmacm.CMTestCase.test_impossible\tException()\n\
                    end\t4\t\n";
        let expected = Expected::parse(&format!(
            "{EXPECTED}\n[[fail]]\nreason = 'needs more'\n\
             tests = ['test_rdmacm.CMTestCase.test_impossible']\n"
        ))
        .unwrap();
        let note = check(&expected, good).unwrap();
        assert!(
            note.starts_with("1 passed, 2 skipped, 1 of other"),
            "{note}"
        );
        assert!(note.contains("test_rss_traffic: 0 passed, 1 skipped (needs raw"));
        for bad in [
            "",
            "end\t0\t\n",
            "passed\ttest_pd.A.b\t\nend\t2\t\n",
            "passed\ttest_pd.A.b\t\nskipped\ttest_pd.A.c\tnew reason\nend\t2\t\n",
            // A listed message, but of another test; and a listed test, but with another message.
            "passed\ttest_pd.A.b\t\n\
             skipped\ttest_cq.CQTest.test_x\tCreate QP type 8 is not supported\nend\t2\t\n",
            "passed\ttest_pd.A.b\t\n\
             skipped\ttest_rss_traffic.RSSTrafficTest.test_rss_traffic\t\
             Create QP type 8 is not supported now\nend\t2\t\n",
            "passed\ttest_pd.A.b\t\n\
             skipped\ttest_rss_traffic.RSSTrafficTest.test_rss_traffic\t\
             ODP implicit is not supported\nend\t2\t\n",
            "passed\ttest_pd.A.b\t\nfailed\ttest_pd.A.c\tException()\nend\t2\t\n",
            "passed\ttest_rdmacm.CMTestCase.test_impossible\t\nend\t1\t\n",
        ] {
            assert!(check(&expected, bad).is_err(), "{bad}");
        }
    }
}
