//! Finds or installs cargo-mutants, and makes the copy of the tree that it changes.
//!
//! The copy is below the target folder and is kept, so that the next run reuses compiled code. The
//! developer's work tree does not change.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::tools;
use xtask::context::Context;
use xtask::files;
use xtask::process::{Log, cargo};

/// The version of cargo-mutants to install.
const VERSION: &str = "27.1.0";

/// cargo-mutants, ready to run.
pub(crate) struct Tool {
    /// The copy of the tree.
    tree: PathBuf,
    /// The folder for compiled code and for results.
    pub(crate) home: PathBuf,
    /// The folder of the program.
    bin: PathBuf,
}

impl Tool {
    /// Finds cargo-mutants, or installs it into the target folder if `context` allows that. Returns
    /// `None` if it is not installed.
    ///
    /// # Errors
    /// If the tree cannot be copied.
    pub(crate) fn new(context: &Context, log: &mut Log) -> Result<Option<Self>> {
        // An unoptimised build is fast enough, and compiles in a third of the time.
        let wanted = ("cargo-mutants", VERSION);
        let Some(program) = tools::from_cargo(context, log, wanted, &["--debug"], &[]) else {
            return Ok(None);
        };
        let bin = program.parent().context("a program is in a folder")?.into();
        let home = context.target.join("xtask-mutants");
        let tree = home.join("tree");
        copy_tree(&context.root, &tree)?;
        Ok(Some(Self { tree, home, bin }))
    }

    /// Returns the command `cargo mutants`, which works on the copy. Append its arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = cargo(&self.tree);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = std::iter::once(self.bin.clone()).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(dirs) {
            command.env("PATH", path);
        }
        command
            .env("CARGO_TARGET_DIR", self.home.join("build"))
            // Each mutant is a small change.
            .env("CARGO_INCREMENTAL", "1")
            // A few cases suffice to detect most mutants. Failing cases must not be kept.
            .env("PROPTEST_CASES", "16")
            .env("PROPTEST_FAILURE_PERSISTENCE", "off")
            .args(["mutants", "--in-place", "--dir"])
            .arg(&self.tree);
        command
    }
}

/// Makes `tree` equal to the work tree at `root`, including files that are not committed. Does not
/// write files that are already equal.
fn copy_tree(root: &Path, tree: &Path) -> Result<()> {
    let listing = files::listed(root)?;
    let files: HashSet<&Path> = listing.iter().map(Path::new).collect();
    for file in &files {
        let (from, to) = (root.join(file), tree.join(file));
        let wanted = fs::read(&from).with_context(|| format!("reading {}", from.display()))?;
        if fs::read(&to).is_ok_and(|contents| contents == wanted) {
            continue;
        }
        if let Some(dir) = to.parent() {
            fs::create_dir_all(dir)?;
        }
        // This also copies the mode, because tests start scripts. The copy has the current time, so
        // cargo compiles the changed files.
        fs::copy(&from, &to).with_context(|| format!("writing {}", to.display()))?;
    }
    remove_others(tree, tree, &files)
}

/// Removes all files below `dir`, a folder of `tree`, that are not in `files`.
fn remove_others(tree: &Path, dir: &Path, files: &HashSet<&Path>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(tree, &path, files)?;
        } else if !path
            .strip_prefix(tree)
            .is_ok_and(|name| files.contains(name))
        {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
