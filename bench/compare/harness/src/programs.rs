//! The compared programs: their names, how they are built, and their lines.

use anyhow::{Context as _, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A compared program.
pub(crate) struct Program {
    /// The name in the tables.
    pub(crate) name: &'static str,
    /// The folder of its package.
    pub(crate) folder: &'static str,
    /// Whether it uses libibverbs, and so runs under `iwarp run`.
    pub(crate) verbs: bool,
    /// Another folder whose lines belong to the program.
    shared: Option<&'static str>,
}

const fn program(name: &'static str, folder: &'static str, verbs: bool) -> Program {
    Program {
        name,
        folder,
        verbs,
        shared: None,
    }
}

const fn grpc(name: &'static str, folder: &'static str, verbs: bool) -> Program {
    Program {
        name,
        folder,
        verbs,
        shared: Some("grpc"),
    }
}

/// The compared programs. The first one is what others are compared with.
pub(crate) const LIST: &[Program] = &[
    program("tokio's TCP", "tcp", false),
    program("iwarp", "iwarp", false),
    program("rdma-io", "rdma-io", true),
    program("async-rdma", "async-rdma", true),
    program("sideway", "sideway", true),
    program("ibverbs", "ibverbs", true),
    program("quinn", "quinn", false),
    grpc("tonic over TCP", "tonic-tcp", false),
    grpc("tonic over iwarp", "tonic-iwarp", false),
    grpc("tonic over rdma-io", "rdma-io-tonic", true),
];

/// Returns the folder of the comparison.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Builds a program.
///
/// # Errors
/// If cargo fails. The text is cargo's first error.
pub(crate) fn build(program: &Program, target: &Path) -> anyhow::Result<()> {
    let output = Command::new("cargo")
        .current_dir(root().join(program.folder))
        .args(["build", "--release", "--quiet", "--target-dir"])
        .arg(target)
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stderr);
    let error = text.lines().find(|line| line.starts_with("error"));
    ensure!(
        output.status.success(),
        "{}",
        error.unwrap_or("cargo failed")
    );
    Ok(())
}

impl Program {
    /// Returns the number of lines of code, and how often they contain `unsafe`. Blank lines and
    /// comments do not count.
    pub(crate) fn lines(&self) -> (usize, usize) {
        let files = [Some(self.folder), self.shared]
            .into_iter()
            .flatten()
            .flat_map(|folder| {
                ["src/main.rs", "src/lib.rs", "build.rs"].map(|file| root().join(folder).join(file))
            });
        let text: String = files
            .filter_map(|file| std::fs::read_to_string(file).ok())
            .collect();
        let code = || {
            text.lines()
                .map(str::trim)
                .filter(|l| !l.is_empty() && !l.starts_with("//"))
        };
        (
            code().count(),
            code().filter(|line| line.contains("unsafe ")).count(),
        )
    }
}
