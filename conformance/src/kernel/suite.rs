//! rdma-core's own tests, from Debian's package python3-pyverbs, in a guest.
//!
//! They connect a device to itself. A test may be skipped or fail only for a reason that
//! `suite.toml` lists: what siw's user interface cannot carry. siw itself has the same results.

use anyhow::Result;

use crate::apps::pyverbs;
use crate::apps::pyverbs_skips::Expected;
use crate::guest::Guest;
use crate::guest::python::TESTS;

/// Time limit in an emulated machine, in seconds.
pub(crate) const LIMIT: u64 = 300;

/// Tests that need not pass, because siw's interface cannot carry what they use.
const EXPECTED: &str = include_str!("suite.toml");

/// Runs the tests on a device, and returns the note for the table. Some tests read the network
/// device's name in sysfs, in the directory of the PCI device. A software device has no such
/// directory, so one with that name is mounted over its own.
///
/// Fails if a test fails, or is skipped for an unknown reason.
pub(crate) fn run(guest: &Guest, device: &str, netdev: &str, limit: u64) -> Result<String> {
    let script = format!(
        "set -e; rm -rf /tmp/class /tmp/results; mkdir -p /tmp/class/{device}/device/net/{netdev}
        for file in /sys/class/infiniband/{device}/*; do
            ln -s $(readlink -f $file) /tmp/class/{device}/
        done
        unshare -m sh -c 'mount -o bind /tmp/class /sys/class/infiniband && cd /tmp &&
        python3 -B -W ignore {tests}/runner.py {tests} results --dev {device} --port 1 --gid 0' \\
            >/tmp/said 2>&1
        cat /tmp/results",
        tests = format_args!("/{TESTS}"),
    );
    let results = guest.must(&script, limit)?;
    let note = pyverbs::check(&Expected::parse(EXPECTED)?, &results)?;
    Ok(note.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expectations_parse() {
        Expected::parse(EXPECTED).unwrap();
    }
}
