//! The check `publish`: `cargo publish --workspace --dry-run`, which packages all published crates
//! in the order of their dependencies and compiles each package with the packages before it.
//!
//! Cargo takes a package of a certain version for unchangeable. So it would reuse what it unpacked
//! and compiled in an earlier run, although the crates have changed since. For this reason each run
//! has a new target folder, and what cargo unpacked in its own folder is removed afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::Release;
use super::packed::TemporaryFolder;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// The line that cargo prints for each package that it would publish.
const UPLOADING: &str = "Uploading ";

/// Runs the check.
pub(super) fn run(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let target = TemporaryFolder::new("publish")?;
    let mut publish = cargo(&release.context.root);
    publish
        .args(["publish", "--workspace", "--dry-run", "--locked"])
        .env("CARGO_TARGET_DIR", target.path());
    if release.args.allow_dirty {
        publish.arg("--allow-dirty");
    }
    let sources = sources()?;
    let before = folders(&sources)?;
    let result = log.run_and_read(&mut publish);
    for folder in folders(&sources)?.difference(&before) {
        fs::remove_dir_all(folder)?;
    }
    let output = result?;
    let order: Vec<&str> = output.lines().filter_map(uploaded).collect();
    let missing = release
        .packed
        .crates
        .iter()
        .filter(|package| !order.contains(&&*package.name));
    let missing: Vec<&str> = missing.map(|package| &*package.name).collect();
    if !missing.is_empty() {
        bail!("cargo would not publish {}", missing.join(", "));
    }
    log.say(format!("order: {}", order.join(", ")));
    Ok(Outcome::Passed)
}

/// Returns the name of the package that a line of cargo's output is about.
fn uploaded(line: &str) -> Option<&str> {
    line.trim_start()
        .strip_prefix(UPLOADING)?
        .split_whitespace()
        .next()
}

/// Returns the folder in which cargo keeps a folder with unpacked packages for each registry.
fn sources() -> Result<PathBuf> {
    let home = match (std::env::var_os("CARGO_HOME"), std::env::home_dir()) {
        (Some(home), _) => home.into(),
        (None, Some(home)) => home.join(".cargo"),
        (None, None) => bail!("neither CARGO_HOME nor HOME is set"),
    };
    Ok(home.join("registry/src"))
}

/// Returns the entries of a folder; none if there is no such folder.
fn folders(path: &Path) -> Result<BTreeSet<PathBuf>> {
    if !path.is_dir() {
        return Ok(BTreeSet::new());
    }
    let entries = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploaded_packages_are_found() {
        assert_eq!(
            uploaded("   Uploading iwarp-proto v0.1.0 (/x)"),
            Some("iwarp-proto")
        );
        assert_eq!(uploaded("warning: aborting upload due to dry run"), None);
    }
}
