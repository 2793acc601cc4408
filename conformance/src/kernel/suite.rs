//! rdma-core's pyverbs tests, from Debian's package python3-pyverbs, in a guest.
//!
//! Both ends of each test use the same device. A test may be skipped or fail only for a reason that
//! `suite.toml` lists: the feature is missing in siw's user ABI, which the module uses. siw has the
//! same results.

use anyhow::Result;

use crate::apps::pyverbs;
use crate::apps::pyverbs_skips::Expected;
use crate::guest::Guest;
use crate::guest::python::TESTS;

/// Time limit in a virtual machine, in seconds.
pub(crate) const LIMIT: u64 = 300;

/// Tests that may be skipped or fail, because they use features that siw's user ABI lacks.
const EXPECTED: &str = include_str!("suite.toml");

/// Runs the tests on a device, and returns the note for the table. Some tests read the name of the
/// network device from the directory of the PCI device in sysfs. A software device has no such
/// directory, so the script mounts a copy of the sysfs directory that contains it.
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
    let results = guest.run_checked(&script, limit)?;
    let note = pyverbs::check(&Expected::parse(EXPECTED)?, &results)?;
    Ok(note.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suite_file_parses() {
        Expected::parse(EXPECTED).unwrap();
    }
}
