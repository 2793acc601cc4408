//! Adds Python and rdma-core's pyverbs tests, from Debian's package python3-pyverbs, to a guest.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::image::{Stage, find};

/// The program that runs the tests and records the results.
const RUNNER: &str = include_str!("../apps/pyverbs.py");
/// The directory of the tests in the package. Debian compresses the larger files.
const PACKAGED: &str = "usr/share/doc/rdma-core/tests";
/// The directory of the tests in the guest.
pub(crate) const TESTS: &str = "usr/share/tests";
const PYVERBS: &str = "usr/lib/python3/dist-packages/pyverbs";

/// Adds Python, the tests and their runner to a guest's files.
pub(super) fn add(stage: &mut Stage<'_>) -> Result<()> {
    let python = find(&stage.programs.join("usr/bin"), is_python)
        .context("no unpacked package contains Python")?;
    let version = python
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    stage.executable(&python, "usr/bin/python3")?;
    let modules = format!("usr/lib/{version}");
    copy_dir(stage, &modules, &modules)?;
    copy_dir(stage, PYVERBS, PYVERBS)?;
    copy_dir(stage, PACKAGED, TESTS)?;
    let tests = stage.root.join(TESTS);
    stage
        .log
        .run(Command::new("gunzip").arg("-rf").arg(&tests))?;
    std::fs::write(tests.join("runner.py"), RUNNER)?;
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

fn copy_dir(stage: &mut Stage<'_>, from: &str, to: &str) -> Result<()> {
    let to = stage.root.join(to);
    std::fs::create_dir_all(to.parent().context("the path has no parent directory")?)?;
    stage.log.run(
        Command::new("cp")
            .arg("-r")
            .arg(stage.programs.join(from))
            .arg(&to),
    )
}

/// Appends the shared objects below `dir` to `files`.
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
