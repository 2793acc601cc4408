//! The programs that build artefacts: zig as the linker, and the writers of packages. They are
//! Python packages, which are installed into a virtual environment in the target folder.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use xtask::context::Context;
use xtask::process::{Log, cargo};

/// The versions and checksums of the Python packages.
const REQUIREMENTS: &str = "packaging/dist/requirements.txt";

/// A virtual environment with the tools.
pub(super) struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Creates the environment, unless it has the required packages already.
    ///
    /// # Errors
    /// If there is no Python 3 with `venv`, or if a package cannot be downloaded or has another
    /// checksum.
    pub(super) fn prepare(context: &Context, log: &mut Log) -> Result<Self> {
        let file = context.root.join(REQUIREMENTS);
        let wanted =
            fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let dir = context.target.join("dist-tools");
        let tools = Self {
            bin: dir.join("bin"),
        };
        let done = dir.join("installed.txt");
        if fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
            return Ok(tools);
        }
        let _ = fs::remove_dir_all(&dir);
        log.say(format!("installing the tools of {REQUIREMENTS}"));
        log.run(Command::new("python3").args(["-m", "venv"]).arg(&dir))
            .context("creating a Python environment (Debian: python3-venv)")?;
        log.run(
            tools
                .python()
                .args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:"])
                .args(["--require-hashes", "--requirement"])
                .arg(&file),
        )?;
        fs::write(done, wanted)?;
        Ok(tools)
    }

    /// Returns a command that starts one of the tools.
    pub(super) fn program(&self, name: &str) -> Command {
        Command::new(self.bin.join(name))
    }

    /// Returns a command that starts the environment's Python.
    pub(super) fn python(&self) -> Command {
        self.program("python")
    }

    /// Returns a command that links for a target of zig.
    pub(super) fn linker(&self, target: &str) -> Command {
        let mut command = self.python();
        command.args(["-m", "ziglang", "cc", "-target", target]);
        command
    }

    /// Returns the command `cargo zigbuild`.
    ///
    /// # Errors
    /// If the environment's path cannot be a part of `PATH`.
    pub(super) fn zigbuild(&self, root: &Path) -> Result<Command> {
        let mut command = cargo(root);
        command.env("PATH", self.path()?).arg("zigbuild");
        Ok(command)
    }

    /// Returns `PATH` with the tools in front.
    fn path(&self) -> Result<OsString> {
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let all = std::iter::once(self.bin.clone()).chain(std::env::split_paths(&inherited));
        std::env::join_paths(all).context("the path of the target folder contains a colon")
    }
}
