//! What every step needs to know about the tree it works on.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

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
    /// Finds the workspace from where this program was built, so that the current directory does not matter.
    ///
    /// # Errors
    /// When the workspace is no longer where it was at build time.
    pub fn new(quick: bool, install: bool) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask has no parent directory")?
            .canonicalize()
            .context("the workspace has moved since xtask was built")?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => std::env::current_dir()?.join(dir),
            None => root.join("target"),
        };
        Ok(Self {
            root,
            target,
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
