//! rdma-core's own tests, from Debian's package python3-pyverbs, in a guest.
//!
//! They connect a device to itself. A test may be skipped or fail only for a reason that
//! `suite.toml` lists: what siw's user interface cannot carry. siw itself has the same results.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::apps::pyverbs;
use crate::apps::pyverbs_skips::Expected;
use crate::guest::Guest;
use crate::guest::image::{Stage, find};

/// The directory of the tests in the package, where the larger ones are compressed, and in the
/// guest.
const TESTS: (&str, &str) = ("usr/share/doc/rdma-core/tests", "usr/share/tests");
const PYVERBS: &str = "usr/lib/python3/dist-packages/pyverbs";

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
        tests = format_args!("/{}", TESTS.1),
    );
    let results = guest.must(&script, limit)?;
    let note = pyverbs::check(&Expected::parse(EXPECTED)?, &results)?;
    Ok(note.lines().next().unwrap_or_default().to_owned())
}

/// Adds Python, the tests and their runner to a guest's files.
pub(crate) fn add(stage: &mut Stage<'_>) -> Result<()> {
    let python = find(&stage.programs.join("usr/bin"), is_python).context("no Python")?;
    let version = python
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    stage.executable(&python, "usr/bin/python3")?;
    let modules = format!("usr/lib/{version}");
    copy_folder(stage, &modules, &modules)?;
    copy_folder(stage, PYVERBS, PYVERBS)?;
    copy_folder(stage, TESTS.0, TESTS.1)?;
    let tests = stage.root.join(TESTS.1);
    stage
        .log
        .run(Command::new("gunzip").arg("-rf").arg(&tests))?;
    std::fs::write(tests.join("runner.py"), pyverbs::RUNNER)?;
    let mut files = VecDeque::from([python]);
    for folder in [&modules, PYVERBS] {
        shared_objects(&stage.root.join(folder), &mut files)?;
    }
    stage.libraries(files)
}

/// Returns `true` for the interpreter, such as `python3.11`.
fn is_python(name: &str) -> bool {
    name.strip_prefix("python3.")
        .is_some_and(|minor| minor.bytes().all(|c| c.is_ascii_digit()))
}

fn copy_folder(stage: &mut Stage<'_>, from: &str, to: &str) -> Result<()> {
    let to = stage.root.join(to);
    std::fs::create_dir_all(to.parent().context("a folder in the guest")?)?;
    stage.log.run(
        Command::new("cp")
            .arg("-r")
            .arg(stage.programs.join(from))
            .arg(&to),
    )
}

/// Appends the extension modules below `dir`.
fn shared_objects(dir: &Path, files: &mut VecDeque<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            shared_objects(&path, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|end| end == "so") {
            files.push_back(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expectations_parse() {
        Expected::parse(EXPECTED).unwrap();
    }
}
