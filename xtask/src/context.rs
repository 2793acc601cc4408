//! What every step needs to know about the tree it works on.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::process::cargo;

/// Where things are, and how thorough to be.
pub struct Context {
    /// The root of the workspace.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// Do less where a step can be made shorter.
    pub quick: bool,
    /// Let the `packages` step install what is missing.
    pub install: bool,
}

impl Context {
    /// Finds the workspace that the current directory is in. Not the one that this program was built in: that may have
    /// been moved, or be another working tree of the same repository.
    ///
    /// # Errors
    /// When the current directory is in no workspace, or in that of another project.
    pub fn new(quick: bool, install: bool) -> Result<Self> {
        let output = cargo(Path::new("."))
            .args(["metadata", "--no-deps", "--format-version=1"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("start this inside of the project's tree");
        }
        let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
        let path = |name: &str| {
            let text = metadata[name].as_str().map(PathBuf::from);
            text.with_context(|| format!("cargo metadata says nothing of {name}"))
        };
        let root = path("workspace_root")?;
        if !root.join("xtask/Cargo.toml").is_file() {
            bail!(
                "{} is another project: start this inside of the project's tree",
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

    /// Where the full output of each step goes.
    pub fn log_dir(&self) -> PathBuf {
        self.target.join("xtask-logs")
    }

    /// Whether a path relative to the root exists.
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
