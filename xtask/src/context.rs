//! The tree that the steps work on: its folders, and the options for all steps.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::process::cargo;

/// The folders of the tree, and options for all steps.
pub struct Context {
    /// The root of the workspace.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// Shorten the steps that can be shortened.
    pub quick: bool,
    /// Let the `packages` step install missing packages.
    pub install: bool,
}

impl Context {
    /// Finds the workspace of the current directory. The workspace in which this program was built
    /// may have been moved, or may be another work tree of the same repository.
    ///
    /// # Errors
    /// If the current directory is in no workspace, or in the workspace of another project.
    pub fn new(quick: bool, install: bool) -> Result<Self> {
        let output = cargo(Path::new("."))
            .args(["metadata", "--no-deps", "--format-version=1"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("run this inside the project's work tree");
        }
        let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
        let path = |name: &str| {
            let text = metadata[name].as_str().map(PathBuf::from);
            text.with_context(|| format!("the output of cargo metadata has no {name}"))
        };
        let root = path("workspace_root")?;
        if !root.join("xtask/Cargo.toml").is_file() {
            bail!(
                "{} is another project: run this inside the project's work tree",
                root.display()
            );
        }
        Ok(Self {
            root,
            target: path("target_directory")?,
            quick,
            install,
        })
    }

    /// Returns the folder for the full output of each step.
    pub fn log_dir(&self) -> PathBuf {
        self.target.join("xtask-logs")
    }

    /// Returns `true` if a path, relative to the root, exists.
    pub fn has(&self, relative: &str) -> bool {
        self.root.join(relative).exists()
    }
}

/// Finds a program in `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}
